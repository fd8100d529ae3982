"""Arms made of numbers, as a server would have answered them."""

from __future__ import annotations

import math

from assay.harness.evidence.invariance import ArmRecord, ProbeReply, Scores

PROMPT = 12
SHARED = 4
DEPTH = 6


def scores(first: int, count: int, shift: float = 0.0, tokens: tuple[int, ...] | None = None) -> Scores:
    """Make scores whose most probable token loses `shift` nats to the second one."""
    logits = [2.0 - shift, 1.0 + shift, 0.0]
    total = math.log(sum(math.exp(logit) for logit in logits))
    row = tuple(logit - total for logit in logits)
    return Scores(
        first=first,
        tokens=tokens or tuple(range(first, first + count)),
        own=(row[0],) * count,
        ids=((7, 8, 9),) * count,
        logprobs=(row,) * count,
    )


def reply(probe: str = "4+8", prefill: float | Scores = 0.0, decode: float | Scores = 0.0, verifications: int = 0) -> ProbeReply:
    """Make the reply to a probe, with these scores, or those of the base shifted in prefill and in decode."""
    return ProbeReply(
        probe=probe,
        prompt_tokens=PROMPT,
        cached_tokens=0,
        prefill=prefill if isinstance(prefill, Scores) else scores(SHARED + 1, PROMPT - SHARED - 1, prefill),
        decode=decode if isinstance(decode, Scores) else scores(PROMPT, DEPTH, decode),
        verifications=verifications,
    )


def arm(
    *features: str,
    number: int = 2,
    why: str = "pairs",
    prefill: float = 0.0,
    decode: float = 0.0,
    verifications: int = 0,
    problem: str = "",
) -> ArmRecord:
    """Make the record of an arm in which every feature was shown to be on, with the same reply to each of three probes."""
    replies = () if problem else tuple(reply(f"{n}+8", prefill, decode, verifications) for n in range(3))
    seen = {} if problem else dict.fromkeys(features, "seen")
    return ArmRecord(number=number, features=features, why=why, replies=replies, seen=seen, problem=problem)


BASE = arm(number=0, why="base")
AGAIN = arm(number=1, why="base again", decode=1e-7)
