import json

import torch

from benchmarks.random_checkpoint import shards_of, write_checkpoint
from benchmarks.shapes import MODELS
from engine.config import EngineConfig
from engine.model.families import parse_model_config
from protocol.sampling import SamplingParams
from router.text.tokenizer import ModelText
from tests.support.local_engine import LocalEngine

SHAPE = MODELS["tiny"] | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 1003}
SHAPE["max_position_embeddings"] = 16384


def test_the_folder_is_a_model_that_others_can_read(tmp_path):
    from transformers import AutoModelForCausalLM

    size = write_checkpoint(SHAPE, tmp_path, seed=3)
    shards = shards_of(parse_model_config(SHAPE))
    assert size == 2 * sum(torch.Size(s).numel() for shard in shards for s in shard.values())

    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = [5, 900, 17, 300]
    with torch.inference_mode():
        expected = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, 4, dtype=torch.long),
            do_sample=False,
            max_new_tokens=6,
            eos_token_id=None,
            pad_token_id=0,
        )
    engine = LocalEngine(EngineConfig(model_path=str(tmp_path), dtype="float32", num_blocks=8))
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    assert engine.generate([(prompt, sampling)]) == [expected[0, 4:].tolist()]


def test_every_id_has_a_token_and_text_survives(tmp_path):
    from transformers import AutoTokenizer

    write_checkpoint(SHAPE, tmp_path)
    text = ModelText(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (text.vocab_size, len(tokenizer)) == (1003, 1003)
    assert text.eos_ids == (config["eos_token_id"],) == (tokenizer.eos_token_id,)
    sample = "Some words, é and 你好"
    assert text.decode(text.encode(sample)) == sample
    plain = range(1003 - 4 - 1003 // 8)
    assert all(text.decode([token]) for token in plain)
