"""When to stop asking questions: shared by the interviews of both roles, which run in threads of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Condition

from assay.harness.evidence.manifest import Stop
from assay.harness.evidence.records import Answer, Item
from assay.harness.judge.answers import Pair
from assay.harness.judge.paired_accuracy import accuracy_of, beginning, soonest_pass
from assay.harness.run.plan import Plan
from assay.harness.sides import ROLES, Role

_LOOK_EVERY, _LOOK_SHARE = 8, 0.02
"""New pairs after which the test looks again: so many, and at least this share of all. Any numbers keep the error rates; a look at
4,096 pairs takes 50 ms of CPU time."""
FLOOR_QUESTIONS = 32
"""Questions that the reference is asked twice."""
FIRST_IN_TURN = 1024
"""Questions that the reference answers first where the servers run in turn: enough in nine of ten runs at 2 % of answers flipped,
and in six at 5 %. If they do not decide, both servers start once more."""
_WAIT_S = 0.25
"""Seconds after which a role that waits for the other checks that its server is still alive."""


class QuestionStop:
    """Looks at the answers of both roles as they arrive, and reports when they have decided.

    The verdict never depends on it: it is computed from the answers on disk, by the same test.

    Args:
        plan: the checked run.
        answers: those of an earlier attempt.
        together: whether both roles are asked at the same time.

    Attributes:
        items: the questions in their order.
        first: where the roles are asked in turn: how many of the order the reference answers before the candidate is asked.
        soonest: how many of the order a pass needs at least. No more are asked before these are answered: what is in flight when
            the answers decide is wasted, and a slow kernel needs seconds for it.
        pairs: questions that both roles answered, up to the first that one of them did not.
        reason: why asking stops; None before.
    """

    def __init__(self, plan: Plan, answers: Sequence[Answer], together: bool) -> None:
        self.items: list[Item] = plan.of("accuracy")
        self.together, self.first = together, len(self.items)
        self._places = {item.id: number for number, item in enumerate(self.items)}
        self._rule = plan.rule
        self._answers: dict[Role, dict[str, Answer]] = {role: {} for role in ROLES}
        self._asking: set[Role] = set()
        self._changed = Condition()
        self.pairs = self._looked = self.soonest = 0
        self.reason: Stop | None = None
        for answer in answers:
            self._take(answer)
        self._look()

    def keep(self, answer: Answer) -> None:
        """Take note of an answer."""
        with self._changed:
            self._take(answer)
            due = self.pairs - self._looked >= max(_LOOK_EVERY, _LOOK_SHARE * self.pairs)
            if self.reason is None and (due or self.pairs >= self.soonest):
                self._look()
            self._changed.notify_all()

    def enough(self) -> bool:
        """Return True if no further question needs to be asked."""
        return self.reason in ("decided", "hopeless")

    def open_items(self, role: Role) -> list[Item]:
        """List the questions that a role must still answer, in order.

        In turn, the candidate gets what the reference has answered.
        """
        if self.enough():
            return []
        items, done = self.items, self._answers[role]
        if not self.together and role == "reference":
            items = items[: self.first]
        elif not self.together:
            items = [item for item in items if item.id in self._answers["reference"]]
        return [item for item in items if item.id not in done]

    def asked_again(self) -> list[Item]:
        """List the questions that the reference is asked twice, for its flip floor: the first with the shared header cached."""
        answered = [item for item in self.items if not item.cold and item.id in self._answers["reference"]]
        return answered[:FLOOR_QUESTIONS]

    def begin(self, roles: Sequence[Role]) -> None:
        """Note that these roles are about to be asked, at the same time."""
        self._asking = set(roles)

    def next_items(
        self, role: Role, waiting: Sequence[Item], most: int, lead: int, check: Callable[[], None]
    ) -> Sequence[Item]:
        """Wait for the questions to ask a role next; none if no further one needs to be asked.

        Where the roles are asked at the same time, a role waits while it is more than `lead` questions ahead, or has answered all
        that the soonest pass needs: what one role answers and the other never will is wasted.

        Args:
            role: which role.
            waiting: the questions it has not answered, in order.
            most: how many to ask at once.
            lead: how many questions it may be ahead of the other.
            check: called while waiting.

        Raises:
            EngineError: `check` found the server dead.
        """
        other: Role = "candidate" if role == "reference" else "reference"
        with self._changed:
            while waiting and not self.enough():
                if other not in self._asking:
                    return waiting[:most]
                needed = sum(self._places[item.id] < self.soonest for item in waiting[:most])
                if needed and len(self._answers[role]) - len(self._answers[other]) <= lead:
                    return waiting[:needed]
                self._changed.wait(_WAIT_S)
                check()
        return []

    def leave(self, role: Role) -> None:
        """Note that a role is not asked any more, or has failed."""
        with self._changed:
            self._asking.discard(role)
            self._look()
            self._changed.notify_all()

    def _take(self, answer: Answer) -> None:
        if answer.suite != "accuracy" or answer.repeat:
            return
        self._answers[answer.role][answer.item] = answer
        reference, candidate = (self._answers[role] for role in ROLES)
        while self.pairs < len(self.items):
            id_ = self.items[self.pairs].id
            if id_ not in reference or id_ not in candidate:
                break
            self.pairs += 1

    def _look(self) -> None:
        self._looked = self.pairs
        reference, candidate = (self._answers[role] for role in ROLES)
        both = [item for item in self.items if item.id in reference and item.id in candidate]
        pairs = [Pair(item, reference[item.id], candidate[item.id]) for item in both]
        result = accuracy_of(beginning(self.items, pairs[: self.pairs]), self._rule)
        if result.over:
            self.reason = "hopeless" if result.hopeless else "decided"
        elif self.pairs == len(self.items):
            self.reason = "all asked"
        soonest = soonest_pass(self.items, pairs, self._rule)
        # Beyond it, something else is missing: the reference has not been shown to beat guessing yet, or letters are.
        self.soonest = soonest if soonest > self.pairs else len(self.items)
