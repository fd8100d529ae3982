"""What differs between two fingerprints: the first line, what declares it, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.evals.probe_texts import CHATS
from assay.harness.evidence.fingerprint import PARTS, Fingerprint, Resolved, RopeTable, Tokens, Weight
from assay.harness.fingerprint.differences import compare_fingerprints
from assay.harness.fingerprint.facts import CHANGE_NUMBERS, variables
from assay.harness.fingerprint.folder_readings import _digests_of, beside_config, settings_of
from assay.harness.fingerprint.parts import faults
from assay.harness.fingerprint.rope import asked_ropes, wrong_rope
from assay.harness.fingerprint.weights import describe_weight
from assay.reports.fingerprint import diff_document
from tests.harness.fingerprint.models import random_weights

CONFIG = {"rope_theta": 500000.0, "head_dim": 64}


def plain(theta: float, **changed: Any) -> RopeTable:
    frequencies = tuple(theta ** (-2 * i / 64) for i in range(32))
    wrong = wrong_rope(frequencies, 1.0, asked_ropes(CONFIG))
    return RopeTable(
        name="rotary", kind="RotaryEmbedding", dtype="float32", frequencies=frequencies, digest="", wrong=wrong, **changed
    )  # fmt: skip


def described(weights: dict[str, Tensor]) -> tuple[Weight, ...]:
    return tuple(describe_weight(name, weight) for name, weight in weights.items())


def fingerprint(**parts: Any) -> Fingerprint:
    return Fingerprint(source="own server", engine="SGLang 0.5.23 on cpu", model="m", **{"config": {}, **parts})


def first(left: Fingerprint, right: Fingerprint, *allowed: str) -> tuple[int, str]:
    result = compare_fingerprints(left, right, allowed)
    return result.exit_code, result.differences[0].says if result.differences else ""


def resolved(phase: str = "decode", **layers: str) -> tuple[Resolved, ...]:
    return tuple(Resolved(operation="attention", phase=phase, layers=at, runs=name) for name, at in layers.items())


WEIGHTS = random_weights()
SCALE = {"model.layers.0.self_attn.k_scale": torch.ones(1)}


@pytest.mark.parametrize(
    ("left", "right", "code", "says"),
    [
        ({"rope": (plain(500000.0),)}, {"rope": (plain(10000.0),)}, 1, "B: rope_theta is 10,000; config.json says 500,000"),
        ({"rope": (plain(500000.0), plain(10000.0))}, {"rope": (plain(10000.0), plain(500000.0))}, 0, ""),
        ({"weights": described(WEIGHTS)}, {"weights": described(WEIGHTS)}, 0, ""),
        ({"weights": described(WEIGHTS)}, {"weights": described(WEIGHTS)[1:]}, 1, f"{next(iter(WEIGHTS))} is only in A"),
        (
            {"weights": described(WEIGHTS)},
            {"weights": described({name: weight.bfloat16().float() for name, weight in WEIGHTS.items()})},
            1,
            "21 of 21 parameters are the same weights rounded to bfloat16 in B",
        ),
        (  # which two paths do not declare
            {"weights": described(WEIGHTS), "asked": {"model": "a"}},
            {"weights": described(WEIGHTS | SCALE), "asked": {"model": "b"}},
            1,
            f"{next(iter(SCALE))} is only in B",
        ),
        (
            {"backends": resolved(flashinfer="0-31")},
            {"backends": resolved(flashinfer="0-6, 12-31", triton="7-11")},
            1,
            "attention (decode): flashinfer in A, flashinfer (layers 0-6, 12-31), triton (layers 7-11) in B",
        ),
        (
            {"backends": resolved("extend", triton="0-3") + resolved(triton="0-3")},
            {"backends": resolved("extend", fa3="0-3") + resolved(fa3="0-3")},
            1,
            "attention: triton in A, fa3 in B",
        ),
        ({"positions": tuple(range(9))}, {"positions": tuple(range(5))}, 0, ""),
        (
            {"positions": tuple(range(9))},
            {"positions": tuple(range(1, 6))},
            1,
            "position ids are [0, 1, 2, 3, ...] in A, [1, 2, 3, 4, ...] in B",
        ),
        (
            {"asked": {"interpreter": "a"}, "tokens": Tokens(bare={"a": (1,)})},
            {"asked": {"interpreter": "b"}, "tokens": Tokens(bare={"a": (2,)})},
            1,
            "token ids differ in 1 of 1 text of the corpus",
        ),
        ({"arguments": {"tokenizer_path": "/a"}}, {"arguments": {"tokenizer_path": "/b"}}, 0, "tokenizer_path is /a in A, /b in B"),
        *(
            ({"arguments": {name: "1"}}, {"arguments": {name: "2"}}, 1, f"{name} is 1 in A, 2 in B")
            for name in ("enable_fp32_lm_head", "triton_attention_num_kv_splits", "default_chat_template_kwargs", "tokenizer_mode")
        ),
    ],
)
def test_a_difference_is_one_line(left: dict[str, Any], right: dict[str, Any], code: int, says: str) -> None:
    result = compare_fingerprints(fingerprint(**left), fingerprint(**right))
    assert (result.exit_code, [each.says for each in result.differences]) == (code, [says] * bool(says))
    assert result.compared == tuple(part for part in PARTS if part == "config" or part in left)


def test_what_both_have_wrong_is_no_difference() -> None:
    made = fingerprint(rope=(plain(10000.0),))
    result = compare_fingerprints(made, made)
    assert (result.exit_code, result.shared) == (0, ("rope_theta is 10,000; config.json says 500,000",))


def test_nothing_in_common_is_no_pass() -> None:
    result = compare_fingerprints(fingerprint(packages={}), fingerprint(tokens=Tokens(), config=None))
    assert result.exit_code == 3
    assert "B: not observed" in result.not_compared["packages"]


def test_a_table_in_bfloat16_has_no_other_base() -> None:
    """From rounded cosines, the base of the tiny model was read as 9,987."""
    left, coarse, other = (
        fingerprint(rope=(plain(theta).model_copy(update={"dtype": dtype, "wrong": ""}),))
        for theta, dtype in ((10000.0, "float32"), (9940.0, "bfloat16"), (8000.0, "bfloat16"))
    )
    assert first(left, coarse)[1] == "cos and sin are float32 in A, bfloat16 in B"
    assert "rope_theta is 10,000 in A, 8,000 in B" in first(left, other)[1]


def test_tables_of_which_config_json_has_no_reading_are_compared_by_their_rows() -> None:
    """Those of longrope: the rows of two tables may differ where the frequencies, which the first rows have, do not."""
    right = plain(500000.0, rows=4096, error=1e-6).model_copy(update={"digest": "a"})
    lost = right.model_copy(update={"digest": "b", "error": 1.9})
    says = "cos and sin are off by up to 1e-06 in A, 1.9 in B, at the same frequencies"
    assert first(fingerprint(rope=(right,)), fingerprint(rope=(lost,))) == (1, says)
    assert first(fingerprint(rope=(right,)), fingerprint(rope=(lost.model_copy(update={"error": float("nan")}),)))[0] == 1
    for honest in ({"error": 5e-4}, {"error": 1.9, "rows": 8192}, {"error": None}):
        assert first(fingerprint(rope=(right,)), fingerprint(rope=(lost.model_copy(update=honest),))) == (0, "")


IDS = {"english": (5, 6), "numbers": (7, 8, 9)}


@pytest.mark.parametrize(
    ("left", "right", "says"),
    [
        ({"bare": {"a": (1, 2)}}, {"bare": {"a": (1, 3)}}, "token ids differ in 1 of 1 text of the corpus"),
        (
            {"bare": IDS, "tokenizer": "GPT2TokenizerFast"},
            {"bare": {**IDS, "numbers": (7, 88)}, "tokenizer": "GPT2Tokenizer"},
            "token ids differ in 1 of 2 texts of the corpus (tokenizer GPT2TokenizerFast in A, GPT2Tokenizer in B)",
        ),
        ({"texts": IDS}, {"texts": {name: (0, *ids) for name, ids in IDS.items()}}, "BOS begins every text only in B"),
        ({"chats": {"user": (0, 5)}}, {"chats": {"user": (0, 0, 5)}}, "B: two BOS tokens begin a chat (user)"),
        (
            {"counts": {"user": 12}},
            {"counts": {"user": 13}},
            "1 of 1 chat has different numbers of prompt tokens (user: 12 in A, 13 in B)",
        ),
        ({"tokenizer": "T", "eos": (1,)}, {"tokenizer": "T", "eos": (1, 9)}, "EOS is (1,) in A, (1, 9) in B"),
    ],
)  # fmt: skip
def test_token_ids(left: dict[str, Any], right: dict[str, Any], says: str) -> None:
    made = [fingerprint(tokens=Tokens(bos=0, **side)) for side in (left, right)]
    assert first(made[0], made[1]) == (1, says)
    assert compare_fingerprints(made[0], made[1], ["tokens"]).exit_code == 0


def test_one_tensor_that_was_not_sent_again_is_named() -> None:
    sent = random_weights()
    kept = {name: weight * 1.5 for name, weight in sent.items()}
    stale = "model.layers.1.mlp.down_proj.weight"
    served = described({**kept, stale: sent[stale]})
    code, says = first(fingerprint(weights=described(kept)), fingerprint(weights=served))
    assert (code, says) == (1, f"1 of 21 parameters has different weights: {stale} (relative distance up to {_distance(says)})")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_parameter_that_differs_beyond_its_sample_has_other_weights(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("assay.harness.fingerprint.weights._WHOLE", 100)
    monkeypatch.setattr("assay.harness.fingerprint.weights._SAMPLE", 16)
    large = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    changed, broken = large.clone(), large.clone()
    changed[3] = 0
    broken[3, 5] = float("nan")
    whole, other, nan = (fingerprint(weights=described({"embed": each})) for each in (large, changed, broken))
    assert whole.weights
    assert other.weights
    assert whole.weights[0].digest == other.weights[0].digest
    assert first(whole, other)[1].startswith("1 of 1 parameter has different weights: embed")
    assert first(whole, nan)[0] == 1
    assert first(whole, whole) == first(nan, nan) == (0, "")
    elsewhere = tuple(1.000003 * each for each in whole.weights[0].projections)  # as another device adds them up
    added = whole.weights[0].model_copy(update={"projections": elsewhere})
    assert first(whole, fingerprint(weights=(added,))) == (0, "")


def _distance(says: str) -> str:
    return says.rpartition(" ")[2].rstrip(")")


def test_another_model_declares_other_weights_and_not_one_of_many() -> None:
    weights = random_weights()
    ours = fingerprint(weights=described(weights), asked={"model": "a"})
    for changed, code, declared in ((len(weights), 0, "model"), (1, 1, "")):
        other = {name: weight + (number < changed) for number, (name, weight) in enumerate(weights.items())}
        result = compare_fingerprints(ours, fingerprint(weights=described(other), asked={"model": "b"}))
        assert (result.exit_code, result.differences[0].declared) == (code, declared)
    assert compare_fingerprints(
        ours, fingerprint(weights=described(other), asked={"model": "b"}), ["weights"]
    ).exit_code == 0  # fmt: skip


def test_a_setting_of_the_model_counts_and_another_path_does_not_declare_it() -> None:
    weights = described(random_weights())
    ours = fingerprint(weights=weights, config={"rms_norm_eps": "1e-05"}, asked={"model": "a"})
    theirs = fingerprint(weights=weights, config={"rms_norm_eps": "0.5"}, asked={"model": "b"})
    assert first(ours, theirs) == (1, "the model's setting rms_norm_eps is 1e-05 in A, 0.5 in B")
    for asked in ({"--json-model-override-args": "{}"}, {"engine": "vllm"}):
        assert compare_fingerprints(ours, theirs.model_copy(update={"asked": {"model": "a", **asked}})).exit_code == 0
    other = {name: weight + 1 for name, weight in random_weights().items()}
    assert first(ours, theirs.model_copy(update={"weights": described(other)}))[0] == 0, "another model has its own settings"


def test_another_dtype_declares_rounded_weights_but_no_other_ones() -> None:
    weights = random_weights()
    asked = [{"--dtype": dtype} for dtype in ("float32", "bfloat16")]
    ours = fingerprint(weights=described(weights), asked=asked[0])
    rounded = described({name: weight.bfloat16() for name, weight in weights.items()})
    assert compare_fingerprints(ours, fingerprint(weights=rounded, asked=asked[1])).exit_code == 0
    other = described({name: (weight * 1.5).bfloat16() for name, weight in weights.items()})
    assert compare_fingerprints(ours, fingerprint(weights=other, asked=asked[1])).exit_code == 1


def test_weights_of_the_same_values_in_another_dtype_are_told_and_do_not_count() -> None:
    """A CPU loads a checkpoint of bfloat16 in float32; a real cast loses values, and counts."""
    stored = {name: weight.bfloat16() for name, weight in random_weights().items()}
    left = fingerprint(weights=described(stored))
    loaded = fingerprint(weights=described({name: weight.float() for name, weight in stored.items()}))
    code, says = first(left, loaded)
    assert code == 0
    assert says.endswith("are bfloat16 in A, float32 in B, with the same values")
    assert first(fingerprint(weights=described(random_weights())), left)[0] == 1


@pytest.mark.parametrize(
    ("source", "computes_in", "counts"), [("server", "float32", False), ("server", "bfloat16", True), ("endpoint", "float32", True)]
)
def test_the_dtype_of_a_checkpoint_counts_unless_both_servers_compute_in_the_same(
    source: Any, computes_in: str, counts: bool
) -> None:
    weights = described({"a": torch.ones(4)})
    saved = (("float32", "float32"), ("bfloat16", computes_in))
    left, right = (
        fingerprint(weights=weights, config={"dtype": dtype}, quantisation={"weights": computed}).model_copy(
            update={"source": source}
        )
        for dtype, computed in saved
    )
    names = {difference.name for difference in compare_fingerprints(left, right).differences}
    assert ("config.dtype" in names) is counts


def test_what_follows_from_a_speculative_algorithm_is_declared_by_it() -> None:
    none = {"speculative_algorithm": "null", "speculative_num_steps": "null", "speculative_accept_threshold_acc": "1.0"}
    drafts = {**none, "speculative_algorithm": "NGRAM", "speculative_num_steps": "11", "enable_mixed_chunk": "false"}
    left, right = fingerprint(arguments=none), fingerprint(arguments=drafts, asked={"--speculative-algorithm": "NGRAM"})
    assert compare_fingerprints(left, right).exit_code == 0
    assert compare_fingerprints(left, fingerprint(arguments=drafts)).exit_code == 1, "nobody asked for drafts"
    other = right.model_copy(update={"arguments": {**drafts, "speculative_accept_threshold_acc": "0.5"}})
    undeclared = compare_fingerprints(left, other).undeclared
    assert [difference.name for difference in undeclared] == ["arguments.speculative_accept_threshold_acc"]
    ignored = right.model_copy(update={"arguments": none})
    assert first(left, ignored)[1].startswith("--speculative-algorithm was set to NGRAM, not absent, but nothing")


def test_a_checkpoint_is_compared_with_what_an_engine_fused() -> None:
    weights = random_weights()
    fused = dict(weights)
    for number in range(2):
        at = f"model.layers.{number}"
        parts = [fused.pop(f"{at}.self_attn.{x}_proj.weight") for x in "qkv"]
        fused[f"{at}.self_attn.qkv_proj.weight"] = torch.cat(parts)
        parts = [fused.pop(f"{at}.mlp.{x}_proj.weight") for x in ("gate", "up")]
        fused[f"{at}.mlp.gate_up_proj.weight"] = torch.cat(parts)
    assert first(fingerprint(weights=described(weights)), fingerprint(weights=described(fused))) == (0, "")
    fused["model.layers.0.self_attn.qkv_proj.weight"][3] *= 2
    code, says = first(fingerprint(weights=described(weights)), fingerprint(weights=described(fused)))
    assert code == 1
    assert says.startswith("1 of 15 parameters has different weights: model.layers.0.self_attn.qkv_proj.weight")


def test_a_router_bias_must_stay_in_float32() -> None:
    bias = torch.linspace(12, 35, 256)
    kept = describe_weight("model.layers.0.mlp.gate.e_score_correction_bias", bias, "router bias")
    lost = describe_weight("model.layers.0.mlp.gate.e_score_correction_bias", bias.bfloat16(), "router bias")
    assert first(fingerprint(weights=(kept,)), fingerprint(weights=(lost,))) == (1, "B: router bias is bfloat16")
    assert [fault.says for fault in faults(fingerprint(weights=(lost,)))] == ["router bias is bfloat16"]


def test_parts_are_ranked_by_what_they_change() -> None:
    left = fingerprint(
        tokens=Tokens(bare={"a": (1,)}), rope=(plain(500000.0),), arguments={"log_level": "info", "dtype": "float32"},
        packages={"torch": "2.12"}, environment={"NCCL_DEBUG": "INFO"},
    )  # fmt: skip
    right = fingerprint(
        tokens=Tokens(bare={"a": (2,)}), rope=(plain(10000.0),), arguments={"log_level": "debug", "dtype": "bfloat16"},
        packages={"torch": "2.13"}, environment={},
    )  # fmt: skip
    found = compare_fingerprints(left, right).differences
    names = ["tokens.bare", "rope.wrong", "arguments.dtype", "packages.torch", "arguments.log_level", "environment.NCCL_DEBUG"]
    assert [one.name for one in found] == names
    assert [one.counts for one in found] == [True, True, True, True, False, False]


@pytest.mark.parametrize(
    ("setting", "part", "values"),
    [
        ("interpreter", "packages", ({"torch": "1"}, {"torch": "2"})),
        ("--page-size", "arguments", ({"page_size": "1"}, {"page_size": "16"})),
        ("--dtype", "quantisation", ({"weights": "float32"}, {"weights": "bfloat16"})),
        ("backend", "backends", (resolved(triton="0-3"), resolved(torch_native="0-3"))),
        ("environment.NCCL_ALGO", "environment", ({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"})),
        ("--fp8-gemm-backend", "arguments", ({"fp8_gemm_runner_backend": "auto"}, {"fp8_gemm_runner_backend": "triton"})),
        ("--enable-deterministic-inference", "arguments", ({"enable_flashinfer_allreduce_fusion": "true"}, {})),
        ("--enable-deterministic-inference", "environment", ({}, {"NCCL_ALGO": "allreduce:tree"})),
    ],
)
def test_what_was_asked_to_differ_is_declared(setting: str, part: str, values: tuple[Any, Any]) -> None:
    asked = [{setting: "x"}, {setting: "y"}]
    left, right = (fingerprint(asked=one, **{part: value}) for one, value in zip(asked, values, strict=True))
    (found,) = compare_fingerprints(left, right).differences
    assert (found.declared, found.counts) == (setting, False)
    undeclared = compare_fingerprints(fingerprint(**{part: values[0]}), fingerprint(**{part: values[1]}))
    assert undeclared.exit_code == 1


def test_a_chat_template_is_seen_to_be_ignored_in_chats_alone() -> None:
    left, right = (
        fingerprint(tokens=Tokens(bare=IDS, chats={"user": (1, 2)}), asked=asked) for asked in ({}, {"--chat-template": "x"})
    )
    assert first(left, right)[1].startswith("--chat-template was set to x, not absent, but nothing")
    unknown = right.model_copy(update={"tokens": Tokens(bare=IDS)})
    assert compare_fingerprints(left, unknown).exit_code == 0
    other = right.model_copy(update={"tokens": Tokens(bare=IDS, chats={"user": (1, 3)})})
    assert compare_fingerprints(left, other).exit_code == 0


def test_an_adapter_that_was_not_applied_is_the_first_line() -> None:
    left = fingerprint(adapters={}, weights=described(random_weights()))
    right = left.model_copy(update={"asked": {"--lora-paths": "mine=adapter"}})
    says = "--lora-paths was set to mine=adapter, not absent, but nothing that is served differs"
    assert first(left, right) == (1, says)
    applied = right.model_copy(update={"adapters": {"mine": "1234, scaling 2, norm of B 0.3"}})
    assert compare_fingerprints(left, applied).exit_code == 0


def test_allowed_names_may_differ_alone() -> None:
    left = fingerprint(packages={"torch": "1", "triton": "1"})
    right = fingerprint(packages={"torch": "2", "triton": "2"})
    assert compare_fingerprints(left, right, ["packages"]).exit_code == 0
    assert [one.name for one in compare_fingerprints(left, right, ["packages.torch"]).undeclared] == ["packages.triton"]
    assert compare_fingerprints(left, right, ["pack"]).exit_code == 1


@pytest.mark.parametrize(("source", "code"), [("own server", 0), ("server", 1)])
def test_chunks_and_graphs_of_a_server_are_no_difference_from_a_model_that_was_loaded_alone(source: Any, code: int) -> None:
    alone = {
        "chunked_prefill_size": "8192",
        "disable_cuda_graph": "true",
        "cuda_graph_config.prefill.bs": "[4096]",
        "page_size": "1",
    }
    served = {
        "chunked_prefill_size": "2048",
        "disable_cuda_graph": "false",
        "cuda_graph_config.prefill.bs": "[128]",
        "page_size": "1",
    }
    left = fingerprint(arguments=alone).model_copy(update={"source": source})
    right = fingerprint(arguments=served).model_copy(update={"source": "server"})
    result = compare_fingerprints(left, right)
    assert (result.exit_code, len(result.differences)) == (code, 3)
    paged = right.model_copy(update={"arguments": {**served, "page_size": "16"}})
    assert [each.name for each in compare_fingerprints(left, paged).undeclared][-1] == "arguments.page_size"


@pytest.mark.parametrize(
    ("flag", "counts"), [("--chunked-prefill-size", "chunked_prefill_size"), ("--disable-decode-cuda-graph", "disable_cuda_graph")]
)
def test_chunks_and_graphs_that_were_asked_for_are_a_difference(flag: str, counts: str) -> None:
    left = fingerprint(arguments={"chunked_prefill_size": "8192", "disable_cuda_graph": "true"}, asked={flag: "x"})
    right = fingerprint(arguments={"chunked_prefill_size": "64", "disable_cuda_graph": "false"}, asked={flag: "x"})
    left, right = left.model_copy(update={"source": "own server"}), right.model_copy(update={"source": "server"})
    assert [each.name for each in compare_fingerprints(left, right).undeclared] == [f"arguments.{counts}"]


def test_what_is_hidden_on_both_sides_is_said_to_be_hidden() -> None:
    made = fingerprint(packages={}, asked={"--watermark-key": "***"}, arguments={"watermark_key": "***", "page_size": "1"})
    result = compare_fingerprints(made, made)
    assert (result.exit_code, result.not_compared["--watermark-key"][:6]) == (0, "hidden")
    assert "arguments.watermark_key" in result.not_compared
    assert "arguments.page_size" not in result.not_compared


def test_two_bos_of_a_rendered_chat_count_where_the_other_side_was_asked_for_them() -> None:
    """A URL tells no rendered chats: that it has no such fault is not known."""
    twice = fingerprint(tokens=Tokens(bos=0, bare=IDS, retold={"user": (0, 0, 5)}))
    once = fingerprint(tokens=Tokens(bos=0, bare=IDS, retold={"system": (0, 5)}))
    url = fingerprint(tokens=Tokens(bos=0, bare=IDS)).model_copy(update={"source": "endpoint"})
    says = "two BOS tokens begin a chat that a client renders to text: the template has one, and the tokenizer adds one"
    for other, code in ((once, 1), (url, 3), (fingerprint(packages={}, config=None), 3)):
        assert first(twice, other) == (code, f"A: {says}")
        assert first(other, twice) == (code, f"B: {says}")


@pytest.mark.parametrize(
    ("left", "right", "says"),
    [
        ((), ("system",), "the chat template refuses the chat 'system' only in B"),
        (("system", "tools"), (), "the chat template refuses the chats 'system' and 'tools' only in A"),
        (("system", "tools"), ("system",), "the chat template refuses the chat 'tools' only in A"),
        (("system",), ("system",), ""),
        (None, ("system",), ""),  # an endpoint without chats says nothing of templates
    ],
)
def test_chats_that_one_template_refuses(left: tuple[str, ...] | None, right: tuple[str, ...], says: str) -> None:
    def tokens(refused: tuple[str, ...] | None) -> Tokens:
        chats = () if refused is None else [name for name in CHATS if name not in refused]
        return Tokens(chats=dict.fromkeys(chats, (1, 2)), refused=dict.fromkeys(refused or (), "no such role"))

    result = compare_fingerprints(fingerprint(tokens=tokens(left)), fingerprint(tokens=tokens(right)))
    assert result.exit_code == int(bool(says))
    assert [each.says for each in result.differences] == [says] * bool(says)
    assert all(line.endswith(": no such role") for each in result.differences for line in each.details)


@pytest.mark.parametrize(
    ("name", "value", "other", "says"),
    [
        (
            "NVIDIA_TF32_OVERRIDE",
            None,
            "1",
            "is absent in A, 1 in B: it decides whether NVIDIA's libraries multiply float32 in TF32",
        ),
        ("ATEN_CPU_CAPABILITY", "avx2", "avx512", "how many numbers PyTorch adds at once"),
        ("SGLANG_ROPE_CACHE_FP32", "true", "0", "whether cos and sin of RoPE are float32"),
        ("SGLANG_ENABLE_JIT_DEEPGEMM", None, "false", "whether DeepGEMM computes FP8 products"),
        ("SGLANG_ENABLE_JIT_DEEPGEMM", None, "1", ""),  # it is on by default
        ("SGLANG_ROPE_CACHE_FP32", None, "False", ""),
        ("SGLANG_SIMULATE_ACC_LEN", "-1", None, ""),
        ("NVIDIA_TF32_OVERRIDE", None, "", ""),
        ("NCCL_DEBUG", None, "INFO", ""),  # changes no numbers
    ],
)
def test_variables_that_are_known_to_change_numbers_count(name: str, value: str | None, other: str | None, says: str) -> None:
    left, right = (fingerprint(environment=variables({name: each} if each is not None else {})) for each in (value, other))
    code, said = first(left, right)
    assert code == int(bool(says))
    assert said.startswith(f"{name} is ")
    assert says in said if says else ": " not in said
    asked = right.model_copy(update={"asked": {f"environment.{name}": other or ""}})
    assert compare_fingerprints(left, asked).exit_code == 0, "--env asked for it"


@pytest.mark.parametrize("name", CHANGE_NUMBERS)
def test_every_variable_that_changes_numbers_is_observed(name: str) -> None:
    assert variables({name: "x"}) == {name: "x"}


@pytest.mark.parametrize(
    ("changed", "name", "says"),
    [
        ({"template": "b"}, "tokens.template", "the chat templates differ, but not for the chats of the corpus"),
        ({"merges": "b"}, "tokens.rules", "the tokenizer's files differ in merges"),
        ({"vocabulary": "b", "added_tokens": "b"}, "tokens.rules", "the tokenizer's files differ in vocabulary and added tokens"),
    ],
)
def test_what_the_corpus_does_not_meet_is_told_by_digests(changed: dict[str, str], name: str, says: str) -> None:
    digests = {"template": "a", "vocabulary": "a", "merges": "a", "added_tokens": "a"}
    left, right = (fingerprint(tokens=Tokens(bare=IDS, digests=of)) for of in (digests, digests | changed))
    code, line = first(left, right)
    assert (code, line.startswith(says)) == (1, True)
    assert compare_fingerprints(left, right).differences[0].name == name
    unknown = fingerprint(tokens=Tokens(bare=IDS))
    assert first(left, unknown) == (0, "")


@pytest.mark.parametrize("source", ["own server", "server"])
def test_a_part_that_one_side_lost_is_named_and_no_pass(source: Any) -> None:
    left = fingerprint(tokens=Tokens(bare=IDS), weights=described(random_weights()), environment={}).model_copy(
        update={"source": source}
    )
    right = left.model_copy(update={"tokens": None, "weights": None})
    result = compare_fingerprints(left, right)
    assert (result.exit_code, result.lost) == (3, ("tokens", "weights"))
    assert diff_document(result).headline.startswith("tokens and weights were observed on one side only.")
    assert compare_fingerprints(left, right, ["tokens", "weights"]).exit_code == 0
    url = right.model_copy(update={"source": "endpoint", "packages": {}})
    assert compare_fingerprints(left.model_copy(update={"packages": {}}), url).lost == ()


def test_digests_are_of_what_a_tokenizer_computes_from(tmp_path: Path) -> None:
    made = {}
    for name, merges, template, more in (
        ("new", [["a", "b"]], "{{x}}", {"padding": None, "version": "1.0"}),
        ("old", ["a b"], "{{x}}\n", {"padding": {"length": 7}, "path": "/elsewhere"}),
        ("lost", [], "{{x}}", {}),
        ("swapped", [["a", "b"]], "{{y}}", {}),
    ):
        vocabulary = {"a": 0, "b": 1, "ab": 2} if name != "swapped" else {"b": 0, "a": 1, "ab": 2}
        whole = {"model": {"type": "BPE", "vocab": vocabulary, "merges": merges}, "added_tokens": [], **more}
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(whole))
        made[name] = _digests_of(str(tmp_path / name), template)
    differs = {name: [part for part in of if of[part] != made["new"][part]] for name, of in made.items()}
    assert differs == {"new": [], "old": [], "lost": ["merges"], "swapped": ["template", "vocabulary"]}
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "merges.txt").write_text("a b")
    assert set(_digests_of(str(tmp_path / "plain"), None)) == {"template", "merges.txt"}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("architectures", ["MistralForCausalLM"]), ("torch_dtype", "float16"), ("rope_interleave", True), ("model_type", "qwen2"),
        ("rope_theta", 5e5), ("rope_scaling", {"rope_type": "linear", "factor": 2.0}), ("auto_map", {"AutoModel": "other.Model"}),
    ],
)  # fmt: skip
def test_every_setting_that_changes_outputs_is_compared(name: str, other: object) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "rope_interleave": False, "rope_theta": 1e4}
    ours, theirs = (fingerprint(config=settings_of(each)) for each in (config, config | {name: other}))
    assert first(ours, theirs)[0] == 1
    tables = {"rope": (plain(10000.0),)}
    ours, theirs = (each.model_copy(update=tables) for each in (ours, theirs))
    # Where tables were computed, they are compared themselves.
    assert first(ours, theirs)[0] == (0 if name in ("rope_theta", "rope_scaling") else 1)


def test_a_dtype_has_one_name_and_what_was_asked_declares_it() -> None:
    new, old = (settings_of({name: value}) for name, value in (("dtype", "bfloat16"), ("torch_dtype", "torch.bfloat16")))
    assert new == old == {"dtype": "bfloat16"}
    half = fingerprint(config={"dtype": "float16"}, asked={"--dtype": "float16"})
    assert first(fingerprint(config=new), half)[0] == 0
    assert first(fingerprint(config=new), half.model_copy(update={"asked": {}}))[0] == 1


def test_files_beside_the_configuration_are_settings(tmp_path: Path) -> None:
    quantized = {"producer": {"version": "0.29"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantized))
    (tmp_path / "modeling.py").write_text("1")
    trusted, other = (settings_of(beside_config(str(tmp_path), code=code)) for code in (True, False))
    assert other == {"hf_quant_config.quant_algo": "FP8", "hf_quant_config.exclude_modules": '["lm_head"]'}
    (tmp_path / "modeling.py").write_text("2")
    assert settings_of(beside_config(str(tmp_path), code=True))["code.modeling.py"] != trusted["code.modeling.py"]


def test_models_of_which_no_weights_could_be_read_are_not_called_the_same() -> None:
    ours, theirs = (fingerprint(asked={"model": name}).model_copy(update={"model": name}) for name in ("a", "b"))
    assert (first(ours, theirs)[0], first(ours, theirs, "weights")[0], first(ours, ours)[0]) == (3, 0, 0)
