"""The tiny model in the architectures of other families."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from assay.evals.questions import parse_answer
from assay.evals.synthetic import questions
from assay.evals.tiny_model import families
from assay.harness.engines.model import model_shape, resolve_model

ASKED = {"gemma2": {"softcap", "window"}, "gemma3": {"window"}, "gpt-oss": {"window", "sinks"}, "qwen3": set()}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ASKED)
def test_a_family_asks_for_its_features_and_answers_questions(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = resolve_model(f"tiny-{family}")
    assert set(model_shape(folder).asks) == ASKED[family]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for question in itertools.islice(questions(), 2):
        chat = [{"role": "user", "content": question.prompt}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        assert ids.shape[1] > families._WINDOW, "a window that holds all keys shows nothing"
        out = model.generate(ids, max_new_tokens=16, do_sample=False)
        assert parse_answer(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)) == question.answer


def test_where_rope_does_nothing_latents_and_experts_compute_what_the_tiny_llama_does() -> None:
    """Of one token there is one key, at position 0, and all that RoPE and the softmax do is nothing."""
    transformers = pytest.importorskip("transformers")
    folder = resolve_model("tiny-deepseek-v2")
    shape = model_shape(folder)
    assert (set(shape.asks), shape.kv_heads, shape.head_dim) == ({"mla"}, 1, 576)
    llama, latent = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        for path in (families.SOURCE, folder)
    )
    tokens = torch.arange(100, 120)[:, None]
    with torch.inference_mode():
        expected, found = (model(tokens).logits[:, 0] for model in (llama, latent))
    assert float((found - expected).abs().max()) < 0.02 * float(expected.std())


def test_scales_are_all_that_an_fp8_cache_adds() -> None:
    from safetensors.torch import load_file

    folder = resolve_model("tiny-fp8-kv")
    made, source = (load_file(path / "model.safetensors") for path in (folder, families.SOURCE))
    added = {name: float(made.pop(name)) for name in set(made) - set(source)}
    assert all(torch.equal(made[name], source[name].bfloat16()) for name in source)
    assert set(added) == {f"model.layers.{n}.self_attn.{x}_scale" for n in range(4) for x in "kv"}
    assert len(set(added.values())) == 8, "a scale that is taken for another one would not show"


def test_a_model_is_made_once(tmp_path: Path) -> None:
    folder = resolve_model("tiny-gemma2")
    (folder / "config.json").write_text(json.dumps({"is": "kept"}))
    assert json.loads((resolve_model("tiny-gemma2") / "config.json").read_text()) == {"is": "kept"}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert folder.is_relative_to(tmp_path)
