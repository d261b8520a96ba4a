"""How much host memory a worker takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from kv_tiers import rank_tiers
from kv_tiers.config import TierConfig
from kv_tiers.rank_tiers import files_key, num_host_slots
from protocol.kv_layout import KVGroup, KVLayout
from tests.support.blocks import FINGERPRINT

LAYOUT = KVLayout(
    num_layers=2,
    num_kv_heads=4,
    head_dim=8,
    block_size=16,
    num_blocks=10,
    dtype="float32",
    rank_heads=((0, 4),),
)
SLOT = 2 * 2 * 4 * 8 * 16 * 4


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host with 1 GiB of free memory and no limit; the folder of its cgroup."""
    monkeypatch.setattr(rank_tiers, "available_memory", lambda: 1 << 30)
    monkeypatch.setattr(rank_tiers, "_CGROUP", tmp_path)
    return tmp_path


def test_by_default_a_sixteenth_of_what_is_free(free: Path) -> None:
    assert num_host_slots(TierConfig(), LAYOUT, on_gpu=False) == (1 << 26) // SLOT
    two = replace(LAYOUT, rank_heads=((0, 2), (2, 4)))
    assert num_host_slots(TierConfig(), two, on_gpu=True) == (1 << 25) // (SLOT // 2)


def test_a_container_with_less_counts(free: Path) -> None:
    (free / "memory.max").write_text("100000000\n")
    (free / "memory.current").write_text("90000000\n")
    (free / "memory.stat").write_text("anon 5\ninactive_file 70000000\nactive_file 3\n")
    assert num_host_slots(TierConfig(), LAYOUT, on_gpu=False) == 80_000_000 // 16 // SLOT
    (free / "memory.max").write_text("max\n")
    assert num_host_slots(TierConfig(), LAYOUT, on_gpu=False) == (1 << 26) // SLOT


def test_as_configured(free: Path) -> None:
    assert num_host_slots(TierConfig(host_bytes=10 * SLOT), LAYOUT, on_gpu=True) == 10
    assert num_host_slots(TierConfig(host_bytes=0), LAYOUT, on_gpu=True) == 0
    windows = replace(LAYOUT, groups=(KVGroup(), KVGroup(window=8)))
    assert num_host_slots(TierConfig(host_bytes=10 * SLOT), windows, on_gpu=False) == 10


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("host_bytes", {"host_bytes": -1}),
        ("disk_bytes", {"disk_bytes": 0}),
        ("segment_tokens", {"segment_tokens": 0}),
        ("disk_path", {"disk_path": "kv"}),
        ("disk_path", {"disk_path": "/kv", "host_bytes": 0}),
    ],
)
def test_a_wrong_setting_is_refused_by_name(field: str, settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=field):
        TierConfig(**settings)  # type: ignore[arg-type]


def test_what_the_bytes_of_a_file_depend_on_is_in_its_key() -> None:
    others = [
        replace(LAYOUT, dtype="bfloat16"),
        replace(LAYOUT, block_size=8),
        replace(LAYOUT, num_layers=3),
        replace(LAYOUT, rank_heads=((0, 2), (2, 4))),
    ]
    keys = {files_key(layout, FINGERPRINT, 0, 16) for layout in (LAYOUT, *others)}
    keys.add(files_key(others[-1], FINGERPRINT, 1, 16))
    keys.add(files_key(LAYOUT, replace(FINGERPRINT, weights="1"), 0, 16))
    keys.add(files_key(LAYOUT, FINGERPRINT, 0, 8))
    assert len(keys) == 8
    assert files_key(replace(LAYOUT, num_blocks=99), FINGERPRINT, 0, 16) in keys
