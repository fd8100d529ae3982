"""One pass over the probes, asked with the features of an arm."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from assay.evals.probes import Probe, ProbeLoad
from assay.harness.engines.base import ChatRequest, Engine, answers
from assay.harness.engines.inside.control import Control, TracedRequest, set_control
from assay.harness.engines.sglang import forcing
from assay.harness.engines.sglang.beside_model import OTHER_ADAPTER
from assay.harness.engines.sglang.probing import ProbeRequest, ask_streamed, ask_together, leave_in_cache
from assay.harness.engines.sglang.server import SGLangServer
from assay.harness.evidence.counters import ADMISSIONS, REPLAYS, Admission, read_counters
from assay.harness.evidence.jsonl import read
from assay.harness.evidence.probes import ProbePass, ProbeReply
from assay.harness.evidence.records import Answer, Item
from assay.harness.judge.invariance_arms import Arm
from assay.harness.run.probe_proof import Pass

# Tokens that the earlier turn of a conversation generates.
_TURN = 8
# Tokens scored at the end of a prompt whose other tokens would all come from batches that cannot be scored.
_LEFT = 3
# New tokens of a probe in the request for its earlier turn.
_BEFORE = 2
# Alternatives returned with each token of a greedy text.
_ALTERNATIVES = 5
TRACE_BYTES = 2 * 2**30
"""Budget of all traces of a server's process: 1,500 tokens of a model of 16 layers and 2,048 dims take a quarter of a GiB."""
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
    """

    load: ProbeLoad
    arm: Arm
    label: str
    answers: Mapping[str, tuple[int, ...]]
    again: int = 0
    longer: bool = False
    recurrent: bool = False


def ask(server: SGLangServer, folder: Path, asked: AskedArm) -> Pass:
    """Ask a running server all probes; its processes write to `folder` (``ASSAY_EVIDENCE``).

    Raises:
        EngineError: the server failed.
        EvidenceError: its folder cannot be written or read.
    """
    said = {"weights-again": _reload(server)} if "weights-again" in asked.arm else {}
    said |= {"sleep-wake": _sleep(server)} if "sleep-wake" in asked.arm else {}
    order, size = _order(asked), _at_once(asked)
    mixed = "mixed-chunk" in asked.arm
    turns = _turns(asked) if "conversation" in asked.arm else _whole_prompts(asked) if mixed else {}
    forced = {request_of(asked.label, probe.id): (*probe.ids, *asked.answers.get(probe.id, ())) for probe in order}
    forced |= {f"{request_of(asked.label, probe.id)}:turn": probe.ids for probe in order if probe.id in turns}
    forcing.tell(folder, forced)
    said |= {"zero-lora": _apply_another(server, folder, asked)} if "zero-lora" in asked.arm else {}
    send: Callable[..., list[ProbeReply]] = ask_streamed if "streamed" in asked.arm else ask_together
    replies: dict[str, ProbeReply] = {}
    before = _replays(folder)
    warm = bool({"prefix-cache", "force-miss", "conversation"} & asked.arm)
    server.flush_cache()
    evicting = _evicting(asked, server) if "hicache" in asked.arm else []
    for request in [*_prefixes(asked), *evicting] if warm else ():
        ask_together(server, [request])
    for at in range(0, len(order), size):
        group = order[at : at + size]
        if not warm and at:
            server.flush_cache()
        if earlier := [_turn(asked, probe, turns[probe.id]) for probe in group if probe.id in turns]:
            (leave_in_cache if mixed else ask_together)(server, earlier)
        if asked.longer:
            scored = ask_together(server, [_longer(asked, probe) for probe in group])
            replies |= {reply.probe: reply.model_copy(update={"decode": reply.prefill}) for reply in scored}
            continue
        requests = [_request(asked, probe, turns.get(probe.id, 0)) for probe in group]
        replies |= {reply.probe: reply for reply in send(server, requests)}
    admissions = [
        admission
        for admission in read(folder / ADMISSIONS, Admission)
        if any(name.startswith(f"{forcing.PREFIX}{asked.label}:") for name in admission.rids)
    ]
    return Pass(
        probes=asked.load.probes,
        replies=[replies[probe.id] for probe in asked.load.probes],
        admissions=admissions,
        sent=[probe.id for probe in order],
        turns=turns,
        said=said,
        warm=warm,
        page=int(server.arguments().get("page_size") or 1),
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


def tracing(server: SGLangServer, folder: Path, record: ProbePass) -> AbstractContextManager[object]:
    """Have a server trace the request that a pass is repeated for, within the context; do nothing for any other pass."""
    if record.traced is None:
        return nullcontext()
    request = request_of(record.label, record.traced.probe)
    traced = TracedRequest(request=request, until=record.traced.index - 1)
    return switched_on(server, folder, Control(trace=record.label, traced=traced))


def write_texts(server: SGLangServer, items: Sequence[Item], tokens: int, at_once: bool) -> tuple[Answer, ...]:
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
    return f"{forcing.PREFIX}{label}:{probe}"


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
    asks = len(probe.ids) if "mixed-chunk" in asked.arm else kept - _TURN + 1
    return ProbeRequest(probe.id, f"{request_of(asked.label, probe.id)}:turn", probe.ids[:asks], asks - 1, _TURN)


def _request(asked: AskedArm, probe: Probe, kept: int) -> ProbeRequest:
    return ProbeRequest(probe.id, request_of(asked.label, probe.id), probe.ids, max(probe.shared, kept), probe.depth)


def _prefixes(asked: AskedArm) -> list[ProbeRequest]:
    """Return the requests that cache the probes' prefixes, one by one: one for all, or one for each end if the model has states."""
    whole = asked.load.prefix
    ends = sorted({probe.shared for probe in asked.load.probes} - {0}) if asked.recurrent else [len(whole)]
    return [ProbeRequest("prefix", f"assay-prefix-{asked.label}-{end}", whole[:end], end - 1, 1) for end in ends]


def _evicting(asked: AskedArm, server: SGLangServer) -> list[ProbeRequest]:
    """Return requests for as many other tokens as the pool holds, which evict the prefix to the host's memory."""
    whole = asked.load.prefix
    count = -(-int(server.arguments()["max_total_tokens"]) // len(whole)) + 1
    turned = [whole[number:] + whole[:number] for number in range(1, count + 1)]
    return [
        ProbeRequest("prefix", f"assay-evicting-{asked.label}-{number}", ids, len(ids) - 1, 1)
        for number, ids in enumerate(turned)
    ]


def _reload(server: SGLangServer) -> str:
    """Have a server reload its own weights; return its reply, or an empty string if it failed."""
    model = server.arguments().get("model_path")
    reply = server.send("/update_weights_from_disk", {"model_path": model, "flush_cache": True})
    return f"the server says: {reply.get('message') or 'loaded'}" if reply.get("success") else ""


def _sleep(server: SGLangServer) -> str:
    """Have a server release its memory and take it back, and return a sentence that says so."""
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        server.send(path, {})
    return "the server gave its memory back and took it again"


def _apply_another(server: SGLangServer, folder: Path, asked: AskedArm) -> str:
    """Have a server load a nonzero adapter and ask a probe with either; return how far apart they are, or an empty string."""
    probe, zeros, path = asked.load.probes[0], server.adapter, (folder / OTHER_ADAPTER).resolve()
    server.send("/load_lora_adapter", {"lora_name": OTHER_ADAPTER, "lora_path": str(path)})
    scored = []
    for name in (zeros, OTHER_ADAPTER):
        server.adapter = name
        server.flush_cache()
        request = ProbeRequest(probe.id, f"assay-{name}-{asked.label}", probe.ids, 0, 1)
        (reply,) = ask_together(server, [request])
        scored.append(reply.prefill.own)
    server.adapter = zeros
    server.send("/unload_lora_adapter", {"lora_name": OTHER_ADAPTER})
    apart = max(abs(first - second) for first, second in zip(*scored, strict=True))
    said = f"in this server, a nonzero adapter moves a log-probability by {apart:.2g} nats"
    return said if apart else ""


def _longer(asked: AskedArm, probe: Probe) -> ProbeRequest:
    """Return the request for a probe, its answer and some further tokens."""
    behind = asked.load.prefix[: 1 + random.Random(probe.id).randrange(_BEHIND)]
    return ProbeRequest(
        probe.id, request_of(asked.label, probe.id), (*probe.ids, *asked.answers[probe.id], *behind), probe.shared, 1
    )
