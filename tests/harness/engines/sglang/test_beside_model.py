from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from assay.harness.engines.model import TINY_MODEL, configuration
from assay.harness.engines.sglang.beside_model import (
    ADAPTER,
    DRAFT,
    MODEL,
    OTHER_ADAPTER,
    adapter,
    draft,
    filled,
    has_experts,
    like_llama,
)

CONFIG = configuration(TINY_MODEL)
WEIGHTS = safetensors.torch.load_file(TINY_MODEL / "model.safetensors")


@pytest.mark.parametrize("zeros", [True, False])
def test_an_adapter_fits_the_projections_of_every_layer_and_adds_zeros_or_something(zeros: bool) -> None:
    _, config, _, weights = adapter(CONFIG, zeros)
    assert len(weights) == 2 * len(config["target_modules"]) * CONFIG["num_hidden_layers"]
    for name, first in weights.items():
        if ".lora_A." in name:
            second = weights[name.replace("lora_A", "lora_B")]
            target = WEIGHTS[name.removeprefix("base_model.model.").replace("lora_A.", "")]
            assert (second @ first).shape == target.shape
            assert first.shape[0] == config["r"]
            assert {first.dtype, second.dtype} == {torch.bfloat16}
            assert bool((second @ first == 0).all()) == zeros
            assert bool((first != 0).any())


def test_a_draft_has_one_layer_of_the_shapes_of_the_model() -> None:
    _, config, _, weights = draft(CONFIG)
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert (config["num_hidden_layers"], config["tie_word_embeddings"]) == (1, False)
    assert config["rope_parameters"] == CONFIG["rope_parameters"]
    of_layer = {name: tensor for name, tensor in weights.items() if not name.startswith("fc.")}
    assert {f"model.{name}": tensor.shape for name, tensor in of_layer.items()} == {
        name: tensor.shape
        for name, tensor in WEIGHTS.items()
        if name.startswith("model.layers.0.") and not name.endswith("input_layernorm.weight")
    }
    assert weights["fc.weight"].shape == (CONFIG["hidden_size"], 2 * CONFIG["hidden_size"])


def test_what_a_flag_names_is_made_and_nothing_else(tmp_path: Path) -> None:
    assert filled((f"--draft={MODEL}", "--tp-size=2"), TINY_MODEL, CONFIG, tmp_path) == (f"--draft={TINY_MODEL}", "--tp-size=2")
    assert not list(tmp_path.iterdir())
    (flag,) = filled((f"--lora-paths=zeros={ADAPTER}",), TINY_MODEL, CONFIG, tmp_path)
    place = Path(flag.removeprefix("--lora-paths=zeros="))
    assert place.is_absolute()
    assert {each.name for each in tmp_path.iterdir()} == {"adapter", OTHER_ADAPTER}
    assert json.loads((place / "adapter_config.json").read_text())["peft_type"] == "LORA"
    stored = safetensors.torch.load_file(place / "adapter_model.safetensors")
    assert not any(tensor.any() for name, tensor in stored.items() if "lora_B" in name)
    (flag,) = filled((f"--speculative-draft-model-path={DRAFT}",), TINY_MODEL, CONFIG, tmp_path)
    place = Path(flag.removeprefix("--speculative-draft-model-path="))
    assert {each.name for each in place.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"num_experts": 8}, ""),
        ({"n_routed_experts": 7}, "7 experts cannot be shared by two"),
        ({"num_local_experts": 4, "model_type": "gpt_oss"}, "SGLang 0.5.17 leaves the experts of gpt-oss together"),
        (CONFIG, "the model has no experts"),
    ],
)
def test_experts_are_shared_where_there_are_some(config: dict[str, Any], why: str) -> None:
    assert has_experts(config) == why


def test_nothing_is_made_for_layers_that_are_not_known() -> None:
    assert like_llama(CONFIG) == ""
    assert like_llama({"architectures": ["DeepseekV2ForCausalLM"]}).endswith("not for DeepseekV2ForCausalLM")
