"""No test is printed that is green where a user runs it: each call is made in a fresh process before."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.declaration import declaration
from assay.harness.attention.sample_calls import call_of
from assay.harness.checks.check import check as check_here
from assay.harness.checks.fresh import _ChanceError, _Fresh, _sequence, _smallest
from assay.harness.checks.jobs import check
from assay.harness.localize.diagnose import NONDETERMINISM, STATE_KEPT
from assay.harness.localize.experiment import Experiments
from assay.harness.localize.faults import OUTPUT
from assay.harness.localize.shrink import Smallest

CALLS = [
    call_of([(5 + n, 3 * n)], (4, 2), 64, [torch.float32, torch.float16][n % 2], "cpu", n).with_spec(layer=n) for n in range(8)
]
LAST = CALLS[-1]


def fresh(kernel: Kernel) -> _Fresh:
    return _Fresh("", kernel, declaration(kernel), "cpu")


def halved_where(holds: Callable[[list[AttentionCall]], bool]) -> Kernel:
    """A kernel that is wrong where that holds of its calls so far, this one included."""
    seen: list[AttentionCall] = []

    def kernel(call: AttentionCall) -> Tensor:
        seen.append(call)
        return rounded_oracle(call) * (0.5 if holds(seen) else 1)

    return kernel


def layers(calls: list[AttentionCall] | None) -> list[int]:
    assert calls is not None
    return [call.layer for call in calls]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("holds", "needed"),
    [
        (lambda seen: len(seen) % 7 == 0, [7] * 7),
        (lambda seen: seen[0].layer != seen[-1].layer, [0, 7]),
        (lambda seen: len(seen) > 1 and seen[-2].layer == 6, [6, 7]),
        (lambda seen: seen[-1].layer == 7 and 4 in [call.layer for call in seen], [4, 7]),
        (lambda seen: seen[-1].layer == 7 and {2, 5} <= {call.layer for call in seen}, [2, 5, 7]),
    ],
    ids=["its 7th run", "the first call decides", "the call before", "one call of all", "two calls"],
)
def test_the_calls_that_must_come_before(holds: Callable[[list[AttentionCall]], bool], needed: list[int]) -> None:
    assert layers(_sequence(fresh(halved_where(holds)), LAST, CALLS[:-1], 20)) == needed


def test_a_call_that_is_wrong_after_no_others_has_no_sequence() -> None:
    assert _sequence(fresh(halved_where(lambda seen: len(seen) > 200)), LAST, CALLS[:-1], 20) is None


def test_chance_is_not_state() -> None:
    def coin(call: AttentionCall) -> Tensor:
        return rounded_oracle(call) * (0.5 if random.random() < 0.2 else 1)

    with pytest.raises(_ChanceError):
        _sequence(fresh(coin), LAST, CALLS[:-1], 64)


@pytest.mark.slow  # fast: test_the_calls_that_must_come_before
def test_both_calls_are_made_smaller_and_the_last_stays_right_alone() -> None:
    def grown(seen: list[AttentionCall]) -> bool:
        return len(seen) > 1 and seen[0].k.shape[0] > 20 >= seen[-1].k.shape[0]

    shown = _smallest(fresh(halved_where(grown)), [LAST, CALLS[3]], (64,))
    assert (shown.kind, shown.times, len(shown.sources)) == ("sequence", 1, 2)
    assert "new+prefix 12+9, 1 q head on 1 kv head" in shown.words[0], "21 keys"
    assert "new+prefix 1+0, 1 q head on 1 kv head" in shown.words[1]


MODULE = """
import random
from assay.harness.attention.bugs.faults import fault, rounded_oracle

stateless = fault("mask-top-left")
runs, first = [], []

def every_9th(call):
    runs.append(call)
    return rounded_oracle(call) * (len(runs) % 9 != 0)

def scale_of_the_first(call):
    first.append(call.scale)
    return rounded_oracle(call.with_spec(scale=first[0]))

def coin(call):
    return rounded_oracle(call) * (random.random() < 0.8)

def raises(call):
    if max(call.prefixes) > 40:
        raise RuntimeError("too long")
    return rounded_oracle(call)
"""
FEW = {"phases": ["decode"], "dtypes": ["float32"], "head_dims": [64], "read_out": 0}


@pytest.mark.slow  # fast: test_the_test_is_a_file_that_fails_and_a_right_kernel_has_none
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("every_9th", "right alone, in a fresh process, and wrong in its run 9"),
        ("scale_of_the_first", "right alone, in a fresh process, and wrong after: "),
        ("stateless", "it fails alone, in a fresh process"),
        ("coin", "chance decides"),
        ("raises", "it fails alone, in a fresh process"),
    ],
)
def test_no_printed_test_is_green(
    python: Callable[..., subprocess.CompletedProcess[str]], name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stateful_kernels.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    result = check(f"stateful_kernels:{name}", **FEW)
    kinds = {finding.id for finding in result.findings}
    assert said in result.smallest
    assert result.verdict == "regression"
    if name == "coin":
        assert not result.test
        assert STATE_KEPT not in kinds
    else:
        (tmp_path / "test_printed.py").write_text(result.test)
        assert python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_printed.py", cwd=tmp_path).returncode == 1
        assert kinds & {STATE_KEPT, NONDETERMINISM} == ({STATE_KEPT} if name in ("every_9th", "scale_of_the_first") else set())


def test_a_kernel_that_no_process_can_import_is_said_to_be_untried() -> None:
    result = check_here(halved_where(lambda seen: True), **FEW)
    assert result.smallest.endswith("; not tried in a fresh process: no other process can import the kernel")
    assert not result.test


@pytest.mark.slow  # fast: test_nothing_is_said_of_a_kernel_that_keeps_state
def test_no_condition_is_said_of_calls_that_are_right_at_first_and_wrong_later() -> None:
    long_before = halved_where(lambda seen: len(seen) > 30 and max(seen[-1].prefixes) >= 40)
    result = check_here(long_before, phases=["decode"], dtypes=["float32"], head_dims=[64], read_out=20)
    assert (result.tried, result.axes) == (None, ())
    assert [finding.id for finding in result.findings] == [STATE_KEPT]


@pytest.mark.parametrize("alone", [True, False])
def test_numbers_decide_only_of_a_call_that_fails_alone(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is right in a fresh process is wrong by what was called before, with the same numbers."""
    monkeypatch.setattr("assay.harness.checks.check.explore", lambda *given: {OUTPUT: Experiments(by_numbers=True)})
    monkeypatch.setattr(
        "assay.harness.checks.fresh.in_fresh_process",
        lambda smallest, guard, run, findings, *given: (Smallest("it", alone=alone), findings),
    )
    result = check_here(halved_where(lambda seen: True), **(FEW | {"read_out": 0.1}))
    assert (result.verdict, result.by_numbers) == ("regression", alone)
