"""RoPE of a configuration, beside what transformers computes of the same one, and what is read off wrong tables."""

from __future__ import annotations

import math
from typing import Any

import pytest

from assay.harness.fingerprint.rope import asked_ropes, read_theta, same_frequencies, wrong_rope

BASE = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 4096, "rope_theta": 500000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn that does not truncate": {**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2},
}


def plain(theta: float, dim: int = 64) -> list[float]:
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = SCALINGS[name]
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=8, max_position_embeddings=4096, rope_parameters={"rope_theta": 500000.0, **scaling}
    )  # fmt: skip
    frequencies, scale = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    (rope, *_) = asked_ropes({**BASE, "rope_scaling": scaling})
    assert same_frequencies(frequencies.tolist(), rope.frequencies)
    assert scale == pytest.approx(rope.scale)


@pytest.mark.parametrize(
    "config",
    [
        BASE,
        {**BASE, "rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}},
        {"text_config": BASE, "rope_theta": 1.0},
        {**BASE, "rope_theta": 1.0, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
    ],
)
def test_plain_rope_is_read_in_each_spelling(config: dict[str, Any]) -> None:
    (rope,) = asked_ropes(config)
    assert rope.frequencies == pytest.approx(plain(500000.0))


def test_a_part_of_a_head_is_turned() -> None:
    (rope,) = asked_ropes({**BASE, "partial_rotary_factor": 0.25})
    assert rope.frequencies == pytest.approx(plain(500000.0, 16))


def test_latent_attention_turns_its_own_dims() -> None:
    (rope,) = asked_ropes({**BASE, "qk_rope_head_dim": 32, "partial_rotary_factor": 0.5})
    assert rope.frequencies == pytest.approx(plain(500000.0, 32))


@pytest.mark.parametrize("nested", [True, False])
def test_gemma_has_two_bases(nested: bool) -> None:
    sliding, full = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    flat = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    kinds = {"rope_parameters": {"sliding_attention": sliding, "full_attention": full}}
    ropes = {rope.layers: rope for rope in asked_ropes({**BASE, **(kinds if nested else flat)})}
    assert ropes["sliding_attention"].frequencies == pytest.approx(plain(1e4))
    assert ropes["full_attention"].frequencies == pytest.approx([f / 8 for f in plain(1e6)])


def test_no_base_and_an_unknown_type_ask_for_nothing() -> None:
    assert asked_ropes({key: value for key, value in BASE.items() if key != "rope_theta"}) == []
    assert asked_ropes({**BASE, "rope_scaling": {"rope_type": "longrope", "factor": 2.0}}) == []


def test_the_base_is_read_off_plain_frequencies_alone() -> None:
    assert read_theta(plain(10000.0)) == pytest.approx(10000.0)
    assert read_theta([f / 8 for f in plain(10000.0)]) is None
    assert read_theta(asked_ropes({**BASE, "rope_scaling": LLAMA3})[0].frequencies) is None


@pytest.mark.parametrize(
    ("config", "frequencies", "scale", "says"),
    [
        ({}, plain(10000.0), 1.0, "rope_theta is 10,000; config.json says 500,000"),
        ({}, plain(500000.0, 32), 1.0, "RoPE rotates 32 dims per head; config.json says 64"),
        ({}, plain(500000.0), 1.2, "cos and sin are scaled by 1.2; config.json says 1"),
        ({}, [f / 8 for f in plain(500000.0)], 1.0, "RoPE is scaled linearly by 8; config.json says no scaling"),
        ({"rope_scaling": LLAMA3}, plain(500000.0), 1.0, "RoPE is not scaled; config.json says llama3 scaling by 8"),
        (
            {"rope_scaling": SCALINGS["linear"]},
            [f / 4 for f in plain(500000.0)],
            1.0,
            "RoPE is scaled linearly by 4; config.json says linear scaling by 8",
        ),
        (
            {"rope_scaling": LLAMA3},
            plain(10000.0),
            1.0,
            "rope_theta is 10,000; config.json says 500,000, and llama3 scaling by 8 is not applied",
        ),
    ],
)
def test_wrong_tables_are_named(config: dict[str, Any], frequencies: list[float], scale: float, says: str) -> None:
    assert wrong_rope(frequencies, scale, asked_ropes({**BASE, **config})) == says


def test_what_is_asked_for_is_not_wrong() -> None:
    for scaling in ({}, *SCALINGS.values()):
        for rope in asked_ropes({**BASE, "rope_scaling": scaling}):
            rounded = [f * (1 + 2.0**-14 * math.sin(i)) for i, f in enumerate(rope.frequencies)]
            assert wrong_rope(rounded, rope.scale, asked_ropes({**BASE, "rope_scaling": scaling})) == ""


def test_the_base_of_another_layer_type_is_wrong() -> None:
    asked = asked_ropes({**BASE, "rope_theta": 1e6, "rope_local_base_freq": 1e4})
    assert wrong_rope(plain(1e4), 1.0, asked, "sliding_attention") == ""
    assert wrong_rope(plain(1e4), 1.0, asked, "full_attention") == (
        "rope_theta is 10,000; config.json says 1,000,000 for full attention"
    )
