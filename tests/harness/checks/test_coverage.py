"""What a check says that it covered, and what it did not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall, KernelRefused, Mask
from assay.harness.attention.declaration import Declaration, declares
from assay.harness.attention.matrix import cases
from assay.harness.attention.sample_calls import call_of
from assay.harness.checks.check import check as check_and_read
from assay.harness.checks.coverage import _is_felt, coverage_of, met_with
from assay.harness.conditions import BORDER_TOKENS
from assay.harness.evidence.kernel_result import Coverage, KernelResult, Reach
from assay.harness.localize.kernel_runs import CallResult, measure
from assay.harness.text import met
from assay.reports.check import _not_covered, _together, check_document, message
from assay.reports.page import to_html

SINKS = Declaration(features=("sinks",))
SCALES = ("scale 1", "scale 1.5 times", "scale 1/128", "unscaled scores")
check = partial(check_and_read, read_out=0)
pytestmark = pytest.mark.usefixtures("thin_matrix")


def answered(call: AttentionCall) -> CallResult:
    return measure(call, rounded_oracle(call))


def test_coverage_is_values_their_reach_and_the_gaps() -> None:
    calls = [(case, case.make()) for case in cases(("extend",), dtypes=[torch.float16])]
    made: list[Any] = [(case, SimpleNamespace(call=call, lse=None)) for case, call in calls]  # of plain calls, no errors are read
    found = coverage_of(made, [], [], [], [], 300)
    assert found.values["dtype"] == ("float16",)
    assert found.values["head_dim"] == ("64", "80", "96", "128", "192", "256")
    assert found.values["layer"] == ("0", "1", "2", "16", "31")
    assert {"normal", "beyond float16", "large positive values"} - {*found.values["data"]} == {"beyond float16"}, "of bfloat16"
    assert {"llama-3-8b", "llama-2-7b"} <= {*found.values["shapes of"]}
    assert "qwen2.5-7b" not in found.values["shapes of"]
    [reach] = found.reach.values()
    assert (reach.new[-1], reach.behind[-1], reach.keys[-1], reach.sequences[-1]) == (513, 512, 4097, 40)
    assert (reach.met["head_dim"]["64"].keys[1], reach.met["head_dim"]["80"].keys[1] // 1000) == (4097, 1)
    assert 16 < reach.pairs["head_dim, layout"].met <= reach.pairs["head_dim, layout"].of == 24
    pairs = {(new, new + cached) for _, one in made for new, cached in zip(one.call.lens_q, one.call.prefixes, strict=True)}
    assert (set(reach.new), set(reach.keys)) == ({new for new, _ in pairs}, {keys for _, keys in pairs}), "none that no call had"
    assert set(reach.sequences) == {len(one.call.lens_q) for _, one in made}
    assert (found.runs, found.device) == (300, "cpu")
    said = message(KernelResult(kernel="k", calls=9, coverage=found))
    assert "head_dim 64, 80, 96, 128" in said
    new, behind = (met([(n, n) for n in some], BORDER_TOKENS) for some in (reach.new, reach.behind))
    assert f"extend, new tokens: values {new}\n  extend, cached prefix: values {behind}\n" in said
    assert " and 4,097\n" in said, "which stands by itself"
    assert f"extend, sequences: values {', '.join(map(str, reach.sequences))}\n" in said


@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_each_value_of_an_axis_is_met_with_long_keys_many_new_tokens_and_many_sequences(phase: str) -> None:
    """Kernels that were wrong in one number of heads beyond 2,100 keys, or in one head dim beyond 64 new tokens, passed."""
    made = cases((phase,))
    values = [
        {"head_dim": c.condition["head_dim"], "dtype": c.condition["dtype"], "q/kv heads": c.condition["heads"],
         "layout": c.condition["inputs"], "layer": c.condition["layer"], "data": c.condition["data"]}
        for c in made
    ]  # fmt: skip
    lens = [case.shape.lens for case in made if case.shape]
    counts = [([a for a, _ in some], [a + b for a, b in some], [len(some)]) for some in lens]
    short = {"MHA 32/32", "GQA 64/8", "beyond float16", "unscaled scores above 1e5", "unscaled scores below -1e5", *SCALES}
    least = {"new": 143, "keys": 1025, "sequences": 17} if phase == "extend" else {"keys": 2049, "sequences": 17}
    for axis, some in met_with(values, counts)[0].items():
        for value, each in some.items():
            reached = {count: getattr(each, count)[1] for count in least}
            assert value in short or all(reached[count] >= least[count] for count in least), (axis, value, reached)


def test_a_pass_states_how_far_calls_reached_with_each_value() -> None:
    lens = [[(1, n - 1) for n in (3, 30, 200, 900, 3000)], [(1, n - 1) for n in (9, 40)], [(1, 2), (1, 5000)]]
    by_value, pairs = met_with([{"head_dim": "64", "data": "a"}, {"head_dim": "80", "data": "a"}, {"head_dim": "96", "data": "b"}],
                          [([1] * len(some), [n + 1 for _, n in some], [len(some)]) for some in lens])  # fmt: skip
    keys = {value: each.keys for value, each in by_value["head_dim"].items()}
    assert keys == {"64": (3, 3000), "80": (9, 40), "96": (3, 3)}, "5,000 keys lie beyond lengths that nothing met"
    assert (pairs["head_dim, data"].met, pairs["head_dim, data"].of, pairs["head_dim, data"].keys) == (3, 6, (9, 3))
    reach = Reach(new=(1,), behind=(), keys=(3, 5000), sequences=(2, 5), met=by_value, pairs=pairs)
    coverage = Coverage(values={"head_dim": ("64", "80", "96")}, reach={"decode": reach}, device="cpu")
    each, exceptions = _together(coverage)
    assert each == "With each of these values: decode up to 3 keys and 2 sequences"
    assert exceptions[0] == ("over twice as many keys in decode", "head_dim 64, 80, data a")
    page = to_html(check_document(KernelResult(kernel="k", calls=3, coverage=coverage)))
    assert "A kernel that is wrong outside these ranges may pass" in page


@pytest.mark.parametrize(("asked", "felt"), [({"mask": Mask(window=8)}, True), ({"mask": Mask(window=4096)}, False)])
def test_what_a_call_asks_for_is_covered_where_it_changed_an_output(asked: dict[str, Any], felt: bool) -> None:
    """A window that cuts no key was covered, as was a kernel that ignores it."""
    case = cases(("extend",), dtypes=[torch.float16])[0]
    case = replace(case, condition={**case.condition, "asked for": "window n"})
    call = call_of([(6, 30), (20, 0)], (4, 2), 16, torch.float16, "cpu", seed=1).with_spec(**asked)
    found = coverage_of([(case, answered(call))], [], [], [], [], 1)
    assert found.values.get("asked for") == (("window n",) if felt else None)
    gaps = [(gap.what, gap.why) for gap in found.gaps]
    assert gaps == (
        [] if felt else [("window n", "it did not change any output by more than rounding, so a kernel could ignore it")]
    )


def test_a_pair_of_values_is_met_by_calls_that_feel_the_feature() -> None:
    """A kernel that ignores the sinks with 64 q heads passed: only calls in which they weigh nothing asked for both."""
    case = replace(cases(("extend",))[0], condition={"asked for": "sinks"})
    weights = {(4, 2): 1.0, (8, 2): -30.0}
    calls = [
        call_of([(6, 30)], heads, 16, torch.float32, "cpu", seed=1).with_spec(sinks=(sink,) * heads[0])
        for heads, sink in weights.items()
    ]
    found = coverage_of([(case, answered(call)) for call in calls], [], [], [], [], 1)
    assert (found.values["asked for"], found.gaps) == (("sinks",), ())
    assert set(found.reach["extend"].met["q/kv heads"]) == {"4/2", "8/2"}
    other = replace(case, condition={"asked for": "nothing"})
    made = [*((case, answered(call)) for call in calls), *((other, answered(call.with_spec(sinks=()))) for call in calls)]
    [pairs] = (pairs for axes, pairs in coverage_of(made, [], [], [], [], 1).reach["extend"].pairs.items() if "asked" in axes)
    assert (pairs.met, pairs.of) == (3, 4)


def test_each_call_with_sinks_feels_them() -> None:
    asking = [case for case in cases(declared=SINKS) if "sinks" in case.condition["asked for"]]
    halves = [case for case in asking if case.condition["dtype"] != "float32"]
    wide = [case for case in halves if case.condition["heads"] == "GQA 64/8"]
    assert wide
    for case in wide + halves[::20]:
        assert _is_felt(answered(case.make())), case.name


def test_what_an_undeclared_kernel_raises_on_is_a_gap_with_advice() -> None:
    def plain(call: AttentionCall) -> Tensor:
        assert call.q.shape[2] in (64, 128), "head_dim must be 64 or 128"
        return rounded_oracle(call)

    result = check(plain, phases=["decode"], dtypes=["float16"], calls=0)
    [gap] = [gap for gap in result.coverage.gaps if gap.what.startswith("head_dim")]
    assert gap.what == "head_dim 80, 96, 192, 256"
    assert gap.why.startswith("raised AssertionError: head_dim must be 64 or 128 (")
    assert gap.why.endswith("declare what it supports: head_dims=(64, 128)")
    assert (result.verdict, result.coverage.values["head_dim"]) == ("pass", ("64", "128"))


def test_a_kernel_for_complete_prompts_says_so() -> None:
    @declares(prefix=False)
    def prefill(call: AttentionCall) -> Tensor:
        assert not any(call.prefixes)
        return rounded_oracle(call)

    result = check(prefill, dtypes=["float16"], calls=0)
    assert (result.verdict, result.missing, result.refused) == ("pass", (), ())
    assert "a cached prefix, by declaration" in _not_covered(result)
    assert result.coverage.reach["extend"].behind == ()
    with pytest.raises(ValueError, match="expected extend alone"):
        declares(phases=("extend", "decode"), prefix=False)


def test_the_advice_on_a_refusal_names_the_axis_that_separates() -> None:
    def no_prefix(call: AttentionCall) -> Tensor:
        if any(call.prefixes):
            raise KernelRefused("no cached prefix")
        return rounded_oracle(call)

    result = check(no_prefix, phases=["extend"], dtypes=["float16"], calls=0)
    assert result.verdict == "inconclusive"
    assert "no extend call with a cached prefix was computed; declare what it supports: prefix=False" in result.missing
    assert not [one for one in result.missing if "dtype" in one or "head_dim" in one]
    [gap] = result.coverage.gaps
    assert gap.what == "a cached prefix"
    assert gap.why == "no cached prefix; declare what it supports: prefix=False"


@pytest.mark.slow
def test_a_head_dim_of_v_is_covered_where_it_is_declared() -> None:
    @declares(head_dims=(192,), head_dims_v=(128,))
    def deepseek(call: AttentionCall) -> Tensor:
        return rounded_oracle(call)

    result = check(deepseek, phases=["extend"], dtypes=["bfloat16"], calls=0)
    assert (result.verdict, result.coverage.values["head_dim_v"]) == ("pass", ("128",))
    assert "head_dim 64, by declaration" in _not_covered(result)

    @declares(head_dims=(64,), head_dims_v=(32,))
    def refuses(call: AttentionCall) -> Tensor:
        if call.v.shape[2] != call.q.shape[2]:
            raise KernelRefused("v is narrow")
        return rounded_oracle(call)

    assert check(refuses, dtypes=[torch.float32], phases=["decode"]).verdict == "inconclusive"
