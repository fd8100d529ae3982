"""Kernels that declare features: the matrix asks for them, and one that ignores them does not pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from assay.harness.attention import matrix_features
from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import FEATURES, AttentionCall, Kernel, KernelRefused, Mask
from assay.harness.attention.declaration import Declaration, declaration, declares
from assay.harness.attention.matrix import Case, cases
from assay.harness.checks import check as checking
from assay.harness.checks.check import check as check_repeatedly
from assay.harness.checks.kernel_jobs import _cases
from assay.harness.checks.kernel_matrix import declined
from assay.harness.errors import ExitCode
from assay.harness.evidence.kernel_result import KernelResult
from assay.harness.localize.kernel_runs import measure


def declaring(kernel: Kernel, *features: str) -> Kernel:
    return declares(features=features)(lambda call: kernel(call))


check = partial(check_repeatedly, calls=0, repeats=0)
FailingCases = Callable[[Kernel, Sequence[Case]], set[str]]


@cache
def asking(*features: str, every: int = 8) -> tuple[Case, ...]:
    """Of the calls of the matrix that ask for a value of features, the first of so many; and some that ask for none."""
    made = cases(declared=declaration(declaring(rounded_oracle, *features)))
    seen = Counter[tuple[str, str]]()
    chosen = []
    for number, case in enumerate(made):
        value = case.condition["phase"], case.condition["asked for"]
        seen[value] += 1
        if number % 40 == 0 if value[1] == "nothing" else seen[value] % every == 1:
            chosen.append(case)
    return tuple(chosen)


def without(feature: str, call: AttentionCall) -> Tensor:
    plain = {
        "window": {"mask": Mask()},
        "softcap": {"softcap": 0.0},
        "temperature": {"temperature": 0},
        "sinks": {"sinks": ()},
        "not_causal": {"mask": Mask()},
        "mla": {"scale": call.scale * (3**-0.5 if call.spec.layout == "v in k" else 1)},
    }
    if feature == "stored_kv":  # without scales
        if call.stored is None:
            return rounded_oracle(call)
        return rounded_oracle(replace(call, k=call.stored.k.to(call.q.dtype), v=call.stored.v.to(call.q.dtype)))
    if feature == "padding":  # as if the last sequence went on to the end of q
        ends = call.cu_seqlens_q.clone()
        ends[-1] = len(call.q)
        return rounded_oracle(replace(call.with_spec(padded_rows=0), cu_seqlens_q=ends))
    return rounded_oracle(call.with_spec(**plain[feature]))


def test_a_kernel_that_computes_what_it_declares_passes_and_the_check_says_what_was_asked_for() -> None:
    result = check(declaring(rounded_oracle, *ASKED), cases=asking(*ASKED, every=64), read_out=0)
    assert (result.exit_code, result.findings) == (ExitCode.PASS, ())
    asked = ", ".join(result.coverage.values["asked for"])
    for value in ("window 1,", "window 129", "softcap 1.5,", "softcap 50", "temperature 64", "sinks near 4"):
        assert value in asked
    together = "window 17 and softcap 1.5 and temperature 2 and sinks near 4 and 300 padded rows and K and V in e5m2 per head"
    assert together in asked


def failing_axis(result: KernelResult, some: Sequence[Case]) -> set[str]:
    """What the failing calls ask for."""
    return {case.condition["asked for"] for case in some if case.name in result.failing}


def stored(*forms: str, kernel: Kernel = rounded_oracle, every: int = 8) -> KernelResult:
    """Check a kernel that declares forms of stored_kv, on calls that ask for it and some that do not."""
    features = ("window", *(f"stored_kv: {form}" for form in forms))
    return check(declaring(kernel, *features), cases=asking(*features, every=every), read_out=0)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "forms", [("e4m3 per tensor",), ("e4m3 per tensor", "e4m3 per head"), ("int8 per tensor", "int8 per token")]
)
def test_forms_that_are_declared_are_asked_for_and_others_are_not_covered(forms: tuple[str, ...]) -> None:
    result = stored(*forms)
    assert (result.exit_code, result.refused) == (ExitCode.PASS, ())
    computed = {value for value in result.coverage.values["asked for"] if "K and V" in value}
    strongest = "e4m3 per head" if "e4m3 per head" in forms else forms[0]
    together = f"window 17 and K and V in {strongest}"
    assert computed == {*(f"K and V in {form}" for form in forms), together}
    gaps = {gap.what for gap in result.coverage.gaps}
    others = {value.removeprefix("K and V in ") for value in matrix_features.ASKED["stored_kv"]} - {*forms}
    assert gaps == {f"stored_kv in {form}" for form in others}


def test_scales_that_are_kept_as_powers_of_two_are_wrong(failing_cases: FailingCases) -> None:
    def rounding(call: AttentionCall) -> Tensor:
        if call.stored is None:
            return rounded_oracle(call)
        k, v = (x.float() * scale.log2().round().exp2() for x, scale in (
            (call.stored.k, call.stored.k_scale), (call.stored.v, call.stored.v_scale)
        ))  # fmt: skip
        return rounded_oracle(replace(call, k=k.to(call.k.dtype), v=v.to(call.v.dtype)))

    some = asking("window", "stored_kv: e4m3 per head")
    assert failing_cases(declaring(rounding, "stored_kv: e4m3 per head"), some)
    assert not failing_cases(declaring(rounded_oracle, "stored_kv: e4m3 per head"), some)


def test_a_form_that_is_declared_and_refused_is_no_pass() -> None:
    def refusing(call: AttentionCall) -> Tensor:
        if call.stored is not None and call.stored.k.dtype == torch.float8_e5m2:
            raise KernelRefused("e5m2 is not built")
        return rounded_oracle(call)

    result = stored("e4m3 per tensor", "e5m2 per tensor", kernel=refusing, every=2)
    assert result.exit_code == ExitCode.NO_VERDICT
    assert "with asked for K and V in e5m2 per tensor was computed" in str(result.missing)


@pytest.mark.parametrize("form", ["stored_kv: int4 per tensor", "stored_kv:", "window: 64"])
def test_an_unknown_form_says_which_there_are(form: str) -> None:
    with pytest.raises(ValueError, match=rf"declares the features \['{form}'\]; expected some of .* 'stored_kv: e4m3 per tensor'"):
        declares(features=(form,))


ASKED = tuple(feature for feature in FEATURES if feature != "lse")


@pytest.mark.few(1)
@pytest.mark.parametrize("feature", ASKED)
@pytest.mark.usefixtures("few_experiments")
def test_a_kernel_that_ignores_what_it_declares_is_wrong_on_every_value(feature: str) -> None:
    some = asking(feature)
    result = check(declaring(lambda call: without(feature, call), feature), cases=some, read_out=1)
    assert result.exit_code == ExitCode.REGRESSION
    failing = failing_axis(result, some)
    assert failing == {case.condition["asked for"] for case in some} - {"nothing"}
    unread = "no single output of a call that can be probed is clearly wrong" in str(result.findings)
    assert unread == (feature in ("padding", "mla", "stored_kv"))


def test_a_kernel_that_declares_nothing_is_asked_for_nothing_and_costs_what_it_cost() -> None:
    assert {case.make().spec.features for case in cases()[::7]} == {()}
    assert "asked for" not in cases()[0].condition


@pytest.mark.slow  # fast: test_a_kernel_that_declares_nothing_is_asked_for_nothing_and_costs_what_it_cost
def test_an_engines_backend_is_checked_on_plain_attention_though_it_takes_whatever_a_layer_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = declaring(lambda call: without("softcap", call), "softcap")
    monkeypatch.setattr(checking, "named", lambda _: ("sglang:mine", backend))
    result = check("sglang:mine", phases=["decode"], dtypes=["float32"], head_dims=[64], read_out=0)
    assert result.verdict == "pass"
    assert "asked for" not in result.coverage.values


def latent(call: AttentionCall) -> Tensor:
    """Absorbed latent attention that is given K alone."""
    assert call.v.data_ptr() == call.k.data_ptr()
    assert (call.k.shape[1:], call.v.shape[1:], call.v.stride()) == ((1, 576), (1, 512), call.k.stride())
    assert call.scale == pytest.approx(192**-0.5) or "scale" in str(call.spec)
    return rounded_oracle(replace(call, v=call.k[..., :512]))


@pytest.mark.slow  # fast: test_latent_attention_meets_as_many_heads_as_deepseek_has
def test_a_kernel_of_latent_attention_gets_v_in_k_and_nothing_else_if_it_computes_nothing_else() -> None:
    only = declares(features=("mla", "stored_kv"), head_dims=(576,), head_dims_v=(512,))(latent)
    made = cases(declared=declaration(only), head_dims=(576,), dtypes=[torch.bfloat16])
    assert len({case.name for case in made}) == len(made) > 60
    assert {case.condition["asked for"].split(" and ")[0] for case in made} == {"MLA"}
    assert {case.condition["heads"] for case in made} >= {"MQA 4/1", "MQA 8/1", "MQA 16/1"}
    call = made[0].make()
    apart = replace(call, v=call.v.clone())  # as a pack keeps it
    for laid in (call, apart.clone(), apart.to("cpu")):
        assert laid.v.data_ptr() == laid.k.data_ptr()
        assert torch.equal(laid.v, call.v)
    assert apart.clone().k.data_ptr() != call.k.data_ptr()
    some = [case for number, case in enumerate(made) if number % 24 == 0 or "stored" in case.name][::2]
    assert check(only, cases=some).findings == ()
    for wrong in (lambda call: replace(call, v=call.k[..., 64:]), lambda call: call.with_spec(scale=576**-0.5)):
        made_wrong = declares(features=("mla", "stored_kv"), head_dims=(576,))(
            lambda call, wrong=wrong: rounded_oracle(wrong(call))
        )
        assert len(check(made_wrong, cases=some[:3], read_out=0).failing) == 3


@pytest.mark.parametrize("features", [("mla",), ("mla", "window")])
@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_latent_attention_meets_as_many_heads_as_deepseek_has(phase: str, features: tuple[str, ...]) -> None:
    """No call had more than 16 heads, and a kernel that read heads from 64 on wrongly passed."""

    @declares(features=features, head_dims=(576,), phases=(phase,))
    def wrong(call: AttentionCall) -> Tensor:
        return rounded_oracle(replace(call, q=call.q[:, torch.arange(call.q.shape[1]).clamp(max=63)]))

    made = cases((phase,), declared=declaration(wrong), head_dims=(576,), dtypes=[torch.bfloat16])
    [most] = [case for case in made if case.condition["heads"] == "MQA 128/1"]
    assert most.condition["asked for"] == "MLA"
    for case in (most, made[0]):
        call = case.make()
        assert measure(call, wrong(call)).fails == (case is most)


def ignoring_windows_above(most: int, call: AttentionCall) -> Tensor:
    return rounded_oracle(call.with_spec(mask=Mask()) if call.spec.mask.window > most else call)


def test_a_kernel_that_ignores_long_windows_fails(failing_cases: FailingCases) -> None:
    """No window was longer than 129 keys, and a kernel that ignored those above 300 passed."""
    declared = declaration(declaring(rounded_oracle, "window"))
    windows = {"window 512", "window 1024"}
    matrix = [case for case in cases(declared=declared) if case.condition["dtype"] == "float16"]
    short = [case for case in matrix if case.condition["asked for"] == "window 129"]
    some = [*short[::8], *(case for case in matrix if case.condition["asked for"] in windows)]
    failing = failing_cases(declaring(partial(ignoring_windows_above, 300), "window"), some)
    assert {case.condition["asked for"] for case in some if case.name in failing} == windows
    right = check(declaring(rounded_oracle, "window"), cases=some, read_out=0)
    assert right.exit_code == ExitCode.PASS
    assert windows <= set(right.coverage.values["asked for"]), "they cut keys"


@pytest.mark.few(1)
@pytest.mark.parametrize(("model", "asked"), [("mistral-7b", "window 4096"), ("gemma-2-9b", "window 4096 and softcap 50")])
def test_the_window_and_cap_of_a_model_are_asked_for_where_they_change_something(model: str, asked: str) -> None:
    features = ("window", "softcap")
    matrix = cases(("decode",), declared=declaration(declaring(rounded_oracle, *features)), like=[model])
    [call] = [case.make() for case in matrix if case.condition["asked for"] == asked]
    assert max(call.lens_k) > call.spec.mask.window, "it cuts keys"
    assert not measure(call, rounded_oracle(call)).fails
    assert measure(call, ignoring_windows_above(2000, call)).fails
    assert call.spec.softcap == 0 or measure(call, without("softcap", call)).fails
    assert declined(Declaration(), {"like": [model]})[0] == f"window 4096, as {model} asks for"


def test_the_matrix_of_a_run_asks_for_what_the_layers_of_its_model_do() -> None:
    shape = {"device": "cpu", "dtype": "bfloat16", "heads": (4, 2), "head_dim": 64, "tokens": 64}
    asked = ("window 4096", "sinks near 0")
    both, one, none = (
        {case.condition.get("asked for") for case in _cases(declaring(rounded_oracle, *features), **shape, asked=asked)}
        for features in (("window", "sinks"), ("window",), ())
    )
    assert both == {"nothing", "window 4096 and sinks near 0"}
    assert one == {"nothing", "window 4096"}
    assert none == {None}
