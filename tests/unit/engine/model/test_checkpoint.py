"""Checkpoints: the index decides, slices are exact, every fault is named."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cpu.runner import RankRunner
from engine.errors import ModelRefused
from engine.executor import build_executor
from engine.model import digest
from engine.model.checkpoint import Checkpoint
from engine.ranks.tensor_parallel import TensorParallel
from tests.support.engine import config
from tests.support.tiny import save_tiny_llama

A = torch.arange(24, dtype=torch.float32).view(6, 4)
B = torch.arange(5, dtype=torch.float32)


def checkpoint(folder) -> Checkpoint:
    return Checkpoint(folder, torch.float32)


def sharded(folder, weight_map=None):
    """`a` in shard one, `b` in shard two, and an index."""
    folder.mkdir(exist_ok=True)
    save_file({"a": A}, folder / "one.safetensors")
    save_file({"b": B}, folder / "two.safetensors")
    names = weight_map or {"a": "one.safetensors", "b": "two.safetensors"}
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def single(folder, **tensors):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")


def test_slices_of_rows_and_columns(folder):
    single(folder, a=A, b=B)
    source = checkpoint(folder)
    assert torch.equal(source.read("a", (6, 4)), A)
    assert torch.equal(source.read("a", (6, 4), rows=(2, 5)), A[2:5])
    columns = source.read("a", (6, 4), columns=(1, 3))
    assert torch.equal(columns, A[:, 1:3])
    assert columns.is_contiguous()
    assert torch.equal(source.read("b", (5,), rows=(4, 5)), B[4:])
    assert source.read("a", (6, 4), rows=(6, 6)).shape == (0, 4)


def test_tensors_arrive_in_the_dtype_asked_for(folder):
    single(folder, a=A)
    assert Checkpoint(folder, torch.bfloat16).read("a", (6, 4)).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int32])
def test_weights_that_are_quantised_are_refused_by_name(folder, dtype):
    single(folder, a=A, b=B.to(dtype))
    with pytest.raises(ModelRefused, match="states no quantization_config") as caught:
        checkpoint(folder).read("b", (5,))
    assert caught.value.param == "b"


def test_the_index_decides_which_file_owns_a_tensor(folder):
    sharded(folder)
    save_file({"a": A, "b": B + 100}, folder / "one.safetensors")
    save_file({"a": A - 7}, folder / "stray.safetensors")
    save_file({"a": A - 9}, folder / "model.safetensors")
    source = checkpoint(folder)
    source.check()
    assert torch.equal(source.read("a", (6, 4)), A)
    assert torch.equal(source.read("b", (5,)), B)


def test_without_an_index_only_the_single_file_counts(folder):
    single(folder, a=A)
    save_file({"b": B}, folder / "stray.safetensors")
    with pytest.raises(ModelRefused) as caught:
        checkpoint(folder).read("b", (5,))
    assert caught.value.param == "b"


def test_a_missing_shard_is_named(folder):
    sharded(folder)
    (folder / "two.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"two\.safetensors"):
        checkpoint(folder)


@pytest.mark.parametrize("keep", [4, 60, -3])
def test_a_truncated_shard_is_named_before_anything_loads(folder, keep):
    sharded(folder)
    path = folder / "two.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelRefused, match=r"two\.safetensors") as caught:
        checkpoint(folder).check()
    assert caught.value.param == str(path)
    with pytest.raises(ModelRefused, match=r"two\.safetensors"):
        checkpoint(folder).digest()


def test_a_tensor_that_its_shard_lacks_is_named(folder):
    sharded(folder, {"a": "two.safetensors", "b": "two.safetensors"})
    with pytest.raises(ModelRefused) as caught:
        checkpoint(folder).read("a", (6, 4))
    assert caught.value.param == "a"
    with pytest.raises(ModelRefused, match="tensor a is missing"):
        checkpoint(folder).digest()


def test_a_wrong_shape_is_named_with_both_shapes(folder):
    single(folder, a=A)
    with pytest.raises(ModelRefused, match=r"a has shape \[6, 4\], expected \[4, 6\]"):
        checkpoint(folder).read("a", (4, 6))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_unreadable_index_is_named(folder, text):
    sharded(folder)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelRefused, match=r"index\.json"):
        checkpoint(folder)


def test_an_index_cannot_point_outside_the_folder(folder):
    sharded(folder, {"a": "../one.safetensors"})
    assert torch.equal(checkpoint(folder).read("a", (6, 4)), A)


def test_an_empty_folder_is_named(folder):
    folder.mkdir()
    with pytest.raises(ModelRefused, match=str(folder)):
        checkpoint(folder)


def test_the_digest_names_content_not_files(tmp_path):
    single(tmp_path / "single", a=A, b=B)
    sharded(tmp_path / "sharded")
    single(tmp_path / "tuned", a=A + 1e-3, b=B)
    single(tmp_path / "reshaped", a=A.view(4, 6), b=B)
    names = ("single", "sharded", "tuned", "reshaped")
    digests = [checkpoint(tmp_path / name).digest() for name in names]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_the_digest_covers_every_byte(tmp_path):
    table = torch.zeros(4000, 8)
    changed = table.clone()
    changed[1500:2500] = 1.0
    for name, tensor in (("first", table), ("second", changed)):
        single(tmp_path / name, a=tensor, b=B)
    assert checkpoint(tmp_path / "first").digest() != checkpoint(tmp_path / "second").digest()


def test_the_digest_of_a_large_checkpoint_is_kept_until_it_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(digest, "_KEPT_BYTES", 0)
    computed = []

    def compute(tensors, original=digest._compute):
        computed.append(len(tensors))
        return original(tensors)

    monkeypatch.setattr(digest, "_compute", compute)
    single(tmp_path / "m", a=A, b=B)
    first = checkpoint(tmp_path / "m").digest()
    assert checkpoint(tmp_path / "m").digest() == first
    assert computed == [2]
    single(tmp_path / "m", a=A + 1, b=B)
    assert checkpoint(tmp_path / "m").digest() != first
    assert computed == [2, 2]


def overwrite(folder):
    """Other bytes in the same file, of the same size and time of modification."""
    path = folder / "one.safetensors"
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x01\x02\x03\x04")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def swap(folder):
    """The index names another shard for a tensor that both have."""
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "two.safetensors", "b": "one.safetensors"}}))


@pytest.mark.parametrize("change", [overwrite, swap])
def test_a_kept_digest_is_never_that_of_other_weights(tmp_path, monkeypatch, change):
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(digest, "_KEPT_BYTES", 0)
    sharded(tmp_path / "m")
    save_file({"a": A, "b": B}, tmp_path / "m" / "one.safetensors")
    save_file({"a": A + 1, "b": B + 1}, tmp_path / "m" / "two.safetensors")
    before = checkpoint(tmp_path / "m").digest()
    assert checkpoint(tmp_path / "m").digest() == before
    change(tmp_path / "m")
    kept = checkpoint(tmp_path / "m").digest()
    monkeypatch.setattr(digest, "_KEPT_BYTES", 1 << 28)
    assert kept == checkpoint(tmp_path / "m").digest()


@pytest.mark.parametrize("content", [b"", b"0123", b"\0" * 32, b"\xff" * 32])
def test_a_kept_digest_that_was_not_written_whole_is_computed_again(tmp_path, monkeypatch, content):
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(digest, "_KEPT_BYTES", 0)
    single(tmp_path / "m", a=A, b=B)
    first = checkpoint(tmp_path / "m").digest()
    (kept,) = (tmp_path / "home" / "digests").glob("*.sha256")
    kept.write_bytes(content)
    assert checkpoint(tmp_path / "m").digest() == first
    assert kept.read_text() == first


def test_a_digest_that_cannot_be_kept_is_computed(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(digest, "_KEPT_BYTES", 0)
    single(tmp_path / "m", a=A, b=B)
    assert len(checkpoint(tmp_path / "m").digest()) == 32


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 269060552\n"
    )
    with pytest.raises(ModelRefused, match="git-lfs") as caught:
        checkpoint(tmp_path)
    assert caught.value.param == str(tmp_path / "model.safetensors")


def test_an_engine_does_not_start_on_a_broken_checkpoint(folder):
    path = save_tiny_llama(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ModelRefused, match=r"model\.safetensors"):
        build_executor(config(path))


def test_an_engine_does_not_start_when_config_and_weights_disagree(folder):
    path = save_tiny_llama(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"intermediate_size": 100}))
    with pytest.raises(ModelRefused, match=r"mlp\.gate_proj\.weight"):
        build_executor(config(path))


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight"]
)
def test_a_tensor_that_the_model_has_no_place_for_is_named(folder, name):
    """Computing without it would give other answers."""
    path = save_tiny_llama(folder)
    tensors = load_file(f"{path}/model.safetensors")
    save_file(tensors | {name: torch.ones(64)}, f"{path}/model.safetensors")
    with pytest.raises(ModelRefused, match="has no place in the model") as caught:
        RankRunner(config(path), TensorParallel())
    assert caught.value.param == name


def test_tensors_beside_the_decoder_are_ignored_with_a_warning(folder, caplog):
    path = save_tiny_llama(folder)
    tensors = load_file(f"{path}/model.safetensors")
    more = {"score.weight": A, "model.layers.0.self_attn.rotary_emb.inv_freq": B}
    save_file(tensors | more, f"{path}/model.safetensors")
    RankRunner(config(path), TensorParallel())
    (warning,) = [r for r in caplog.records if "not used" in r.message]
    assert warning.ignored == ["score.weight"]


def test_an_impossible_degree_is_refused_before_weights_are_read(folder):
    path = save_tiny_llama(folder, hidden_size=48, num_attention_heads=6, num_key_value_heads=3)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="allowed: 1, 2, 3, 6"):
        RankRunner(config(path, tp_size=4), TensorParallel(0, 4))


@pytest.mark.parametrize("head", ["other", "same", "none"])
def test_a_tied_model_with_another_head_in_its_file_is_served_with_a_warning(folder, caplog, head):
    path = save_tiny_llama(folder, tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    if head != "none":
        table = weights["model.embed_tokens.weight"].clone()
        table[-1, -1] += head == "other"
        weights["lm_head.weight"] = table
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level("WARNING"):
        build_executor(config(path))
    warned = [record for record in caplog.records if "output head" in record.getMessage()]
    assert len(warned) == (head == "other")
    if warned:
        assert (warned[0].used, warned[0].ignored) == (
            "model.embed_tokens.weight",
            "lm_head.weight",
        )
