"""A checked run: `RunSpec` -> `Plan`. Nothing is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from assay.evals.greedy import greedy_prompts
from assay.evals.gsm8k import draw_gsm8k, is_gsm8k
from assay.evals.loads import shapes_of
from assay.evals.mmlu import draw_questions
from assay.evals.questions import Question, prompt_hash
from assay.harness.backend import Backend
from assay.harness.config import RunSpec
from assay.harness.engines import registry
from assay.harness.engines.launch import check_engine_args
from assay.harness.engines.model import resolve_model
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.envelope import Envelope
from assay.harness.evidence.fingerprint import read_fingerprint
from assay.harness.evidence.records import Item, Suite
from assay.harness.extras import require
from assay.harness.judge.paired_accuracy import Rule
from assay.harness.sides import ROLES, Role, profile_of
from assay.harness.text import listed
from assay.harness.workload import Workload

# One question in eight is asked with an empty cache, until there are sixteen, so that both conditions occur in every run.
_COLD_EVERY, _MAX_COLD = 8, 16
COLD_QUESTIONS, WARM_QUESTIONS = 4, 12
"""Questions of the layer diff: asked one by one with an empty cache, and with the shared header cached."""


@dataclass(frozen=True)
class Plan:
    """A validated run: it can no longer cause a usage error.

    Attributes:
        spec: the requested run.
        models: folder of each role's model.
        items: the most that both servers are asked; questions are in their random order.
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
        """Folder of the reference's model, for which questions and loads are made."""
        return self.models["reference"]

    def backend(self, role: Role) -> Backend:
        """Return a role's backend."""
        return self.reference if role == "reference" else self.candidate

    @property
    def rule(self) -> Rule:
        """The parameters of the accuracy test."""
        policy = self.spec.policy
        return Rule(policy.margin, policy.alpha, self.spec.regression_alpha, self.units)

    @property
    def envelope(self) -> Envelope:
        """The envelope of the policy, on the run's device."""
        return Envelope.of(self.spec.policy.envelope_tokens, self.spec.device)

    @property
    def compares_answers(self) -> bool:
        """True if both roles answer questions or prompts."""
        return bool({"accuracy", "greedy"} & set(self.spec.workload.suites))

    @property
    def has_url(self) -> bool:
        """True if a role is a running server, which assay cannot instrument."""
        return self.reference.is_url or self.candidate.is_url

    def instrumented(self, role: Role) -> bool:
        """Return True if assay counts, shadows and traces the calls in a role's server."""
        return not self.backend(role).is_url and profile_of(self.spec.sides[role].engine).instrumented

    @property
    def beside(self) -> str:
        """The backend that computes in the candidate's server what the candidate does not, and its shadow: an engine's own.

        Empty, for the device's default, if the reference is a URL or a kernel, which may lack the same phase.
        """
        if self.instrumented("reference") or self.has_url:
            return self.reference.delegate
        return profile_of(self.spec.candidate.engine).references[self.spec.device]

    @property
    def has_layer_diff(self) -> bool:
        """True if the layer diff was requested and is possible."""
        return "layers" in self.spec.workload.suites and not self.has_url

    @property
    def has_decode_kernel(self) -> bool:
        """True if a kernel of the contract computes decode in either role.

        Such a kernel resolves its paging in Python, so a CUDA graph cannot capture its decode calls.
        """
        return any(backend.is_kernel and "decode" in backend.phases for backend in (self.reference, self.candidate))

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles that need a server.

        A layer diff without answers needs only the reference's, where the candidate runs as a shadow or is substituted.
        """
        scores = "logits" in self.spec.workload.suites and not self.has_layer_diff
        return ROLES if self.compares_answers or scores else ("reference",)


def prepare(spec: RunSpec) -> Plan:
    """Check backends, model and questions; start nothing.

    Callers check last whether this machine can serve the run (`assay.harness.run.preflight.check_environment`), because errors in
    a command do not depend on the memory that happens to be free.

    Raises:
        UsageError: missing packages, an unknown backend, an incomplete model, an unknown shape of requests,
            settings of a candidate whose server is never asked, or
            questions that cannot be read.
    """
    require("serve", "A run")  # its report needs packages that asking does not
    for side in spec.sides.values():
        check_engine_args(side.engine, side.flags)
    shapes_of(spec.workload.latency_shapes, spec.device)
    reference, candidate = (
        registry.checked_backend(side.engine, f"--{role}", side.backend) for role, side in spec.sides.items()
    )
    _check_fingerprint(spec.policy.fingerprint)
    models = {role: resolve_model(side.model, side.flags) for role, side in spec.sides.items()}
    plan = Plan(spec, models, (), reference, candidate)
    _check_both_asked(plan)
    return ask(plan, spec.workload)


def _check_both_asked(plan: Plan) -> None:
    """Refuse a candidate with its own settings if its own server is never asked: a pass would prove nothing about them."""
    others = [name for name in plan.spec.treatment if name != "backend"]
    timed_alone = plan.spec.workload.suites == ("latency",)  # by servers of both sides
    if others and plan.roles != ROLES and not timed_alone:
        raise UsageError(
            f"The sides differ in {listed(others)}, and nothing asks the candidate's own server.",
            "a command or suites that ask both servers: accuracy or greedy",
            "add one to --suites, or give both sides the same settings, with --engine-arg and --model",
        )


def ask(plan: Plan, workload: Workload) -> Plan:
    """Return the plan of a run that asks the same servers something else.

    Raises:
        UsageError: the questions cannot be read.
    """
    plan = replace(plan, spec=plan.spec.model_copy(update={"workload": workload}))
    # The logits' prompts are the first greedy ones, with the same ids.
    of_suites: dict[Suite, int] = {
        "accuracy": workload.questions,
        "layers": COLD_QUESTIONS + WARM_QUESTIONS if plan.has_layer_diff else 0,
        "greedy": workload.greedy_prompts,
        "logits": workload.logits_prompts,
    }
    counts = {suite: count if suite in workload.suites else 0 for suite, count in of_suites.items()}
    most = max(*counts.values(), 1)
    draw = draw_gsm8k if is_gsm8k(workload.data) else draw_questions
    drawn = draw(workload.data, most, workload.order_seed)
    items = _items(drawn.questions, counts, synthetic=workload.synthetic)
    return replace(plan, items=items, units=drawn.units)


def _items(questions: Sequence[Question], counts: Mapping[Suite, int], *, synthetic: bool) -> tuple[Item, ...]:
    """Turn the first questions into the items of each suite."""
    items = [_item("accuracy", question, place) for place, question in enumerate(questions[: counts["accuracy"]])]
    items += [_item("layers", question) for question in questions[: counts["layers"]]]
    for suite in ("greedy", "logits"):
        items += [
            Item(suite=suite, id=id_, prompt=prompt, prompt_hash=prompt_hash(prompt))
            for id_, prompt in greedy_prompts(questions, counts[suite], synthetic)
        ]
    return tuple(items)


def _item(suite: Suite, question: Question, place: int | None = None) -> Item:
    return Item(
        suite=suite,
        id=question.id,
        prompt=question.prompt,
        prompt_hash=prompt_hash(question.prompt),
        group=question.group,
        subject=question.subject,
        expected=question.answer,
        unit="" if question.unit == question.id else question.unit,
        cold=place is not None and place < _COLD_EVERY * _MAX_COLD and place % _COLD_EVERY == _COLD_EVERY - 1,
    )


def _check_fingerprint(name: str) -> None:
    """Refuse an accepted fingerprint that is missing or damaged. An empty name means that there is none."""
    if not name:
        return
    try:
        read_fingerprint(Path(name))
    except (UsageError, EvidenceError) as error:
        raise UsageError(f"--fingerprint: {error.found}", error.expected, error.do) from None
