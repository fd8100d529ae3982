"""A model as transformers computes it, and what of it contradicts its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from assay.harness.engines.hf.model import Model
from assay.harness.engines.model import TINY_MODEL, resolve_model

IDS = [(7 * n) % 1000 + 3 for n in range(60)]


@pytest.fixture(scope="module")
def tiny() -> Model:
    return Model(TINY_MODEL)


def test_a_kept_prefix_changes_no_score(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.forget()
    cold, none = tiny.log_probabilities(IDS)
    rest, reused = tiny.log_probabilities(IDS, 41)
    assert (none, reused, cold.shape, rest.shape) == (0, 41, (60, 1031), (19, 1031))
    assert (rest - cold[41:]).abs().max() < 1e-5
    other = [*IDS[:20], 5, 6, 7]
    assert tiny.log_probabilities(other, 41)[1] == 20, "as far as both begin alike"
    assert tiny.log_probabilities(other, 41)[1] == 22, "the last token is always computed"
    tiny.forget()
    monkeypatch.setattr(tiny.network, "_is_stateful", True)  # as of a model with a recurrent state
    whole, reused = tiny.log_probabilities(IDS, 41)
    assert (reused, tiny.reusable(IDS)) == (0, 0)
    assert (whole - cold).abs().max() < 1e-5
    assert torch.allclose(cold.exp().sum(-1), torch.ones(60, dtype=torch.float64))


@pytest.mark.parametrize("family", ["tiny-gemma2", "tiny-gemma3", "tiny-gpt-oss", "tiny-qwen3", "tiny-deepseek-v2"])
@pytest.mark.few(2)
def test_a_kept_prefix_changes_no_score_of_another_family(family: str) -> None:
    model = Model(resolve_model(family, ()))
    ids = [(11 * n) % 900 + 3 for n in range(150)]
    cold, _ = model.log_probabilities(ids)
    rest, reused = model.log_probabilities(ids, 100)
    assert reused == 100
    assert (rest - cold[100:]).abs().max() < 1e-4
    assert model.contradictions() == []


@pytest.mark.parametrize("family", ["tiny", "tiny-gemma2", "tiny-deepseek-v2"])
def test_a_trace_has_what_attention_reads_and_returns_in_each_layer(family: str) -> None:
    model = Model(resolve_model(family, ()))
    cold, kept = model.log_probabilities(IDS)[0], model.trace(IDS)
    layers = range(model.network.config.num_hidden_layers)
    assert {name.partition(".")[0] for name in kept} == {"q", "new_k", "new_v", "k", "v", "layer", "after"}
    assert {int(name.partition(".")[2]) for name in kept} == set(layers)
    assert {len(tensor) for tensor in kept.values()} == {len(IDS)}
    assert (model.log_probabilities(IDS)[0] - cold).abs().max() == 0, "nothing stays watched"
    ends = model.network.get_decoder().norm(kept[f"after.{max(layers)}"][:, 0])
    assert (torch.log_softmax(model.network.lm_head(ends).double(), -1) - cold).abs().max() < 1e-5 or family != "tiny"
    if family == "tiny":
        q, k, v = (kept[f"{name}.0"] for name in "qkv")
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * model.network.config.head_dim**-0.5
        weights = (scores + torch.full_like(scores, -torch.inf).triu(1)).softmax(-1)
        assert (torch.einsum("hqk,khd->qhd", weights, v) - kept["layer.0"]).abs().max() < 1e-5


def test_an_answer_is_greedy_and_ends_with_a_token_that_ends_it(tiny: Model) -> None:
    made = list(tiny.generate(IDS, 5))
    assert [id_ for id_, scores in made] == [int(scores.argmax()) for _, scores in made]
    assert [id_ for id_, _ in tiny.generate(IDS, 5, {made[0][0]})] == [made[0][0]]
    told = [*IDS, *(id_ for id_, _ in made)]
    tiny.forget()
    assert tiny.log_probabilities(told)[0][len(IDS) - 1 : -1].argmax(-1).tolist() == told[len(IDS) :]


def test_it_is_held_against_its_folder(tiny: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiny.contradictions() == []
    shutil.copytree(TINY_MODEL, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    lacking = Model(tmp_path)
    (said,) = lacking.contradictions()
    assert "model.layers.1.mlp.up_proj.weight is served, but missing from the checkpoint" in said

    tiny.network.model.rotary_emb.inv_freq.mul_(0.5)  # as a wrong reading of the configuration would make it
    try:
        (said,) = tiny.contradictions()
    finally:
        tiny.network.model.rotary_emb.inv_freq.mul_(2.0)
    assert said.startswith("RoPE is scaled linearly by 2")

    shutil.copytree(TINY_MODEL, tmp_path, dirs_exist_ok=True)
    written = json.loads((tmp_path / "tokenizer.json").read_text())
    whole, tokens = Model(tmp_path), tiny.tokens()
    written["pre_tokenizer"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    monkeypatch.setattr(whole, "tokens", lambda: tokens.model_copy(update={"written": {"english": (1, 2, 3)}}))
    assert [said for said in whole.contradictions() if "do not match tokenizer.json" in said]
