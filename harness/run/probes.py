"""One pass over the probes, asked with the features of an arm."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from assay.evals.probes import Probe, ProbeLoad
from assay.harness.engines.base import ChatRequest, Engine, ProbeRequest, answers
from assay.harness.engines.features import Pass
from assay.harness.engines.inside.control import FORCED, FORCED_REQUEST, TRACE, Control, TracedRequest, set_control
from assay.harness.evidence.counters import ADMISSIONS, REPLAYS, Admission, read_counters
from assay.harness.evidence.jsonl import read
from assay.harness.evidence.probes import ProbePass, ProbeReply
from assay.harness.evidence.records import Answer, Item
from assay.harness.judge.invariance_arms import Arm

# Tokens that the earlier turn of a conversation generates.
_TURN = 8
# Tokens scored at the end of a prompt whose other tokens would all come from batches that cannot be scored.
_LEFT = 3
# New tokens of a probe in the request for its earlier turn.
_BEFORE = 2
# Alternatives returned with each token of a greedy text.
_ALTERNATIVES = 5
# Budget of all traces of a server's process: 1,500 tokens of a model of 16 layers and 2,048 dims take a quarter of a GiB.
_TRACE_BYTES = 2 * 2**30
PROBED = {FORCED: "1", TRACE: str(_TRACE_BYTES)}
"""Environment of a server that is asked the probes."""
# Most tokens that follow a probe and its answer if both are scored as the beginning of a longer prompt.
_BEHIND = 96


@dataclass(frozen=True)
class AskedArm:
    """The settings of one pass.

    Attributes:
        load: the probes.
        arm: the features that are on.
        label: the pass's label, with which its requests' ids begin.
        answers: the tokens that the base wrote for each probe id, which are forced; empty for the base itself.
        again: if this repeats the base in the opposite order, the number of probes sent at once; or else 0.
        longer: whether the base's answer and further tokens follow each probe, all in one prefill: no feature is on, and the
            kernels for other numbers of tokens compute the same positions.
        recurrent: whether the model keeps states, which the cache has only for the ends of earlier requests.
        evicts: other tokens to send after the prefix, which evict it; 0 to leave it.
    """

    load: ProbeLoad
    arm: Arm
    label: str
    answers: Mapping[str, tuple[int, ...]]
    again: int = 0
    longer: bool = False
    recurrent: bool = False
    evicts: int = 0


def ask(server: Engine, folder: Path, asked: AskedArm) -> Pass:
    """Ask a running server all probes; its processes write to `folder` (``ASSAY_EVIDENCE``).

    Raises:
        EngineError: the server failed.
        EvidenceError: its folder cannot be written or read.
    """
    first = asked.load.probes[0]
    said = server.toggle(asked.arm, ProbeRequest(first.id, f"assay-toggled-{asked.label}", first.ids, 0, 1))
    order, size = _order(asked), _at_once(asked)
    mixed = "mixed-chunk" in asked.arm
    turns = _turns(asked) if "conversation" in asked.arm else _whole_prompts(asked) if mixed else {}
    replies: dict[str, ProbeReply] = {}
    before = _replays(folder)
    warm = bool({"prefix-cache", "force-miss", "conversation"} & asked.arm)
    server.flush_cache()
    for request in [*_prefixes(asked), *_evicting(asked)] if warm else ():
        server.probe([request])
    for at in range(0, len(order), size):
        group = order[at : at + size]
        if not warm and at:
            server.flush_cache()
        if earlier := [_turn(asked, probe, turns[probe.id]) for probe in group if probe.id in turns]:
            server.probe(earlier)
        if asked.longer:
            scored = server.probe([_longer(asked, probe) for probe in group])
            replies |= {reply.probe: reply.model_copy(update={"decode": reply.prefill}) for reply in scored}
            continue
        requests = [_request(asked, probe, turns.get(probe.id, 0)) for probe in group]
        replies |= {reply.probe: reply for reply in server.probe(requests, streamed="streamed" in asked.arm)}
    own = server.request_id(request_of(asked.label, ""))
    limits = server.limits(1)
    return Pass(
        probes=asked.load.probes,
        replies=[replies[probe.id] for probe in asked.load.probes],
        admissions=[
            admission
            for admission in read(folder / ADMISSIONS, Admission)
            if any(name.startswith(own) for name in admission.rids)
        ],
        sent=[probe.id for probe in order],
        turns=turns,
        said=said,
        warm=warm,
        page=limits.page_tokens if limits else 1,
        caches=limits is None or limits.prefix_cache,
        arguments=server.arguments(),
        replays=_replays(folder) - before,
    )


@contextmanager
def switched_on(engine: Engine, place: Path, control: Control) -> Iterator[str]:
    """Have a server follow a control within the context; afterwards everything is off and its prefix cache empty.

    Yields the token of the setting.
    """
    engine.flush_cache()
    try:
        yield set_control(place, control)
    finally:
        set_control(place, Control())
    engine.flush_cache()


def tracing(server: Engine, folder: Path, record: ProbePass) -> AbstractContextManager[object]:
    """Have a server trace the request that a pass is repeated for, within the context; do nothing for any other pass."""
    if record.traced is None:
        return nullcontext()
    request = server.request_id(request_of(record.label, record.traced.probe))
    traced = TracedRequest(request=request, until=record.traced.index - 1)
    return switched_on(server, folder, Control(trace=record.label, traced=traced))


def write_texts(server: Engine, items: Sequence[Item], tokens: int, at_once: bool) -> tuple[Answer, ...]:
    """Have a running server answer prompts greedily, with at most this many tokens each.

    Raises:
        EngineError: the server failed.
    """
    server.flush_cache()
    requests = [ChatRequest.of(item, tokens, _ALTERNATIVES) for item in items]
    return tuple(answers(server, requests, len(requests) if at_once else 1))


def _replays(folder: Path) -> Counter[tuple[str, int]]:
    """Count the passes that CUDA graphs have served in a server, by phase and requests."""
    counts = read_counters(folder / REPLAYS)
    return Counter({(of.phase, requests): passes for of in counts for requests, passes in of.calls_by_layer.items()})


def request_of(label: str, probe: str) -> str:
    """Return the id of a probe's request in a pass."""
    return f"{FORCED_REQUEST}{label}:{probe}"


def _order(asked: AskedArm) -> list[Probe]:
    order = list(asked.load.probes)
    if asked.again:
        order.reverse()
    elif "order" in asked.arm:
        random.Random(" ".join(sorted(asked.arm))).shuffle(order)  # the same if an arm is asked again
    return order


def _at_once(asked: AskedArm) -> int:
    if "batch" in asked.arm:
        return len(asked.load.probes)
    return asked.again or 1


def _turns(asked: AskedArm) -> dict[str, int]:
    """Return how many tokens the earlier turn of each probe leaves in the cache; short probes have none.

    The K and V of the last token of a turn do not exist yet.
    """
    least = _BEFORE + _TURN + 2
    return {
        probe.id: probe.shared + _BEFORE + _TURN - 1
        for probe in asked.load.probes
        if len(probe.ids) - probe.shared >= least
    }


def _whole_prompts(asked: AskedArm) -> dict[str, int]:
    """Return how many tokens an unscored pass leaves in each prompt's cache, so that some tokens are left to score."""
    return {probe.id: len(probe.ids) - _LEFT for probe in asked.load.probes if len(probe.ids) - _LEFT >= probe.shared}


def _turn(asked: AskedArm, probe: Probe, kept: int) -> ProbeRequest:
    """Return the request of an earlier turn, which generates tokens of the probe's prompt; an unscored one takes all of it."""
    mixed = "mixed-chunk" in asked.arm
    asks = len(probe.ids) if mixed else kept - _TURN + 1
    name = f"{request_of(asked.label, probe.id)}:turn"
    return ProbeRequest(probe.id, name, probe.ids[:asks], asks - 1, _TURN, probe.ids[asks:], scored=not mixed)


def _request(asked: AskedArm, probe: Probe, kept: int) -> ProbeRequest:
    name, written = request_of(asked.label, probe.id), asked.answers.get(probe.id, ())
    return ProbeRequest(probe.id, name, probe.ids, max(probe.shared, kept), probe.depth, written)


def _prefixes(asked: AskedArm) -> list[ProbeRequest]:
    """Return the requests that cache the probes' prefixes, one by one: one for all, or one for each end if the model has states."""
    whole = asked.load.prefix
    ends = sorted({probe.shared for probe in asked.load.probes} - {0}) if asked.recurrent else [len(whole)]
    return [ProbeRequest("prefix", f"assay-prefix-{asked.label}-{end}", whole[:end], end - 1, 1) for end in ends]


def _evicting(asked: AskedArm) -> list[ProbeRequest]:
    """Return requests for as many other tokens as evict the prefix."""
    whole = asked.load.prefix
    count = -(-asked.evicts // len(whole)) + 1 if asked.evicts else 0
    turned = [whole[number:] + whole[:number] for number in range(1, count + 1)]
    return [
        ProbeRequest("prefix", f"assay-evicting-{asked.label}-{number}", ids, len(ids) - 1, 1)
        for number, ids in enumerate(turned)
    ]


def _longer(asked: AskedArm, probe: Probe) -> ProbeRequest:
    """Return the request for a probe, its answer and some further tokens."""
    behind = asked.load.prefix[: 1 + random.Random(probe.id).randrange(_BEHIND)]
    return ProbeRequest(
        probe.id, request_of(asked.label, probe.id), (*probe.ids, *asked.answers[probe.id], *behind), probe.shared, 1
    )
