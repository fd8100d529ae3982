"""Asking one server everything that is still open, and keeping every answer as it arrives."""

from __future__ import annotations

from dataclasses import dataclass

from assay.evals.greedy import MAX_TOKENS as GREEDY_TOKENS
from assay.evals.questions import parse_answer
from assay.harness.collect.plan import Plan
from assay.harness.engines.base import ChatRequest, Engine, Reply, cache_header
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.records import FLOOR_REPEAT, Answer, Item, Role
from assay.harness.progress import ProgressDisplay

COLD_DIVISOR, MAX_COLD = 8, 16
"""One question in eight, at most sixteen, is asked with an empty cache, so that both conditions occur in every run."""
FLOOR_EVERY = 4
"""The reference is asked one greedy prompt in four again."""
TOP_LOGPROBS = 5
"""Alternatives recorded at each greedy position, as many as vLLM's ``check_logprobs_close`` compares."""

AnswerKey = tuple[str, str, str, int]
"""`Answer.key`: suite, role, item, repeat."""


@dataclass(frozen=True)
class _Stage:
    """Items that are asked in the same way."""

    title: str
    items: list[Item]
    repeat: int
    max_tokens: int
    top_logprobs: int = 0


def _stages(plan: Plan, role: Role, answered: set[AnswerKey]) -> tuple[list[_Stage], list[_Stage]]:
    """What a role has not answered yet: before the shared header is cached, and after."""
    questions = plan.of("mmlu")
    greedy = plan.of("greedy")
    cold = min(len(questions) // COLD_DIVISOR, MAX_COLD)
    limit = plan.spec.token_limit
    # The floor's prompts are sent in another order, so that the run-to-run difference includes the effect of batching.
    floor = [("greedy again", greedy[::FLOOR_EVERY][::-1], FLOOR_REPEAT)] if role == "reference" else []

    def pending(items: list[Item], repeat: int) -> list[Item]:
        return [item for item in items if (item.suite, role, item.id, repeat) not in answered]

    before = [_Stage("questions, cold", pending(questions[:cold], 0), 0, limit)]
    after = [_Stage("questions", pending(questions[cold:], 0), 0, limit)]
    for title, items, repeat in [("greedy", greedy, 0), *floor]:
        after.append(_Stage(title, pending(items, repeat), repeat, GREEDY_TOKENS, TOP_LOGPROBS))
    return [stage for stage in before if stage.items], [stage for stage in after if stage.items]


def is_answered(plan: Plan, role: Role, answered: set[AnswerKey]) -> bool:
    """Whether a role has answered everything."""
    return not any(_stages(plan, role, answered))


def interview(
    engine: Engine, plan: Plan, folder: RunFolder, answered: set[AnswerKey], display: ProgressDisplay
) -> None:
    """Ask a server everything it has not answered: some questions with an empty cache, then the rest with the header cached.

    Raises:
        EngineError: the server failed; what it answered before is in the folder.
        EvidenceError: the folder cannot be written.
    """
    before, after = _stages(plan, engine.role, answered)
    for stage in before:
        # One at a time: in a batch, all but the first request would find the header that the first one left in the cache.
        for number in range(len(stage.items)):
            engine.flush_cache()
            _ask(engine, stage, slice(number, number + 1), 1, folder, display)
    if after:
        cache_header(engine)
    for stage in after:
        _ask(engine, stage, slice(None), plan.spec.concurrency, folder, display)


def _ask(
    engine: Engine, stage: _Stage, part: slice, concurrency: int, folder: RunFolder, display: ProgressDisplay
) -> None:
    """Ask part of a stage at once."""
    items = stage.items[part]
    done = part.start or 0

    def keep(index: int, reply: Reply) -> None:
        nonlocal done
        folder.append(_answer(engine.role, stage, items[index], reply))
        done += 1
        display.count(f"{engine.role}: {stage.title}", done, len(stage.items))

    engine.ask([ChatRequest(item.prompt, stage.max_tokens, stage.top_logprobs) for item in items], concurrency, keep)


def _answer(role: Role, stage: _Stage, item: Item, reply: Reply) -> Answer:
    return Answer(
        suite=item.suite,
        role=role,
        item=item.id,
        repeat=stage.repeat,
        prompt_hash=item.prompt_hash,
        request_id=reply.request_id,
        text=reply.text,
        parsed=parse_answer(reply.text) if item.suite == "mmlu" else None,
        finish_reason=reply.finish_reason,
        prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens,
        cached_tokens=reply.cached_tokens,
        latency_s=reply.latency_s,
        tokens=reply.tokens,
    )
