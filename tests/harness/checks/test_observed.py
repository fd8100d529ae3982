"""Kernels that are read because they are wrong: what their findings then say, and what a kernel may do meanwhile."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import fault, rounded_oracle
from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.matrix import Case
from assay.harness.attention.sample_calls import call_of
from assay.harness.backend import Backend
from assay.harness.checks import observed
from assay.harness.checks.check import assert_correct, check
from assay.harness.checks.observed import Reader, _picture_on
from assay.harness.checks.replay import replay, replay_recorded
from assay.harness.engines.inside.pack_writer import PackWriter
from assay.harness.errors import ExitCode
from assay.harness.evidence.kernel_result import KernelResult, Tried
from assay.harness.evidence.pack import Source
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.experiment import Experiments
from assay.harness.localize.guard import Guard
from assay.harness.localize.kernel_runs import KernelRun, measure
from assay.harness.picture import Picture
from assay.harness.readout.readout import ReadOut
from assay.harness.verdict import Finding
from assay.worker import Event, Journal

pytestmark = pytest.mark.usefixtures("few_experiments")

Lens = list[tuple[int, int]]
NO_MASK, SCALE_TWICE = fault("mask-missing"), fault("scale-twice")


def no_rule_in_21(call: AttentionCall) -> Tensor:
    if call.layer != 21:
        return NO_MASK(call)
    draw = torch.Generator().manual_seed(int(call.q.double().abs().sum() * 1000))
    return torch.randn(*call.q.shape[:2], call.v.shape[2], generator=draw, dtype=torch.float64).to(call.q.dtype)


SAYS = "no causal mask: query i also sees keys j > p"
"""What is read off the kernel without a mask."""


def case(lens: Lens, dtype: torch.dtype = torch.float32, name: str = "some") -> Case:
    call = call_of(lens, (4, 2), 64, dtype, "cpu", seed=1)
    call = call.with_spec(phase="decode" if lens[0][0] == 1 else "extend")
    return Case(name, {"phase": call.phase}, partial(_given, call))


def _given(call: AttentionCall) -> AttentionCall:
    return call


CASES = [case([(7, 16)]), case([(1, 20)], name="decode"), case([(9, 0), (5, 3)], name="batch")]


def checked(kernel: Kernel, cases: list[Case] = CASES, read_out: float = 60.0) -> KernelResult:
    return check(kernel, cases=cases, read_out=read_out)


def read(kernel: Kernel, cases: list[Case] = CASES, seconds: float = 60.0) -> tuple[KernelResult, ReadOut | None]:
    """The result of a check, and what was read."""
    reader = Reader(seconds)
    return check(kernel, cases=cases, read_out=reader), reader.last


def standing() -> tuple[Journal, list[KernelResult]]:
    """A journal, and the results that stand before a kernel is read."""
    before: list[KernelResult] = []

    def keep(event: Event) -> None:
        if event["event"] == "stands" and event["reading"]:
            before.append(event["result"])

    return Journal(keep), before


def first(result: KernelResult) -> Finding:
    return result.findings[0]


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object, **__: object) -> ReadOut:
        raise AssertionError("the kernel was read")

    monkeypatch.setattr(observed, "read_out", asked)


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize(("known", "again"), [("mask-missing", False), ("scale-twice", True)])
def test_a_bug_that_an_earlier_read_out_explained_is_neither_tried_nor_read_again(known: str, again: bool) -> None:
    result = check(NO_MASK, cases=CASES, read_out=Reader(known={known}))
    finding = first(result)
    assert (result.tried is not None) == again
    assert (finding.id, finding.operator, "the kernel was read" in str(finding.evidence)) == ("mask-missing", "", again)


def test_a_wrong_kernel_is_read_and_the_finding_says_what_it_computes() -> None:
    journal, before = standing()
    reader = Reader()
    result = check(NO_MASK, cases=CASES, journal=journal, read_out=reader)
    finding = first(result)
    assert (finding.id, finding.operator) == ("mask-missing", SAYS)
    assert "sees" in SAYS
    assert finding.picture is not None
    assert reader.last is not None
    assert (reader.last.sentence, reader.last.exact, reader.last.samples) == (SAYS, True, ())
    assert 0 < reader.last.calls < 300
    took = f"inferred from the kernel in {reader.last.calls} calls and {reader.last.seconds:.1f} s: "
    assert any(line.startswith(took) for line in finding.evidence)
    assert result.seconds > reader.last.seconds
    [draft] = before
    assert first(draft).operator == ""
    assert draft.failing == result.failing


@pytest.mark.usefixtures("never")
def test_a_kernel_that_is_right_is_not_read() -> None:
    journal, before = standing()
    result = check(rounded_oracle, cases=CASES, journal=journal)
    assert (result.verdict, result.findings, before) == ("pass", (), [])


@pytest.mark.usefixtures("never")
def test_a_wrong_kernel_is_not_read_where_it_should_not_be() -> None:
    result = checked(NO_MASK, read_out=0)
    assert (result.verdict, first(result).operator) == ("regression", "")


def test_a_kernel_that_raises_when_it_is_read_keeps_its_findings() -> None:
    def kernel(call: AttentionCall) -> Tensor:
        if not call.v.all():  # as where weights are read
            raise SystemExit(0)
        return NO_MASK(call)

    result = checked(kernel)
    assert (result.verdict, first(result).id) == ("regression", "mask-missing")
    assert any("not answered: SystemExit" in line for line in first(result).evidence)


def test_an_error_in_the_experiments_leaves_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ValueError("cannot convert float NaN to integer")

    monkeypatch.setattr("assay.harness.checks.check.experiment", fails)
    result = checked(NO_MASK)
    assert (result.verdict, first(result).operator) == ("regression", SAYS)
    assert "its condition could not be tested: ValueError: cannot convert float NaN to integer" in first(result).evidence


def test_the_reading_is_not_limited_to_a_condition_outside_which_calls_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def reads(*_: object, tried: Tried | None, **__: object) -> ReadOut:
        given.append(tried)
        raise ArithmeticError

    monkeypatch.setattr(observed, "read_out", reads)
    result = measure(call := call_of([(7, 16)], (4, 2), 64, torch.float32, "cpu", seed=1), NO_MASK(call))
    for outside in (0, 1):
        narrow = Tried(rule=(), context={"dtype": "float32"}, wrong=9, right=9, calls=9, outside=outside)
        Reader().observe(diagnose(KernelRun((result,))), Guard(NO_MASK), [result], Experiments(tried=narrow))
    assert [tried is not None for tried in given] == [True, False]


def test_an_error_in_the_reading_leaves_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> ReadOut:
        raise ArithmeticError("singular matrix")

    reader = Reader(60.0)
    reader.last = ReadOut.__new__(ReadOut)
    monkeypatch.setattr(observed, "read_out", fails)
    result = check(NO_MASK, cases=CASES, read_out=reader)
    assert reader.last is None, "what was read before is not of this time"
    assert (result.verdict, first(result).id) == ("regression", "mask-missing")
    assert "the kernel could not be read: ArithmeticError: singular matrix" in first(result).evidence
    assert first(result).picture is not None, "the failing call was"


@pytest.mark.slow  # fast: test_an_assertion_fails_where_an_input_is_written
def test_an_assertion_says_what_was_read_if_it_gives_the_output() -> None:
    with pytest.raises(AssertionError, match=f"; observed: {re.escape(SAYS)}$"):
        assert_correct(NO_MASK, CASES[0].make())
    with pytest.raises(AssertionError, match="rounding explains") as raised:
        assert_correct(no_rule_in_21, CASES[0].make().with_spec(layer=21))
    assert "; observed:" not in str(raised.value)


# Recorded calls


def a_pack(folder: Path, kernel: Kernel, layer: int = 1) -> Path:
    """Calls that were recorded in the shadow of a kernel."""
    writer = PackWriter(folder, Source(engine="e", model="m", model_hash="h", reference="r", candidate="c"), 10**8)
    for number, (new, prefix) in enumerate([(3, 0), (9, 20), (30, 5)]):
        call = call_of([(new, prefix)], (4, 2), 64, torch.float32, "cpu", seed=number).with_spec(layer=layer)
        writer.add(call, rounded_oracle(call), candidate=kernel(call))
    writer.flush()
    return folder


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Kernel], str]:
    """Gives a kernel a name."""
    monkeypatch.syspath_prepend(tmp_path)

    def publish(name: str, kernel: Kernel) -> str:
        (tmp_path / f"{name}.py").write_text("")
        vars(importlib.import_module(name))["forward"] = kernel
        return f"{name}:forward"

    return publish


@pytest.mark.slow  # fast: test_a_wrong_kernel_is_read_and_the_finding_says_what_it_computes
def test_a_replay_shows_the_edge_of_the_mask_and_says_what_holds_on_the_recorded_calls(
    tmp_path: Path, importable: Callable[[str, Kernel], str]
) -> None:
    result = replay(a_pack(tmp_path / "pack", NO_MASK), importable("no_mask", NO_MASK))
    [finding] = result.findings
    assert (finding.id, finding.operator) == ("mask-missing", SAYS)
    assert finding.picture is not None
    assert len(finding.picture.cells) >= 4, "one query hides how the mask goes on"
    assert len(finding.picture.key_indices) >= 8
    [held_on] = [line for line in finding.evidence if line.startswith("inferred from the kernel in ")]
    given, _, rest = held_on.partition(": gives ")[2].partition(" of ")
    assert rest.startswith(f"{given} wrong outputs")
    assert not replay(a_pack(tmp_path / "again", NO_MASK), "no_mask:forward", read_out=0).findings[0].operator


def test_a_kernel_that_is_right_outside_of_its_server_is_said_to_be(
    tmp_path: Path, importable: Callable[[str, Kernel], str]
) -> None:
    recorded = a_pack(tmp_path / "pack", NO_MASK)
    result = replay_recorded(recorded, Backend.parse(importable("right_here", rounded_oracle)), "again", reader=Reader())
    finding = result.findings[0]
    assert finding.picture is not None, "of the recorded outputs"
    assert "asked again, the kernel computes 2 recorded calls within bounds: it is wrong in its server" in finding.evidence
    assert result.exit_code == ExitCode.REGRESSION


def test_a_call_that_is_too_large_to_be_read_is_shown_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of([(9, 700)], (4, 2), 64, torch.float32, "cpu")
    result = measure(call, NO_MASK(call))
    picture = _picture_on(Guard(NO_MASK), result)
    assert isinstance(picture, Picture)
    assert "!" in "".join(picture.cells)
    monkeypatch.setattr(observed, "_PICTURE_CALLS", 10)
    picture = _picture_on(Guard(NO_MASK), result)
    assert isinstance(picture, Picture)
    assert set(picture.rows) == {"wrong", "right"}
    assert set(picture.cells) == {""}


@pytest.mark.slow
def test_a_check_works_without_the_read_out(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef zeros(call):\n    return torch.zeros(*call.q.shape[:2], call.v.shape[2], dtype=call.q.dtype)\n"
    )
    program = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("assay.harness.readout"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
from assay.harness.attention.matrix import cases
from assay.harness.checks import (jobs, observed, replay)
from assay.harness.checks.check import assert_correct, check
from mine import (zeros)

result = check(zeros, phases=["decode"], cases=cases(("decode",))[::40])
assert result.findings and not result.findings[0].operator, result
assert result.findings[0].title == "output not written"
print("checked")
"""
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert done.stdout == "checked\n", done.stderr
