"""The collection of a run's evidence: two servers get the same questions, step by step.

Each step of `_STEPS` collects one kind of evidence, for a claim of `assay.harness.judge`. Evidence already in the folder is not
collected again, so an interrupted run resumes where it stopped.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from assay.harness.engines.base import ChatRequest, Engine, answers
from assay.harness.engines.inside.control import Control, set_control
from assay.harness.errors import EngineError
from assay.harness.evidence.executed import FOLDER
from assay.harness.evidence.fingerprint import FINGERPRINT
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff_record import LAYER_DIFF
from assay.harness.evidence.logit_files import logits_path
from assay.harness.evidence.manifest import QUESTION_PLAN
from assay.harness.files import write_whole
from assay.harness.judge.baselines import has_stored_logits
from assay.harness.progress import ProgressDisplay
from assay.harness.run import layer_diff, sensitivity, side_probes
from assay.harness.run.envelope import AGAIN, serve_again
from assay.harness.run.kernel_process import examine_kernel, try_kernel
from assay.harness.run.logit_scoring import SCORINGS, score
from assay.harness.run.plan import Plan
from assay.harness.run.preflight import check_accepted, check_asked, check_tokens
from assay.harness.run.questions import FIRST_IN_TURN, AnswerKey, QuestionStop, interview, is_answered
from assay.harness.run.rounding import measure_rounding
from assay.harness.run.run_folder import asked_roles, recorded, shadowed_role
from assay.harness.run.servers import make_run_engine, manifest_of, record_fingerprint, resolve_sides, running, together
from assay.harness.run.witness import ask_witness
from assay.harness.sides import ROLES, Role

# File that marks a server's kernels as listed; it holds the nonce of the run.
_COMPLETE = "complete"
# The first of these tokens comes from the extend pass, the others from decode steps.
_KERNEL_TOKENS = 4
# The second prompt's addition to the first, which is in the cache: more new tokens than a decode step has.
_CONTINUATION = (
    "\nThink about every option once more before you answer, and give nothing but the letter of the right one."
)


def collect(plan: Plan, folder: RunFolder, display: ProgressDisplay, ready: Sequence[Engine] = ()) -> None:
    """Ask both servers the questions they have not answered yet. An error that ends a run early is recorded, not raised.

    Args:
        folder: where each answer is written.
        ready: both servers, if they are running already; otherwise they are started and stopped here.

    Raises:
        KeyboardInterrupt: after the servers were stopped and the interruption was recorded.
    """
    with recorded(folder):
        _resolve(plan, folder)
        same_time = asked_roles(plan, folder) == ROLES and (bool(ready) or together(plan))
        stop = QuestionStop(plan, folder.answers(), together=same_time)
        most = len(stop.items)
        # In turn, the servers first get few questions, since those usually decide.
        for stop.first in [most] if same_time or most <= FIRST_IN_TURN else [FIRST_IN_TURN, most]:
            _ask_round(_Asking(plan, folder, display, stop, {answer.key for answer in folder.answers()}), ready)
            if stop.enough():
                break
        if (questions := folder.read(QUESTION_PLAN)) is not None and stop.reason is not None:
            display.say(f"Questions: {stop.reason} after {stop.pairs:,} of {most:,}.")
            folder.write(QUESTION_PLAN, questions.model_copy(update={"stopped": stop.reason, "pairs": stop.pairs}))
        _resolve(plan, folder)
        measure_rounding(plan, folder, display)
        ask_witness(plan, folder, display)
        if plan.has_layer_diff:
            examine_kernel(plan, folder, display)


def _resolve(plan: Plan, folder: RunFolder) -> None:
    if not plan.has_url:
        servers = {server.role: server for server in folder.progress().servers}
        resolve_sides(plan.spec, folder, servers, lambda role: make_run_engine(plan, folder, role))


@dataclass
class _Asking:
    """The questions that the servers of a run are asked in one session, together or in turn.

    Attributes:
        plan: the checked run.
        folder: receives the evidence.
        display: shows the progress.
        stop: reports when the questions have decided.
        answered: questions that were answered before.
    """

    plan: Plan
    folder: RunFolder
    display: ProgressDisplay
    stop: QuestionStop
    answered: Collection[AnswerKey]


def _ask_round(asked: _Asking, ready: Sequence[Engine]) -> None:
    """Ask both servers the questions they have not answered yet, together or in turn."""
    plan, folder, display, stop = asked.plan, asked.folder, asked.display, asked.stop
    roles = asked_roles(plan, folder)
    pending = [role for role in roles if any(step(asked, role) for step in chain(*_STEPS))]
    if not pending:
        display.say("All questions were already answered." if plan.items else "The suites have nothing to ask.")
        return
    if ready:
        _ask_all(ready, asked)
        return
    # Ordered by what a refusal costs: a call of the kernel takes seconds, measuring backends up to a minute, starting a server
    # minutes. A resumed run has passed both.
    if not folder.progress().servers:
        try_kernel(plan, folder)
        check_asked(plan, display)
    if not stop.together and roles == ROLES and "reference" in pending and stop.open_items("reference"):
        pending = list(ROLES)  # the reference is about to answer more questions, and the candidate will get them too
    for together_ in [pending] if stop.together else [[role] for role in pending]:
        group = [make_run_engine(plan, folder, role) for role in together_]
        display.say(f"Starting {' and '.join(f'{e.role} {e.backend}' for e in group)}.")
        with running(group, plan.spec.device, display):
            _ask_all(group, asked)


def _ask_all(engines: Sequence[Engine], asked: _Asking) -> None:
    """Take all engines through the steps at the same time; the first failure stops all servers and thereby all threads."""
    folder, display = asked.folder, asked.display
    for engine in engines:
        folder.record_server(manifest_of(engine))
        started = f", ready in {engine.startup_s:.0f} s" if engine.startup_s else ""
        display.say(f"{engine.role.capitalize()} is {engine.backend} in {engine.label}{started}.")
    _take_fingerprints(engines, asked)  # before the first answer: a server that must not be compared is not asked
    # A role that has answered everything does not ask, so the other must not wait for it.
    asked.stop.begin([engine.role for engine in engines if _answers(asked, engine.role)])
    first, *others = _STEPS
    _collect(engines, asked, first)
    # By now the layer diff has recorded calls, and servers are idle while they wait for each other's scores.
    with _kernel_aside(asked.plan, folder, display):
        for group in others:
            _collect(engines, asked, group)


def _take_fingerprints(engines: Sequence[Engine], asked: _Asking) -> None:
    """Record each server's fingerprint before asking anything; refuse a candidate that differs from the accepted one."""
    plan, folder = asked.plan, asked.folder
    accepted = plan.spec.policy.fingerprint

    def take(engine: Engine) -> None:
        made = record_fingerprint(engine, plan.spec.sides[engine.role], folder.server_folder(engine.role), folder.nonce)
        if accepted and engine.role == "candidate":
            if made is None:
                raise EngineError(
                    f"The candidate's server did not report a fingerprint, so it cannot be compared with {accepted}.",
                    "a server whose processes report a fingerprint",
                    "see its log, or leave --fingerprint out",
                )
            check_accepted(Path(accepted), made)

    _in_threads(engines, take)
    if "engine" in plan.spec.treatment:
        made = [FINGERPRINT.read(folder.server_folder(role)) for role in ROLES]
        if (reference := made[0]) and (candidate := made[1]):
            check_tokens(reference, candidate)


def _collect(engines: Sequence[Engine], asked: _Asking, steps: Sequence[_Step]) -> None:
    """Take each engine through some steps, in a separate thread."""

    def go_through(engine: Engine) -> None:
        for step in steps:
            if work := step(asked, engine.role):
                work(engine)

    _in_threads(engines, go_through)


def _in_threads(engines: Sequence[Engine], work: Callable[[Engine], None]) -> None:
    """Do work with each engine, in a separate thread. If one fails, stop all engines and raise the first error."""
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
    """Examine the candidate's kernel on a CPU core that the servers no longer use; on a GPU, wait until they have freed its memory.

    Anything that interrupts the run, or fails in it, ends the examination.
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


_Work = Callable[[Engine], None]
"""Has a server do a step. Raises EngineError if the server failed, EvidenceError if the folder cannot be written."""


def _answers(asked: _Asking, role: Role) -> _Work | None:
    if is_answered(asked.plan, role, asked.answered, asked.stop):
        return None
    return lambda engine: interview(engine, asked.plan, asked.folder, asked.answered, asked.stop, asked.display)


def _kernels(asked: _Asking, role: Role) -> _Work | None:
    place = asked.folder.server_folder(role)
    listed = place / FOLDER / _COMPLETE
    known = listed.exists() and listed.read_text() == asked.folder.nonce
    if known or not asked.plan.compares_answers or not asked.plan.instrumented(role):
        return None

    def list_kernels(engine: Engine) -> None:
        """Have a server list its kernels in one pass without and one with a cached prefix, and in decode steps."""
        prompt = asked.plan.items[0].prompt
        shutil.rmtree(place / FOLDER, ignore_errors=True)
        set_control(place, Control(profile="kernels"))
        try:
            engine.flush_cache()
            for text in (prompt, prompt + _CONTINUATION):
                answers(engine, [ChatRequest(text, _KERNEL_TOKENS)], 1)
        finally:
            set_control(place, Control())
        write_whole(listed, asked.folder.nonce, durable=False)

    return list_kernels


def _layers(asked: _Asking, role: Role) -> _Work | None:
    plan, folder = asked.plan, asked.folder
    if not plan.has_layer_diff or folder.read(LAYER_DIFF, role) is not None:
        return None
    if role == shadowed_role(plan, folder):
        return lambda engine: layer_diff.compare_layers(engine, folder, plan, asked.display)
    return lambda engine: layer_diff.trace_free_running(engine, folder, plan)


def _envelope_again(asked: _Asking, role: Role, number: int) -> _Work | None:
    together_ = asked.stop.together and asked_roles(asked.plan, asked.folder) == ROLES
    compared = {"layers", "greedy"} <= set(asked.plan.spec.workload.suites)
    return serve_again(asked.plan, asked.folder, role, number) if together_ and compared else None


def _unscored(asked: _Asking, role: Role) -> list[tuple[Role, int]]:
    """List this server's remaining scorings, as role and repeat; of both roles if it is the only server and runs both backends."""
    plan, roles = asked.plan, asked_roles(asked.plan, asked.folder)
    if "logits" not in plan.spec.workload.suites or plan.has_url:
        return []
    stored = has_stored_logits(asked.folder)
    if roles != ROLES and not (plan.has_layer_diff or stored):
        return []  # no server can score for the role that has none
    scored = (role,) if roles == ROLES or stored else ROLES
    return [due for due in SCORINGS if due[0] in scored and not logits_path(asked.folder.path, *due).exists()]


def _logits(asked: _Asking, role: Role, of: Sequence[tuple[Role, int]] = SCORINGS) -> _Work | None:
    """Score the reference's tokens. The candidate is asked about the reference's answers, which are complete by now."""
    if not (due := [scoring for scoring in _unscored(asked, role) if scoring in of]):
        return None
    folder, items, told = asked.folder, asked.plan.of("logits"), asked.folder.answers()
    place = folder.server_folder(role)

    def score_due(engine: Engine) -> None:
        for each, repeat in due if engine.scores else ():  # otherwise the logits are not compared
            with layer_diff.substituted_everywhere(place) if each != role else nullcontext():
                score(engine, items, told, folder.path, asked.display, each, repeat, folder.nonce)

    return score_due


def _first_logits(asked: _Asking, role: Role) -> _Work | None:
    return _logits(asked, role, SCORINGS[:1])


def _probes(asked: _Asking, role: Role, most: int | None = None) -> _Work | None:
    """Ask the probes; the reference writes the tokens that all other passes are forced to, in its first one."""
    if not side_probes.open_passes(asked.plan, asked.folder, role):
        return None
    return lambda engine: side_probes.ask_probes(engine, asked.plan, asked.folder, asked.display, most)


def _first_probes(asked: _Asking, role: Role) -> _Work | None:
    return _probes(asked, role, 1) if role == "reference" else None


def _parting(asked: _Asking, role: Role) -> _Work | None:
    if not (side_probes.compares_probes(asked.plan) and side_probes.trace_open(asked.plan, asked.folder, role)):
        return None
    return lambda engine: side_probes.trace_sides(engine, asked.plan, asked.folder)


def _seeded_fault(asked: _Asking, role: Role) -> _Work | None:
    if not sensitivity.is_open(asked.plan, asked.folder, role):
        return None
    return lambda engine: sensitivity.measure_sensitivity(engine, asked.plan, asked.folder, asked.display)


_Step = Callable[[_Asking, Role], _Work | None]
"""One kind of evidence: returns the work that a role's server still has to do for it, or None."""

# A server goes through a group at its own pace; the next group begins when every server is there. Logits need all answers of the
# reference, the other steps its first ones. The fault comes last: no other step may read evidence that it spoils.
_STEPS: tuple[tuple[_Step, ...], ...] = (
    (_answers, _kernels, _layers), *((partial(_envelope_again, number=n),) for n in range(len(AGAIN))),
    (_first_logits, _first_probes), (_logits, _probes), (_parting,), (_seeded_fault,),
)  # fmt: skip
