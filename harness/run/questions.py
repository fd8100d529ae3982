"""Asking one server all open questions, until the answers of both roles have decided."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from threading import Condition
from typing import NamedTuple

from assay.evals.greedy import MAX_TOKENS as GREEDY_TOKENS
from assay.harness.engines.base import ChatRequest, Engine, cache_header, never
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import Stop
from assay.harness.evidence.records import FLOOR_REPEAT, Answer, Item
from assay.harness.judge.answers import Pair
from assay.harness.judge.paired_accuracy import accuracy_of, beginning, soonest_pass
from assay.harness.progress import ProgressDisplay
from assay.harness.run.plan import Plan
from assay.harness.sides import ROLES, Role

# The test looks again after this many new pairs, and at least this share of all. Any numbers keep the error rates; a look at
# 4,096 pairs takes 50 ms of CPU time.
_LOOK_EVERY, _LOOK_SHARE = 8, 0.02
# Questions that the reference is asked twice.
_FLOOR_QUESTIONS = 32
FIRST_IN_TURN = 1024
"""Questions that the reference answers first if the servers run in turn: enough in nine of ten runs if 2 % of answers flip,
and in six of ten at 5 %. If they do not decide, both servers start once more."""
TOP_LOGPROBS = 5
"""Alternatives recorded at each greedy position, as many as vLLM's ``check_logprobs_close`` compares."""
# Seconds after which a role that waits for the other checks that its server is still alive.
_WAIT_S = 0.25
# The reference is asked one greedy prompt in four again.
_FLOOR_EVERY = 4
# Questions that are asked at once, and how far a role may be ahead of the other when it asks for more, as multiples of the
# requests in flight: questions that only one role answers are wasted.
CHUNK, _LEAD = 4, 2

AnswerKey = tuple[str, str, str, int]
"""`Answer.key`: suite, role, item, repeat."""


class QuestionStop:
    """Looks at the answers of both roles as they arrive, and reports when they have decided.

    The verdict never depends on it, because the same test computes it from the answers on disk. Each role is asked in its own
    thread; `_changed` guards all of this, and wakes a role that waits for the other.

    Args:
        answers: those of an earlier attempt.
        together: whether both roles are asked at the same time.

    Attributes:
        items: the questions in their order.
        first: if the roles are asked in turn, how many questions the reference answers before the candidate is asked.
        soonest: how many questions a pass needs at least. No more are asked before these are answered, because requests in flight
            when the answers decide are wasted, and a slow kernel needs seconds for them.
        pairs: questions that both roles answered, up to the first that either did not.
        reason: why asking stops, or None until then.
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
        """Record an answer."""
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
        """List the questions that a role must still answer; in turn, the candidate gets those that the reference has answered."""
        if self.enough():
            return []
        items, done = self.items, self._answers[role]
        if not self.together and role == "reference":
            items = items[: self.first]
        elif not self.together:
            items = [item for item in items if item.id in self._answers["reference"]]
        return [item for item in items if item.id not in done]

    def asked_again(self) -> list[Item]:
        """List the questions that the reference is asked twice, for its flip floor, starting with those whose header is cached."""
        answered = [item for item in self.items if not item.cold and item.id in self._answers["reference"]]
        return answered[:_FLOOR_QUESTIONS]

    def begin(self, roles: Sequence[Role]) -> None:
        """Record that these roles are about to be asked at the same time."""
        self._asking = set(roles)

    def next_items(
        self, role: Role, waiting: Sequence[Item], most: int, lead: int, check: Callable[[], None]
    ) -> Sequence[Item]:
        """Wait for the questions to ask a role next; return none if no further one needs to be asked.

        If the roles are asked at the same time, a role waits while it is over `lead` questions ahead, or has answered all that the
        soonest pass needs: questions that only one role ever answers are wasted.

        Args:
            waiting: the questions it has not answered, in order.
            most: how many to ask at once.
            lead: how many questions it may be ahead of the other.
            check: called while waiting; raises EngineError if the role's server has died.
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
        """Record that a role is not asked any more, or has failed."""
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
        # Beyond that, something else is missing: the reference does not beat guessing yet, or letters are missing.
        self.soonest = soonest if soonest > self.pairs else len(self.items)


class _Stage(NamedTuple):
    """Items that are asked in the same way."""

    title: str
    items: list[Item]
    repeat: int
    max_tokens: int
    top_logprobs: int = 0


def _after_questions(plan: Plan, role: Role, answered: Collection[AnswerKey], stop: QuestionStop) -> list[_Stage]:
    """List the items that a role has not answered yet in the stages after the questions."""
    greedy, limit = plan.of("greedy"), plan.spec.workload.token_limit
    stages = [_Stage("greedy", greedy, 0, GREEDY_TOKENS, TOP_LOGPROBS)]
    if role == "reference":
        # The floors are asked in another order, so that the run-to-run difference includes the effect of batching.
        again = _Stage("questions again", stop.asked_again()[::-1], FLOOR_REPEAT, limit)
        floor = _Stage("greedy again", greedy[::_FLOOR_EVERY][::-1], FLOOR_REPEAT, GREEDY_TOKENS, TOP_LOGPROBS)
        stages = [again, *stages, floor]
    pending = []
    for stage in stages:
        items = [item for item in stage.items if (item.suite, role, item.id, stage.repeat) not in answered]
        pending += [stage._replace(items=items)] if items else []
    return pending


def is_answered(plan: Plan, role: Role, answered: Collection[AnswerKey], stop: QuestionStop) -> bool:
    """Return True if a role has answered everything that it will be asked."""
    return not stop.open_items(role) and not _after_questions(plan, role, answered, stop)


def interview(
    engine: Engine,
    plan: Plan,
    folder: RunFolder,
    answered: Collection[AnswerKey],
    stop: QuestionStop,
    display: ProgressDisplay,
) -> None:
    """Ask a server everything it has not answered: some questions with an empty cache, then the rest with the header cached.

    Questions are asked until `stop` reports a decision; the few with an empty cache are asked in any case. Every answer is kept as
    it arrives.
    """
    role, concurrency, limit = engine.role, plan.spec.workload.concurrency, plan.spec.workload.token_limit

    def ask(stage: _Stage, part: slice, in_flight: int, enough: Callable[[], bool] = never) -> None:
        items, done = stage.items[part], part.start or 0

        def keep(index: int, answer: Answer) -> None:
            nonlocal done
            folder.append(answer)
            stop.keep(answer)
            done += 1
            display.count(f"{role}: {stage.title}", done, len(stage.items), may_stop=enough is not never)

        requests = [ChatRequest.of(item, stage.max_tokens, stage.top_logprobs, stage.repeat) for item in items]
        engine.ask(requests, in_flight, keep, enough)

    items = stop.open_items(role)
    cold = _Stage("questions, cold", [item for item in items if item.cold], 0, limit)
    cached = _Stage("questions", [item for item in items if not item.cold], 0, limit)
    try:
        # One at a time: in a batch, all but the first request would find the header that the first one left in the cache.
        for number in range(len(cold.items)):
            engine.flush_cache()
            ask(cold, slice(number, number + 1), 1)
        if cached.items or _after_questions(plan, role, answered, stop):
            cache_header(engine)
        asked = 0
        while part := stop.next_items(
            role, cached.items[asked:], CHUNK * concurrency, _LEAD * concurrency, engine.check
        ):
            ask(cached, slice(asked, asked + len(part)), concurrency, stop.enough)
            asked += len(part)
    finally:
        stop.leave(role)
    for stage in _after_questions(plan, role, answered, stop):
        ask(stage, slice(None), concurrency)
