from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import pytest
import torch
from rich.console import Console

from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.kernels import declares
from assay.harness.attention.matrix import Case
from assay.harness.attention.sample_calls import call_of
from assay.harness.attention.sdpa import torch_sdpa
from assay.harness.bugs.catalogue import CATALOGUE
from assay.harness.bugs.seeded import SeededFault, Where
from assay.harness.certify.footprint import footprint, widened
from assay.harness.certify.kernel import CertifiedKernel
from assay.harness.certify.op_level import OpLevel, checked, examine_fault, examine_honest, honest, read
from assay.harness.certify.op_tasks import CANDIDATE, op_envelope, op_tasks
from assay.harness.certify.session import CannotContinueError, Trial, certify
from assay.harness.errors import ExitCode, UsageError
from assay.harness.evidence.certificate import Certificate, Examined, read_certificate
from assay.harness.localize.bounds import CallNoise
from assay.harness.offline.check_result import CheckResult
from assay.harness.progress import ProgressDisplay


class FewCases(OpLevel):
    """Some twenty short cases: enough for a fault that shows everywhere."""

    @cached_property
    def cases(self) -> list[Case]:
        short = [case for case in super().cases if case.make().k.shape[0] <= 512]
        return short[::9]  # an odd step, since layers take turns


class FewerCases(FewCases):
    """Every third of them: enough to tell a right kernel from one that is wrong in every call."""

    @cached_property
    def cases(self) -> list[Case]:
        return super().cases[::3]


pytestmark = pytest.mark.usefixtures("shared_hypotheses")
FEW, ALL = FewCases(), OpLevel()
INT8 = FewCases(kernel=CertifiedKernel(honest("int8_qk", 3), "mine:int8"))
FP4 = FewCases(kernel=CertifiedKernel(honest("fp4_kv", 3), "mine:fp4"))
"""The same cases, with faults in a kernel that quantises."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def run(folder: Path, tasks: Sequence[Trial], time_limit: float = 60, level: OpLevel = FEW) -> Certificate:
    return certify(tasks, op_envelope(level), folder, ProgressDisplay(Console(quiet=True)), time_limit)


def a_task(examine: object, id: str = "a-fault") -> Trial:
    return Trial(id, "fault", "a fault", (), "", examine)  # type: ignore[arg-type]


def caught(id: str = "a-fault") -> Examined:
    return Examined(id=id, kind="fault", title="a fault", outcome="caught", seconds=1.0)


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", [f for f in CATALOGUE.values() if not f.equivalent], ids=lambda f: f.id)
def test_every_fault_changes_some_output(fault: SeededFault) -> None:
    rounds = 5 if fault.where.share < 1 else 1
    levels = (FEW, *(ALL.at(seed) for seed in range(rounds)))  # most show on the first, which takes a tenth of the time
    assert any(footprint(fault, level.wide).calls for level in levels)


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", [f for f in CATALOGUE.values() if f.equivalent], ids=lambda f: f.id)
def test_equivalent_faults_change_nothing_and_are_not_flagged(fault: SeededFault) -> None:
    assert footprint(fault, FEW.wide).calls == ()
    assert examine_fault(fault, FEW).outcome == "quiet"


@pytest.mark.slow
def test_a_footprint_is_where_the_fault_was_put() -> None:
    zero = SeededFault("zero", "zero", "", lambda call, out: out * 0, where=Where(layers=(2,), heads=(1,), phase="decode"))
    shown = footprint(zero, ALL.wide)
    assert (shown.layers, shown.heads, shown.phases) == ((2,), (1,), ("decode",))
    assert {number for number, _ in shown.sequences} == set(shown.calls)


def test_a_footprint_has_the_models_numbers_of_heads() -> None:
    """Calls of one process of several, and calls of more and fewer heads: a finding counts heads as the model does."""
    zero = SeededFault("zero", "zero", "", lambda call, out: out * 0, where=Where(heads=(1,)))
    some = [call_of([(8, 0)], (4, 4), 32, torch.float32, "cpu").with_spec(first_head=first) for first in (0, 4)]
    shown = footprint(zero, widened([*some, call_of([(8, 0)], (2, 2), 32, torch.float32, "cpu")]))
    assert (shown.heads, shown.of_heads) == ((1, 5), 8)


def test_a_fault_is_caught_named_and_pinned() -> None:
    one = examine_fault(CATALOGUE["mask-top-left-head-3"], FEW)
    assert (one.outcome, one.named, one.pinned) == ("caught", True, True)
    [look] = one.looks
    assert look.after is not None
    assert 1 <= look.after <= look.of == len(FEW.cases)


def test_a_finding_elsewhere_does_not_pin_a_fault() -> None:
    def wrong_head(kernel: Kernel, cases: Sequence[Case]) -> CheckResult:
        return checked(elsewhere, cases)

    def elsewhere(call: AttentionCall) -> torch.Tensor:
        out = torch_sdpa(call)
        out[:, 0] *= 2
        return out

    one = examine_fault(CATALOGUE["head-3-zero"], FEW, wrong_head)
    assert (one.outcome, one.pinned) == ("caught", False)


@pytest.mark.slow
def test_a_fault_is_read_where_that_is_asked_for() -> None:
    fault = CATALOGUE["mask-top-left-head-3"]
    one = examine_fault(fault, FEW, read)
    assert one.read
    assert one.read.endswith("only in q head 3")
    assert one.read_exact
    quiet = examine_honest("exact", "exact", honest("", 0), FEW, read)
    assert (quiet.read, quiet.read_exact) == (None, None)
    one = examine_fault(fault, FEW)
    assert (one.read, one.read_exact) == (None, None)
    assert op_envelope(FEW, read_out=True) != op_envelope(FEW), "results without it are not taken for those with it"


def test_an_honest_kernel_is_left_alone() -> None:
    assert examine_honest("exact", "exact", honest("", 0), FEW).outcome == "quiet"


@pytest.mark.slow
def test_an_undeclared_family_is_a_false_alarm_if_it_is_flagged() -> None:
    def as_exact(kernel: Kernel, cases: Sequence[Case]) -> CheckResult:
        return checked(lambda call: kernel(call), cases)  # the wrapper hides the declaration

    assert examine_honest("int8", "int8", honest("int8_qk", 0), FEW, as_exact).outcome == "false alarm"


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("fault", ["mask-top-left-head-3", "mask-missing", "scale-twice"])
def test_a_fault_in_a_kernel_that_quantises_is_named_and_pinned(fault: str) -> None:
    one = examine_fault(CATALOGUE[fault], INT8)
    assert (one.outcome, one.named, one.pinned) == ("caught", True, True)
    assert one.findings == (CATALOGUE[fault].hypothesis,), "no quantisation is missing where the fault is"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["identity", "keys-reversed", "splits-merged"])
def test_an_equivalent_fault_in_a_kernel_that_quantises_is_not_flagged(fault: str) -> None:
    assert examine_fault(CATALOGUE[fault], INT8).outcome == "quiet"


@pytest.mark.slow
def test_a_kernel_that_is_named_is_examined_without_a_fault() -> None:
    [task] = op_tasks(FewerCases(kernel=INT8.kernel), [CANDIDATE])
    assert (task.kind, task.examine().outcome) == ("honest", "quiet")
    wrong = FewerCases(kernel=CertifiedKernel(lambda call: 2 * torch_sdpa(call), "mine:wrong"))
    [task] = op_tasks(wrong, [CANDIDATE])
    assert task.examine().outcome == "false alarm"
    assert examine_fault(CATALOGUE["identity"], wrong).outcome == "false alarm", "faults are seeded in this kernel"
    assert CANDIDATE not in [task.id for task in op_tasks(FEW)]


def test_the_envelope_names_the_kernel_and_what_it_declares() -> None:
    made = op_envelope(INT8)
    assert (made.candidate, made.noise, made.phases) == ("mine:int8", "int8_qk", ("extend", "decode"))
    made = op_envelope(FEW)
    assert (made.candidate, made.noise) == ("", "")


def test_there_is_an_envelope_where_assay_is_on_the_path_only(not_installed: None) -> None:
    assert op_envelope(FEW).version == "not installed"


def test_what_the_kernel_does_not_declare_is_outside_the_envelope() -> None:
    declared = declares(phases=("extend",), head_dims=(64,), dtypes=("float32",))
    level = FewCases(kernel=CertifiedKernel(declared(lambda call: torch_sdpa(call)), "mine:extend"))
    assert {(call.phase, call.q.shape[2], call.q.dtype) for call in level.calls} == {("extend", 64, torch.float32)}
    assert examine_fault(CATALOGUE["first-sequence-everywhere"], level).outcome == "not shown"


@pytest.mark.slow
def test_a_fault_that_the_declared_noise_hides_is_missed_and_fails_no_certificate(tmp_path: Path) -> None:
    made = run(tmp_path, op_tasks(FP4, ["scores-in-bf16", "mask-top-left"]), level=FP4)
    [hidden] = made.having("missed")
    assert (hidden.id, hidden.hidden) == ("scores-in-bf16", True)
    assert hidden.effect is not None
    assert f"at most {hidden.effect:.2g} times what the noise of fp4_kv costs there (hidden by it)" in hidden.why
    assert made.exit_code == ExitCode.PASS
    assert run(tmp_path, op_tasks(FP4, ["scores-in-bf16"]), level=FP4).exit_code == ExitCode.NO_VERDICT


@pytest.mark.slow
def test_bounds_that_are_far_too_wide_are_not_taken_for_noise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = CallNoise._bounds
    monkeypatch.setattr(CallNoise, "_bounds", lambda self, ensemble: 1e9 * right(self, ensemble))
    monkeypatch.setattr("assay.harness.localize.diagnose.scaled", lambda results: None)
    made = run(tmp_path, op_tasks(FP4, ["mask-top-left", "scores-in-bf16"]), level=FP4)
    assert [(one.id, one.hidden) for one in made.having("missed")] == [("mask-top-left", False), ("scores-in-bf16", True)]
    assert made.exit_code == ExitCode.REGRESSION


def test_a_check_with_bounds_that_are_far_too_wide_fails_the_certificate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ids = ["mask-top-left", "gain-0.1-percent", "identity"]
    assert run(tmp_path / "right", op_tasks(FewerCases(), ids)).exit_code == ExitCode.PASS
    right = CallNoise._bounds
    monkeypatch.setattr(CallNoise, "_bounds", lambda self, ensemble: 1e9 * right(self, ensemble))
    monkeypatch.setattr("assay.harness.localize.diagnose.scaled", lambda results: None)
    broken = run(tmp_path / "broken", op_tasks(FewerCases(), ids))
    assert {one.id for one in broken.having("missed")} == {"mask-top-left", "gain-0.1-percent"}
    assert broken.exit_code == ExitCode.REGRESSION


def test_a_check_that_flags_everything_fails_the_certificate(tmp_path: Path) -> None:
    def alarmist(kernel: Kernel, cases: Sequence[Case]) -> CheckResult:
        return checked(lambda call: 2 * torch_sdpa(call), cases)

    made = run(tmp_path, op_tasks(FewerCases(), ["mask-top-left", "identity"], alarmist))
    assert [(one.id, one.pinned) for one in made.having("false alarm")] == [("identity", False)]
    assert made.exit_code == ExitCode.REGRESSION


def test_a_fault_outside_the_envelope_is_not_counted_as_missed(tmp_path: Path) -> None:
    far = SeededFault("far", "far", "", lambda call, out: out * 0, where=Where(length=(10**6, None)))
    made = run(tmp_path, [Trial.of(far, lambda fault: examine_fault(fault, FEW))])
    assert [one.outcome for one in made.examined] == ["not shown"]
    assert made.exit_code == ExitCode.PASS


def test_a_certificate_says_what_of_the_catalogue_was_left_out(tmp_path: Path) -> None:
    known = [task.id for task in op_tasks(FEW)]
    tasks = op_tasks(FEW, ["identity"])
    made = certify(tasks, op_envelope(FEW), tmp_path, ProgressDisplay(Console(quiet=True)), 60, known)
    assert (made.exit_code, len(made.not_asked)) == (ExitCode.PASS, len(known) - 1)
    assert "identity" not in made.not_asked


def test_an_unknown_fault_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no fault gremlins"):
        op_tasks(FEW, ["gremlins"])


def test_crashes_and_time_outs_are_kept_apart_and_leave_no_verdict(tmp_path: Path) -> None:
    def crash() -> Examined:
        raise RuntimeError("boom")

    def hang() -> Examined:
        while True:
            pass

    made = run(tmp_path, [a_task(crash, "crashes"), a_task(hang, "hangs"), a_task(caught)], time_limit=0.2)
    assert [one.outcome for one in made.examined] == ["crash", "time-out", "caught"]
    assert "boom" in made.examined[0].why
    assert made.exit_code == ExitCode.NO_VERDICT


def test_what_is_not_the_doing_of_a_fault_ends_the_command_and_is_no_result(tmp_path: Path) -> None:
    def no_servers() -> Examined:
        raise CannotContinueError("no server starts")

    with pytest.raises(CannotContinueError):
        run(tmp_path, [a_task(no_servers)])
    assert [one.outcome for one in run(tmp_path, [a_task(caught)]).examined] == ["caught"]


def test_a_repeated_command_goes_on_where_it_stopped(tmp_path: Path) -> None:
    seen: list[str] = []

    def stopped() -> Examined:
        raise KeyboardInterrupt

    def examine() -> Examined:
        seen.append("b")
        return caught("b")

    first = a_task(lambda: seen.append("a") or caught("a"), "a")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [first, a_task(stopped, "b")])
    made = run(tmp_path, [first, a_task(examine, "b")])
    assert seen == ["a", "b"]
    assert [one.id for one in made.examined] == ["a", "b"]
    assert read_certificate(tmp_path / "certificate.json") == made


def test_what_ends_the_process_twice_counts_as_a_crash(tmp_path: Path) -> None:
    envelope = op_envelope(FEW)

    def killed() -> Examined:
        raise SystemError("never reached: the process is gone")

    run(tmp_path, [a_task(lambda: caught("before"), "before")])
    [results] = tmp_path.glob("results-*.jsonl")
    running = tmp_path / results.name.replace("results-", "running-").removesuffix(".jsonl")
    running.write_text("killer\nkiller")  # as two processes left it that were killed
    made = certify([a_task(killed, "killer")], envelope, tmp_path, ProgressDisplay(Console(quiet=True)), 60)
    assert [(one.outcome, "ended 2 times" in one.why) for one in made.examined] == [("crash", True)]


def test_results_of_another_envelope_are_not_taken(tmp_path: Path) -> None:
    run(tmp_path, [a_task(caught)])
    other = op_envelope(FEW).model_copy(update={"source": "another"})
    made = certify(
        [a_task(lambda: caught().model_copy(update={"seconds": 2.0}))], other, tmp_path, ProgressDisplay(Console(quiet=True)), 60
    )
    assert [one.seconds for one in made.examined] == [2.0]
