"""The evidence of a run as a claim reads it, and the judgement that a claim makes from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.harness.backend import Backend
from assay.harness.config import RunSpec, recorded_spec
from assay.harness.engines import registry
from assay.harness.engines.arguments import ABSENT, differences, numerics
from assay.harness.evidence.bench_folder import bench_folder
from assay.harness.evidence.counters import CallCount
from assay.harness.evidence.envelope import EnvelopeCounts, envelope_of
from assay.harness.evidence.executed import KERNEL_TRACES, KernelTrace
from assay.harness.evidence.faults import SENSITIVITY_RECORD, SensitivityRecord
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.evidence.folder import EvidenceFolder, RunFolder
from assay.harness.evidence.kernel_result import MATRIX, KernelResult
from assay.harness.evidence.layer_diff_record import shadow_errors_of
from assay.harness.evidence.manifest import (
    QUESTION_PLAN,
    RESOLVED,
    ROUNDING,
    Manifest,
    QuestionPlan,
    RoundingCost,
    ServerManifest,
)
from assay.harness.evidence.records import Answer, Item, Suite
from assay.harness.evidence.shadow_errors import ShadowErrors
from assay.harness.judge.answers import Pair, Pairing, envelope_pairs, pair
from assay.harness.judge.baselines import counts_of, fingerprints_of, measured_roles
from assay.harness.judge.noise_limits import EXACT_KL, measured_noise
from assay.harness.judge.paired_accuracy import Accuracy, Rule, accuracy_of, beginning
from assay.harness.judge.probe_scores import kernel_cost
from assay.harness.judge.report import SuiteResult
from assay.harness.schema import Part
from assay.harness.sides import ROLES, Engine, Role, profile_of
from assay.harness.verdict import Check, Finding

# Suites that compare both servers' answers.
_ANSWERED: tuple[Suite, ...] = ("accuracy", "greedy")


@dataclass(frozen=True)
class Judged:
    """A claim's contribution to the report of a run.

    Attributes:
        suite: its verdict, or None if it tests nothing or was not measured.
        checks: the requirements of a pass that it states.
        causes: the bugs of the kernel.
        findings: everything else that shows a defect.
        parts: fields of the `Report`, by name.
    """

    suite: SuiteResult | None = None
    checks: Sequence[Check] = ()
    causes: Sequence[Finding] = ()
    findings: Sequence[Finding] = ()
    parts: Mapping[str, Part] = field(default_factory=dict)


@dataclass(frozen=True)
class RunEvidence:
    """The contents of a run's folder, read once, for the claims.

    Attributes:
        pairings: pairs of answers to questions and of greedy texts, by suite.
        questions: in their random order, each prompt once.
        question_plan: the record made before the first of them was asked, or None.
        read: pairs of answers to the beginning of the questions that the test of accuracy reads.
        again: for each question that the reference answered twice, whether one answer was right and the other not.
        over_envelope: both roles' answers to the requests at required lengths.
        servers: by role; a role without a record is missing.
        fingerprints: each server's fingerprint; a role whose server did not report it is missing.
        argument_differences: server arguments that differ beyond the treatment and do not follow from it.
        derived_arguments: those that differ because the engine resolves each side's own command line differently.
        kernels: the kernels that each role's processes launched in the passes that they traced.
        errors: the candidate's errors on the reference's inputs, or None without a layer diff.
        envelope: the conditions of the calls that the layer diff compared, or None without one.
        matrix: the candidate's kernel on the op-level matrix, or None if it was not run.
        seeded: the answers of the servers under a seeded fault, by role; may be empty.
        measured: roles whose calls this run counted: all but a reference whose answers are stored, and a witness.
        claimed: phases that the candidate claims, as its server reported: its kernel need not be importable here.
        urls: roles whose server assay did not start.
        compared: the requested suites that compare both servers' answers.
        compares_servers: whether two servers are compared: by their answers, or by logits without a layer diff.
    """

    folder: RunFolder
    manifest: Manifest
    spec: RunSpec
    items: Sequence[Item]
    answers: Sequence[Answer]
    pairings: Mapping[Suite, Pairing]
    questions: Sequence[Item]
    question_plan: QuestionPlan | None
    read: Sequence[Pair]
    accuracy: Accuracy
    again: Sequence[bool]
    over_envelope: Sequence[Pair]
    servers: Mapping[Role, ServerManifest]
    fingerprints: Mapping[Role, Fingerprint]
    counts: Mapping[Role, Sequence[CallCount]]
    argument_differences: dict[str, tuple[str, str]]
    derived_arguments: dict[str, tuple[str, str]]
    kernels: Mapping[Role, Sequence[KernelTrace]]
    errors: ShadowErrors | None
    envelope: EnvelopeCounts | None
    matrix: KernelResult | None
    seeded: Mapping[Role, SensitivityRecord]
    measured: tuple[Role, ...]
    noise: Sequence[str]
    rounding: RoundingCost | None
    claimed: Sequence[str]
    urls: Collection[Role]
    compared: Sequence[Suite]
    compares_servers: bool

    @property
    def dtype(self) -> str:
        """The dtype of both servers' activations, or an empty string: of two, the sides may differ by the coarser."""
        dtypes = {numerics(server).get("dtype", "") for server in self.servers.values()}
        return dtypes.pop() if len(dtypes) == 1 else ""

    @property
    def honest_kl(self) -> float:
        """Mean divergence, in nats, that a candidate may cost that declares no noise.

        Where the sides differ in more than a backend, as for probes: no shadow compares the candidate's own layers.
        """
        return kernel_cost(self.dtype) if set(self.spec.treatment) - {"backend"} else EXACT_KL

    @property
    def needed(self) -> set[str]:
        """Ids of the questions that both roles must have answered: all, or those up to the end of the test if it ended early."""
        return {pair.item.id for pair in self.read} if self.accuracy.over else {item.id for item in self.questions}

    @classmethod
    def of(cls, folder: RunFolder, timed: bool = False) -> RunEvidence:
        """Read a run's folder.

        Args:
            timed: whether latency was measured to its end; in a run of latency alone, the servers are the timed ones.
        """
        manifest, items, answers = folder.manifest(), folder.items(), folder.answers()
        spec, plan = recorded_spec(manifest.spec), folder.read(QUESTION_PLAN)
        # Levels and margin are the policy's; only the size of the set comes from the record.
        rule = Rule(spec.policy.margin, spec.policy.alpha, spec.regression_alpha, plan.population if plan else None)
        pairings = {suite: pair(items, answers, suite) for suite in _ANSWERED}
        asked = pairings["accuracy"]
        questions = [item for item in items if item.suite == "accuracy" and item.id not in asked.repeated]
        read = beginning(questions, asked.pairs)
        only_timed = timed and not folder.progress().servers
        servers, counts = _servers(folder, only_timed)
        candidate = servers.get("candidate")
        errors, envelope, over_envelope = shadow_errors_of(folder), envelope_of(folder), envelope_pairs(answers)
        traces = {role: KERNEL_TRACES.read_each(folder.server_folder(role), folder.nonce) for role in ROLES}
        seeded = {role: folder.read(SENSITIVITY_RECORD, role) for role in ROLES}
        compared = [suite for suite in _ANSWERED if suite in spec.workload.suites]
        rounding = folder.read(ROUNDING)
        undeclared, derived = sorted_differences(
            bench_folder(folder) if only_timed else folder, servers, spec.treatment
        )
        if spec.reference_baseline:  # its model has the same hash, wherever the folder was when it was accepted
            undeclared = {
                name: values for name, values in undeclared.items() if name not in ("model_path", "tokenizer_path")
            }
        return cls(
            folder=folder,
            manifest=manifest,
            spec=spec,
            items=items,
            answers=answers,
            pairings=pairings,
            questions=questions,
            question_plan=plan,
            read=read,
            accuracy=accuracy_of(read, rule),
            again=_answered_otherwise(asked, answers),
            over_envelope=over_envelope,
            servers=servers,
            fingerprints=bench_folder(folder).fingerprints() if only_timed else fingerprints_of(folder),
            counts=counts,
            argument_differences=undeclared,
            derived_arguments=derived,
            kernels={role: list(by_process.values()) for role, by_process in traces.items()},
            errors=errors,
            envelope=envelope,
            matrix=folder.read(MATRIX),
            seeded={role: record for role, record in seeded.items() if record is not None},
            measured=tuple(role for role in measured_roles(folder) if profile_of(spec.sides[role].engine).instrumented),
            noise=[*manifest.noise.values(), *_measured(rounding)],
            rounding=rounding,
            claimed=candidate.claimed_phases if candidate else errors.headers[0].phases if errors else (),
            urls=[role for role, side in spec.sides.items() if Backend.parse(side.backend).is_url],
            compared=compared,
            compares_servers=bool(compared) or ("logits" in spec.workload.suites and errors is None),
        )


def _measured(rounding: RoundingCost | None) -> list[str]:
    """Name the rounding that the sides declare and that was measured, if any."""
    known = rounding is not None and rounding.mean is not None
    return [measured_noise(rounding.declared, rounding.mean)] if known else []  # type: ignore[union-attr,arg-type]


def _answered_otherwise(asked: Pairing, answers: Sequence[Answer]) -> list[bool]:
    """Return whether the reference's second answer to a question was right and the first not, or the other way round."""
    first = {pair.item.id: pair for pair in asked.pairs}
    again = [a for a in answers if a.suite == "accuracy" and a.role == "reference" and a.repeat > 0 and a.item in first]
    return [first[a.item].right("reference") != first[a.item].item.is_right(a.parsed) for a in again]


def _servers(folder: RunFolder, timed: bool) -> tuple[dict[Role, ServerManifest], dict[Role, Sequence[CallCount]]]:
    if timed:
        bench = bench_folder(folder)
        return {server.role: server for server in bench.manifest().servers}, {r: bench.counters(r) for r in ROLES}
    servers = folder.progress().servers
    return {server.role: server for server in servers}, {role: counts_of(folder, role) for role in ROLES}


def sorted_differences(
    folder: EvidenceFolder[Any], servers: Mapping[Role, ServerManifest], treatment: Mapping[str, tuple[str, str]]
) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]]:
    """Sort the arguments that differ beyond the treatment into those that nobody asked for and those that follow from it."""
    differ = differences(servers, treatment)
    resolved = {role: record.arguments for role in ROLES if (record := folder.read(RESOLVED, role)) is not None}
    kinds = {role: server.kind for role, server in servers.items()}
    derived = derived_arguments(differ, resolved, kinds)
    return {name: values for name, values in differ.items() if name not in derived}, derived


def derived_arguments(
    differences: Mapping[str, tuple[str, str]],
    resolved: Mapping[Role, Mapping[str, Any]],
    kinds: Mapping[Role, Engine],
) -> dict[str, tuple[str, str]]:
    """Return the differences that follow from the treatment: both servers have the arguments that their command lines resolve to.

    Args:
        resolved: arguments by role, from `Engine.resolved_arguments`, or {} if they were not requested.
        kinds: each role's engine.
    """
    if not differences or len(resolved) < len(ROLES) or len(set(kinds.values())) > 1:
        return {}
    reference, candidate = (registry.arguments(kinds[role]).flat(resolved[role]) for role in ROLES)
    own = {name: (reference.get(name, ABSENT), candidate.get(name, ABSENT)) for name in differences}
    return {name: values for name, values in differences.items() if own[name] == values}
