import contextlib
import enum
import inspect
import math
import time
import types
import typing
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec, messages
from protocol.errors import ErrorCode, ErrorInfo, InvalidRequest
from protocol.ids import RequestKey, Role, WorkerRef
from protocol.loads import RouterLoad
from protocol.message import Message
from protocol.messages import (
    Ack,
    CacheChange,
    Cancel,
    EventBatch,
    StatusQuery,
    Submit,
    Ticket,
    TokenEvent,
    WorkerLoad,
)
from protocol.sampling import SamplingParams
from protocol.states import FinishReason
from protocol.timeline import Phase, Span

CLASSES = sorted(
    {
        cls
        for _, cls in inspect.getmembers(messages, inspect.isclass)
        if issubclass(cls, Message) and cls is not Message
    }
    | {ErrorInfo, Ticket, Span, SamplingParams},
    key=lambda cls: cls.__name__,
)
#: Every field of these has a default.
DEFAULTS_ONLY = {Ack, CacheChange, RouterLoad, SamplingParams, WorkerLoad}
INTS = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.floats(allow_nan=False)


def strategy(cls):
    """Instances of a message from its declared types, with integers that fit msgpack."""
    return st.builds(cls, **{name: _of(kind) for name, kind in _hints(cls).items()})


def is_record(kind):
    return hasattr(kind, "__struct_fields__") or hasattr(kind, "_fields")


def _hints(cls):
    return typing.get_type_hints(cls, include_extras=True)


def _bounded(kind, bounds):
    """Values of an annotated type within its bounds."""
    low, high = (bounds.ge if bounds.gt is None else bounds.gt), bounds.le
    if kind is int:
        return st.integers(-(2**63) if low is None else low, 2**64 - 1 if high is None else high)
    if kind is float:
        return st.floats(low, high, exclude_min=bounds.gt is not None)
    return _of(kind)


def _of(kind):
    args = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Annotated:
        return _bounded(*args)
    if kind is int:
        return INTS
    if kind is float:
        return FLOATS
    if kind in (str, bytes, bool):
        return st.from_type(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if is_record(kind):
        return strategy(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return st.one_of(st.none(), *(_of(arg) for arg in args if arg is not type(None)))
    if typing.get_origin(kind) is dict:
        return st.dictionaries(_of(args[0]), _of(args[1]), max_size=3)
    if len(args) == 2 and args[1] is Ellipsis:
        return st.lists(_of(args[0]), max_size=3).map(tuple)
    return st.tuples(*(_of(arg) for arg in args))


def raw_of(cls):
    """The plain array of one small instance of `cls`."""
    return list(msgpack.unpackb(codec.encode(smallest(cls)), strict_map_key=False))


def smallest(cls):
    return cls(**{name: _smallest_of(kind) for name, kind in _hints(cls).items()})


def _smallest_of(kind):
    if typing.get_origin(kind) is typing.Annotated:
        plain, bounds = typing.get_args(kind)
        low = 1 if bounds.gt is not None else bounds.ge or 0
        return plain(low) if plain in (int, float) else _smallest_of(plain)
    if kind in (int, float, str, bytes, bool):
        return kind()
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    if is_record(kind):
        return smallest(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return None
    if typing.get_origin(kind) is dict:
        return {}
    return ()


def refused(cls, data):
    with pytest.raises(InvalidRequest) as caught:
        codec.decode(cls, data)
    return caught.value


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_message_round_trips(cls):
    @settings(max_examples=25, deadline=None)
    @given(strategy(cls))
    def round_trip(message):
        decoded = codec.decode(cls, codec.encode(message))
        assert decoded == message
        assert type(decoded) is cls

    round_trip()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_wrong_field_is_refused_by_name(cls):
    for index, field in enumerate(msgspec.structs.fields(cls)):
        raw = raw_of(cls)
        raw[index] = 7.5 if raw[index] == {} else {"no": "map"}
        if field.type is float:
            raw[index] = "1.0"
        error = refused(cls, msgpack.packb(raw))
        assert error.param.startswith(f"{cls.__name__}.{field.name}")
        assert error.code is ErrorCode.INVALID_REQUEST
        assert "Expected" in error.message


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_missing_and_extra_fields_are_refused(cls):
    raw = raw_of(cls)
    if raw and cls not in DEFAULTS_ONLY:
        assert refused(cls, msgpack.packb(raw[:-1])).param == cls.__name__
    assert refused(cls, msgpack.packb([*raw, 1])).param == cls.__name__


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="unused type byte"),
        pytest.param(b"\x93\x01", id="truncated array"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="array of four billion"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="map of four billion"),
        pytest.param(b"\xdb\xff\xff\xff\xffx", id="string of four billion bytes"),
        pytest.param(b"\x90\x90", id="trailing message"),
        pytest.param(b"\x91" * 5000 + b"\x01", id="nested too deep"),
        pytest.param(b"\x91\xa2\xff\xfe", id="invalid UTF-8"),
        pytest.param(b"\x81\x80\x01", id="a map as a key"),
        pytest.param(b"\xd6\xff\x00\x00\x00", id="truncated timestamp"),
        pytest.param(b"\xc7\x0c\xff" + b"\xff" * 12, id="impossible timestamp"),
        pytest.param(b"\x91\xd4\x05\x01", id="extension type"),
        pytest.param(b"\xc0", id="nil"),
        pytest.param(b"\x80", id="a map for a message"),
        pytest.param(b"\x07", id="a number for a message"),
    ],
)
def test_bytes_that_are_no_message_are_refused(data):
    assert refused(Cancel, data).param.startswith("Cancel")


@given(st.binary(max_size=64))
@settings(max_examples=200, deadline=None)
def test_random_bytes_never_raise_anything_else(data):
    for cls in (Cancel, Submit, EventBatch):
        with contextlib.suppress(InvalidRequest):
            codec.decode(cls, data)


@given(strategy(Submit), st.data())
@settings(max_examples=100, deadline=None)
def test_a_flipped_byte_is_decoded_or_refused(message, data):
    encoded = bytearray(codec.encode(message))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(InvalidRequest):
        assert isinstance(codec.decode(Submit, bytes(encoded)), Submit)


def key_bytes(request_id="r", attempt=0):
    return [request_id, attempt]


def test_types_are_read_by_one_thread_at_a_time(monkeypatch):
    """msgspec crashes where a thread meets a type of which another has read some fields."""
    make, inside, most = msgspec.msgpack.Decoder, [], []

    def slow(cls):
        inside.append(cls)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return make(cls)

    class Leaf(Message):
        number: int

    class Tree(Message):
        leaf: Leaf

    monkeypatch.setattr(
        codec,
        "msgspec",
        SimpleNamespace(**vars(msgspec) | {"msgpack": SimpleNamespace(Decoder=slow)}),
    )
    tree = Tree(leaf=Leaf(number=3))
    data = codec.encode(tree)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: codec.decode(Tree, data), range(4))) == [tree] * 4
    assert set(most) == {1}


def test_paths_reach_into_nested_values():
    bad = msgpack.packb([False, [key_bytes(), key_bytes(attempt="one")]])
    assert refused(Cancel, bad).param == "Cancel.keys[1].attempt"
    event = [key_bytes(), 0, None, [["decode", "", {"bytes": 1.5}, "", 0.0, 1.0]], None, 5]
    assert refused(TokenEvent, msgpack.packb(event)).param == "TokenEvent.spans[0].counts[...]"


@pytest.mark.parametrize("value", [True, False])
def test_booleans_are_not_numbers(value):
    event = [key_bytes(attempt=value), 0, None, [], None, 5]
    assert refused(TokenEvent, msgpack.packb(event)).param == "TokenEvent.key.attempt"
    span = ["decode", "", {}, "", value, 1.0]
    assert refused(Span, msgpack.packb(span)).param == "Span.start"


def test_whole_numbers_are_good_floats_but_not_the_reverse():
    span = codec.decode(Span, msgpack.packb(["decode", "", {}, "", 3, 4]))
    assert span.start == 3.0
    assert type(span.start) is float
    event = [key_bytes(), 1.0, None, [], None, 5]
    assert refused(TokenEvent, msgpack.packb(event)).param == "TokenEvent.index"


def test_strings_and_bytes_are_not_mixed_up():
    assert refused(Cancel, msgpack.packb([False, [[b"r", 0]]])).param == "Cancel.keys[0].request_id"
    ticket = [key_bytes(), 1, 2, 3, "not bytes", 4.0]
    assert refused(Ticket, msgpack.packb(ticket)).param == "Ticket.signature"


@pytest.mark.parametrize("value", ["sideways", 3, None, [], {"a": 1}])
def test_unknown_enum_values_are_refused(value):
    raw = ["decode-0", 1, value, "", "127.0.0.1:1"]
    assert refused(WorkerRef, msgpack.packb(raw)).param == "WorkerRef.role"


def test_enums_travel_by_value():
    raw = msgpack.unpackb(codec.encode(TokenEvent(key=RequestKey("r"), index=0, token=1)))
    assert raw[2] is None
    finished = TokenEvent(key=RequestKey("r"), index=0, token=1, finish=FinishReason.LENGTH)
    assert msgpack.unpackb(codec.encode(finished))[2] == "length"


def test_infinities_survive_and_nan_stays_nan():
    span = Span(phase=Phase.DECODE, start=-math.inf, end=math.inf)
    assert codec.decode(Span, codec.encode(span)) == span
    odd = Span(phase=Phase.DECODE, start=math.nan, end=0.0)
    assert math.isnan(codec.decode(Span, codec.encode(odd)).start)


def test_an_empty_message_is_an_empty_array():
    assert codec.encode(StatusQuery()) == b"\x90"
    assert codec.decode(StatusQuery, b"\x90") == StatusQuery()


def test_integers_beyond_64_bits_cannot_be_sent():
    with pytest.raises(OverflowError):
        codec.encode(WorkerLoad(running=2**64))


def test_values_without_a_wire_form_are_programming_errors():
    class Anything(Message):
        value: Any

    class Either(Message):
        value: Ack | Cancel  # nothing on the wire tells which

    with pytest.raises(TypeError, match="unsupported"):
        codec.encode(Anything(value=object()))
    with pytest.raises(TypeError, match="union"):
        codec.decode(Either, b"\x91\x90")


def test_the_last_field_of_a_message_has_no_default():
    for cls in set(CLASSES) - DEFAULTS_ONLY:
        fields = msgspec.structs.fields(cls)
        assert not fields or fields[-1].required, cls


def test_messages_are_frozen_and_copied_with_changes():
    load = WorkerLoad(running=1)
    with pytest.raises(AttributeError):
        load.running = 2
    assert msgspec.structs.replace(load, waiting=3) == WorkerLoad(running=1, waiting=3)
    with pytest.raises(TypeError):
        WorkerLoad(1)


def test_a_long_prompt_is_compact():
    submit = Submit(
        key=RequestKey("0" * 32),
        router_id="router-0",
        prompt_ids=tuple(range(8192)),
        sampling=SamplingParams(),
        time_left_s=1e9,
    )
    assert len(codec.encode(submit)) < 3 * 8192 + 300
    assert codec.decode(Submit, codec.encode(submit)) == submit


def test_roles_are_the_two_pools():
    assert {role.value for role in Role} == {"prefill", "decode"}
