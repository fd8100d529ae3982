"""Asking one server everything that is still open, and keeping every answer as it arrives."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from assay.evals.greedy import MAX_TOKENS as GREEDY_TOKENS
from assay.harness.engines.base import ChatRequest, Engine, cache_header, never
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.records import FLOOR_REPEAT, Answer, Item
from assay.harness.progress import ProgressDisplay
from assay.harness.run.plan import Plan
from assay.harness.run.question_stop import QuestionStop
from assay.harness.sides import Role

_FLOOR_EVERY = 4
"""The reference is asked one greedy prompt in four again."""
TOP_LOGPROBS = 5
"""Alternatives recorded at each greedy position, as many as vLLM's ``check_logprobs_close`` compares."""

AnswerKey = tuple[str, str, str, int]
"""`Answer.key`: suite, role, item, repeat."""
CHUNK, _LEAD = 4, 2
"""Questions that are asked at once, and by how many a role may be ahead of the other when it asks for more, as multiples of the
requests in flight: what only one role answers is wasted."""


@dataclass(frozen=True)
class _Stage:
    """Items that are asked in the same way."""

    title: str
    items: list[Item]
    repeat: int
    max_tokens: int
    top_logprobs: int = 0


def _questions(plan: Plan, role: Role, stop: QuestionStop) -> tuple[_Stage, _Stage]:
    """List the questions that a role has not answered yet: with an empty cache, and with the shared header cached."""
    items, limit = stop.open_items(role), plan.spec.workload.token_limit
    cold, cached = ([item for item in items if item.cold is empty] for empty in (True, False))
    return _Stage("questions, cold", cold, 0, limit), _Stage("questions", cached, 0, limit)


def _after_questions(plan: Plan, role: Role, answered: Collection[AnswerKey], stop: QuestionStop) -> list[_Stage]:
    """List the stages that a role has not answered yet and that follow the questions."""
    greedy = plan.of("greedy")

    def pending(title: str, items: list[Item], repeat: int, max_tokens: int, top_logprobs: int = 0) -> _Stage:
        items = [item for item in items if (item.suite, role, item.id, repeat) not in answered]
        return _Stage(title, items, repeat, max_tokens, top_logprobs)

    stages = [pending("greedy", greedy, 0, GREEDY_TOKENS, TOP_LOGPROBS)]
    if role == "reference":
        # The floors are asked in another order, so that the run-to-run difference includes the effect of batching.
        stages = [
            pending("questions again", stop.asked_again()[::-1], FLOOR_REPEAT, plan.spec.workload.token_limit),
            *stages,
            pending("greedy again", greedy[::_FLOOR_EVERY][::-1], FLOOR_REPEAT, GREEDY_TOKENS, TOP_LOGPROBS),
        ]
    return [stage for stage in stages if stage.items]


def is_answered(plan: Plan, role: Role, answered: Collection[AnswerKey], stop: QuestionStop) -> bool:
    """Return True if a role has answered everything that it is to be asked."""
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

    Questions are asked until `stop` reports that they have decided; those with an empty cache, of which there are few, in any case.

    Raises:
        EngineError: the server failed; what it answered before is in the folder.
        EvidenceError: the folder cannot be written.
    """
    role, concurrency = engine.role, plan.spec.workload.concurrency

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

    cold, cached = _questions(plan, role, stop)
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
