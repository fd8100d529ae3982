"""Kernels that are read because they are wrong: what their findings then say, and what a kernel may do meanwhile."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
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
from assay.harness.checks.observed import Reader, _held, _picture_on, _tried
from assay.harness.checks.replay import replay, replay_recorded
from assay.harness.engines.inside.pack_writer import PackWriter
from assay.harness.errors import ExitCode
from assay.harness.evidence.kernel_result import KernelResult
from assay.harness.evidence.pack import Source
from assay.harness.localize.guard import Guard
from assay.harness.localize.kernel_runs import measure
from assay.harness.picture import Picture
from assay.harness.readout.effects import constant
from assay.harness.readout.mining import Condition, Literal, Term
from assay.harness.readout.operators import Clause, Operator
from assay.harness.readout.readout import ReadOut, read_out
from assay.harness.verdict import UNEXPLAINED, Finding
from assay.worker import Event, Journal

Lens = list[tuple[int, int]]
NO_MASK, SCALE_TWICE = fault("mask-missing"), fault("scale-twice")


def no_rule_in_21(call: AttentionCall) -> Tensor:
    if call.layer != 21:
        return NO_MASK(call)
    draw = torch.Generator().manual_seed(int(call.q.double().abs().sum() * 1000))
    return torch.randn(*call.q.shape[:2], call.v.shape[2], generator=draw, dtype=torch.float64).to(call.q.dtype)


@cache
def read_off(kernel: Kernel) -> ReadOut:
    """What is read off a kernel, once for all tests."""
    return read_out(kernel)


def says() -> str:
    """What is read off the kernel without a mask."""
    return read_off(NO_MASK).sentence


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

    monkeypatch.setattr(observed, "_read_kernel", asked)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel is asked for the picture of the failing call only."""
    monkeypatch.setattr(observed, "_read_kernel", lambda *_: "not now")


@pytest.fixture
def read_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is what is read off the kernel without a mask."""
    monkeypatch.setattr(observed, "_read_kernel", lambda *_: read_off(NO_MASK))


def test_a_wrong_kernel_is_read_and_the_finding_says_what_it_computes() -> None:
    journal, before = standing()
    reader = Reader()
    result = check(NO_MASK, cases=CASES, journal=journal, read_out=reader)
    finding = first(result)
    assert (finding.id, finding.operator) == ("mask-missing", says())
    assert "sees" in says()
    assert finding.picture is not None
    assert reader.last is not None
    assert (reader.last.sentence, reader.last.exact, reader.last.samples) == (says(), True, ())
    assert 20 < reader.last.calls < 3000
    took = f"read off the kernel in {reader.last.calls} calls and {reader.last.seconds:.1f} s: "
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
    given = {case.make().q.shape[0] for case in CASES}

    def kernel(call: AttentionCall) -> Tensor:
        if call.q.shape[0] not in given:
            raise SystemExit(0)
        return NO_MASK(call)

    result = checked(kernel)
    assert (result.verdict, first(result).id) == ("regression", "mask-missing")
    assert any("not answered: SystemExit" in line for line in first(result).evidence)


def test_an_error_in_the_reading_leaves_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> ReadOut:
        raise ArithmeticError("singular matrix")

    monkeypatch.setattr(observed, "read_out", fails)
    result = checked(NO_MASK)
    assert (result.verdict, first(result).id) == ("regression", "mask-missing")
    assert "the kernel could not be read: ArithmeticError: singular matrix" in first(result).evidence
    assert first(result).picture is not None, "the failing call was"


@pytest.mark.parametrize(("name", "unsure"), [("nth", True), ("decode", False)])
def test_an_operator_that_counts_calls_cannot_be_tried_on_calls_without_an_order(name: str, unsure: bool) -> None:
    read = ReadOut(Operator((Clause(constant(0.0), Condition((Literal(Term(name), "<", 2),))),)), "the output is zero, at first")
    call = call_of([(9, 20)], (4, 2), 64, torch.float32, "cpu")
    tried = _tried(read, [measure(call, 0 * rounded_oracle(call))])
    assert (tried.unsure, tried.whole) == (unsure, not unsure)


def test_a_reader_reads_a_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Kernel] = []

    def read_now(kernel: Kernel, **_: object) -> ReadOut:
        asked.append(kernel)
        return ReadOut()

    monkeypatch.setattr(observed, "read_out", read_now)
    reader = Reader(5)
    for kernel in (NO_MASK, NO_MASK, fault("mask-missing"), NO_MASK):
        check(kernel, cases=CASES, read_out=reader)
    assert len(asked) == 2
    check(NO_MASK, cases=[case([(7, 16)], torch.float16)], read_out=reader)
    assert len(asked) == 3, "in another dtype"


@pytest.mark.usefixtures("read_before")
def test_an_assertion_says_what_was_read_if_it_gives_the_output() -> None:
    with pytest.raises(AssertionError, match=f"; observed: {re.escape(says())}$"):
        assert_correct(NO_MASK, CASES[0].make())
    with pytest.raises(AssertionError, match="own error") as raised:
        assert_correct(no_rule_in_21, CASES[0].make().with_spec(layer=21))
    assert "; observed:" not in str(raised.value)


def test_a_call_that_passes_counts_against_an_operator_that_changes_it() -> None:
    read, calls = read_off(NO_MASK), [call_of([lens], (4, 2), 64, torch.float32, "cpu") for lens in ((9, 20), (9, 0))]
    failing, passing = measure(calls[0], NO_MASK(calls[0])), measure(calls[1], rounded_oracle(calls[1]))
    assert observed._tried(read, [failing]).exact
    assert not observed._tried(read, [failing, passing]).exact


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


@pytest.mark.usefixtures("read_before")
def test_a_replay_shows_the_edge_of_the_mask_and_says_what_holds_on_the_recorded_calls(
    tmp_path: Path, importable: Callable[[str, Kernel], str]
) -> None:
    result = replay(a_pack(tmp_path / "pack", NO_MASK), importable("no_mask", NO_MASK))
    [finding] = result.findings
    assert (finding.id, finding.operator) == ("mask-missing", says())
    assert finding.picture is not None
    assert len(finding.picture.cells) >= 4, "one query hides how the mask goes on"
    assert len(finding.picture.key_indices) >= 8
    [held_on] = [line for line in finding.evidence if line.startswith("it gives ")]
    given, _, of = held_on.removeprefix("it gives ").partition(" of ")
    assert of == f"{given} wrong outputs of the recorded calls"
    assert not replay(a_pack(tmp_path / "again", NO_MASK), "no_mask:forward", read_out=0).findings[0].operator


@pytest.mark.usefixtures("read_before")
def test_a_replay_does_not_say_what_holds_only_on_other_calls(tmp_path: Path, importable: Callable[[str, Kernel], str]) -> None:
    pack = a_pack(tmp_path / "pack", no_rule_in_21, layer=21)
    [finding] = replay(pack, importable("by_layer", no_rule_in_21)).findings
    assert (finding.id, finding.operator) == (UNEXPLAINED, "")
    assert finding.picture is not None
    assert finding.picture.call == "layer 21 extend, new+prefix 9+20", "the smallest failing call with some queries and keys"
    assert any(line.startswith("on other calls the kernel computes this, which gives ") for line in finding.evidence)


@pytest.mark.usefixtures("quick")
def test_a_kernel_that_is_right_outside_of_its_server_is_said_to_be(
    tmp_path: Path, importable: Callable[[str, Kernel], str]
) -> None:
    recorded = a_pack(tmp_path / "pack", NO_MASK)
    result = replay_recorded(recorded, Backend.parse(importable("right_here", rounded_oracle)), "again", reader=Reader())
    finding = result.findings[0]
    assert finding.picture is None
    assert any(line.startswith("asked again, the kernel computes layer 1 extend, new+prefix 9+20") for line in finding.evidence)
    assert result.exit_code == ExitCode.REGRESSION


def test_an_operator_holds_only_on_calls_whose_outputs_it_gives() -> None:
    read, call = read_off(NO_MASK), call_of([(9, 20)], (4, 2), 64, torch.float32, "cpu")
    right = measure(call, NO_MASK(call))
    assert _held(read, [right, right]).exact
    assert _held(read, [right, right]).wrong > 0
    assert _held(read, [measure(call, fault("scale-twice")(call))]).share < 0.1
    passing = _held(read, [measure(call, rounded_oracle(call))])
    assert passing.wrong == 0 < passing.false, "the operator is wrong where the kernel is right"


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
