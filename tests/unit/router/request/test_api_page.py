"""docs/api.md names every field and every error there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.errors import STATUSES, ErrorCode
from protocol.wire import inference_pb2 as pb
from router.request.chat_request import ChatRequest
from router.request.completion_request import CompletionRequest
from router.request.unserved import HARMLESS, UNSERVED

PAGE = (Path(__file__).parents[4] / "docs" / "api.md").read_text(encoding="utf-8")
FIELDS = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}


@pytest.mark.parametrize("field", sorted(FIELDS | UNSERVED.keys() | HARMLESS))
def test_every_field_is_on_the_page(field: str) -> None:
    assert f"`{field}`" in PAGE


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_is_on_the_page(code: ErrorCode) -> None:
    assert f"| `{code.value}` | {STATUSES[code].http} | {STATUSES[code].grpc} |" in PAGE


def test_both_doors_know_the_same_served_fields() -> None:
    in_proto = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields}
    inputs = {"messages", "prompt", "chat", "prompts", "prompt_token_ids"}
    assert FIELDS - inputs == in_proto - inputs - UNSERVED.keys()
