"""What servers are asked for, in order: each collector leaves one kind of evidence, for the claims of `assay.harness.judge`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from assay.harness.collect import layer_diff, sensitivity
from assay.harness.collect.interview import AnswerKey, interview, is_answered
from assay.harness.collect.logit_scoring import Handover, is_scored, score_role
from assay.harness.collect.plan import Plan
from assay.harness.collect.question_stop import QuestionStop
from assay.harness.collect.run_folder import asked_roles, shadowed_role
from assay.harness.collect.trace_kernels import is_traced, trace_kernels
from assay.harness.engines.base import Engine
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff_record import LAYER_DIFF
from assay.harness.progress import ProgressDisplay
from assay.harness.sides import ROLES, Role


@dataclass(frozen=True)
class Round:
    """What the servers of a run are asked from one start to their stop.

    Attributes:
        plan: the checked run.
        folder: where the evidence goes.
        display: shows the progress.
        stop: reports when the questions have decided.
        answered: what was answered before.
    """

    plan: Plan
    folder: RunFolder
    display: ProgressDisplay
    stop: QuestionStop
    answered: Collection[AnswerKey]


class Collector:
    """One kind of evidence. What the folder holds already is not collected again.

    Args:
        asked: the round in which it is collected.
    """

    def __init__(self, asked: Round) -> None:
        self.asked, self.plan, self.folder = asked, asked.plan, asked.folder

    def is_open(self, role: Role) -> bool:
        """Return True if a role's server still has something to do."""
        raise NotImplementedError

    def begin(self, engines: Sequence[Engine]) -> None:
        """Prepare for these engines, which then `collect` at the same time, each in its own thread."""

    def collect(self, engine: Engine) -> None:
        """Have a server do what is open.

        Raises:
            EngineError: the server failed.
            EvidenceError: it wrote nothing, or the folder cannot be written.
        """
        raise NotImplementedError


class Answers(Collector):
    """Answers to questions and greedy prompts."""

    def is_open(self, role: Role) -> bool:
        return not is_answered(self.plan, role, self.asked.answered, self.asked.stop)

    def begin(self, engines: Sequence[Engine]) -> None:
        self.asked.stop.begin([engine.role for engine in engines])

    def collect(self, engine: Engine) -> None:
        interview(engine, self.plan, self.folder, self.asked.answered, self.asked.stop, self.asked.display)


class Kernels(Collector):
    """The kernels that run in a server, where servers are compared."""

    def is_open(self, role: Role) -> bool:
        compared = self.plan.compares_answers and not self.plan.backend(role).is_url
        return compared and not is_traced(self.folder, role)

    def collect(self, engine: Engine) -> None:
        if self.plan.compares_answers:
            trace_kernels(engine, self.folder, self.plan.items)


class Layers(Collector):
    """The layer diff: a shadow in one server, and traces of both."""

    def is_open(self, role: Role) -> bool:
        return self.plan.has_layer_diff and self.folder.read(LAYER_DIFF, role) is None

    def collect(self, engine: Engine) -> None:
        if not self.is_open(engine.role):
            return
        if engine.role == shadowed_role(self.plan, self.folder):
            layer_diff.compare_layers(engine, self.folder, self.plan, self.asked.display)
        else:
            layer_diff.trace_free_running(engine, self.folder, self.plan)


class LogitScores(Collector):
    """Log-probabilities of the reference's tokens. The candidate is asked about the reference's answers, so they come first.

    Where both roles are open and have a server, the reference's scoring hands over to the candidate's, sequence by sequence.
    """

    _handover: Handover | None = None

    def is_open(self, role: Role) -> bool:
        return bool(self._unscored(role))

    def begin(self, engines: Sequence[Engine]) -> None:
        open_roles = [role for engine in engines for role in self._unscored(engine.role)]
        together = len(engines) == len(ROLES) and open_roles == [engine.role for engine in engines]
        if together and all(engine.scorer for engine in engines):
            self._handover = Handover(len(self.plan.of("logits")))

    def collect(self, engine: Engine) -> None:
        folder, display, items = self.folder, self.asked.display, self.plan.of("logits")
        if engine.scorer is None:
            return  # the logits are then not compared
        for role in self._unscored(engine.role):
            place = folder.server_folder(engine.role)
            with layer_diff.substituted_everywhere(place) if role != engine.role else nullcontext():
                score_role(
                    engine.scorer, items, folder.answers(), folder.path, display, role, folder.nonce, self._handover
                )

    def _unscored(self, role: Role) -> list[Role]:
        """List the roles whose logits this server must still score: both, where it is the only one and also runs the other."""
        asked = asked_roles(self.plan, self.folder)
        if "logits" not in self.plan.spec.workload.suites or self.plan.has_url:
            return []
        if asked != ROLES and not self.plan.has_layer_diff:
            return []  # the role without a server cannot be scored anywhere
        scored = (role,) if asked == ROLES else ROLES
        return [each for each in scored if not is_scored(self.folder.path, each)]


class Sensitivity(Collector):
    """What the suites see of a seeded fault. The suites are complete by then: nothing that they read comes later."""

    def is_open(self, role: Role) -> bool:
        return sensitivity.is_open(self.plan, self.folder, role)

    def collect(self, engine: Engine) -> None:
        sensitivity.measure_sensitivity(engine, self.plan, self.folder, self.asked.display)


COLLECTORS: tuple[tuple[type[Collector], ...], ...] = ((Answers, Kernels, Layers), (LogitScores,), (Sensitivity,))
"""All of them in their order. A server goes through a group at its own pace; the next group begins when every server is there."""
