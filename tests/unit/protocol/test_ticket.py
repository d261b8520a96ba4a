import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from protocol import codec
from protocol.errors import StaleMessage
from protocol.ids import RequestKey
from protocol.messages import Ticket

SECRET = b"the cluster's secret"
GOOD = Ticket(
    key=RequestKey("r1", 2),
    sender_epoch=11,
    receiver_epoch=22,
    num_blocks=5,
    lifetime_s=60.0,
).signed(SECRET)
TAMPERED = {
    "key": [RequestKey("r2", 2), RequestKey("r1", 3)],
    "sender_epoch": [12, -11, 22],
    "receiver_epoch": [23, 11],
    "num_blocks": [6, 0, -5, 55],
    "lifetime_s": [61.0, math.nextafter(60.0, math.inf), math.inf],
    "signature": [b"", GOOD.signature[:-1], GOOD.signature + b"\0", bytes(32)],
}


def refused(ticket, secret=SECRET):
    with pytest.raises(StaleMessage) as caught:
        ticket.verify(secret)
    assert caught.value.param == "ticket"
    return caught.value.message


def test_a_signed_ticket_verifies():
    GOOD.verify(SECRET)


def test_signing_changes_nothing_but_the_signature():
    unsigned = replace(GOOD, signature=b"")
    assert unsigned.signed(SECRET) == GOOD
    assert len(GOOD.signature) == 32


def test_every_field_is_tampered_with():
    assert set(TAMPERED) == {field.name for field in fields(Ticket)}


@pytest.mark.parametrize(
    ("field", "value"), [(name, value) for name, values in TAMPERED.items() for value in values]
)
def test_a_tampered_field_breaks_the_signature(field, value):
    assert "signature" in refused(replace(GOOD, **{field: value}))


@pytest.mark.parametrize("lifetime_s", [math.nan, math.inf, -math.inf])
def test_a_ticket_has_an_end(lifetime_s):
    assert "never ends" in refused(replace(GOOD, lifetime_s=lifetime_s).signed(SECRET))


@pytest.mark.parametrize("secret", [b"", b"another secret", SECRET + b"!", SECRET[:-1]])
def test_another_secret_breaks_the_signature(secret):
    assert "signature" in refused(GOOD, secret=secret)


def test_two_secrets_make_two_signatures():
    assert replace(GOOD, signature=b"").signed(b"other").signature != GOOD.signature


def test_fields_cannot_run_into_each_other():
    first = Ticket(
        key=RequestKey("r", 1), sender_epoch=23, receiver_epoch=4, num_blocks=5, lifetime_s=1.0
    )
    second = replace(first, key=RequestKey("r", 12), sender_epoch=3)
    assert first.signed(SECRET).signature != second.signed(SECRET).signature


def test_a_ticket_still_verifies_after_the_wire():
    codec.decode(Ticket, codec.encode(GOOD)).verify(SECRET)


@given(st.floats(min_value=0.0, max_value=1e15), st.integers(0, 2**62), st.integers(0, 2**31))
def test_any_ticket_verifies_after_the_wire(lifetime_s, epoch, num_blocks):
    ticket = Ticket(
        key=RequestKey("r"),
        sender_epoch=epoch,
        receiver_epoch=epoch,
        num_blocks=num_blocks,
        lifetime_s=lifetime_s,
    ).signed(SECRET)
    codec.decode(Ticket, codec.encode(ticket)).verify(SECRET)
