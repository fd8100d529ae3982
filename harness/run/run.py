"""A run, from its spec to its report: the one sequence that the commands, pytest, nox and pipelines share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from assay.harness.config import RunSpec
from assay.harness.engines.base import Engine
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.bench_folder import bench_folder
from assay.harness.evidence.folder import EndedFolder, RunFolder
from assay.harness.evidence.invariance import InvarianceFolder
from assay.harness.evidence.layer_diff_record import pack_of
from assay.harness.evidence.pack import PackManifest, read_manifest
from assay.harness.evidence.run_file import new_nonce
from assay.harness.interruption import like_ctrl_c, too_late
from assay.harness.judge.baselines import adopt_reference, with_stored_reference
from assay.harness.judge.build import build
from assay.harness.judge.invariance import judge_invariance
from assay.harness.judge.invariance_result import InvarianceResult
from assay.harness.judge.judgement import WHOLE
from assay.harness.judge.report import Report
from assay.harness.progress import ProgressDisplay
from assay.harness.run import layer_diff
from assay.harness.run.bench import BenchPlan, bench, plan_bench
from assay.harness.run.collect import collect
from assay.harness.run.invariance.drive import InvarianceSession
from assay.harness.run.invariance.plan import compared_spec, gpu_count, plan_invariance
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.preflight import check_environment
from assay.harness.run.run_folder import asked_roles, default_folder, note_changed_kernels, open_folder, recorded
from assay.harness.run.servers import check_together, make_run_engine, running
from assay.harness.sides import Role

_AnyPart = TypeVar("_AnyPart", bound=EndedFolder[Any])


def run(
    spec: RunSpec, out: Path | None = None, *, gate: bool = False, display: ProgressDisplay | None = None
) -> Report:
    """Start the servers of both roles, ask both the same questions, and judge the evidence.

    An interrupted or failed run has a report too, whose verdict is "error"; repeated with the same `out`, it resumes where it
    stopped. Nothing is rendered; `assay.reports.write.write_reports` writes report files::

        from pathlib import Path

        from assay import RunSpec, run
        from assay.reports.wording.verdict import headline
        from assay.reports.write import write_reports

        out = Path("runs/mine")
        report = run(RunSpec.of(reference="torch_native", candidate="mine:forward", questions=512), out)
        write_reports(report, out)
        assert report.verdict == "pass", headline(report)

    Args:
        spec: what to run.
        out: the run's folder; by default a new one in ``runs/``.
        gate: whether it is a gate, whose pass requires every suite of a whole run, unless the policy names others.
        display: shows the progress; by default it is not shown.

    Raises:
        UsageError: the spec cannot be run, or `out` holds another run. Nothing was started.
        EvidenceError: the folder is damaged or cannot be written.
    """
    display = display or ProgressDisplay(Console(quiet=True))
    opened = OpenRun.open(spec, out, gate=gate, display=display)
    with like_ctrl_c():
        with suppress(KeyboardInterrupt):  # the answers so far still make a report
            opened.collect(display)
        with too_late():
            opened.end()
            return opened.report()


def compare_features(
    spec: RunSpec,
    out: Path,
    *,
    features: Sequence[str] = (),
    together: bool = False,
    display: ProgressDisplay | None = None,
) -> InvarianceResult:
    """Toggle features of the reference's engine that should not affect outputs, and judge the differences. Nothing is rendered.

    Args:
        spec: its reference is compared with itself; its candidate and workload are ignored.
        out: a new folder for the evidence.
        features: ids of the features; empty for all that this machine supports.
        together: turn all of them on in one arm, and each alone if that differs; otherwise every two are on together in some arm.
        display: shows the progress; by default it is not shown.

    Raises:
        UsageError: the features cannot be toggled, or `out` is not empty. Nothing was started.
        EngineError: the server without any feature failed.
        EvidenceError: the folder cannot be written.
    """
    plan = plan_invariance(prepare(compared_spec(spec)), features, together, gpu_count(spec.device))
    check_environment(plan.run)
    folder = InvarianceFolder.new(out)
    with like_ctrl_c():
        InvarianceSession(plan, folder, display or ProgressDisplay(Console(quiet=True))).run()
    return judge_invariance(folder)


def record_pack(plan: Plan, pack: Path, display: ProgressDisplay) -> PackManifest:
    """Record a replay pack alone: one reference server, a short workload, no verdict.

    Args:
        plan: the checked run, with the suite layers; calls on which its candidate is worst are kept too.
        pack: a new folder.
        display: shows the progress.

    Returns:
        The manifest of the pack.

    Raises:
        UsageError: `pack` is not empty, or this machine cannot serve the run.
        EngineError: the server failed; the message ends with its log.
        EvidenceError: nothing could be recorded.
    """
    if pack.exists() and (not pack.is_dir() or any(pack.iterdir())):
        raise UsageError(f"{pack} is not empty.", "a new folder for the pack", "name another one with --record")
    check_environment(plan, display.say)
    with tempfile.TemporaryDirectory(prefix="assay-record-") as made:
        folder = RunFolder(Path(made), new_nonce())  # a temporary one, without a manifest
        server = make_run_engine(plan, folder, "reference")
        display.say(f"Starting {server.backend}.")
        with running([server], plan.spec.device, display):
            display.say("Asking a short workload.")
            layer_diff.shadow(server, folder.server_folder("reference"), plan)
        recorded = pack_of(folder)
        if recorded is None:
            raise EvidenceError(
                "No call was recorded.", "at least one call that a kernel can compute", "see assay run --suites layers"
            )
        pack.parent.mkdir(parents=True, exist_ok=True)
        if pack.exists():
            pack.rmdir()
        shutil.move(recorded, pack)
    return read_manifest(pack)


@dataclass(frozen=True)
class OpenRun:
    """A checked run with its folder. Nothing has been started.

    Attributes:
        plan: the checked run.
        bench: the checked latency suite, or None if the run does not ask for it.
        folder: receives all evidence.
    """

    plan: Plan
    bench: BenchPlan | None
    folder: RunFolder

    @classmethod
    def open(
        cls,
        spec: RunSpec,
        out: Path | None,
        *,
        gate: bool = False,
        kept_running: bool = False,
        display: ProgressDisplay,
    ) -> OpenRun:
        """Check a spec and open its folder.

        Args:
            spec: as in `run`; so are `out`, `gate`, `display` and the errors.
            kept_running: whether `servers` will be used, which needs both servers at the same time.
        """
        if gate and "require" not in spec.policy.given_by:
            spec = spec.changed(require=WHOLE, given_by={**spec.policy.given_by, "require": "assay gate"})
        plan = prepare(with_stored_reference(spec))
        bench = plan_bench(plan) if "latency" in plan.spec.workload.suites else None
        check_environment(plan, display.say)
        if kept_running and len(plan.roles) > 1:
            check_together(plan, "they run as long as the tests")
        folder = open_folder(plan, out or default_folder(spec.candidate.backend), "gate" if gate else "run")
        display.say(f"Run {folder.path}: {plan.spec.candidate.backend} against {plan.spec.reference.backend}.")
        if adopt_reference(folder):
            display.say(f"Reference: stored in {plan.spec.reference_baseline}.")
        return cls(plan, bench, folder)

    def collect(self, display: ProgressDisplay, ready: Sequence[Engine] = ()) -> None:
        """Ask both servers all open questions, then time both. An error that ends the run early is recorded, not raised.

        Args:
            display: shows the progress.
            ready: the running servers of `servers`, which has done all else already; otherwise they are started and stopped here.

        Raises:
            KeyboardInterrupt: after the servers were stopped and the interruption was recorded.
        """
        collect(self.plan, self.folder, display, ready)
        self._measure_apart(display)

    @contextmanager
    def servers(self, display: ProgressDisplay) -> Iterator[Mapping[Role, Engine]]:
        """Run the servers of a run for as long as a caller needs them; yield none if one did not start, which is recorded.

        Latency is timed first, on separate servers, since these would disturb it.
        """
        self._measure_apart(display)
        roles = asked_roles(self.plan, self.folder)
        engines = [make_run_engine(self.plan, self.folder, role) for role in roles]
        started = ExitStack()
        if not self.folder.progress().failure:
            with recorded(self.folder), ExitStack() as starting:
                starting.enter_context(running(engines, self.plan.spec.device, display))
                started = starting.pop_all()
        with started:
            yield {} if self.folder.progress().failure else {engine.role: engine for engine in engines}

    def _measure_apart(self, display: ProgressDisplay) -> None:
        """Time separate servers: nothing else may compute meanwhile, such as a shadow."""
        if (timed := self.bench) is not None:
            _make_part(self.folder, bench_folder(self.folder), lambda empty: bench(timed, empty, display))

    def end(self) -> None:
        """Seal the evidence, unless something ended the run early, so that the run can resume.

        A kernel that changed meanwhile also ends the run early.

        Raises:
            EvidenceError: the folder cannot be written.
        """
        if not self.folder.progress().failure:
            note_changed_kernels(self.plan, self.folder)
        if not self.folder.progress().failure:
            self.folder.seal()

    def report(self) -> Report:
        """Make the report from the folder's evidence."""
        return build(self.folder)


def _make_part(folder: RunFolder, part: _AnyPart, make: Callable[[_AnyPart], None]) -> None:
    """Make a part of a run that has its own servers, unless the run has failed or the part exists.

    An interrupted part starts over, because its beginning came from other servers. An error that ends it early is recorded; only an
    interruption is raised again.
    """
    if folder.progress().failure or part.complete:
        return
    with recorded(folder):
        shutil.rmtree(part.path, ignore_errors=True)
        make(type(part).new(part.path, folder.nonce))
