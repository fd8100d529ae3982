"""Features that should not affect outputs: how to toggle each, its allowed cost, and the proof that it was on.

Each engine lists its own (`assay.harness.engines.registry.features`). Passing a flag proves nothing, since engines may switch a
feature off for reasons of their own: what shows it are the arguments that the server resolved, its replies, and the prefill batches
that it admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

from assay.evals.probes import Probe
from assay.harness.evidence.counters import Admission
from assay.harness.evidence.probes import ProbePass, ProbeReply
from assay.harness.sides import Device, flag_values
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
        caches: whether the server has a prefix cache.
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
    caches: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)
    replays: Mapping[tuple[str, int], int] = field(default_factory=dict)


Seen = tuple[str, str]
"""The proof that a feature was on, or the reason why there is none; the other is empty."""


# The declared cost of a feature: nothing beyond the order of sums; a kernel, whose rounding differs; or different numbers, so that
# variants with it are compared among themselves.
_Cost = Literal["nothing", "another kernel", "a base of its own"]


@dataclass(frozen=True)
class Feature:
    """One feature.

    Attributes:
        id: kebab-case and stable.
        title: its effect, a clause.
        on: flags of a server with the feature on.
        off: flags of a server with the feature off.
        environment: environment variables of a server with the feature on.
        backend: attention backend to use instead of the base's, or empty for the same.
        resolved: arguments that the server resolves when it is on, in the engine's names, nested ones joined by dots.
        declares: other parts of the fingerprint that it may change, as ``assay compare --allow`` names them.
        seen: the proof that it was on, beyond its arguments, or None if they suffice.
        cost: the declared change of outputs.
        requires: features without which it has no effect.
        excludes: features that cannot be on together with it.
        devices: devices on which it can be on.
        lacks: what the other devices lack.
        gpus: number of GPUs that it needs on a GPU.
        package: package that it needs.
        drafts: least tokens of a pass that verifies a model's drafts, or 0 if drafts depend on earlier requests.
        bitwise: whether it changes not even a bit if kernels are deterministic.
        stays: whether it cannot be switched off again in a running server.
        evicts: tokens that a server holds with it on; as many others evict the prefix. 0 if nothing is to be evicted.
        lacking: returns why it cannot be on for a model's configuration, or an empty string.
    """

    id: str
    title: str
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    backend: str = ""
    resolved: Mapping[str, Any] = field(default_factory=dict)
    declares: tuple[str, ...] = ()
    seen: Callable[[Pass], Seen] | None = None
    cost: _Cost = "nothing"
    requires: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ("cpu", "cuda")
    lacks: str = ""
    gpus: int = 1
    package: str = ""
    drafts: float = 0.0
    bitwise: bool = False
    stays: bool = False
    evicts: int = 0
    lacking: Callable[[Mapping[str, Any]], str] = lambda config: ""

    @property
    def restarts(self) -> bool:
        """True if a server has to be started for it."""
        return bool(self.on or self.off or self.environment or self.backend)

    def unavailable(self, device: Device, gpus: int, config: Mapping[str, Any]) -> str:
        """Say why it cannot be toggled here, for a model with this configuration, or return an empty string."""
        if device not in self.devices:
            return f"not on {device}: {self.lacks}"
        if device == "cuda" and gpus < self.gpus:
            return f"needs {self.gpus} GPUs; {gpus} found"
        if self.package and find_spec(self.package) is None:
            return f"needs the package {self.package}"
        return self.lacking(config)

    def decided(self, flags: Mapping[str, str], environment: Mapping[str, str], backend: str) -> str:
        """Say what already decides, in every server, whether it is on, or return an empty string.

        The engine's own flags override the feature's; `backend` is the attention backend of the base.
        """
        own = {f"--{name.rpartition('.')[2].replace('_', '-')}": str(value) for name, value in self.resolved.items()}
        for flag in [*flag_values(self.off), *(flag for flag, value in own.items() if _differ(flags.get(flag), value))]:
            if flag in flags:
                return f"{flag}={flags[flag]} overrides the flag that switches it"
        on = flag_values(self.on) | dict(self.environment)
        given = {**flags, **environment}
        if on and not self.stays and all(name in given and not _differ(given[name], on[name]) for name in on):
            return f"the base has it too: {', '.join(f'{name}={value}' for name, value in on.items())}"
        if self.backend and self.backend == backend:
            return f"the base has it too: its attention backend is {backend}"
        return ""


def _differ(given: str | None, value: str) -> bool:
    return given is not None and given.casefold() != value.casefold()


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
        if (own := _argument(over.arguments, name)) != value:
            return "", f"the server resolved {name} = {own}, not {value}"
    resolved = ", ".join(f"{name} = {value}" for name, value in feature.resolved.items())
    if feature.seen is None:
        return resolved or "switched in the environment of its server", ""
    said, why = feature.seen(over)
    return (", ".join(filter(None, [resolved, said])), "") if said else ("", why)


def _argument(arguments: Any, name: str) -> Any:
    """Return an argument by its name, in which dots separate sections; None without it."""
    for part in name.split("."):
        arguments = arguments.get(part) if isinstance(arguments, Mapping) else None
    return arguments


def shown_if(on: object, said: str, why: str) -> Seen:
    """Return a proof if it holds, or the reason why there is none."""
    return (said, "") if on else ("", why)


def cached(over: Pass, left: int = 0) -> Seen:
    """Prove that every shared prefix came from the cache, but for at most `left` tokens."""
    wanted = {probe.id: probe.shared // over.page * over.page for probe in over.probes if probe.shared >= over.page}
    hits = [reply for reply in over.replies if 0 < wanted.get(reply.probe, 0) <= reply.cached_tokens + left]
    most = max((reply.cached_tokens for reply in hits), default=0)
    if not wanted:
        return "", "no shared prefix fills a page"
    came = "came from the cache"
    said, why = (
        f"{len(hits)} prefixes {came}, up to {most:,} tokens",
        f"{len(hits)} of {len(wanted)} shared prefixes {came}",
    )
    return shown_if(len(hits) >= len(wanted), said, why)


def missed(over: Pass) -> Seen:
    """Prove that no token came from a cache that held the prefixes."""
    hit = sum(bool(reply.cached_tokens) for reply in over.replies)
    why = f"{hit} prefixes came from the cache" if over.warm else "no prefix was left in the cache"
    return shown_if(over.warm and not hit, "no token came from the cache", why)


def batched(over: Pass) -> Seen:
    """Prove that several requests were prefilled together."""
    most = max((len(admission.rids) for admission in over.admissions), default=0)
    return shown_if(most > 1, f"up to {most} requests in a prefill batch", "no two requests were prefilled together")


def reordered(over: Pass) -> Seen:
    """Prove that the probes were sent in another order."""
    other = list(over.sent) != [probe.id for probe in over.probes]
    return shown_if(other, "the probes were sent in another order", "the order was the same")


def continued(over: Pass) -> Seen:
    """Prove that every earlier turn came from the cache."""
    pages = {probe.id: (probe.shared // over.page, over.turns.get(probe.id, 0) // over.page) for probe in over.probes}
    # Only a page that the shared prefix does not fill shows that the turn was found.
    wanted = {id_: turn * over.page for id_, (shared, turn) in pages.items() if turn > shared}
    hits = [reply for reply in over.replies if wanted.get(reply.probe) and reply.cached_tokens >= wanted[reply.probe]]
    if not wanted:
        return "", "no earlier turn fills a page by itself"
    said = f"{len(hits)} of {len(wanted)} earlier turns came from the cache"
    return shown_if(len(hits) == len(wanted), said, said)


def streamed(over: Pass) -> Seen:
    """Prove that answers came in pieces."""
    most = max((reply.pieces for reply in over.replies), default=0)
    return shown_if(most > 1, f"answers came in up to {most} pieces", "every answer came in one piece")


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
            goes_on = new > 1 and ends.get(rid) == prefix < lengths.get(probe_of(rid), 0)
            running[rid] = running[rid] + 1 if goes_on else 1
            pieces[rid] = max(pieces.get(rid, 1), running[rid])
            ends[rid] = prefix + new
    chunks = [count for count in pieces.values() if count > 1]
    return f"{counted(len(chunks), 'prompt')} split, into up to {max(chunks)} chunks" if chunks else ""


def chunked(over: Pass) -> Seen:
    """Prove that prompts were prefilled in chunks."""
    return split(over), "no prompt was split"


def probe_of(rid: str) -> str:
    """Return the probe that a request's id names (`assay.harness.run.probes`), also for an earlier turn."""
    return [*rid.split(":"), ""][1]
