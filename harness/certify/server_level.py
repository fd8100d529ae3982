"""Examining faults in a pair of running servers, which stay up: the control switches each fault on and off.

A run comes first, whose evidence is what the faulty outputs are compared with; its candidate is the certified kernel. Then, for
each fault, the candidate's server answers questions, writes greedy texts and scores logits with the fault in what its model uses of
the kernel, while in the reference's server the candidate in the shadow has it, on the load of the envelope.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import torch

from assay.evals.envelope_load import BATCH, DEPTH, LoadReach, longest, short_load
from assay.evals.greedy import MAX_TOKENS as GREEDY_TOKENS
from assay.evals.questions import PROMPT_HEADER
from assay.harness.attention.call import AttentionCall, default_device
from assay.harness.bugs.catalogue import CATALOGUE
from assay.harness.bugs.seeded import SeededFault
from assay.harness.certify.footprint import widened
from assay.harness.certify.hidden import hidden_words, largest_effect
from assay.harness.certify.kernel import CertifiedKernel, seeded
from assay.harness.certify.pins import is_named
from assay.harness.certify.session import CannotContinueError, Trial, chosen
from assay.harness.collect.envelope import drop, send
from assay.harness.collect.interview import TOP_LOGPROBS
from assay.harness.collect.machine import installed_packages
from assay.harness.collect.sensitivity import QUESTIONS, fault_load, serve_fault, switched_on
from assay.harness.compare.answers import Pair
from assay.harness.conditions import PHASES
from assay.harness.config import RunSpec, make_spec
from assay.harness.engines.base import ChatRequest, Engine, Reply, cache_header
from assay.harness.engines.model import ModelShape, model_shape
from assay.harness.errors import EvidenceError
from assay.harness.evidence.certificate import (
    CertifiedEnvelope,
    Examined,
    Look,
    Outcome,
    installed_version,
    source_hash,
)
from assay.harness.evidence.faults import SENSITIVITY, SeededCalls, SensitivityRecord, read_seeded_calls
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff_record import pack_of
from assay.harness.evidence.pack import read_pack
from assay.harness.evidence.records import Answer, Item
from assay.harness.evidence.shadow_errors import FOLDER as SHADOW_FOLDER
from assay.harness.evidence.shadow_errors import read_shadow_errors
from assay.harness.judge.greedy_suite import greedy_suite
from assay.harness.judge.report import Report
from assay.harness.judge.sensitivity import answers_see, logits_see
from assay.harness.judge.truth_bounds import HEAD, LAYER, PHASE, AgainstNoise, compare_with_noise
from assay.harness.localize.staged import diagnose_kernel
from assay.harness.localize.threads import few_threads
from assay.harness.offline.replay import choose
from assay.harness.progress import ProgressDisplay
from assay.harness.run import OpenRun
from assay.harness.server.control import Control
from assay.harness.server.write_request import write_now
from assay.harness.sides import Device, Role
from assay.harness.text import some
from assay.harness.verdict import Finding

_SUITES = ("layers", "logits", "greedy", "accuracy")
_GREEDY_PROMPTS = 8
"""Greedy texts that are written under a fault: with 3 of 8 apart, a share of 10 % is rejected at 5 %."""
_SHADOWED_TOKENS = 4
"""Tokens of each answer while the candidate in the shadow has a fault: the first is of the prompt, the others are of decode."""
HONEST = "honest-served"


@dataclass(frozen=True)
class _Under:
    """The record of what the servers did under one fault.

    Attributes:
        served: answers and logits of the candidate's server.
        greedy: its greedy texts.
        shadowed: calls of the shadow in the reference's server.
        against: errors of the candidate in that shadow, against what noise explains.
    """

    served: SensitivityRecord
    greedy: tuple[Answer, ...]
    shadowed: SeededCalls | None
    against: AgainstNoise


class ServerLevel:
    """A pair of servers that stays up from fault to fault; it is started again after one of them has failed.

    Args:
        spec: what to run; its candidate is the certified kernel.
        folder: of the run.
        display: shows the progress.
        kernel: the certified kernel.

    Raises:
        UsageError: the spec cannot be run, or the folder holds another run. Nothing was started.
    """

    def __init__(self, spec: RunSpec, folder: Path, display: ProgressDisplay, kernel: CertifiedKernel) -> None:
        self.kernel = kernel
        self._opened = OpenRun.open(spec, folder, kept_running=True, display=display)
        self._display = display
        self._up: ExitStack | None = None
        self._engines: Mapping[Role, Engine] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stop()

    @property
    def spec(self) -> RunSpec:
        """The spec of the run."""
        return self._opened.plan.spec

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return self._opened.folder

    @cached_property
    def recorded(self) -> list[AttentionCall]:
        """Calls of the kernel's phases that the run without a fault recorded, as many as a replay examines.

        Raises:
            EvidenceError: it recorded none, or a file is damaged.
        """
        pack = pack_of(self.folder)
        if pack is None:
            raise EvidenceError(
                f"{self.folder.path} has no recorded call.", "a replay pack", "remove it, and certify again"
            )
        phases = self.kernel.declared.phases
        chosen = choose([recorded for recorded in read_pack(pack) if recorded.call.phase in phases])
        return [recorded.call.to(default_device()) for recorded in chosen]

    @property
    def model(self) -> ModelShape:
        """The model that is served."""
        return model_shape(self._opened.plan.model)

    def report(self) -> Report:
        """Make the report of the run without a fault, which is collected first.

        Raises:
            CannotContinueError: the servers did not start, or the run failed.
        """
        self._running()
        return self._opened.report()

    def under(self, fault: str) -> _Under:
        """Switch a fault on in both servers, and measure what every suite sees of it.

        Raises:
            EngineError: a server failed; both are started again for the next fault.
            CannotContinueError: they do not start.
            EvidenceError: the folder cannot be written.
        """
        engines = self._running()
        with ThreadPoolExecutor(len(engines)) as pool:
            try:
                shadow = pool.submit(self._shadowed, engines["reference"], fault)
                served, greedy = self._served(engines["candidate"], fault)
                seeded, against = shadow.result()
            except BaseException:
                self._stop()  # which also ends what the other thread waits for
                raise
        return _Under(served, greedy, seeded, against)

    def _running(self) -> Mapping[Role, Engine]:
        if self._engines:
            return self._engines
        with ExitStack() as starting:
            # Of servers that a fault ended: these are new ones.
            self.folder.update(self.folder.progress().model_copy(update={"failure": None}))
            engines = starting.enter_context(self._opened.servers(self._display))
            if engines:
                self._opened.collect(self._display, list(engines.values()))
            if failure := self.folder.progress().failure:
                do = "read the logs, and repeat the command"
                raise CannotContinueError(failure.found, "a complete run", do, details=failure.details)
            self._up = starting.pop_all()
        self._engines = engines
        return engines

    def _stop(self) -> None:
        self._engines = {}
        if self._up is not None:
            self._up.close()
        self._up = None

    def _served(self, engine: Engine, fault: str) -> tuple[SensitivityRecord, tuple[Answer, ...]]:
        plan, place, nonce = self._opened.plan, self.folder.server_folder(engine.role), self.folder.nonce
        load = fault_load(plan, self.folder, {"answers", "logits"})
        phases = self.kernel.declared.phases  # what computes the others is not the kernel
        record = serve_fault(engine, place, fault, load, nonce=nonce, phases=phases)
        items, replies = plan.of("greedy")[:_GREEDY_PROMPTS], dict[int, Reply]()
        with switched_on(engine, place, Control(fault=fault, fault_phases=phases)):
            cache_header(engine)
            asks = [ChatRequest(item.prompt, GREEDY_TOKENS, TOP_LOGPROBS) for item in items]
            engine.ask(asks, plan.spec.workload.concurrency, replies.__setitem__)
        return record, tuple(_greedy_answer(item, replies[number], nonce) for number, item in enumerate(items))

    def _shadowed(self, engine: Engine, fault: str) -> tuple[SeededCalls | None, AgainstNoise]:
        plan, place, nonce = self._opened.plan, self.folder.server_folder(engine.role), self.folder.nonce
        prompts = [ChatRequest(item.prompt, _SHADOWED_TOKENS) for item in plan.of("layers")]

        def poke() -> None:
            engine.ask([ChatRequest(PROMPT_HEADER, 1)], 1, lambda index, reply: None)

        shutil.rmtree(place / SENSITIVITY / SHADOW_FOLDER, ignore_errors=True)
        with switched_on(engine, place, Control(shadow=True, fault=fault)) as token:
            cache_header(engine)
            engine.ask(prompts, plan.spec.workload.concurrency, lambda index, reply: None)
            if engine.scorer is not None:
                # As few tokens as on a CPU: each more is another pass of decode in the shadow, under each of the faults.
                length = _reach(self.spec.policy.envelope_tokens, self.model, self.spec.device)
                short = LoadReach(length, self.model.context, chunk=length, depth=min(DEPTH.values()))
                send(engine, engine.scorer, short_load(short, self.model.vocabulary, token), drop)
            write_now(place / SENSITIVITY, poke)
            seeded = read_seeded_calls(place, token, nonce)
        return seeded, compare_with_noise(read_shadow_errors(place / SENSITIVITY, nonce))


def _examine(fault: SeededFault, level: ServerLevel) -> Examined:
    """Examine a fault in running servers with the suites of a run.

    Raises:
        EngineError: a server failed.
    """
    begun = time.monotonic()
    under = level.under(fault.id)
    looks = _looks_at(level, under)
    caught, changed = any(look.caught for look in looks), _changed(under)
    outcome: Outcome = "caught" if caught else "missed" if changed else "not shown"
    if fault.equivalent:
        outcome = "false alarm" if caught else "quiet"
    flagged = _flagged_places(under.against)
    findings = _findings_of(fault, level.kernel, level.recorded) if caught and not fault.equivalent else []
    noise = level.kernel.declared.noise
    effect = _effect_of(fault, level.recorded, noise) if outcome == "missed" else None
    unseen = f"{changed} calls were changed{hidden_words(effect, noise)}"
    return Examined(
        id=fault.id, kind="equivalent" if fault.equivalent else "fault", title=fault.title, links=fault.links,
        restricted=fault.where.words, outcome=outcome, looks=looks,
        named=is_named(fault, findings) if caught and not fault.equivalent else None,
        pinned=_is_pinned_in(fault, flagged, level.model) if flagged else None, findings=tuple(finding.id for finding in findings),
        where=_flagged_words(flagged, level.model) if flagged else "",
        effect=effect, why="" if outcome in ("caught", "quiet") else unseen,
        seed=fault.where.seed, seconds=time.monotonic() - begun,
    )  # fmt: skip


def _findings_of(fault: SeededFault, kernel: CertifiedKernel, calls: Sequence[AttentionCall]) -> list[Finding]:
    """List what a report would name: the findings on recorded calls of the certified kernel with the fault.

    The calls are those that the run without a fault recorded, and the fault sits on the certified kernel in assay's own process, as
    `assay replay` would run it.
    """
    fault.restart()
    with few_threads(calls):
        _, findings, _ = diagnose_kernel(seeded(fault, kernel), calls)
        return list(findings)


def _effect_of(fault: SeededFault, calls: Sequence[AttentionCall], noise: str) -> float | None:
    """Compute the largest effect of a fault on recorded calls, as `assay.harness.certify.hidden.largest_effect` measures it."""
    with few_threads(calls):
        return largest_effect(fault, widened(calls), noise)


def _looks_at(level: ServerLevel, under: _Under) -> tuple[Look, ...]:
    """List what each suite saw, by the measure of the run's own check of its sensitivity."""
    spec, folder, answers = level.spec, level.folder, level.folder.answers()
    noise = list(folder.manifest().noise.values())
    items = {item.id: item for item in folder.items() if item.suite == "greedy"}
    references = {a.item: a for a in answers if (a.suite, a.role, a.repeat) == ("greedy", "reference", 0)}
    pairs = [Pair(items[a.item], references[a.item], a) for a in under.greedy if a.item in references]
    place = folder.server_folder("candidate") / SENSITIVITY
    asked = len(under.served.answers)
    greedy = greedy_suite(spec.policy, pairs, answers, noise, synthetic=spec.workload.synthetic)
    right = answers_see(spec.policy, folder.items(), answers, under.served.answers).seen
    return (
        Look(suite="layers", caught=bool(_flagged_places(under.against)), of=under.shadowed.calls if under.shadowed else 0),
        Look(suite="logits", caught=logits_see(spec.policy, folder.path, place, noise, folder.nonce).seen, of=under.served.scored),
        Look(suite="greedy", caught=greedy.verdict == "regression", of=len(pairs)),
        Look(suite="accuracy", caught=right, after=asked if right else None, of=QUESTIONS),
    )  # fmt: skip


def _flagged_places(against: AgainstNoise) -> frozenset[tuple[int, int, int]]:
    """Return (layer, head, phase) of every cell that noise does not explain."""
    places = [
        test.index[test.flagged][:, [LAYER, HEAD, PHASE]] for test in (against.cells, against.gains, against.apart)
    ]
    return frozenset((int(layer), int(head), int(phase)) for layer, head, phase in np.concatenate(places))


def _is_pinned_in(fault: SeededFault, flagged: Collection[tuple[int, int, int]], model: ModelShape) -> bool:
    """Return True if all that was flagged lies where the fault is restricted to, and in every such layer.

    A fault that comes and goes may miss a layer by chance.
    """
    layers = set(range(model.layers)) if fault.where.layers is None else set(fault.where.layers)
    heads = set(fault.where.q_heads(model.q_heads))
    places = [(layer, head, phase) for layer, head, phase in flagged if layer >= 0]  # a gain may cover all layers
    within = all(layer in layers and (head in heads or head < 0) for layer, head, _ in places)
    everywhere = {layer for layer, _, _ in places} == layers or fault.where.counts
    phases = {PHASES[phase] for _, _, phase in places}
    return within and everywhere and (not fault.where.phase or phases == {fault.where.phase})


def _flagged_words(flagged: Collection[tuple[int, int, int]], model: ModelShape) -> str:
    """Describe what was flagged."""
    layers = sorted({layer for layer, _, _ in flagged if layer >= 0})
    heads = sorted({head for _, head, _ in flagged if head >= 0})
    phases = " and ".join(PHASES[phase] for phase in sorted({phase for _, _, phase in flagged}))
    return ", ".join(
        [phases, some("layer", layers, range(model.layers)), some("head", heads, range(model.q_heads))]
    )  # fmt: skip


def _examine_run(level: ServerLevel) -> Examined:
    """Examine the run without a fault, which should leave the certified kernel alone.

    Raises:
        CannotContinueError: the servers did not start, or the run failed.
    """
    begun = time.monotonic()
    report = level.report()
    looks = tuple(
        Look(suite=suite.id, caught=suite.verdict == "regression", of=0)
        for suite in report.suites
        if suite.id in _SUITES
    )
    flagged = report.verdict == "regression"
    return Examined(
        id=HONEST, kind="honest", title="honest kernel in a whole run", outcome="false alarm" if flagged else "quiet", looks=looks,
        findings=tuple(finding.id for finding in report.findings), why=report.headline if flagged else "",
        seconds=time.monotonic() - begun,
    )  # fmt: skip


def server_tasks(level: ServerLevel, only: Collection[str] = ()) -> list[Trial]:
    """List the run without a fault, and the examination of every fault.

    Raises:
        UsageError: there is nothing with one of these ids.
    """
    tasks = [Trial(HONEST, "honest", "honest kernel in a whole run", (), "", lambda: _examine_run(level))]
    tasks += [Trial.of(fault, lambda fault: _examine(fault, level)) for fault in CATALOGUE.values()]
    return chosen(tasks, only)


def server_envelope(level: ServerLevel) -> CertifiedEnvelope:
    """Return the envelope of the servers: what the policy of their run asks for."""
    spec, model = level.spec, level.model
    length = _reach(spec.policy.envelope_tokens, model, spec.device)
    return CertifiedEnvelope(
        level="server", device=spec.device, machine=torch.cuda.get_device_name() if spec.device == "cuda" else "",
        engine=f"SGLang {installed_packages().get('sglang', '')}", reference=spec.reference.backend, model=spec.reference.model,
        model_hash=level.folder.manifest().model_hash, candidate=level.kernel.name,
        code=level.kernel.code, phases=level.kernel.declared.phases, noise=level.kernel.declared.noise,
        dtypes=(model.dtype,) if spec.device == "cuda" else ("float32",), torch=torch.__version__, layers=model.layers,
        heads=model.q_heads, most_new=length, longest=length, largest_batch=BATCH[spec.device], seed=spec.workload.order_seed,
        suites=_SUITES, version=installed_version(), source=source_hash(),
    )  # fmt: skip


def _reach(tokens: int, model: ModelShape, device: Device) -> int:
    """Return the number of tokens up to which requests under a fault reach."""
    return longest(tokens, model.context, DEPTH[device])


def certified_spec(device: str, model: str, kernel: CertifiedKernel) -> RunSpec:
    """Make the spec of the run in whose servers faults are seeded: the certified kernel against the device's reference."""
    return make_spec(
        {"device": device, "model": model, "candidate": kernel.backend, "suites": ",".join(reversed(_SUITES))}, None
    )


def _greedy_answer(item: Item, reply: Reply, nonce: str) -> Answer:
    return Answer(
        run=nonce, suite="greedy", role="candidate", item=item.id, prompt_hash=item.prompt_hash, request_id=reply.request_id,
        text=reply.text, parsed=None, finish_reason=reply.finish_reason, prompt_tokens=reply.prompt_tokens,
        completion_tokens=reply.completion_tokens, cached_tokens=reply.cached_tokens, latency_s=reply.latency_s,
        tokens=reply.tokens,
    )  # fmt: skip


def _changed(under: _Under) -> int:
    return sum(calls.changed for calls in (under.served.served, under.shadowed) if calls is not None)
