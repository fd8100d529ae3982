"""Arms made of numbers, as a server would have answered them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from assay.harness.engines.sglang.features import features_of
from assay.harness.evidence.fingerprint import FINGERPRINT, Fingerprint
from assay.harness.evidence.invariance import InvarianceFolder, InvarianceManifest
from assay.harness.evidence.probes import ProbePass, ProbeReply, Scores, record_pass
from assay.harness.evidence.records import Answer, Token

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


def text(first: str, second: str, gap: float) -> Answer:
    """Make a greedy text of one token, which is more probable than another one by so many nats."""
    token = Token(text=first, logprob=-0.5, top=((first, -0.5), (second, -0.5 - gap)))
    return Answer(
        suite="greedy", role="reference", item="greedy-000", prompt_hash="", text=first, finish_reason="length", prompt_tokens=9,
        completion_tokens=1, latency_s=0.1, tokens=(token,),
    )  # fmt: skip


def arm(
    *features: str,
    number: int = 2,
    why: str = "pairs",
    prefill: float = 0.0,
    decode: float = 0.0,
    verifications: int = 0,
    problem: str = "",
) -> ProbePass:
    """Make the record of an arm in which every feature was shown to be on, with the same reply to each of three probes."""
    replies = () if problem else tuple(reply(f"{n}+8", prefill, decode, verifications) for n in range(3))
    seen = {} if problem else dict.fromkeys(features, "seen")
    return ProbePass(number=number, features=features, why=why, replies=replies, seen=seen, problem=problem)


def drafting(*features: str, passes: int, odd: int = 0) -> ProbePass:
    """Make an arm of 40 probes whose answers took so many passes each, those of the first `odd` one more."""
    replies = tuple(reply(f"{n}+8", verifications=passes + (n < odd)) for n in range(40))
    return arm(*features).model_copy(update={"replies": replies})


SERVED = Fingerprint(source="server", engine="SGLang 0 on cpu", model="tiny", packages={"torch": "2"}, arguments={"page_size": "1"})
BASE = arm(number=0, why="base")
AGAIN = arm(number=1, why="base again", decode=1e-7)


def write(
    folder: InvarianceFolder,
    made: Sequence[ProbePass],
    again: ProbePass | None = None,
    *,
    base: bool = True,
    fault_seen: tuple[float, float] | None = (1.0, 1.0),
    ended: bool = True,
    served: Mapping[int, Fingerprint | None] = MappingProxyType({}),
    **manifest: Any,
) -> None:
    """Write a folder with these arms after the base, which ended or did not; a seeded fault moved both measures so far.

    Every server served the same but for those in `served`, by number.
    """
    names = [id_ for id_ in features_of("cpu") if any(id_ in record.features for record in made)]
    given = {
        "created": "2026-11-26T12:00:00+00:00",
        "spec": {"device": "cpu", "reference": {"model": "tiny", "flags": ()}},
        "command": "assay invariance",
        "packages": {"sglang": "0.5.23"},
        "hardware": "2 cores",
        "python": "3.11",
        "git": "",
        "model_hashes": {"reference": "", "candidate": ""},
        "backend": "torch_native",
        "features": tuple(names),
        "not_covered": {},
        "arms": tuple(tuple(sorted(record.features)) for record in made),
        "dtype": "float32",
        "lengths": {f"{n}+8": (PROMPT, SHARED, DEPTH) for n in range(3)},
    }
    folder.write_manifest(InvarianceManifest(nonce=folder.nonce, **given | manifest))
    records = [BASE, again or AGAIN] if base else []
    records += made
    if fault_seen:
        prefill, decode = fault_seen
        faulty = arm("prefix-cache", number=99, why="sensitivity", prefill=prefill, decode=decode)
        records.append(
            faulty.model_copy(update={"replies": tuple(each.model_copy(update={"cached_tokens": 4}) for each in faulty.replies)})
        )
    for record in records:
        record_pass(folder.path, record, folder.nonce)
    for number in {record.server for record in records}:
        if made_by := served.get(number, SERVED):
            FINGERPRINT.write(folder.server_folder(number), made_by, folder.nonce)
    if ended:
        folder.seal()
