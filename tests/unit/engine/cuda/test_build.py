"""What GPUs refuse."""

import pytest

from engine.config import EngineConfig
from engine.cuda.build import check_served
from engine.errors import ModelRefused
from tests.support.cuda import tiny_config


def test_what_only_cpus_serve_is_refused_by_name():
    check_served(EngineConfig(model_path="unused"), tiny_config())
    with pytest.raises(ModelRefused) as caught:
        check_served(EngineConfig(model_path="unused", quantization="int8"), tiny_config())
    assert caught.value.param == "quantization"
    gemma4 = {"architectures": ["Gemma4ForCausalLM"], "hidden_size_per_layer_input": 0}
    with pytest.raises(ModelRefused, match="Gemma4ForCausalLM is served on CPUs") as caught:
        check_served(EngineConfig(model_path="unused"), tiny_config(**gemma4))
    assert caught.value.param == "architectures"
