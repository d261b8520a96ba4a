import inspect

import grpc
import pytest

from protocol import errors
from protocol.errors import STATUSES, BatonError, ErrorCode, ErrorInfo

LEAVES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, BatonError) and cls is not BatonError
]


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_has_a_class_an_http_and_a_grpc_status(code):
    error = ErrorInfo(code=code, message="m").to_error()
    assert error.code is code
    assert 400 <= STATUSES[code].http < 600
    assert grpc.StatusCode[STATUSES[code].grpc] is not grpc.StatusCode.OK


def test_codes_and_classes_pair_up():
    assert {cls.code for cls in LEAVES} == set(ErrorCode)
    assert len(LEAVES) == len(ErrorCode)
    assert set(STATUSES) == set(ErrorCode)


@pytest.mark.parametrize("cls", LEAVES, ids=lambda cls: cls.__name__)
def test_an_error_survives_the_trip_through_its_info(cls):
    error = cls("what happened", param="top_p", retry_after_s=1.5)
    again = error.info().to_error()
    assert type(again) is cls
    assert (again.message, again.param, again.retry_after_s) == ("what happened", "top_p", 1.5)
    assert str(again) == "what happened"


def test_errors_of_the_caller_are_4xx_and_ours_5xx():
    for cls in LEAVES:
        caller = issubclass(cls, errors.InvalidRequest) or cls in (
            errors.NotFound,
            errors.Unauthenticated,
            errors.PermissionDenied,
            errors.PayloadTooLarge,
            errors.UnsupportedEncoding,
            errors.Overloaded,
            errors.Cancelled,
            errors.StaleMessage,
        )
        assert (STATUSES[cls.code].http < 500) == caller


def test_a_stale_ticket_is_never_taken_for_a_bad_request():
    assert not issubclass(errors.StaleMessage, errors.InvalidRequest)
    assert issubclass(errors.ContextTooLong, errors.InvalidRequest)
    assert issubclass(errors.Unsupported, errors.InvalidRequest)
