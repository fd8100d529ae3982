"""A run, checked: `RunSpec` -> `Plan`. Nothing is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from assay.evals.greedy import greedy_prompts
from assay.evals.loads import shapes_of
from assay.evals.question_sets import draw
from assay.evals.questions import AnyQuestion, prompt_hash
from assay.harness.backend import Backend
from assay.harness.collect.preflight import check_certificate, check_environment
from assay.harness.config import RunSpec, Workload
from assay.harness.engines.model import fit_of, resolve_model
from assay.harness.engines.sglang.catalog import checked_backend
from assay.harness.engines.sglang.launch import check_engine_args
from assay.harness.evidence.records import Item, Suite
from assay.harness.sides import ROLES, Role

COLD_EVERY, MAX_COLD = 8, 16
"""One question in eight, until there are sixteen, is asked with an empty cache, so that both conditions occur in every run."""
COLD_QUESTIONS, WARM_QUESTIONS = 4, 12
"""Questions of the layer diff: with an empty cache, one by one, and with the shared header cached."""


@dataclass(frozen=True)
class Plan:
    """A validated run: it can no longer cause a usage error.

    Attributes:
        spec: what was asked for.
        models: folder of each role's model.
        items: what both servers are asked at most; questions in their random order.
        units: units of the set from which the questions were drawn (`Item.unit`).
        reference: the reference's backend.
        candidate: the candidate's backend.
    """

    spec: RunSpec
    models: Mapping[Role, Path]
    items: tuple[Item, ...]
    reference: Backend
    candidate: Backend
    units: int = 0

    def of(self, suite: Suite) -> list[Item]:
        """List the items of a suite, in order."""
        return [item for item in self.items if item.suite == suite]

    @property
    def model(self) -> Path:
        """Folder of the reference's model: the one that questions and loads are made for."""
        return self.models["reference"]

    def backend(self, role: Role) -> Backend:
        """Return a role's backend."""
        return self.reference if role == "reference" else self.candidate

    @property
    def compares_answers(self) -> bool:
        """True if both roles answer questions or prompts."""
        return bool({"accuracy", "greedy"} & set(self.spec.workload.suites))

    @property
    def has_url(self) -> bool:
        """True if a role is a running server, which assay cannot instrument."""
        return self.reference.is_url or self.candidate.is_url

    @property
    def has_layer_diff(self) -> bool:
        """True if the layer diff was asked for and is possible."""
        return "layers" in self.spec.workload.suites and not self.has_url

    @property
    def has_kernel(self) -> bool:
        """True if a role is a kernel of the contract."""
        return self.reference.is_kernel or self.candidate.is_kernel

    @property
    def has_decode_kernel(self) -> bool:
        """True if a kernel of the contract computes decode in either role.

        Such a kernel resolves its paging in Python, so a CUDA graph cannot capture its decode calls.
        """
        return any(backend.is_kernel and "decode" in backend.phases for backend in (self.reference, self.candidate))

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles that need a server.

        A layer diff without answers needs only the reference's, in which the candidate runs as a shadow or is substituted.
        """
        scores = "logits" in self.spec.workload.suites and not self.has_layer_diff
        return ROLES if self.compares_answers or scores else ("reference",)


def prepare(spec: RunSpec) -> Plan:
    """Check backends, model and questions; start nothing.

    Raises:
        UsageError: an unknown backend, an incomplete model, a certificate that cannot be read, an unknown shape of requests, a
            device that is not there or cannot hold the model, or questions that cannot be read.
    """
    _check_spec(spec)
    return _with_items(_on_this_machine(spec))


def _check_spec(spec: RunSpec) -> None:
    """Check what a spec says by itself; nothing is read.

    Raises:
        UsageError: flags that assay sets itself, or an unknown shape of requests.
    """
    for role in ROLES:
        check_engine_args(spec.side(role).flags)
    shapes_of(spec.workload.latency_shapes, spec.device)


def _on_this_machine(spec: RunSpec) -> Plan:
    """Find backends, models, certificate and device."""
    reference = checked_backend("--reference", spec.reference.backend)
    candidate = checked_backend("--candidate", spec.candidate.backend)
    check_certificate(spec.policy.certificate)
    models: dict[Role, Path] = {role: resolve_model(spec.side(role).model, spec.side(role).flags) for role in ROLES}
    sides = {role: spec.side(role) for role in ROLES}
    check_environment(spec.device, sides, models, (reference, candidate))
    return Plan(spec, models, (), reference, candidate)


def _with_items(plan: Plan) -> Plan:
    """Draw the questions and prompts."""
    workload = plan.spec.workload
    asked = workload.questions if "accuracy" in workload.suites else 0
    traced = COLD_QUESTIONS + WARM_QUESTIONS if plan.has_layer_diff else 0
    prompts = {suite: count for suite, count in _prompt_counts(workload).items() if suite in workload.suites}
    most = max(asked, traced, *prompts.values(), 1)
    drawn = draw(workload.data, most, workload.order_seed, lambda: fit_of(plan.model, workload.token_limit))
    questions = drawn.questions
    items = [_item("accuracy", question, place) for place, question in enumerate(questions[:asked])]
    items += [_item("layers", question) for question in questions[:traced]]
    for suite, count in prompts.items():
        items += [
            Item(suite=suite, id=id_, prompt=prompt, prompt_hash=prompt_hash(prompt))
            for id_, prompt in greedy_prompts(questions, count, workload.synthetic)
        ]
    return replace(plan, items=tuple(items), units=drawn.units)


def _prompt_counts(workload: Workload) -> dict[Suite, int]:
    """Count the prompts of the suites of texts and logits. The logits' prompts are the first greedy ones, with the same ids."""
    return {"greedy": workload.greedy_prompts, "logits": workload.logits_prompts}


def _item(suite: Suite, question: AnyQuestion, place: int | None = None) -> Item:
    return Item(
        suite=suite,
        id=question.id,
        prompt=question.prompt,
        prompt_hash=question.prompt_hash,
        group=question.group,
        subject=question.subject,
        expected=question.answer,
        unit="" if question.unit == question.id else question.unit,
        cold=place is not None and place < COLD_EVERY * MAX_COLD and place % COLD_EVERY == COLD_EVERY - 1,
    )
