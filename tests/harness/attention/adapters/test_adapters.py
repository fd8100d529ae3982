"""Functions with a signature of their own as kernels: what is passed on, what is refused by name, and what is wrong behind it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.harness import cli
from assay.harness.attention import kernels
from assay.harness.attention.adapters.adapter import Adapted, Parameters
from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import FEATURES, WITHOUT_LSE, AttentionCall, Kernel, KernelRefused, Mask, tensor_of
from assay.harness.attention.declaration import declaration, declares
from assay.harness.attention.forms import feature_of
from assay.harness.attention.matrix import Case, cases
from assay.harness.attention.matrix_features import _padded, _stored
from assay.harness.attention.oracle import log_sum_exp, oracle
from assay.harness.attention.published import adapter_and_path, module_of
from assay.harness.attention.sample_calls import call_of
from assay.harness.attention.source import source_hashes
from assay.harness.checks import kernel_jobs
from assay.harness.checks.check import check as check_repeatedly
from assay.harness.engines.inside.pack_writer import PackWriter
from assay.harness.errors import ExitCode
from assay.harness.evidence.pack import Source
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.guard import run_calls
from assay.harness.localize.kernel_runs import measure

check = partial(check_repeatedly, calls=0, repeats=0)
FailingCases = Callable[[Kernel, Sequence[Case]], set[str]]
SDPA = "torch.nn.functional:scaled_dot_product_attention"
OF_FLASH_ATTN = ("window", "softcap", "lse", "padding", "not_causal")
OF_PREFILL = ("window", "softcap", "lse", "not_causal")
RIGHT = {
    "signatures:flash_attn_2": ("flash_attn", OF_FLASH_ATTN),
    "signatures:flash_attn_3": ("flash_attn", OF_FLASH_ATTN),
    "signatures:flash_attn_4": ("flash_attn", (*OF_FLASH_ATTN, "sinks")),
    "signatures:flash_attn_vllm": ("flash_attn", (*OF_FLASH_ATTN, "sinks")),
    "signatures:unified_attention": ("vllm", ("window", "softcap", "sinks", "padding", "not_causal", "stored_kv")),
    "signatures:BatchPrefillWithPagedKVCacheWrapper": ("flashinfer", (*OF_PREFILL, "stored_kv")),
    "signatures:BatchPrefillWithRaggedKVCacheWrapper": ("flashinfer", OF_PREFILL),
    "signatures:BatchDecodeWithPagedKVCacheWrapper": ("flashinfer", ("window", "softcap", "lse", "stored_kv")),
    "signatures:kvcache_2": ("flash_attn_with_kvcache", ("window", "softcap", "lse", "not_causal")),
    "signatures:kvcache_3": ("flash_attn_with_kvcache", (*OF_FLASH_ATTN, "sinks")),
    "signatures:kvcache_4": ("flash_attn_with_kvcache", (*OF_FLASH_ATTN, "sinks")),
    SDPA: ("sdpa", ("window", "not_causal")),
}
"""Functions, their signatures, and the features that these pass on."""
ASKED: dict[str, list[Callable[[AttentionCall], AttentionCall]]] = {
    "window": [partial(AttentionCall.with_spec, mask=Mask(window=window)) for window in (1, 2, 7, 8, 16, 17, 60)],
    "softcap": [partial(AttentionCall.with_spec, softcap=cap) for cap in (1.0, 30.0)],
    "sinks": [partial(AttentionCall.with_spec, sinks=(1.0, 2.0, -1.0, 3.0))],
    "temperature": [partial(AttentionCall.with_spec, temperature=8)],
    "padding": [partial(_padded, 1), partial(_padded, 40)],
    "not_causal": [partial(AttentionCall.with_spec, mask=Mask(causal=False))],
    "lse": [],
    "mla": [],
    "stored_kv": [partial(_stored, name, "tensor") for name in ("e4m3", "e5m2")],
}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "stand_ins" / "kernels")


def error(kernel: Any, call: AttentionCall) -> float:
    """Relative L1 error of the worst query and head, or the error of the worst log-sum-exp if that is larger."""
    result, truth = kernel(call), oracle(call)
    own = ((tensor_of(result)[: call.rows].double() - truth).abs().mean(-1) / truth.abs().mean(-1)).max()
    if "lse" in declaration(kernel).features and WITHOUT_LSE not in call.spec.ways:
        own = max(own, (result.lse[: call.rows].double() - log_sum_exp(call)).abs().max())
    return float(own)


def calls(phase: str, dtype: torch.dtype = torch.float32) -> list[AttentionCall]:
    lens = {"extend": ([(9, 40), (5, 0), (1, 20)], [(33, 0)]), "decode": ([(1, 50), (1, 1), (1, 19)],)}[phase]
    return [call_of(one, (4, 2), 64, dtype, "cpu").with_spec(phase=phase) for one in lens]


@pytest.mark.parametrize("name", RIGHT)
def test_a_known_signature_is_recognised_and_computes_what_a_call_asks_for(name: str) -> None:
    kernel = kernels.load(name)
    assert isinstance(kernel, Adapted)
    signature, features = RIGHT[name]
    declared = declaration(kernel)
    assert set(map(feature_of, declared.features)) == set(features)
    for phase in declared.phases:
        for call in calls(phase):
            for ask in [
                lambda same: same,
                partial(AttentionCall.with_spec, ways=declared.ways),
                *(ask for feature in features for ask in ASKED[feature]),
            ]:
                assert error(kernel, ask(call)) < 5e-6, (phase, ask)
    assert kernels.load(f"{signature}@{name}").assay == declared


@pytest.mark.parametrize("name", RIGHT)
def test_what_a_signature_lacks_is_refused_by_name(name: str) -> None:
    kernel = kernels.load(name)
    [call, *_] = calls(declaration(kernel).phases[-1])
    for feature in set(FEATURES) - {*RIGHT[name][1], "lse", "not_causal", "mla"}:
        with pytest.raises(KernelRefused, match=f"does not declare {feature}"):
            kernels.run_kernel(name, kernel, ASKED[feature][0](call))


def packed_calls(folder: Path) -> str:
    """A replay pack of some calls."""
    source = Source(engine="e", model="m", model_hash="", reference="torch_native", candidate="")
    writer = PackWriter(folder, source, 10**7)
    for layer, phase in enumerate(("extend", "decode")):
        for call in calls(phase):
            writer.add(call.with_spec(layer=layer), rounded_oracle(call))
    writer.flush()
    return str(folder)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["assay", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


def test_a_signature_that_does_not_exist_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = packed_calls(tmp_path / "pack")
    for asked in (("replay", pack), ("bench",)):
        assert command(monkeypatch, *asked, "--candidate", "flash_atn@signatures:flash_attn_2") == ExitCode.USAGE
        assert "no signature is named 'flash_atn', did you mean 'flash_attn'" in " ".join(capsys.readouterr().err.split())


def test_features_are_those_of_parameters_that_are_there() -> None:
    def plain(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False):  # type: ignore[no-untyped-def]
        pass

    def more(*args: Any, softcap: float = 0.0, **kwargs: Any) -> None:
        pass

    assert declaration(kernels.taking_calls("plain", plain)).features == ("padding", "not_causal")
    assert declaration(kernels.taking_calls("more", more, "flash_attn")).features == ("softcap", "padding", "not_causal")


def test_a_function_that_says_that_it_lacks_what_is_asked_for_refuses_it() -> None:
    def mine(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, s_aux=None):  # type: ignore[no-untyped-def]
        assert s_aux is None, "FA2 does not support s_aux"
        raise NotImplementedError("no s_aux")

    kernel = kernels.taking_calls("mine", mine)
    [call, *_] = calls("extend")
    with pytest.raises(KernelRefused, match="FA2 does not support s_aux"):
        kernel(ASKED["sinks"][0](call))
    with pytest.raises(NotImplementedError):
        kernel(call)  # which asks for neither


def test_the_parameters_of_a_built_in_function_are_those_that_it_documents() -> None:
    found = Parameters.of(torch.nn.functional.scaled_dot_product_attention)
    assert {"query", "attn_mask", "is_causal", "scale", "enable_gqa"} <= found.names
    assert found.required == {"query", "key", "value"}
    assert Parameters.of(len) == Parameters()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flash_atn@signatures:flash_attn_2", "no signature is named 'flash_atn', did you mean 'flash_attn'; known are"),
        ("sdpa@signatures:flash_attn_2", "the nearest is sdpa: it lacks query, key, value, attn_mask, is_causal, scale"),
        ("signatures:_one", "missing a required argument: 'k'; of the signatures flash_attn, sdpa, vllm"),
        ("signatures:_computed", "cannot be imported"),
    ],
)
def test_what_has_no_known_signature_is_refused_with_what_is_missing(name: str, said: str) -> None:
    with pytest.raises(KernelRefused, match=said):
        kernels.load(name)


def test_a_parameter_that_nothing_passes_is_named() -> None:
    def mine(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, plan):  # type: ignore[no-untyped-def]
        pass

    with pytest.raises(KernelRefused, match="the nearest is flash_attn: it requires plan, which that does not have"):
        kernels.taking_calls("mine", mine)


def test_a_name_with_a_signature_is_that_of_its_module() -> None:
    assert adapter_and_path("flash_attn@mine:f") == ("flash_attn", "mine:f")
    assert adapter_and_path("sglang:triton@16") == ("", "sglang:triton@16")
    assert module_of("flash_attn@mine:f") == module_of("mine:f") == "mine"
    assert source_hashes("flash_attn@signatures:flash_attn_2") == source_hashes("signatures:flash_attn_2")


def some_cases(name: str, feature: str = "") -> list[Case]:
    """Every 46th case of the check of a kernel: of each axis that a bug here depends on, some; and a few that ask for a feature."""
    every = cases(("extend", "decode"), "cpu", declared=declaration(kernels.load(name)))
    asking = [case for case in every if feature in case.condition["asked for"]][::9] if feature else []
    return every[::46] + asking


def test_sdpa_passes_a_check_of_some_calls() -> None:
    result = check(SDPA, cases=some_cases(SDPA))
    assert (result.failing, result.findings, result.refused) == ((), (), ())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("signatures:flash_attn_top_left", "causal mask top-left"),
        ("signatures:sdpa_of_other_heads", "GQA heads interleaved"),
        ("signatures:extend_without_prefix", "prefix dropped"),
    ],
)
def test_a_wrong_function_is_named_and_its_test_calls_it(name: str, said: str) -> None:
    result = check(name, cases=some_cases(name), read_out=0)
    assert result.exit_code == ExitCode.REGRESSION
    assert result.findings[0].title == said
    assert f"KERNEL = {name!r}" in result.test


@pytest.mark.slow  # fast: test_a_function_that_ignores_the_scales_of_a_form_that_it_has_is_wrong
@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("signatures:flash_attn_without_cap", "softcap"),
        ("signatures:unified_one_key_fewer", "window"),
        ("signatures:UnplannedWindow", "window"),
    ],
)
def test_a_function_that_is_wrong_with_a_feature_fails_where_it_is_asked_for(
    name: str, feature: str, failing_cases: FailingCases
) -> None:
    some = some_cases(name, feature)
    failing = failing_cases(kernels.load(name), some)
    assert {feature in case.condition["asked for"] for case in some if case.name in failing} == {True}


@pytest.mark.interpreter
@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("decode_attention:decode_attention_fwd", {"window", "softcap", "sinks"}),
        ("extend_attention:extend_attention_fwd", {"window", "softcap", "sinks", "temperature", "lse", "padding"}),
    ],
)
def test_sglangs_own_kernels_compute_what_a_call_asks_for(name: str, features: set[str]) -> None:
    kernel = kernels.load(f"sglang.kernels.ops.attention.{name}")
    declared = declaration(kernel)
    assert set(declared.features) == features
    [phase] = declared.phases
    for call in calls(phase):
        for ask in [
            lambda same: same,
            partial(AttentionCall.with_spec, ways=declared.ways),
            *(ask for feature in features for ask in ASKED[feature]),
        ]:
            asked = ask(call)
            none = phase == "extend" and asked.spec.mask.window == 1  # to SGLang, no keys before a query's own is no window
            assert (error(kernel, asked) < 5e-6) != none, ask


EXTEND, DECODE = (
    f"sglang.kernels.ops.attention.{name}"
    for name in ("extend_attention:extend_attention_fwd", "decode_attention:decode_attention_fwd")
)
E4M3, OTHERWISE = ASKED["stored_kv"][0], [("int8", "head"), ("e4m3", "token"), ("e4m3", "block of 16 tokens")]


@pytest.mark.interpreter
@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
@pytest.mark.parametrize("name", [EXTEND, DECODE])
def test_sglangs_own_kernels_read_what_is_stored_if_they_declare_what_that_costs(name: str) -> None:
    function = kernels.load(name).function  # type: ignore[attr-defined]
    undeclared = kernels.taking_calls(name, function)
    assert "stored_kv" not in map(feature_of, declaration(undeclared).features)
    kernel = kernels.taking_calls(name, declares(noise="fp8_qp")(partial(function)))
    declared = declaration(kernel)
    assert ("stored_kv: e4m3 per tensor" in declared.features, declared.noise) == (True, "fp8_qp")
    some = calls(declared.phases[0], torch.float16)
    run = run_calls(kernel, [*some, *map(E4M3, some)], repeats=0)
    assert diagnose(run) == [], "Q is cast beside FP8 alone, and not for new tokens"
    assert len(run.results) == 2 * len(some)
    for call in some:
        for scale in ("k_scale", "v_scale"):
            asked = E4M3(call)
            wrong = asked.with_tensors({scale: 2 * asked.tensors[scale]})
            assert measure(asked, tensor_of(kernel(wrong)), "fp8_qp").fails == bool(max(call.prefixes)), scale


@pytest.mark.parametrize("per", ["tensor", "head"])
@pytest.mark.parametrize("name", ["signatures:flash_attn_3", "signatures:kvcache_3"])
def test_flash_attention_3_takes_stored_k_and_v_with_a_q_of_their_dtype(name: str, per: str) -> None:
    function = kernels.load(name).function  # type: ignore[attr-defined]
    kernel = kernels.taking_calls("fa3", declares(noise="fp8_qp")(partial(function)))
    for call in calls("extend", torch.bfloat16):
        asked = _stored("e4m3", per, call)
        assert not measure(asked, tensor_of(kernel(asked)), "fp8_qp").fails
        for scale in ("k_scale", "v_scale"):
            wrong = asked.with_tensors({scale: asked.tensors[scale] * torch.tensor([[[1.0], [2.0]]])})
            assert measure(asked, tensor_of(kernel(wrong)), "fp8_qp").fails, scale
        with pytest.raises(KernelRefused, match="with a stored_kv in FP8, FlashAttention computes only bfloat16"):
            kernel(E4M3(calls("extend", torch.float16)[0]))


@pytest.mark.parametrize(
    "name",
    [
        "signatures:unified_attention",
        "signatures:BatchPrefillWithPagedKVCacheWrapper",
        "signatures:BatchDecodeWithPagedKVCacheWrapper",
    ],
)
def test_scales_that_a_signature_has_no_place_for_are_refused_by_name(name: str) -> None:
    kernel = kernels.load(name)
    for form, per in OTHERWISE:
        with pytest.raises(
            KernelRefused, match=r"the signature has no stored_kv in .*: it takes e4m3 per tensor or e5m2 per tensor"
        ):
            kernel(_stored(form, per, calls(declaration(kernel).phases[-1])[0]))


PAGED_DECODE = "signatures:BatchDecodeWithPagedKVCacheWrapper"


def of_stored(kernel: Any) -> list[Case]:
    """Cases of the check of a paged decode kernel: those that ask for stored K and V, and some that do not."""
    every = cases(("decode",), "cpu", declared=declaration(kernel))
    return [case for number, case in enumerate(every) if "K and V" in case.condition["asked for"] or number % 40 == 0]


def test_forms_that_a_signature_has_no_place_for_are_not_covered_and_forbid_no_pass() -> None:
    kernel = kernels.load(PAGED_DECODE)
    result = check(PAGED_DECODE, cases=of_stored(kernel))
    assert (result.exit_code, result.refused) == (ExitCode.PASS, ())
    assert {"K and V in e4m3 per tensor", "K and V in e5m2 per tensor"} <= {*result.coverage.values["asked for"]}
    gaps = [gap.what for gap in result.coverage.gaps if not gap.why]
    for form in ("int8 per token", "int8 per head", "e5m2 per head", "e4m3 per token", "e4m3 per block of 16 tokens"):
        assert f"stored_kv in {form}" in gaps


def test_a_function_that_ignores_the_scales_of_a_form_that_it_has_is_wrong(
    monkeypatch: pytest.MonkeyPatch, failing_cases: FailingCases
) -> None:
    function: Any = kernels.load(PAGED_DECODE).function  # type: ignore[attr-defined]
    computed = function._computed
    monkeypatch.setattr(function, "_computed", lambda self, q, kv, *asked: computed(self, q, kv, *asked[:2]))
    kernel = kernels.load(PAGED_DECODE)
    some = of_stored(kernel)
    failing = failing_cases(kernel, some)
    assert {"K and V" in case.condition["asked for"] for case in some if case.name in failing} == {True}


FORK, CACHE = "signatures:flash_attn_vllm", "signatures:kvcache_3"
CALLED: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
    "without LSE": (FORK, lambda passed: not passed.get("return_softmax_lse")),
    "without scale": (FORK, lambda passed: passed.get("softmax_scale") is None),
    "max_seqlen_q rounded up": (FORK, lambda passed: passed["max_seqlen_q"] > int(passed["cu_seqlens_q"].diff().max())),
    "max_seqlen_k rounded up": (FORK, lambda passed: passed["max_seqlen_k"] == 4096),
    "with out": (FORK, lambda passed: passed.get("out") is not None),
    "with block table": (FORK, lambda passed: passed.get("block_table") is not None),
    "with block table, FlashAttention 2": ("signatures:flash_attn_2", lambda passed: passed.get("block_table") is not None),
    "with block table, FlashAttention 4": ("signatures:flash_attn_4", lambda passed: passed.get("page_table") is not None),
    "in one part": (FORK, lambda passed: passed.get("num_splits") == 1),
    "in 32 parts": (FORK, lambda passed: passed.get("num_splits") == 32),
    "KV cache without LSE": (CACHE, lambda passed: not passed.get("return_softmax_lse")),
    "KV cache without scale": (CACHE, lambda passed: passed.get("softmax_scale") is None),
    "KV cache with out": (CACHE, lambda passed: passed.get("out") is not None),
    "KV cache, max_seqlen_q rounded up": (CACHE, lambda passed: passed["max_seqlen_q"] > int(passed["cu_seqlens_q"].diff().max())),
    "KV cache, table as wide as the context": (CACHE, lambda passed: passed["page_table"].shape[1] == 4096 // 128),
    "KV cache, pages of a token": (CACHE, lambda passed: passed["k_cache"].shape[1] == 1),
    "KV cache with new K and V": (CACHE, lambda passed: passed["k"] is not None),
    "KV cache with lengths of all keys": (CACHE, lambda passed: passed["k"] is None and passed.get("cu_seqlens_k_new") is not None),
    "KV cache in one part": (CACHE, lambda passed: passed.get("num_splits") == 1),
    "KV cache in 32 parts": (CACHE, lambda passed: passed.get("num_splits") == 32),
    "KV cache in extend": (CACHE, lambda passed: int(passed["cu_seqlens_q"].diff().max()) > 1),
    "KV cache of FlashAttention 2 with new K and V": ("signatures:kvcache_2", lambda passed: passed["k"] is not None),
    "KV cache of FlashAttention 2 in 32 parts": ("signatures:kvcache_2", lambda passed: passed.get("num_splits") == 32),
    "KV cache of FlashAttention 4": ("signatures:kvcache_4", lambda passed: passed.get("num_splits") == 32),
    "with segments": ("signatures:unified_attention", lambda passed: passed.get("seq_threshold_3D") is not None),
    "pages of 64 tokens": ("signatures:unified_attention", lambda passed: passed["k"].shape[1] == 64),
    "K and V in one cache": ("signatures:unified_attention", lambda passed: not passed["v"].is_contiguous()),
    "a part of a block table": ("signatures:unified_attention", lambda passed: not passed["block_table"].is_contiguous()),
    "FlashInfer without LSE": ("signatures:BatchDecodeWithPagedKVCacheWrapper", lambda passed: "return_lse" not in passed),
    "FlashInfer with out": ("signatures:BatchPrefillWithPagedKVCacheWrapper", lambda passed: "out" in passed),
    "FlashInfer without scale": ("signatures:BatchPrefillWithRaggedKVCacheWrapper", lambda passed: "sm_scale" not in passed),
    "FlashInfer by forward": ("signatures:BatchPrefillWithPagedKVCacheWrapper", lambda passed: "by forward" in passed),
    "SDPA without scale": (SDPA, lambda passed: "scale" not in passed),
}
"""Calls that engines make, by the function and what it is passed in one."""


def zeros_where(function: Any, is_so: Callable[[dict[str, Any]], bool]) -> Any:
    """A function that multiplies its output by zero in some calls."""
    if isinstance(function, type):
        planned = {"plan": function.plan, "run": function.run}  # type: ignore[attr-defined]
        parts = {name: zeros_where(part, is_so) for name, part in planned.items()}
        forward: Any = function.forward  # type: ignore[attr-defined]

        def asked(self: Any, *args: Any, **passed: Any) -> Any:
            self.planned = {**self.planned, "by forward": True}
            return forward(self, *args, **passed)

        return type(function.__name__, (function,), {**parts, "forward": asked})

    def called(*args: Any, **passed: Any) -> Any:
        made = function(*args, **passed)
        wrong = is_so(passed) if function.__name__ not in ("plan", "run") else planned_so(args[0], function, passed, is_so)
        written = [made, *(made if isinstance(made, tuple) else ()), passed.get("out")]
        for tensor in [tensor for tensor in written if isinstance(tensor, torch.Tensor)] if wrong else []:
            tensor.zero_()
        return made

    return functools.wraps(function)(called)


def planned_so(wrapper: Any, function: Any, passed: dict[str, Any], is_so: Callable[[dict[str, Any]], bool]) -> bool:
    if function.__name__ == "plan":
        wrapper.planned = passed
        return False
    return is_so({**wrapper.planned, **passed})


@pytest.mark.few(7)
@pytest.mark.parametrize("called", CALLED)
def test_a_function_that_is_wrong_in_a_call_that_engines_make_fails(called: str, failing_cases: FailingCases) -> None:
    name, is_so = CALLED[called]
    function = kernels.load(name).function  # type: ignore[attr-defined]
    if not hasattr(function, "__wrapped__") and function.__name__ == "scaled_dot_product_attention":
        function = sdpa_in_python
    wrong = kernels.taking_calls("wrong", zeros_where(function, is_so))
    some = cases(dtypes=[torch.float32], declared=declaration(wrong))[::25]
    assert any(failing_cases(wrong, [case]) for case in some)


@pytest.mark.parametrize("name", ["signatures:kvcache_2", "signatures:kvcache_3"])
def test_a_function_that_leaves_new_k_and_v_out_of_its_cache_fails(name: str) -> None:
    function = kernels.load(name).function  # type: ignore[attr-defined]

    @functools.wraps(function)
    def forgetting(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **passed: Any) -> Any:
        return function(q, k_cache.clone(), v_cache.clone(), **passed)

    kernel = kernels.taking_calls("forgetting", forgetting)
    [call] = calls("decode")
    assert error(kernel, call) < 5e-6
    with pytest.raises(ValueError, match="after the call, k_cache does not hold k"):
        kernel(call.with_spec(ways=("with new K and V",)))


def sdpa_in_python(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):  # type: ignore[no-untyped-def]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


@pytest.mark.slow  # fast: test_sdpa_passes_a_check_of_some_calls
@pytest.mark.parametrize("name", [FORK, "signatures:flash_attn_2", "signatures:flash_attn_4"])
def test_calls_as_engines_make_them_are_no_more_calls_and_a_right_function_passes(name: str) -> None:
    declared = declaration(kernels.load(name))
    every = cases(dtypes=[torch.float32], declared=declared)
    assert len(every) == len(cases(dtypes=[torch.float32], declared=replace(declared, ways=())))
    result = check(name, cases=every[::19])
    assert (result.exit_code, result.failing, result.findings) == (ExitCode.PASS, (), ())
    assert 0 < result.coverage.lses < result.computed


PAGES = {FORK: (16, 32), "signatures:flash_attn_2": (256, 512), "signatures:flash_attn_4": (128, 64)}


@pytest.mark.slow  # fast: test_a_function_of_one_size_of_pages_gets_it_and_the_others_are_a_gap
@pytest.mark.parametrize("name", PAGES)
def test_a_function_meets_each_size_of_pages_that_it_takes_and_one_that_it_refuses_is_a_gap(
    name: str, failing_cases: FailingCases
) -> None:
    """Its pages always had one size, and a function that was wrong with others passed."""
    function = kernels.load(name).function  # type: ignore[attr-defined]
    usual, other = PAGES[name]

    def with_table(passed: dict[str, Any]) -> bool:
        return any(passed.get(table) is not None for table in ("block_table", "page_table"))

    wrong = kernels.taking_calls("wrong", zeros_where(function, lambda given: with_table(given) and given["k"].shape[1] != usual))
    some = cases(dtypes=[torch.float32], declared=declaration(wrong))[::25]
    said = {case.name: case.condition["with block table"] for case in some}
    assert {*said.values()} == {"no", f"pages of {usual} tokens", f"pages of {other} tokens"}
    assert {said[name] for name in failing_cases(wrong, some)} == {f"pages of {other} tokens"}

    @functools.wraps(function)
    def refusing(*args: Any, **passed: Any) -> Any:
        if with_table(passed) and passed["k"].shape[1] != usual:
            raise RuntimeError(f"page size must be {usual}")
        return function(*args, **passed)

    result = check(kernels.taking_calls("refusing", refusing), cases=some)
    assert (result.exit_code, result.refused) == (ExitCode.PASS, ())
    assert f"with block table: pages of {other} tokens" in [gap.what for gap in result.coverage.gaps]
    assert f"pages of {other} tokens" not in result.coverage.values["with block table"]


def test_the_matrix_of_a_runs_model_is_called_as_engines_call_it() -> None:
    some = kernel_jobs._cases(kernels.load(FORK), "cpu", "float32", (4, 2), 64, 300)
    taken = {way for case in some for way in case.make().spec.ways}
    assert taken == {*declaration(kernels.load(FORK)).ways}


def test_a_right_function_passes_and_parameters_that_no_call_passes_are_listed_as_not_covered() -> None:
    result = check(FORK, cases=some_cases(FORK), read_out=0)
    assert (result.failing, result.findings) == ((), ()), "sinks too, which the function takes in bfloat16"
    [gap] = [gap for gap in result.coverage.gaps if "alibi_slopes" in gap.what]
    assert {"deterministic", "scheduler_metadata", "mask_mod"} < set(gap.what.removeprefix("parameters ").split(", "))
    assert not {"out", "block_table", "softmax_scale", "seqused_k", "return_softmax_lse"} & set(gap.what.split(", "))
    assert gap.why == "no call passes them"


@pytest.mark.slow  # fast: test_a_function_of_one_size_of_pages_gets_it_and_the_others_are_a_gap
def test_a_way_that_a_function_says_it_lacks_is_a_gap_and_not_a_fault() -> None:
    def mine(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, block_table=None):  # type: ignore[no-untyped-def]
        assert block_table is None, "paged KV not supported on SM 8.0"
        return kernels.load(FORK).function(  # type: ignore[attr-defined]
            q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, softmax_scale=softmax_scale, causal=causal
        )

    kernel = kernels.taking_calls("mine", mine)
    result = check(kernel, cases=cases(dtypes=[torch.float32], declared=declaration(kernel))[::9])
    assert (result.exit_code, result.refused) == (ExitCode.PASS, ())
    whys = {gap.what: gap.why for gap in result.coverage.gaps if gap.what.startswith("with block table: ")}
    assert whys == dict.fromkeys((f"with block table: pages of {n} tokens" for n in (256, 512)), "paged KV not supported on SM 8.0")
