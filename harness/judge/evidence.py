"""The evidence of a run as a claim reads it, and what a claim makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from assay.harness.backend import Backend
from assay.harness.baselines import Status, counts_of, measured_roles, status_of
from assay.harness.compare.answers import Pair, Pairing, pair
from assay.harness.config import RunSpec, recorded_spec
from assay.harness.engines.sglang.arguments import differences
from assay.harness.evidence.bench_folder import bench_folder
from assay.harness.evidence.counters import CallCount
from assay.harness.evidence.envelope import EnvelopeCounts, envelope_of
from assay.harness.evidence.executed import KERNEL_TRACES, KernelTrace
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff_record import shadow_errors_of
from assay.harness.evidence.manifest import Manifest, ServerManifest
from assay.harness.evidence.op_matrix import MATRIX, MatrixRecord
from assay.harness.evidence.records import Answer, Item, Suite
from assay.harness.evidence.sensitivity import SENSITIVITY_RECORD, SensitivityRecord
from assay.harness.evidence.shadow_errors import ShadowErrors
from assay.harness.judge.questions import Questions, parsed_from_text, read_questions
from assay.harness.judge.report import SuiteResult
from assay.harness.judge.served import ServedEnvelope, envelope_pairs, served_envelope
from assay.harness.schema import Part
from assay.harness.sides import ROLES, Role
from assay.harness.verdict import Check, Finding

_ANSWERED: tuple[Suite, ...] = ("mmlu", "greedy")
"""Suites that compare both servers' answers."""


@dataclass(frozen=True)
class Judged:
    """What a claim contributes to the report of a run.

    Attributes:
        suite: its verdict; None if it tests nothing, or nothing of it was measured.
        checks: the requirements of a pass that it states.
        causes: what is wrong with the kernel.
        findings: what else shows that something is wrong.
        parts: fields of the `Report`, by name.
    """

    suite: SuiteResult | None = None
    checks: Sequence[Check] = ()
    causes: Sequence[Finding] = ()
    findings: Sequence[Finding] = ()
    parts: Mapping[str, Part] = field(default_factory=dict)


class RunEvidence:
    """The contents of a run's folder, each read once, when a claim first asks for it.

    Any of them may raise an `EvidenceError`: a file is damaged, or of another run.

    Args:
        folder: the run's.
        timed: whether latency was measured to its end; in a run of latency alone, the servers are those that were timed.
    """

    def __init__(self, folder: RunFolder, timed: bool = False) -> None:
        self.folder = folder
        self._timed = timed

    @cached_property
    def manifest(self) -> Manifest:
        """The record of what runs, with what, on what."""
        return self.folder.manifest()

    @cached_property
    def spec(self) -> RunSpec:
        """Both sides, the workload and the policy."""
        return recorded_spec(self.manifest.spec)

    @cached_property
    def items(self) -> Sequence[Item]:
        """All that was to be asked."""
        return self.folder.items()

    @cached_property
    def recorded(self) -> Sequence[Answer]:
        """The answers as recorded."""
        return self.folder.answers()

    @cached_property
    def answers(self) -> Sequence[Answer]:
        """The answers, parsed from their texts again."""
        return parsed_from_text(self.recorded, self.items)

    @cached_property
    def pairings(self) -> Mapping[Suite, Pairing]:
        """Pairs of answers to questions and of greedy texts, by suite."""
        return {suite: pair(self.items, self.answers, suite) for suite in _ANSWERED}

    @property
    def questions(self) -> Sequence[Pair]:
        """Pairs of answers to questions."""
        return self.pairings["mmlu"].pairs

    @cached_property
    def accuracy(self) -> Questions:
        """The questions, and what the test of accuracy reads of them."""
        return read_questions(self.folder, self.spec, self.items, self.pairings["mmlu"], self.answers)

    @cached_property
    def over_envelope(self) -> Sequence[Pair]:
        """Both roles' answers to the requests of the envelope."""
        return envelope_pairs(self.answers)

    @cached_property
    def servers(self) -> Mapping[Role, ServerManifest]:
        """The servers, by role; none for a role whose server never started."""
        servers = self.folder.progress().servers
        if self._timed and not servers:
            servers = bench_folder(self.folder).manifest().servers
        return {server.role: server for server in servers}

    @cached_property
    def counts(self) -> Mapping[Role, Sequence[CallCount]]:
        """The attention calls that were counted, by role."""
        if self._timed and not self.folder.progress().servers:
            bench = bench_folder(self.folder)
            return {role: bench.counters(role) for role in ROLES}
        return {role: counts_of(self.folder, role) for role in ROLES}

    @cached_property
    def argument_differences(self) -> dict[str, tuple[str, str]]:
        """Server arguments that differ beyond the treatment."""
        if len(self.servers) < len(ROLES):
            return {}
        reference, candidate = (self.servers[role].arguments for role in ROLES)
        return differences(reference, candidate, self.spec.treatment)

    @cached_property
    def kernels(self) -> Mapping[Role, Sequence[KernelTrace]]:
        """What the processes of each role saw in the passes that they traced."""
        folder = self.folder
        traces = {role: KERNEL_TRACES.read_each(folder.server_folder(role), folder.nonce) for role in ROLES}
        return {role: list(by_process.values()) for role, by_process in traces.items()}

    @cached_property
    def errors(self) -> ShadowErrors | None:
        """The candidate's errors on the reference's inputs; None without a layer diff."""
        return shadow_errors_of(self.folder)

    @cached_property
    def envelope(self) -> EnvelopeCounts | None:
        """The conditions of the calls that the layer diff compared; None without one."""
        return envelope_of(self.folder)

    @cached_property
    def served(self) -> ServedEnvelope | None:
        """What the candidate's own server answered of the envelope; None where no such answer is compared."""
        if self.envelope is None or self.envelope.limits is None or not self.over_envelope:
            return None
        admissions = self.folder.admissions("candidate")
        return served_envelope(self.envelope.limits, self.over_envelope, admissions, self.counts["candidate"])

    @cached_property
    def matrix(self) -> MatrixRecord | None:
        """The candidate's kernel on the op-level matrix; None where it was not run."""
        return self.folder.read(MATRIX)

    @cached_property
    def seeded(self) -> Mapping[Role, SensitivityRecord]:
        """What the servers did under a seeded fault, by role; empty where none was seeded."""
        records = {role: self.folder.read(SENSITIVITY_RECORD, role) for role in ROLES}
        return {role: record for role, record in records.items() if record is not None}

    @cached_property
    def baselines(self) -> Status | None:
        """The accepted baselines that match; None if the run was not compared with any."""
        return status_of(self.folder)

    @cached_property
    def measured(self) -> tuple[Role, ...]:
        """Roles that were measured in this run: all but a reference whose answers are stored."""
        return measured_roles(self.folder)

    @property
    def reference_is_stored(self) -> bool:
        """True if the reference's answers are those of an accepted baseline."""
        return "reference" not in self.measured

    @property
    def noise(self) -> Sequence[str]:
        """Noise families that the roles declare."""
        return list(self.manifest.noise.values())

    @property
    def claimed(self) -> Sequence[str]:
        """Phases that the candidate claims, as its server reported: its kernel need not be importable here."""
        if candidate := self.servers.get("candidate"):
            return candidate.claimed_phases
        return self.errors.headers[0].phases if self.errors is not None else ()

    @property
    def has_url(self) -> bool:
        """True if a role is a server that assay did not start."""
        return any(Backend.parse(self.spec.side(role).backend).is_url for role in ROLES)

    @property
    def compared(self) -> Sequence[Suite]:
        """The requested suites that compare both servers' answers."""
        return [suite for suite in _ANSWERED if suite in self.spec.workload.suites]

    @property
    def compares_servers(self) -> bool:
        """True if two servers are compared: by their answers, or by logits without a layer diff."""
        return bool(self.compared) or ("logits" in self.spec.workload.suites and self.errors is None)
