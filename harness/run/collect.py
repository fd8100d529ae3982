"""A run: two servers get the same questions, and leave the evidence for the verdict."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from assay.harness.engines.base import Engine
from assay.harness.errors import EngineError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import QUESTION_PLAN
from assay.harness.progress import ProgressDisplay
from assay.harness.run.asked import check_asked
from assay.harness.run.collectors import COLLECTORS, Asking, Collector
from assay.harness.run.fingerprints import of_side
from assay.harness.run.kernel_process import examine_kernel, try_kernel
from assay.harness.run.plan import Plan
from assay.harness.run.preflight import check_accepted
from assay.harness.run.question_stop import FIRST_IN_TURN, QuestionStop
from assay.harness.run.run_folder import asked_roles, recorded
from assay.harness.run.servers import make_run_engine, manifest_of, record_fingerprint, running, together
from assay.harness.sides import ROLES, Role


def collect(plan: Plan, folder: RunFolder, display: ProgressDisplay, ready: Sequence[Engine] = ()) -> None:
    """Ask both servers what they have not answered yet. What ends a run early is recorded, not raised.

    Args:
        plan: the checked run.
        folder: where answers go, one by one.
        display: shows the progress.
        ready: both servers, if they are running already; otherwise they are started and stopped here.

    Raises:
        KeyboardInterrupt: after the servers were stopped and the interruption was recorded.
    """
    with recorded(folder):
        stop = QuestionStop(plan, folder.answers(), together=_asked_together(plan, folder, ready))
        if stop.items and stop.reason is None:
            rule, seed = plan.rule, plan.spec.workload.order_seed
            display.say(
                f"Questions: at most {len(stop.items):,}, in the random order of seed {seed}; margin {rule.margin:g}, "
                f"alpha {rule.alpha:g}. Asking stops when the answers decide."
            )
        for number, first in enumerate(_rounds(stop)):
            if number and stop.enough():
                break
            stop.first = first
            _ask_round(Asking(plan, folder, display, stop, {answer.key for answer in folder.answers()}), ready)
        _record_stop(folder, stop, display)
        if plan.has_layer_diff:
            examine_kernel(plan, folder, display)


def _asked_together(plan: Plan, folder: RunFolder, ready: Sequence[Engine]) -> bool:
    """Return True if both roles are asked at the same time."""
    return asked_roles(plan, folder) == ROLES and (bool(ready) or together(plan))


def _rounds(stop: QuestionStop) -> list[int]:
    """Return how many questions the servers have got after each round: few at first, since those usually decide."""
    most = len(stop.items)
    return [most] if stop.together or most <= FIRST_IN_TURN else [FIRST_IN_TURN, most]


def _ask_round(asked: Asking, ready: Sequence[Engine]) -> None:
    """Ask both servers what they have not answered yet, together or in turn."""
    plan, folder, display, stop = asked.plan, asked.folder, asked.display, asked.stop
    pending = [
        role for role in asked_roles(plan, folder) if any(each.is_open(asked, role) for each in chain(*COLLECTORS))
    ]
    if not pending:
        display.say("All questions were already answered." if plan.items else "There is nothing to ask.")
        return
    if ready:
        _ask_all(ready, asked)
        return
    if not folder.progress().servers:
        try_kernel(plan, folder)
        check_asked(plan, display)
        _check_loaded(plan, display)
    for roles in [pending] if stop.together else [[role] for role in _in_turn(plan, folder, pending, stop)]:
        group = [make_run_engine(plan, folder, role) for role in roles]
        display.say(f"Starting {' and '.join(f'{e.role} {e.backend}' for e in group)}.")
        with running(group, plan.spec.device, display):
            _ask_all(group, asked)


def _in_turn(plan: Plan, folder: RunFolder, pending: Sequence[Role], stop: QuestionStop) -> Sequence[Role]:
    """List the pending roles; the candidate is pending as well where the reference is about to answer more questions."""
    both = asked_roles(plan, folder) == ROLES
    return ROLES if both and "reference" in pending and stop.open_items("reference") else pending


def _record_stop(folder: RunFolder, stop: QuestionStop, display: ProgressDisplay) -> None:
    """Record where asking stopped, and why."""
    recorded_plan = folder.read(QUESTION_PLAN)
    if recorded_plan is None or stop.reason is None:
        return
    display.say(f"Questions: {stop.reason} after {stop.pairs:,} of {len(stop.items):,}.")
    folder.write(QUESTION_PLAN, recorded_plan.model_copy(update={"stopped": stop.reason, "pairs": stop.pairs}))


def _ask_all(engines: Sequence[Engine], asked: Asking) -> None:
    """Take all engines through the collectors at the same time; the first failure stops all servers and so all threads."""
    folder, display = asked.folder, asked.display
    for engine in engines:
        folder.record_server(manifest_of(engine))
        started = f", ready in {engine.startup_s:.0f} s" if engine.startup_s else ""
        display.say(f"{engine.role.capitalize()} is {engine.backend} in {engine.label}{started}.")
    _take_fingerprints(engines, asked)
    first, *others = COLLECTORS
    _collect(engines, asked, first)
    with _kernel_aside(asked.plan, folder, display):
        for group in others:
            _collect(engines, asked, group)


def _check_loaded(plan: Plan, display: ProgressDisplay) -> None:
    """Refuse a candidate whose model, loaded without a server, is not what was accepted: servers would take minutes to say so.

    A kernel is served by a server alone, and checked there, as everything is once more.
    """
    spec = plan.spec
    if spec.policy.fingerprint and not (plan.candidate.is_url or plan.candidate.is_kernel):
        with display.waiting("loading the candidate's model, whose fingerprint is compared"):
            made = of_side(spec.candidate, spec.device, spec.startup_timeout)
        check_accepted(Path(spec.policy.fingerprint), made)


def _take_fingerprints(engines: Sequence[Engine], asked: Asking) -> None:
    """Record what each server really serves, before anything is asked; refuse a candidate that is not what was accepted."""
    plan, folder = asked.plan, asked.folder
    accepted = plan.spec.policy.fingerprint

    def take(engine: Engine) -> None:
        made = record_fingerprint(engine, plan.spec.sides[engine.role], folder.server_folder(engine.role), folder.nonce)
        if accepted and engine.role == "candidate":
            if made is None:
                raise EngineError(
                    f"The candidate's server tells no fingerprint, which {accepted} is to be compared with.",
                    "a server whose processes write theirs",
                    "see its log, or leave --fingerprint out",
                )
            check_accepted(Path(accepted), made)

    _in_threads(engines, take)


def _collect(engines: Sequence[Engine], asked: Asking, group: Sequence[Collector]) -> None:
    """Take each engine through a group of collectors, in a thread of its own."""
    for collector in group:
        collector.begin(asked, engines)

    def go_through(engine: Engine) -> None:
        for collector in group:
            collector.collect(asked, engine)

    _in_threads(engines, go_through)


def _in_threads(engines: Sequence[Engine], work: Callable[[Engine], None]) -> None:
    """Do work with each engine, in a thread of its own. If one fails, all engines are stopped, and the first error is raised."""
    with ThreadPoolExecutor(len(engines)) as pool:
        futures = [pool.submit(work, engine) for engine in engines]
        complete = False
        try:
            finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future in finished:
                    future.result()
            complete = True
        finally:
            if not complete:
                for engine in engines:
                    engine.stop()


@contextmanager
def _kernel_aside(plan: Plan, folder: RunFolder, display: ProgressDisplay) -> Iterator[None]:
    """Examine the candidate's kernel on a CPU core that the servers no longer keep busy; a GPU's memory is theirs until they stop.

    What interrupts the run, or fails in it, ends the examination.
    """
    if plan.spec.device != "cpu" or not plan.has_layer_diff or not plan.candidate.is_kernel:
        yield
        return
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        examined = pool.submit(examine_kernel, plan, folder, display, stop)
        try:
            yield
            examined.result()
        finally:
            stop.set()
