"""One running server whose control file selects the layers that run the candidate: its probes and the layer bisection."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from assay.evals.greedy import MAX_TOKENS
from assay.harness.backend import Backend
from assay.harness.conditions import CACHED_PREFIX_TOKENS
from assay.harness.config import BISECT_FLAGS, RunSpec
from assay.harness.drivers.bisect.layer_search import SearchResult, find_layers
from assay.harness.drivers.bisect.layer_task import (
    LayerBisection,
    ProbeRecord,
    can_fail,
    choose_criterion,
    conclude,
    fewest_prompts,
    probe_record,
    right_prompts,
)
from assay.harness.engines.base import ChatRequest, Engine, answers, cache_header
from assay.harness.engines.inside.control import SHADOW, Control, set_control, substituted_calls
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.layer_diff_record import layers_seen
from assay.harness.evidence.records import Item
from assay.harness.progress import ProgressDisplay
from assay.harness.run.plan import Plan
from assay.harness.run.preflight import check_environment
from assay.harness.run.servers import core_of, make_engine, running
from assay.harness.statement import state
from assay.harness.text import ranges


class _AnswerSet(NamedTuple):
    """The answers to all prompts under one control, in prompt order; `with_prefix` of them had at least 16 cached tokens."""

    texts: tuple[str, ...]
    with_prefix: int
    seconds: float


@dataclass
class _ProbeServer:
    """A running server with the candidate as the reference's shadow, its evidence folder, and the prompts of a probe."""

    engine: Engine
    evidence: Path
    items: Sequence[Item]
    max_tokens: int
    concurrency: int

    def ask(self, candidate: frozenset[int]) -> _AnswerSet:
        """Answer all prompts with the candidate in these layers and the shared header cached; verify that it ran there.

        Raises:
            EngineError: the server failed; a candidate that raises ends the server.
            EvidenceError: the candidate ran in other layers.
        """
        begun = time.monotonic()
        set_control(self.evidence, Control(substitute=tuple(candidate)))
        # The cache was filled under the last control, and the K and V of later layers depend on the layers substituted then.
        cache_header(self.engine)
        asks = [ChatRequest.of(item, self.max_tokens) for item in self.items]
        said = answers(self.engine, asks, self.concurrency)
        ran = frozenset(substituted_calls(self.evidence))
        if ran != candidate:
            raise EvidenceError(
                f"The candidate should have run in the layers {ranges(candidate)}; it ran in {ranges(ran)}.",
                "the candidate's output in these layers and no others, in the phases that it computes",
                "see the server's log",
            )
        texts = tuple(answer.text for answer in said)
        with_prefix = sum((answer.cached_tokens or 0) >= CACHED_PREFIX_TOKENS for answer in said)
        return _AnswerSet(texts, with_prefix, time.monotonic() - begun)


def bisect_layers(plan: Plan, folder: Path, display: ProgressDisplay) -> LayerBisection:
    """Find the layers that must run the reference for the task to be right again; start one server for the search.

    Args:
        plan: the validated run: roles, device, limits, alpha, and the questions of each probe, which share `PROMPT_HEADER`.

    Raises:
        UsageError: `folder` is not empty, there are too few questions to detect a loss, or this machine cannot serve the run.
        EngineError: the server failed, or the candidate raised.
        EvidenceError: a substitution did not happen, or a file cannot be written.
    """
    spec, items = plan.spec, plan.of("accuracy")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty.", "a new folder", "give another one with --out")
    fewest = fewest_prompts(spec.policy.alpha)
    if len(items) < fewest:
        raise UsageError(
            f"--questions is {len(items)}: even the loss of all of them would not be significant.",
            f"at least {fewest}, at alpha = {spec.policy.alpha:g}",
            f"give --questions {fewest} or more",
        )
    check_environment(plan, display.say)
    evidence = folder / "server"
    set_control(evidence, Control())
    display.say(f"Starting {spec.reference.backend} with {spec.candidate.backend} as its shadow.")
    shadowed = spec.reference.launched_with({SHADOW: spec.candidate.backend})
    server = make_engine(
        plan, "reference", evidence, folder / "server.log", cpu_core=core_of(spec.device), eager=True, side=shadowed
    )
    with running([server], spec.device, display):
        display.say(f"Ready in {server.startup_s or 0:.0f} s.")
        probed = _ProbeServer(server, evidence, items, spec.workload.token_limit, spec.workload.concurrency)
        return _search_layers(probed, spec, display)


def _search_layers(server: _ProbeServer, spec: RunSpec, display: ProgressDisplay) -> LayerBisection:
    """Bisect on a running server.

    The reference alone is asked twice, and so is the candidate in all layers. If both repeat their texts exactly, each set is
    probed once; otherwise it is probed until one outcome leads clearly.
    """
    begun, alpha, items = time.monotonic(), spec.policy.alpha, server.items
    own = server.ask(frozenset())
    by, known = choose_criterion(items, own.texts, alpha)
    if by == "text":
        server.max_tokens = min(server.max_tokens, MAX_TOKENS)
        own = server.ask(frozenset())
    again = server.ask(frozenset())
    # A text compared with itself proves nothing.
    reference = right_prompts(by, items, own.texts, (again if by == "text" else own).texts)
    display.say(f"By {by}: the reference is right on {known} of {len(items)} questions.")
    layers, floor = layers_seen(server.evidence), _floor("The reference", own, again, display)
    candidate_floor, waiting, records = 0, list[_AnswerSet](), list[ProbeRecord]()

    def probe(candidate: frozenset[int]) -> bool:
        every = candidate == frozenset(layers)
        answers = waiting.pop(0) if every and waiting else server.ask(candidate)
        right = right_prompts(by, items, own.texts, answers.texts)
        made = probe_record(candidate, reference, right, alpha, answers.with_prefix, answers.seconds)
        records.append(made)
        display.say(
            f"Probe {len(records)}: {spec.candidate.backend} in {ranges(candidate)}: {made.outcome} "
            f"({made.lost} lost, {made.gained} gained of {len(right)})."
        )
        return made.outcome == "right"

    if can_fail(by, sum(reference), len(items), alpha):
        waiting += [server.ask(frozenset(layers)) for _ in range(2)]  # the candidate's floor, and its first probes
        candidate_floor = _floor("The candidate in all layers", waiting[0], waiting[1], display)
        search = find_layers(layers, probe, steady=not floor and not candidate_floor)
    else:
        why = state("reference-too-weak", right=sum(reference), prompts=len(items), by=by)
        search = SearchResult(outcome="inconclusive", why=why)
    command = ["assay", "bisect", "layers", *spec.given_flags(BISECT_FLAGS), f"--questions={len(items)}"]
    return conclude(
        LayerBisection(
            **search.model_dump(),
            reference=spec.reference.backend,
            candidate=spec.candidate.backend,
            model=spec.reference.model,
            device=spec.device,
            engine=server.engine.label,
            phases=Backend.parse(spec.candidate.backend).phases,
            layers=layers,
            prompts=len(items),
            alpha=alpha,
            reproduce=shlex.join(command),
            by=by,
            known=known,
            reference_right=sum(reference),
            floor=floor,
            candidate_floor=candidate_floor,
            probes=tuple(records),
            seconds=time.monotonic() - begun,
        )
    )


def _floor(who: str, first: _AnswerSet, second: _AnswerSet, display: ProgressDisplay) -> int:
    """Count the texts that differ between two answers to the same prompts."""
    differing = sum(text != again for text, again in zip(first.texts, second.texts, strict=True))
    total = len(first.texts)
    display.say(f"{who} asked twice: {total - differing} of {total} texts identical.")
    return differing
