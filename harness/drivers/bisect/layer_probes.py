"""One running server, in which a control file selects the layers that run the candidate: its probes and the layer bisection."""

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
from assay.harness.drivers.bisect.layer_search import find_layers
from assay.harness.drivers.bisect.layer_task import (
    Floors,
    LayerBisection,
    LayerSetup,
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
from assay.harness.files import write_whole
from assay.harness.progress import ProgressDisplay
from assay.harness.run.plan import Plan
from assay.harness.run.preflight import check_environment
from assay.harness.run.servers import core_of, make_engine, running
from assay.harness.text import ranges

_RESULT = "bisect.json"


class _AnswerSet(NamedTuple):
    """The answers to all prompts under one control, in the order of the prompts; `with_prefix` had 16 cached tokens or more."""

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
        # The cache was filled under the last control: the K and V below a substituted layer depend on it.
        cache_header(self.engine)
        asks = [ChatRequest.of(item, self.max_tokens) for item in self.items]
        said = answers(self.engine, asks, self.concurrency)
        ran = frozenset(substituted_calls(self.evidence))
        if ran != candidate:
            raise EvidenceError(
                f"The candidate should have run in the layers {ranges(candidate)}; it ran in {ranges(ran)}.",
                "the candidate's output in these layers and no others, in the phases that it computes",
                "see the server's log; a replayed CUDA graph cannot be substituted: start the server without graphs",
            )
        texts = tuple(answer.text for answer in said)
        with_prefix = sum((answer.cached_tokens or 0) >= CACHED_PREFIX_TOKENS for answer in said)
        return _AnswerSet(texts, with_prefix, time.monotonic() - begun)


def bisect_layers(plan: Plan, folder: Path, display: ProgressDisplay) -> LayerBisection:
    """Find the layers that must run the reference for the task to be right again; start one server for it.

    Args:
        plan: the validated run: roles, device, limits, alpha, and the questions of each probe, which share `PROMPT_HEADER`.
        folder: new folder for the server's log and ``bisect.json``.
        display: shows every probe.

    Returns:
        The result, which also lies in ``folder/bisect.json``.

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
    check_environment(plan)
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
        result = _search_layers(probed, spec, display)
    write_whole(folder / _RESULT, result.model_dump_json(indent=2) + "\n")
    return result


class _Reference(NamedTuple):
    """The reference alone, asked twice: its first answers, whether each is right, and floors without the candidate's."""

    texts: tuple[str, ...]
    right: list[bool]
    floors: Floors


class _Probe:
    """The probe of `find_layers`: receives a set of layers, returns whether the task is right, and keeps every answer."""

    def __init__(
        self, server: _ProbeServer, setup: LayerSetup, reference: _Reference, display: ProgressDisplay
    ) -> None:
        self._server, self._setup, self._reference = server, setup, reference
        self._layers, self._display = frozenset(setup.layers), display
        self.records: list[ProbeRecord] = []
        self._waiting: list[_AnswerSet] = []

    def floors(self) -> Floors:
        """Ask the candidate in all layers twice, and measure both floors. The answers serve as probes, too."""
        self._waiting = [self._server.ask(self._layers) for _ in range(2)]
        total = len(self._waiting[0].texts)
        floor = _differing(*self._waiting)
        self._display.say(f"The candidate in all layers asked twice: {total - floor} of {total} texts identical.")
        return self._reference.floors.model_copy(update={"candidate_floor": floor})

    def __call__(self, candidate: frozenset[int]) -> bool:
        known = self._waiting if candidate == self._layers else []
        answers = known.pop(0) if known else self._server.ask(candidate)
        own, items, by = self._reference, self._server.items, self._reference.floors.by
        right = right_prompts(by, items, own.texts, answers.texts)
        alpha, cached = self._setup.alpha, answers.with_prefix
        made = probe_record(candidate, own.right, right, alpha, cached, answers.seconds)
        self.records.append(made)
        self._display.say(
            f"Probe {len(self.records)}: {self._setup.candidate} in {ranges(candidate)}: {made.outcome} "
            f"({made.lost} lost, {made.gained} gained of {len(right)})."
        )
        return made.outcome == "right"


def _search_layers(server: _ProbeServer, spec: RunSpec, display: ProgressDisplay) -> LayerBisection:
    """Bisect on a running server.

    The reference alone is asked twice, and so is the candidate in all layers. If both repeat their texts exactly, each set is
    probed once; otherwise until one outcome leads clearly.
    """
    begun = time.monotonic()
    reference = _ask_reference(server, spec.workload.token_limit, spec.policy.alpha, display)
    setup = _setup(server, spec)
    probe = _Probe(server, setup, reference, display)
    floors, search = reference.floors, None
    if can_fail(floors.by, floors.reference_right, setup.prompts, setup.alpha):
        floors = probe.floors()
        search = find_layers(setup.layers, probe, floors.steady)
    return conclude(setup, floors, search, probe.records, time.monotonic() - begun)


def _ask_reference(server: _ProbeServer, token_limit: int, alpha: float, display: ProgressDisplay) -> _Reference:
    """Ask the reference alone twice, and choose what must be right. Texts are short, whatever the limit of an answer."""
    own = server.ask(frozenset())
    chosen, why = choose_criterion(server.items, own.texts, alpha)
    if chosen == "text":
        server.max_tokens = min(token_limit, MAX_TOKENS)
        own = server.ask(frozenset())
    again = server.ask(frozenset())
    once, twice = (right_prompts(chosen, server.items, own.texts, answers.texts) for answers in (own, again))
    total, floor = len(server.items), _differing(own, again)
    display.say(f"By {chosen}: {why}.")
    display.say(f"The reference asked twice: {total - floor} of {total} texts identical.")
    right = twice if chosen == "text" else once  # a text compared with itself proves nothing
    floors = Floors(by=chosen, by_why=why, reference_right=sum(right), floor=floor)
    return _Reference(own.texts, right, floors)


def _setup(server: _ProbeServer, spec: RunSpec) -> LayerSetup:
    command = ["assay", "bisect", "layers", *spec.given_flags(BISECT_FLAGS), f"--questions={len(server.items)}"]
    return LayerSetup(
        reference=spec.reference.backend,
        candidate=spec.candidate.backend,
        model=spec.reference.model,
        device=spec.device,
        engine=server.engine.label,
        phases=Backend.parse(spec.candidate.backend).phases,
        layers=layers_seen(server.evidence),
        prompts=len(server.items),
        alpha=spec.policy.alpha,
        reproduce=shlex.join(command),
    )


def _differing(left: _AnswerSet, right: _AnswerSet) -> int:
    return sum(first != second for first, second in zip(left.texts, right.texts, strict=True))
