"""What servers are asked for, in order: each collector leaves one kind of evidence, for the claims of `assay.harness.judge`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from assay.harness.engines.base import Engine
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff_record import LAYER_DIFF
from assay.harness.progress import ProgressDisplay
from assay.harness.run import layer_diff, sensitivity
from assay.harness.run.interview import AnswerKey, interview, is_answered
from assay.harness.run.logit_scoring import ScoringHandover, is_scored, score_role
from assay.harness.run.plan import Plan
from assay.harness.run.question_stop import QuestionStop
from assay.harness.run.run_folder import asked_roles, shadowed_role
from assay.harness.run.trace_kernels import is_traced, trace_kernels
from assay.harness.sides import ROLES, Role


@dataclass
class Asking:
    """The questions that the servers of a run are asked in one go, together or in turn.

    Attributes:
        plan: the checked run.
        folder: where the evidence goes.
        display: shows the progress.
        stop: reports when the questions have decided.
        answered: what was answered before.
        handover: between two roles whose logits are scored at the same time; None where they are not.
    """

    plan: Plan
    folder: RunFolder
    display: ProgressDisplay
    stop: QuestionStop
    answered: Collection[AnswerKey]
    handover: ScoringHandover | None = None


def _do_nothing(asked: Asking, engines: Sequence[Engine]) -> None: ...


@dataclass(frozen=True)
class Collector:
    """One kind of evidence that servers leave. What the folder holds already is not collected again.

    Attributes:
        is_open: whether a role's server still has something to do.
        collect: has a server do it. Raises EngineError if the server failed, EvidenceError if the folder cannot be written.
        begin: called before some servers collect at the same time, each in its own thread.
    """

    is_open: Callable[[Asking, Role], bool]
    collect: Callable[[Asking, Engine], None]
    begin: Callable[[Asking, Sequence[Engine]], None] = _do_nothing


def _answers_open(asked: Asking, role: Role) -> bool:
    return not is_answered(asked.plan, role, asked.answered, asked.stop)


def _begin_questions(asked: Asking, engines: Sequence[Engine]) -> None:
    asked.stop.begin([engine.role for engine in engines])


def _answer(asked: Asking, engine: Engine) -> None:
    interview(engine, asked.plan, asked.folder, asked.answered, asked.stop, asked.display)


def _kernels_open(asked: Asking, role: Role) -> bool:
    compared = asked.plan.compares_answers and not asked.plan.backend(role).is_url
    return compared and not is_traced(asked.folder, role)


def _list_kernels(asked: Asking, engine: Engine) -> None:
    if asked.plan.compares_answers:
        trace_kernels(engine, asked.folder, asked.plan.items)


def _layers_open(asked: Asking, role: Role) -> bool:
    return asked.plan.has_layer_diff and asked.folder.read(LAYER_DIFF, role) is None


def _compare_layers(asked: Asking, engine: Engine) -> None:
    if not _layers_open(asked, engine.role):
        return
    if engine.role == shadowed_role(asked.plan, asked.folder):
        layer_diff.compare_layers(engine, asked.folder, asked.plan, asked.display)
    else:
        layer_diff.trace_free_running(engine, asked.folder, asked.plan)


def _unscored(asked: Asking, role: Role) -> list[Role]:
    """List the roles whose logits this server must still score: both, where it is the only one and also runs the other."""
    plan, roles = asked.plan, asked_roles(asked.plan, asked.folder)
    if "logits" not in plan.spec.workload.suites or plan.has_url:
        return []
    if roles != ROLES and not plan.has_layer_diff:
        return []  # the role without a server cannot be scored anywhere
    scored = (role,) if roles == ROLES else ROLES
    return [each for each in scored if not is_scored(asked.folder.path, each)]


def _logits_open(asked: Asking, role: Role) -> bool:
    return bool(_unscored(asked, role))


def _begin_scoring(asked: Asking, engines: Sequence[Engine]) -> None:
    """Have the reference's scoring hand over to the candidate's, where both roles are open and have a server."""
    open_roles = [role for engine in engines for role in _unscored(asked, engine.role)]
    together = len(engines) == len(ROLES) and open_roles == [engine.role for engine in engines]
    if together and all(engine.scorer for engine in engines):
        asked.handover = ScoringHandover(len(asked.plan.of("logits")))


def _score(asked: Asking, engine: Engine) -> None:
    """Score the reference's tokens. The candidate is asked about the reference's answers, which are complete by now."""
    if engine.scorer is None:
        return  # the logits are then not compared
    folder, items, answers = asked.folder, asked.plan.of("logits"), asked.folder.answers()
    for role in _unscored(asked, engine.role):
        place = folder.server_folder(engine.role)
        with layer_diff.substituted_everywhere(place) if role != engine.role else nullcontext():
            score_role(engine.scorer, items, answers, folder.path, asked.display, role, folder.nonce, asked.handover)


def _sensitivity_open(asked: Asking, role: Role) -> bool:
    return sensitivity.is_open(asked.plan, asked.folder, role)


def _seed_fault(asked: Asking, engine: Engine) -> None:
    sensitivity.measure_sensitivity(engine, asked.plan, asked.folder, asked.display)


COLLECTORS: tuple[tuple[Collector, ...], ...] = (
    (
        Collector(_answers_open, _answer, _begin_questions),
        Collector(_kernels_open, _list_kernels),
        Collector(_layers_open, _compare_layers),
    ),
    (Collector(_logits_open, _score, _begin_scoring),),
    (Collector(_sensitivity_open, _seed_fault),),
)
"""All of them in their order. A server goes through a group at its own pace; the next group begins when every server is there."""
