"""One running server, in which a control says which layers run the candidate: its probes, and a layer bisect by them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.evals.greedy import MAX_TOKENS
from assay.evals.questions import PROMPT_HEADER
from assay.harness.bisect.layer_search import Search, find_layers, spans
from assay.harness.bisect.layer_task import (
    By,
    LayerBisect,
    ProbeRecord,
    can_fail,
    choose,
    fewest_prompts,
    finding,
    judge,
    marks,
    noise_of,
)
from assay.harness.conditions import CACHED_PREFIX_TOKENS
from assay.harness.config import RunSpec
from assay.harness.engines.backend import Backend
from assay.harness.engines.base import ChatRequest, Engine, Reply
from assay.harness.engines.launch import Launch
from assay.harness.engines.sglang import SGLangServer
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.counters import read_counters
from assay.harness.evidence.records import Item
from assay.harness.files import write_whole
from assay.harness.progress import ProgressDisplay
from assay.harness.server.control import Control, set_control, substituted
from assay.harness.server.sglang_plugin import SHADOW

RESULT = "bisect.json"
PREFIX_SHARE = 0.5
"""Share of the prompts that must have met a cached prefix of 16 tokens or more, if nothing was found."""


@dataclass(frozen=True)
class AnswerSet:
    """The answers to all prompts under one control.

    Attributes:
        texts: in the order of the prompts.
        with_prefix: prompts of which at least 16 tokens were cached.
        seconds: time that it took.
    """

    texts: tuple[str, ...]
    with_prefix: int
    seconds: float


class ProbeServer:
    """A running server that has the candidate beside it (``ASSAY_SHADOW``), and the prompts that it is asked.

    Args:
        server: the reference.
        evidence: its folder (``ASSAY_EVIDENCE``).
        items: what is asked.
        max_tokens: token limit of an answer.
        concurrency: requests in flight.
    """

    def __init__(
        self, server: Engine, evidence: Path, items: Sequence[Item], max_tokens: int, concurrency: int
    ) -> None:
        self.server, self.evidence, self.items = server, evidence, items
        self.max_tokens, self.concurrency = max_tokens, concurrency

    def ask(self, candidate: frozenset[int]) -> AnswerSet:
        """Answer all prompts, the shared header cached, with the candidate in these layers, and prove that it ran there.

        Raises:
            EngineError: the server failed; a candidate that raises ends it.
            EvidenceError: the candidate ran in other layers than these.
        """
        begun = time.monotonic()
        set_control(self.evidence, Control(substitute=tuple(candidate)))
        # What is cached was computed under the last control: below a substituted layer, K and V are its children.
        self.server.flush_cache()
        self.server.ask([ChatRequest(PROMPT_HEADER, 1)], 1, lambda index, reply: None)
        replies: dict[int, Reply] = {}
        asks = [ChatRequest(item.prompt, self.max_tokens) for item in self.items]
        self.server.ask(asks, self.concurrency, replies.__setitem__)
        ran = frozenset(substituted(self.evidence))
        if ran != candidate:
            raise EvidenceError(
                f"The candidate was to run in the layers {spans(candidate)}; it ran in {spans(ran)}.",
                "the candidate's output in these layers and no others, in the phases that it computes",
                "see the server's log; a replayed CUDA graph cannot be substituted: start without them",
            )
        texts = tuple(replies[index].text for index in range(len(asks)))
        with_prefix = sum((reply.cached_tokens or 0) >= CACHED_PREFIX_TOKENS for reply in replies.values())
        return AnswerSet(texts, with_prefix, time.monotonic() - begun)

    def layers(self) -> tuple[int, ...]:
        """The attention layers that were counted running, in order."""
        return tuple(sorted({n for count in read_counters(self.evidence / "counters") for n in count.calls_by_layer}))


def bisect_layers(
    spec: RunSpec,
    model: Path,
    items: Sequence[Item],
    by: By | None,
    folder: Path,
    cpu_core: int | None,
    display: ProgressDisplay,
) -> LayerBisect:
    """Find the layers that must run the reference for the task to be right again; start one server for it.

    Args:
        spec: the run that it is about: roles, device, engine flags, limits and alpha.
        model: the model's folder.
        items: the questions of each probe, which share `PROMPT_HEADER`.
        by: what must be right again; None chooses, see `assay.harness.bisect.layer_task.choose`.
        folder: new folder for the server's log and ``bisect.json``.
        cpu_core: the core that a CPU server computes on.
        display: shows every probe.

    Returns:
        The result, which also lies in ``folder/bisect.json``.

    Raises:
        UsageError: `folder` holds something, or there are too few questions to see any loss.
        EngineError: the server failed, or the candidate raised.
        EvidenceError: a substitution did not happen, or a file cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty.", "a new folder", "name another one with --out")
    fewest = fewest_prompts(spec.alpha)
    if len(items) < fewest:
        raise UsageError(
            f"--questions is {len(items)}: even the loss of all of them would not be significant.",
            f"at least {fewest}, at alpha = {spec.alpha:g}",
            f"give --questions {fewest} or more",
        )
    evidence = folder / "server"
    set_control(evidence, Control())
    display.say(f"Starting {spec.reference} with {spec.candidate} beside it.")
    server = SGLangServer(
        Launch(
            role="reference",
            backend=spec.reference,
            model=str(model),
            device=spec.device,
            engine_args=spec.engine_arg,
            evidence=evidence,
            log=folder / "server.log",
            startup_timeout=spec.startup_timeout,
            request_timeout=spec.request_timeout,
            decode_backend=Backend.parse(spec.reference).delegate,
            cpu_core=cpu_core,
            eager=True,
            extra={SHADOW: spec.candidate},
        )
    )
    with server:
        display.say(f"Ready in {server.startup_s or 0:.0f} s.")
        result = search(ProbeServer(server, evidence, items, spec.token_limit, spec.concurrency), spec, by, display)
    write_whole(folder / RESULT, result.model_dump_json(indent=2) + "\n")
    return result


class _Probe:
    """What `find_layers` asks: a set of layers in, right or wrong out, every answer kept."""

    def __init__(
        self,
        bench: ProbeServer,
        spec: RunSpec,
        by: By,
        own: AnswerSet,
        reference: Sequence[bool],
        display: ProgressDisplay,
    ) -> None:
        self._bench, self._spec, self._by, self._own = bench, spec, by, own
        self._reference, self._display = reference, display
        self.whole = frozenset(bench.layers())
        self.records: list[ProbeRecord] = []
        self._waiting: list[AnswerSet] = []

    def floor(self) -> tuple[int, int]:
        """Ask the candidate in all layers twice: prompts whose text differs, and that flip. Both answers serve as probes later."""
        self._waiting = [self._bench.ask(self.whole) for _ in range(2)]
        first, again = (self.marks(asking) for asking in self._waiting)
        return _differing(*self._waiting), _flips(first, again)

    def marks(self, asking: AnswerSet) -> list[bool]:
        """Which prompts are right."""
        return marks(self._by, self._bench.items, self._own.texts, asking.texts)

    def __call__(self, candidate: frozenset[int]) -> bool:
        known = self._waiting if candidate == self.whole else []
        asking = known.pop(0) if known else self._bench.ask(candidate)
        these = self.marks(asking)
        judged = judge(self._reference, these, self._spec.alpha)
        self.records.append(
            ProbeRecord(
                candidate=tuple(sorted(candidate)),
                right=judged.right,
                lost=judged.lost,
                gained=judged.gained,
                p=judged.p,
                outcome=judged.outcome,
                with_prefix=asking.with_prefix,
                seconds=asking.seconds,
            )
        )
        self._display.say(
            f"Probe {len(self.records)}: {self._spec.candidate} in {spans(candidate)}: {judged.outcome} "
            f"({judged.lost} lost, {judged.gained} gained of {len(these)})."
        )
        return judged.outcome == "right"


def search(bench: ProbeServer, spec: RunSpec, by: By | None, display: ProgressDisplay) -> LayerBisect:
    """The bisect itself, on a server that runs.

    The reference alone is asked twice, and the candidate in all layers twice. If both gave the same texts both times, the floor is
    identical and each set is asked once. Else an answer of a probe may be false, see `noise_of`, and sets are
    asked again, see `assay.harness.bisect.layer_search.lead_needed`.

    Args:
        bench: the server and the prompts.
        spec: roles, device, limits and alpha.
        by: what must be right again; None chooses.
        display: shows every probe.

    Raises:
        EngineError: the server failed, or the candidate raised.
        EvidenceError: a substitution did not happen.
    """
    begun = time.monotonic()
    short = min(spec.token_limit, MAX_TOKENS)
    if by == "text":
        bench.max_tokens = short
    own = bench.ask(frozenset())
    chosen, by_why = (by, "asked for") if by else choose(bench.items, own.texts, spec.alpha)
    if chosen == "text" and bench.max_tokens != short:
        bench.max_tokens = short
        own = bench.ask(frozenset())
    again = bench.ask(frozenset())
    once, twice = (marks(chosen, bench.items, own.texts, asking.texts) for asking in (own, again))
    reference = twice if chosen == "text" else once  # a text is equal to itself, which says nothing
    right, total, floor = sum(reference), len(bench.items), _differing(own, again)
    display.say(f"By {chosen}: {by_why}.")
    display.say(f"The reference asked twice: {total - floor} of {total} texts equal.")

    probe = _Probe(bench, spec, chosen, own, reference, display)
    candidate_floor, flips, noise = 0, _flips(once, twice), 0.0
    if can_fail(chosen, right, total, spec.alpha):
        candidate_floor, more = probe.floor()
        flips += more
        display.say(f"The candidate in all layers asked twice: {total - candidate_floor} of {total} texts equal.")
        noise = noise_of(flips, 2 * total, total, spec.alpha) if floor or candidate_floor else 0.0
        found = find_layers(sorted(probe.whole), probe, noise, spec.alpha)
    else:
        why = f"The reference alone gets {right} of {total} right by {chosen}: next to it a broken candidate would look as good."
        found = Search("inconclusive", why, (), True, ())
    verdict, reason = found.verdict, found.why
    met = min((one.with_prefix for one in probe.records if len(one.candidate) == len(probe.whole)), default=0)
    if verdict == "nothing" and met < PREFIX_SHARE * total:
        verdict = "inconclusive"
        reason = (
            f"Nothing failed with the candidate in all {len(probe.whole)} layers, but only {met} of {total} prompts met a cached "
            "prefix of 16 tokens or more: run with the prefix cache on."
        )
    reproduce = _command(spec, total, by)
    roles = (spec.reference, spec.candidate)
    return LayerBisect(
        verdict=verdict,
        why=reason,
        reference=spec.reference,
        candidate=spec.candidate,
        model=spec.model,
        device=spec.device,
        engine=bench.server.label,
        phases=Backend.parse(spec.candidate).phases,
        layers=tuple(sorted(probe.whole)),
        prompts=total,
        by=chosen,
        by_why=by_why,
        reference_right=right,
        floor=floor,
        candidate_floor=candidate_floor,
        flips=flips,
        noise=noise,
        alpha=spec.alpha,
        restored=found.restored,
        monotone=found.monotone,
        probes=tuple(probe.records),
        findings=(finding(found, probe.records, chosen, roles, reproduce),) if found.restored else (),
        reproduce=reproduce,
        seconds=time.monotonic() - begun,
    )


def _differing(one: AnswerSet, other: AnswerSet) -> int:
    return sum(first != second for first, second in zip(one.texts, other.texts, strict=True))


def _flips(one: Sequence[bool], other: Sequence[bool]) -> int:
    return sum(first != second for first, second in zip(one, other, strict=True))


def _command(spec: RunSpec, prompts: int, by: By | None) -> str:
    flags = [f"--device={spec.device}", f"--reference={spec.reference}", f"--candidate={spec.candidate}"]
    flags += [f"--model={spec.model}", *(f"--engine-arg={flag}" for flag in spec.engine_arg), f"--questions={prompts}"]
    return shlex.join(["assay", "bisect", "layers", *flags, *([f"--by={by}"] if by else [])])
