"""The proof that a feature was on: the arguments that the server resolved, its replies, and the prefill batches it admitted.

Passing a flag proves nothing: engines may switch a feature off for reasons of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.evals.probes import Probe
from assay.harness.engines.sglang.features import Feature
from assay.harness.evidence.counters import Admission
from assay.harness.evidence.probes import ProbePass, ProbeReply
from assay.harness.text import counted


@dataclass(frozen=True)
class Pass:
    """The record of one pass over the probes.

    Attributes:
        probes: the probes.
        replies: the reply to each probe.
        admissions: the prefill batches of its requests, in the order in which they were admitted.
        sent: ids of the probes, in the order in which they were sent.
        turns: tokens that a probe's earlier turn left in the cache, by the probe's id.
        said: the server's response to a command that a feature needs, by the feature's id.
        warm: whether prefixes were cached before.
        page: tokens per page.
        arguments: as the server resolved them.
        replays: passes that CUDA graphs served, by phase and requests.
    """

    probes: Sequence[Probe]
    replies: Sequence[ProbeReply]
    admissions: Sequence[Admission]
    sent: Sequence[str]
    turns: Mapping[str, int]
    said: Mapping[str, str] = field(default_factory=dict)
    warm: bool = False
    page: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    replays: Mapping[tuple[str, int], int] = field(default_factory=dict)


def switched(feature: Feature, over: Pass, base: Pass | None) -> tuple[str, str]:
    """Return the proof that a feature was on, and not in the base, or the reason why there is none; the other is empty.

    Args:
        base: the pass of its base, or None if the base has the feature by intent, or was not run.
    """
    on, why = shown(feature, over)
    if on and base is not None and (too := shown(feature, base)[0]):
        return "", f"the base has it too: {too}; remove the engine's own flag that sets it"
    return on, why


def answered(record: ProbePass, over: Pass, proofs: Mapping[str, tuple[str, str]]) -> ProbePass:
    """Return the record of a pass with its replies and, by feature, the proof that it was on, or the reason why there is none."""
    seen = {id_: proof for id_, (proof, _) in proofs.items() if proof}
    unseen = {id_: why for id_, (proof, why) in proofs.items() if not proof}
    return record.model_copy(update={"replies": tuple(over.replies), "seen": seen, "unseen": unseen})


def shown(feature: Feature, over: Pass) -> tuple[str, str]:
    """Return the proof that a feature was on, or the reason why there is none; the other is empty."""
    for name, value in feature.resolved.items():
        if over.arguments.get(name) != value:
            return "", f"the server resolved {name} = {over.arguments.get(name)}, not {value}"
    resolved = ", ".join(f"{name} = {value}" for name, value in feature.resolved.items())
    if not feature.seen:
        return resolved or "switched in the environment of its server", ""
    said, why = _SEEN[feature.seen](over)
    return (", ".join(filter(None, [resolved, said])), "") if said else ("", why)


_Seen = tuple[str, str]
"""The proof that a feature was on, or the reason why there is none; the other is empty."""
# Most tokens that SGLang recomputes instead of reading them back from the host's memory: its ``load_back_threshold`` is 10.
_LEFT_ON_HOST = 9


def _seen(on: object, said: str, why: str) -> _Seen:
    return (said, "") if on else ("", why)


def _cached(over: Pass) -> _Seen:
    wanted = {probe.id: probe.shared // over.page * over.page for probe in over.probes if probe.shared >= over.page}
    left = _LEFT_ON_HOST if over.arguments.get("enable_hierarchical_cache") else 0
    hits = [reply for reply in over.replies if 0 < wanted.get(reply.probe, 0) <= reply.cached_tokens + left]
    most = max((reply.cached_tokens for reply in hits), default=0)
    if not wanted:
        return "", "no shared prefix fills a page"
    came = "came from the cache"
    said, why = (
        f"{len(hits)} prefixes {came}, up to {most:,} tokens",
        f"{len(hits)} of {len(wanted)} shared prefixes {came}",
    )
    return _seen(len(hits) >= len(wanted), said, why)


def _read_back(over: Pass) -> _Seen:
    # SGLang reports what it found there, even if it was too little to be read back, or too much for the pool.
    read = [reply.host_tokens for reply in over.replies if _LEFT_ON_HOST < reply.host_tokens <= reply.cached_tokens]
    said = f"{len(read)} prefixes were read back from the host's memory, up to {max(read, default=0):,} tokens"
    return _seen(read, said, "no prefix was read back from the host's memory")


def _missed(over: Pass) -> _Seen:
    hit = sum(bool(reply.cached_tokens) for reply in over.replies)
    why = f"{hit} prefixes came from the cache" if over.warm else "no prefix was left in the cache"
    return _seen(over.warm and not hit, "no token came from the cache", why)


def _batched(over: Pass) -> _Seen:
    most = max((len(admission.rids) for admission in over.admissions), default=0)
    return _seen(most > 1, f"up to {most} requests in a prefill batch", "no two requests were prefilled together")


def _reordered(over: Pass) -> _Seen:
    other = list(over.sent) != [probe.id for probe in over.probes]
    return _seen(other, "the probes were sent in another order", "the order was the same")


def _continued(over: Pass) -> _Seen:
    pages = {probe.id: (probe.shared // over.page, over.turns.get(probe.id, 0) // over.page) for probe in over.probes}
    # Only a page that the shared prefix does not fill shows that the turn was found.
    wanted = {id_: turn * over.page for id_, (shared, turn) in pages.items() if turn > shared}
    hits = [reply for reply in over.replies if wanted.get(reply.probe) and reply.cached_tokens >= wanted[reply.probe]]
    if not wanted:
        return "", "no earlier turn fills a page by itself"
    said = f"{len(hits)} of {len(wanted)} earlier turns came from the cache"
    return _seen(len(hits) == len(wanted), said, said)


def _streamed(over: Pass) -> _Seen:
    most = max((reply.pieces for reply in over.replies), default=0)
    return _seen(most > 1, f"answers came in up to {most} pieces", "every answer came in one piece")


def split(over: Pass) -> str:
    """Say how many prompts were prefilled in chunks, or return an empty string.

    A chunk is a batch that continues where the previous one ended inside the prompt. A retracted request starts elsewhere.
    """
    lengths = {probe.id: len(probe.ids) for probe in over.probes}
    running: dict[str, int] = {}
    pieces: dict[str, int] = {}
    ends: dict[str, int] = {}
    for admission in over.admissions:
        for rid, new, prefix in zip(admission.rids, admission.new, admission.prefix, strict=True):
            goes_on = new > 1 and ends.get(rid) == prefix < lengths.get(_probe_of(rid), 0)
            running[rid] = running[rid] + 1 if goes_on else 1
            pieces[rid] = max(pieces.get(rid, 1), running[rid])
            ends[rid] = prefix + new
    chunks = [count for count in pieces.values() if count > 1]
    return f"{counted(len(chunks), 'prompt')} split, into up to {max(chunks)} chunks" if chunks else ""


def _chunked(over: Pass) -> _Seen:
    return split(over), "no prompt was split"


def _said(feature: str, why: str) -> Callable[[Pass], _Seen]:
    return lambda over: _seen(over.said.get(feature), over.said.get(feature, ""), why)


def _graphs(phase: str) -> Callable[[Pass], _Seen]:
    def seen(over: Pass) -> _Seen:
        config = over.arguments.get("cuda_graph_config") or {}
        backend = (config.get(phase) or {}).get("backend") or "disabled"
        if backend == "disabled":
            return "", f"the server resolved no graph for {phase}"
        passes = _replayed(over, phase)
        said = f"{passes:,} passes of {phase} ran in CUDA graphs ({backend})"
        return _seen(passes, said, f"the server resolved {backend} graphs for {phase}, and no pass ran in one")

    return seen


def _replayed(over: Pass, phase: str, requests: int = 1 << 30) -> int:
    """Count the passes of a phase that CUDA graphs served with at most this many requests."""
    return sum(passes for (of, size), passes in over.replays.items() if of == phase and size <= requests)


def _compiled(over: Pass) -> _Seen:
    most = int(over.arguments.get("torch_compile_max_bs") or 0)
    passes = _replayed(over, "decode", most)
    why = f"no pass of at most {most} requests, the compiled ones, ran in a CUDA graph"
    return _seen(passes, f"{passes:,} passes of at most {most} requests ran in compiled code", why)


def _mixed(over: Pass) -> _Seen:
    lengths = {reply.probe: reply.prompt_tokens for reply in over.replies}
    mixed = sum(
        any(new == 1 and prefix >= lengths.get(_probe_of(rid), 1 << 60) for rid, new, prefix in rows)
        and any(new > 1 for _, new, _ in rows)
        for admission in over.admissions
        for rows in [list(zip(admission.rids, admission.new, admission.prefix, strict=True))]
    )
    return _seen(mixed, f"{mixed} batches held both", "no batch held both")


def _retracted(over: Pass) -> _Seen:
    times = sum(reply.retractions for reply in over.replies)
    return _seen(times, f"requests were retracted {times} times", "no request was retracted")


def _speculated(over: Pass) -> _Seen:
    passes = sum(reply.verifications for reply in over.replies)
    written = sum(len(reply.decode.tokens) for reply in over.replies if reply.verifications)
    said = f"{passes} passes verified drafts, {written / max(passes, 1):.2f} tokens each"
    return _seen(passes, said, "no draft was verified")


def _probe_of(rid: str) -> str:
    """Return the probe that a request's id names (`assay.harness.run.probes`), also for an earlier turn."""
    return [*rid.split(":"), ""][1]


_SEEN: Mapping[str, Callable[[Pass], _Seen]] = {
    "cached": _cached,
    "missed": _missed,
    "batched": _batched,
    "reordered": _reordered,
    "continued": _continued,
    "streamed": _streamed,
    "read back": _read_back,
    "reloaded": _said("weights-again", "the server did not confirm that it loaded them"),
    "chunked": _chunked,
    "decode graphs": _graphs("decode"),
    "prefill graphs": _graphs("prefill"),
    "compiled": _compiled,
    "mixed": _mixed,
    "retracted": _retracted,
    "woken": _said("sleep-wake", "the server did not confirm that it slept and woke"),
    "adapted": _said("zero-lora", "a nonzero adapter changed nothing"),
    "speculated": _speculated,
}
