"""One running server, in which a control file selects the layers that run the candidate: its probes and the layer bisect."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.evals.greedy import MAX_TOKENS
from assay.evals.questions import PROMPT_HEADER
from assay.harness.bisect.layer_search import SearchResult, find_layers
from assay.harness.bisect.layer_task import (
    Criterion,
    LayerBisect,
    ProbeRecord,
    answer_noise,
    can_fail,
    choose_criterion,
    compare_with_reference,
    fewest_prompts,
    layer_finding,
    right_prompts,
)
from assay.harness.collect.plan import Plan
from assay.harness.collect.servers import core_of, make_engine
from assay.harness.conditions import CACHED_PREFIX_TOKENS
from assay.harness.config import RunSpec
from assay.harness.engines.backend import Backend
from assay.harness.engines.base import ChatRequest, Engine, Reply
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.counters import read_counters
from assay.harness.evidence.records import Item
from assay.harness.files import write_whole
from assay.harness.progress import ProgressDisplay
from assay.harness.server.control import Control, set_control, substituted_calls
from assay.harness.server.sglang_plugin import SHADOW
from assay.harness.text import ranges

RESULT = "bisect.json"
MIN_CACHED_SHARE = 0.5
"""Minimum share of prompts with a cached prefix if no layer was found: without one, extend over a prefix was not tested."""


@dataclass(frozen=True)
class AnswerSet:
    """The answers to all prompts under one control.

    Attributes:
        texts: in the order of the prompts.
        with_prefix: prompts of which at least 16 tokens were cached.
        seconds: duration.
    """

    texts: tuple[str, ...]
    with_prefix: int
    seconds: float


class ProbeServer:
    """A running server with the candidate as the reference's shadow (``ASSAY_SHADOW``), and the prompts of a probe.

    Args:
        engine: the reference.
        evidence: its folder (``ASSAY_EVIDENCE``).
        items: the prompts.
        max_tokens: token limit of an answer.
        concurrency: requests in flight.
    """

    def __init__(
        self, engine: Engine, evidence: Path, items: Sequence[Item], max_tokens: int, concurrency: int
    ) -> None:
        self.engine, self.evidence, self.items = engine, evidence, items
        self.max_tokens, self.concurrency = max_tokens, concurrency

    def ask(self, candidate: frozenset[int]) -> AnswerSet:
        """Answer all prompts with the candidate in these layers and the shared header cached; verify that it ran there.

        Raises:
            EngineError: the server failed; a candidate that raises ends the server.
            EvidenceError: the candidate ran in other layers.
        """
        begun = time.monotonic()
        set_control(self.evidence, Control(substitute=tuple(candidate)))
        # The cache was filled under the last control: the K and V below a substituted layer depend on it.
        self.engine.flush_cache()
        self.engine.ask([ChatRequest(PROMPT_HEADER, 1)], 1, lambda index, reply: None)
        replies: dict[int, Reply] = {}
        asks = [ChatRequest(item.prompt, self.max_tokens) for item in self.items]
        self.engine.ask(asks, self.concurrency, replies.__setitem__)
        ran = frozenset(substituted_calls(self.evidence))
        if ran != candidate:
            raise EvidenceError(
                f"The candidate should have run in the layers {ranges(candidate)}; it ran in {ranges(ran)}.",
                "the candidate's output in these layers and no others, in the phases that it computes",
                "see the server's log; a replayed CUDA graph cannot be substituted: start the server without graphs",
            )
        texts = tuple(replies[index].text for index in range(len(asks)))
        with_prefix = sum((reply.cached_tokens or 0) >= CACHED_PREFIX_TOKENS for reply in replies.values())
        return AnswerSet(texts, with_prefix, time.monotonic() - begun)

    def layers(self) -> tuple[int, ...]:
        """The attention layers that ran, as counted, in order."""
        return tuple(sorted({n for count in read_counters(self.evidence / "counters") for n in count.calls_by_layer}))


def bisect_layers(plan: Plan, by: Criterion | None, folder: Path, display: ProgressDisplay) -> LayerBisect:
    """Find the layers that must run the reference for the task to be right again; start one server for it.

    Args:
        plan: the validated run: roles, device, limits, alpha, and the questions of each probe, which share `PROMPT_HEADER`.
        by: what must be right again; None to choose, see `assay.harness.bisect.layer_task.choose_criterion`.
        folder: new folder for the server's log and ``bisect.json``.
        display: shows every probe.

    Returns:
        The result, which also lies in ``folder/bisect.json``.

    Raises:
        UsageError: `folder` is not empty, or there are too few questions to detect a loss.
        EngineError: the server failed, or the candidate raised.
        EvidenceError: a substitution did not happen, or a file cannot be written.
    """
    spec, items = plan.spec, plan.of("mmlu")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty.", "a new folder", "give another one with --out")
    fewest = fewest_prompts(spec.alpha)
    if len(items) < fewest:
        raise UsageError(
            f"--questions is {len(items)}: even the loss of all of them would not be significant.",
            f"at least {fewest}, at alpha = {spec.alpha:g}",
            f"give --questions {fewest} or more",
        )
    evidence = folder / "server"
    set_control(evidence, Control())
    display.say(f"Starting {spec.reference} with {spec.candidate} as its shadow.")
    server = make_engine(
        plan,
        "reference",
        evidence,
        folder / "server.log",
        cpu_core=core_of(spec.device),
        eager=True,
        environment={SHADOW: spec.candidate},
    )
    with server:
        display.say(f"Ready in {server.startup_s or 0:.0f} s.")
        result = search_layers(
            ProbeServer(server, evidence, items, spec.token_limit, spec.concurrency), spec, by, display
        )
    write_whole(folder / RESULT, result.model_dump_json(indent=2) + "\n")
    return result


class _Probe:
    """The probe of `find_layers`: receives a set of layers, returns whether the task is right, and keeps every answer."""

    def __init__(
        self,
        server: ProbeServer,
        spec: RunSpec,
        by: Criterion,
        own: AnswerSet,
        reference: Sequence[bool],
        display: ProgressDisplay,
    ) -> None:
        self._server, self._spec, self._by, self._own = server, spec, by, own
        self._reference, self._display = reference, display
        self.all_layers = frozenset(server.layers())
        self.records: list[ProbeRecord] = []
        self._waiting: list[AnswerSet] = []

    def floor(self) -> tuple[int, int]:
        """Ask the candidate in all layers twice; return the prompts whose text differs and that flip. Both serve as probes."""
        self._waiting = [self._server.ask(self.all_layers) for _ in range(2)]
        first, again = (self.right_prompts(answers) for answers in self._waiting)
        return _differing(*self._waiting), _flips(first, again)

    def right_prompts(self, answers: AnswerSet) -> list[bool]:
        """Which prompts are right."""
        return right_prompts(self._by, self._server.items, self._own.texts, answers.texts)

    def __call__(self, candidate: frozenset[int]) -> bool:
        known = self._waiting if candidate == self.all_layers else []
        answers = known.pop(0) if known else self._server.ask(candidate)
        these = self.right_prompts(answers)
        comparison = compare_with_reference(self._reference, these, self._spec.alpha)
        self.records.append(
            ProbeRecord(
                **comparison.model_dump(),
                candidate=tuple(sorted(candidate)),
                with_prefix=answers.with_prefix,
                seconds=answers.seconds,
            )
        )
        self._display.say(
            f"Probe {len(self.records)}: {self._spec.candidate} in {ranges(candidate)}: {comparison.outcome} "
            f"({comparison.lost} lost, {comparison.gained} gained of {len(these)})."
        )
        return comparison.outcome == "right"


def search_layers(server: ProbeServer, spec: RunSpec, by: Criterion | None, display: ProgressDisplay) -> LayerBisect:
    """Bisect on a running server.

    The reference alone is asked twice, and so is the candidate in all layers. If both repeat their texts exactly, the floor is
    identical and each set is asked once. Otherwise an answer of a probe may be wrong, see `answer_noise`, and sets are asked
    repeatedly, see `assay.harness.bisect.layer_search.lead_needed`.

    Args:
        server: the server and the prompts.
        spec: roles, device, limits and alpha.
        by: what must be right again; None to choose.
        display: shows every probe.

    Raises:
        EngineError: the server failed, or the candidate raised.
        EvidenceError: a substitution did not happen.
    """
    begun = time.monotonic()
    short = min(spec.token_limit, MAX_TOKENS)
    if by == "text":
        server.max_tokens = short
    own = server.ask(frozenset())
    chosen, by_why = (by, "asked for") if by else choose_criterion(server.items, own.texts, spec.alpha)
    if chosen == "text" and server.max_tokens != short:
        server.max_tokens = short
        own = server.ask(frozenset())
    again = server.ask(frozenset())
    once, twice = (right_prompts(chosen, server.items, own.texts, answers.texts) for answers in (own, again))
    reference = twice if chosen == "text" else once  # a text compared with itself proves nothing
    right, total, floor = sum(reference), len(server.items), _differing(own, again)
    display.say(f"By {chosen}: {by_why}.")
    display.say(f"The reference asked twice: {total - floor} of {total} texts identical.")

    probe = _Probe(server, spec, chosen, own, reference, display)
    candidate_floor, flips, noise = 0, _flips(once, twice), 0.0
    if can_fail(chosen, right, total, spec.alpha):
        candidate_floor, more = probe.floor()
        flips += more
        display.say(f"The candidate in all layers asked twice: {total - candidate_floor} of {total} texts identical.")
        noise = answer_noise(flips, 2 * total, total, spec.alpha) if floor or candidate_floor else 0.0
        found = find_layers(sorted(probe.all_layers), probe, noise, spec.alpha)
    else:
        why = f"The reference alone gets {right} of {total} right by {chosen}: a broken candidate could not look worse."
        found = SearchResult("inconclusive", why, (), True, ())
    outcome, reason = found.outcome, found.why
    met = min((one.with_prefix for one in probe.records if len(one.candidate) == len(probe.all_layers)), default=0)
    if outcome == "nothing" and met < MIN_CACHED_SHARE * total:
        outcome = "inconclusive"
        reason = (
            f"The task is right with the candidate in all {len(probe.all_layers)} layers, but only {met} of {total} prompts had a "
            f"cached prefix of {CACHED_PREFIX_TOKENS} tokens or more: run with the prefix cache on."
        )
    reproduce = _command(spec, total, by)
    roles = (spec.reference, spec.candidate)
    return LayerBisect(
        outcome=outcome,
        why=reason,
        reference=spec.reference,
        candidate=spec.candidate,
        model=spec.model,
        device=spec.device,
        engine=server.engine.label,
        phases=Backend.parse(spec.candidate).phases,
        layers=tuple(sorted(probe.all_layers)),
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
        findings=(layer_finding(found, probe.records, chosen, roles, reproduce),) if found.restored else (),
        reproduce=reproduce,
        seconds=time.monotonic() - begun,
    )


def _differing(one: AnswerSet, other: AnswerSet) -> int:
    return sum(first != second for first, second in zip(one.texts, other.texts, strict=True))


def _flips(one: Sequence[bool], other: Sequence[bool]) -> int:
    return sum(first != second for first, second in zip(one, other, strict=True))


def _command(spec: RunSpec, prompts: int, by: Criterion | None) -> str:
    flags = [f"--device={spec.device}", f"--reference={spec.reference}", f"--candidate={spec.candidate}"]
    flags += [f"--model={spec.model}", *(f"--engine-arg={flag}" for flag in spec.engine_arg), f"--questions={prompts}"]
    return shlex.join(["assay", "bisect", "layers", *flags, *([f"--by={by}"] if by else [])])
