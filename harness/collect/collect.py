"""A run: two servers get the same questions, and leave the evidence for the verdict."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext

from assay.harness.collect import layer_diff, sensitivity
from assay.harness.collect.interview import AnswerKey, interview, is_answered
from assay.harness.collect.kernel_process import examine_kernel, try_kernel
from assay.harness.collect.logit_scoring import Handover, is_scored, score_role
from assay.harness.collect.plan import Plan
from assay.harness.collect.question_stop import FIRST_IN_TURN, QuestionStop, outlook
from assay.harness.collect.run_folder import asked_roles, recorded, shadowed_role
from assay.harness.collect.servers import make_run_engine, manifest_of, running, together
from assay.harness.collect.trace_kernels import is_traced, trace_kernels
from assay.harness.engines.base import Engine
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff_record import LAYER_DIFF
from assay.harness.evidence.question_plan import QUESTION_PLAN
from assay.harness.progress import ProgressDisplay
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
            for line in outlook(plan.spec, len(stop.items)):
                display.say(line)
        for number, first in enumerate(_rounds(stop)):
            if number and stop.enough():
                break
            stop.first = first
            _ask_round(plan, folder, stop, display, ready)
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


def _ask_round(
    plan: Plan, folder: RunFolder, stop: QuestionStop, display: ProgressDisplay, ready: Sequence[Engine]
) -> None:
    """Ask both servers what they have not answered yet, together or in turn."""
    answered = {answer.key for answer in folder.answers()}
    pending = [role for role in asked_roles(plan, folder) if _is_pending(plan, folder, role, answered, stop)]
    if not pending:
        display.say("All questions were already answered." if plan.items else "There is nothing to ask.")
    elif ready:
        _ask_all(ready, plan, folder, answered, stop, display)
    else:
        if not folder.progress().servers:
            try_kernel(plan, folder)
        groups = [pending] if stop.together else [[role] for role in _in_turn(plan, folder, pending, stop)]
        for roles in groups:
            group = [make_run_engine(plan, folder, role, alone=len(roles) == 1) for role in roles]
            display.say(f"Starting {' and '.join(f'{e.role} {e.backend}' for e in group)}.")
            with running(group, plan.spec.device, display):
                _ask_all(group, plan, folder, answered, stop, display)


def _in_turn(plan: Plan, folder: RunFolder, pending: Sequence[Role], stop: QuestionStop) -> Sequence[Role]:
    """The pending roles; the candidate is pending as well where the reference is about to answer more questions."""
    both = asked_roles(plan, folder) == ROLES
    return ROLES if both and "reference" in pending and stop.open_items("reference") else pending


def _record_stop(folder: RunFolder, stop: QuestionStop, display: ProgressDisplay) -> None:
    """Record where asking stopped, and why."""
    recorded_plan = folder.read(QUESTION_PLAN)
    if recorded_plan is None or stop.reason is None:
        return
    display.say(f"Questions: {stop.reason} after {stop.pairs:,} of {len(stop.items):,}.")
    folder.write(QUESTION_PLAN, recorded_plan.model_copy(update={"stopped": stop.reason, "pairs": stop.pairs}))


def _is_pending(plan: Plan, folder: RunFolder, role: Role, answered: set[AnswerKey], stop: QuestionStop) -> bool:
    """Return True if a role's server still has something to do."""
    compared = not plan.has_layer_diff or folder.read(LAYER_DIFF, role) is not None
    traced = not plan.compares_answers or plan.backend(role).is_url or is_traced(folder, role)
    done = compared and traced and is_answered(plan, role, answered, stop)
    return not done or bool(_unscored(plan, folder, role)) or sensitivity.is_open(plan, folder, role)


def _ask_all(
    engines: Sequence[Engine],
    plan: Plan,
    folder: RunFolder,
    answered: set[AnswerKey],
    stop: QuestionStop,
    display: ProgressDisplay,
) -> None:
    """Ask all engines at the same time, each from its own thread; the first failure stops all servers and so all threads."""
    for engine in engines:
        folder.record_server(manifest_of(engine))
        started = f", ready in {engine.startup_s:.0f} s" if engine.startup_s else ""
        display.say(f"{engine.role.capitalize()} is {engine.backend} in {engine.label}{started}.")

    def ask(engine: Engine) -> None:
        interview(engine, plan, folder, answered, stop, display)
        if plan.compares_answers:
            trace_kernels(engine, folder, plan.items)
        _compare_layers(engine, plan, folder, display)

    stop.begin([engine.role for engine in engines])
    _in_parallel(engines, ask)
    with _kernel_aside(plan, folder, display):
        _score_all(engines, plan, folder, display)
        _in_parallel(engines, lambda engine: sensitivity.measure_sensitivity(engine, plan, folder, display))


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


def _compare_layers(engine: Engine, plan: Plan, folder: RunFolder, display: ProgressDisplay) -> None:
    """Do a server's part of the layer diff, unless it is done or none was asked for."""
    if not plan.has_layer_diff or folder.read(LAYER_DIFF, engine.role) is not None:
        return
    if engine.role == shadowed_role(plan, folder):
        layer_diff.compare_layers(engine, folder, plan, display)
    else:
        layer_diff.trace_free_running(engine, folder, plan)


def _unscored(plan: Plan, folder: RunFolder, role: Role) -> list[Role]:
    """Roles whose logits this server still has to score: both, where it is the only one and also runs the other backend."""
    asked = asked_roles(plan, folder)
    if "logits" not in plan.spec.workload.suites or plan.has_url:
        return []
    if asked != ROLES and not plan.has_layer_diff:
        return []  # the role without a server cannot be scored anywhere
    scored = (role,) if asked == ROLES else ROLES
    return [one for one in scored if not is_scored(folder.path, one)]


def _score_all(engines: Sequence[Engine], plan: Plan, folder: RunFolder, display: ProgressDisplay) -> None:
    """Score the reference's tokens. This comes after the interviews: the candidate is asked about the reference's answers.

    Where both roles are open and have a server, both are scored at the same time; otherwise one after the other.
    """
    items, answers = plan.of("logits"), folder.answers()
    open_roles = [role for engine in engines for role in _unscored(plan, folder, engine.role)]
    together = open_roles == [engine.role for engine in engines] and len(engines) == len(ROLES)
    handover = Handover(len(items)) if together and all(engine.scorer for engine in engines) else None

    def score(engine: Engine) -> None:
        scorer = engine.scorer
        if scorer is None:
            return  # the logits are then not compared
        for role in _unscored(plan, folder, engine.role):
            substitutes = role != engine.role
            with layer_diff.substituted_everywhere(folder.server_folder(engine.role)) if substitutes else nullcontext():
                score_role(scorer, items, answers, folder.path, display, role, folder.nonce, handover)

    if handover:
        _in_parallel(engines, score)
    else:
        for engine in engines:
            score(engine)


def _in_parallel(engines: Sequence[Engine], do: Callable[[Engine], None]) -> None:
    with ThreadPoolExecutor(len(engines)) as pool:
        futures = [pool.submit(do, engine) for engine in engines]
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
