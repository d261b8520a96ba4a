import pytest
from msgspec.structs import fields, replace

from protocol.kv_layout import DTYPE_BYTES, KVFingerprint, KVLayout

LAYOUT = KVLayout(
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    block_size=16,
    num_blocks=10,
    dtype="bfloat16",
    rank_heads=((0, 3),),
)
FINGERPRINT = KVFingerprint(
    model="llama",
    weights="abc",
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    dtype="bfloat16",
    rope="100000",
)


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (1500, 94)]
)
def test_blocks_for(tokens, blocks):
    assert LAYOUT.blocks_for(tokens) == blocks


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_token_bytes_counts_keys_and_values_of_all_layers(dtype):
    layout = replace(LAYOUT, dtype=dtype)
    assert layout.token_bytes() == 30 * 2 * 3 * 64 * DTYPE_BYTES[dtype]


def test_token_bytes_does_not_count_replicas():
    replicated = replace(LAYOUT, rank_heads=((0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3)))
    assert replicated.tp_size == 6
    assert replicated.token_bytes() == LAYOUT.token_bytes()


def test_equal_fingerprints_fit():
    assert FINGERPRINT.differing_field(replace(FINGERPRINT)) is None


@pytest.mark.parametrize("field", [field.name for field in fields(KVFingerprint)])
def test_every_field_of_the_fingerprint_counts(field):
    value = getattr(FINGERPRINT, field)
    other = replace(FINGERPRINT, **{field: value + (1 if isinstance(value, int) else "x")})
    assert FINGERPRINT.differing_field(other) == field
    assert other.differing_field(FINGERPRINT) == field


def test_the_first_difference_is_named():
    other = replace(FINGERPRINT, dtype="float32", model="mistral")
    assert FINGERPRINT.differing_field(other) == "model"
