"""Digests of blocks: equal exactly when everything that KV depends on is equal."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.kv_layout import HINT_BYTES, chain_seed, extend_chain, hints, split_hints
from tests.support.blocks import FINGERPRINT

SEED = chain_seed(FINGERPRINT)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def chain(tokens: list[int], seed: bytes = SEED, block_size: int = 4) -> list[bytes]:
    digests: list[bytes] = []
    extend_chain(digests, tokens, block_size=block_size, seed=seed)
    return digests


def test_a_digest_is_sha256_of_the_one_before_and_the_ids() -> None:
    first = sha256(SEED + b"".join(i.to_bytes(4, "little") for i in (1, 2, 3, 70000))).digest()
    second = sha256(first + b"".join(i.to_bytes(4, "little") for i in (5, 6, 7, 8))).digest()
    assert chain([1, 2, 3, 70000, 5, 6, 7, 8, 9]) == [first, second]


@given(IDS, st.integers(0, 40))
def test_growing_in_steps_gives_the_same_chain(tokens: list[int], cut: int) -> None:
    digests = chain(tokens[:cut])
    extend_chain(digests, tokens, block_size=4, seed=SEED)
    assert digests == chain(tokens)
    assert len(digests) == len(tokens) // 4


@given(IDS, IDS)
def test_chains_agree_exactly_as_far_as_full_blocks_do(a: list[int], b: list[int]) -> None:
    b = a[: len(b)] + b
    common = 0
    while a[4 * common : 4 * common + 4] == b[4 * common : 4 * common + 4] and common < min(
        len(a) // 4, len(b) // 4
    ):
        common += 1
    assert [x == y for x, y in zip(chain(a), chain(b), strict=False)] == [
        i < common for i in range(min(len(a) // 4, len(b) // 4))
    ]


@pytest.mark.parametrize(
    "change",
    [
        *({"model": "n"}, {"weights": "v"}, {"num_layers": 3}, {"num_kv_heads": 2}),
        *({"head_dim": 16}, {"dtype": "bfloat16"}, {"rope": "q"}),
    ],
)
def test_whatever_kv_depends_on_changes_every_digest(change: dict) -> None:
    other = chain_seed(replace(FINGERPRINT, **change))
    assert not set(chain(list(range(40)))) & set(chain(list(range(40)), other))


def test_blocks_of_other_sizes_never_share() -> None:
    assert not set(chain([7] * 64, block_size=4)) & set(chain([7] * 64, block_size=8))


def test_salts_never_share() -> None:
    seeds = {chain_seed(FINGERPRINT, salt) for salt in ("", "a", "b", "ab")}
    assert len({chain([1, 2, 3, 4], seed)[0] for seed in seeds}) == 4


def test_hints_are_the_first_bytes_in_order() -> None:
    digests = chain(list(range(12)))
    firsts = [int.from_bytes(digest[:HINT_BYTES], "little") for digest in digests]
    assert split_hints(hints(digests)) == tuple(firsts)
    assert split_hints(b"") == ()
