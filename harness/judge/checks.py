"""Checks, suites and findings -> verdict -> exit code. A pass needs everything; anything missing is inconclusive.

The checks are pure functions of the evidence. What a pass needs grows with assay: a condition whose machinery does not exist
yet is listed as "not checked", so that nobody takes an early verdict for the final one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from assay.harness.conditions import CACHED_PREFIX, CACHED_PREFIX_TOKENS
from assay.harness.errors import ExitCode
from assay.harness.evidence.counters import CallCount, total_calls
from assay.harness.evidence.manifest import Failure, ServerManifest
from assay.harness.evidence.records import Answer, Role
from assay.harness.evidence.shadow_errors import ShadowErrors
from assay.harness.verdict import Check, Verdict

CACHED_SHARE = 0.5
"""Share of the questions that must have met a cached prefix."""
COMPILED_SHARE = 0.5
"""Share of each server's decode calls that must have been compiled: capturing alone compiles some, whatever serves afterwards."""

NOT_CHECKED = (
    Check(
        id="workload-sensitive",
        title="the workload is sensitive",
        status="not checked",
        found="no fault was seeded to see whether these questions catch it",
        settles="a certificate of caught faults, which this version of assay does not have",
    ),
)
ACCURACY_TESTED = "accuracy-tested"
"""Id of the check that says that no question was asked for its answer."""
BASELINE = "baseline"
"""Id of the suite that compares a candidate with what was accepted of it."""


def check_layers(
    suites: Sequence[str], cells: ShadowErrors | None, claimed: Sequence[str], expected: Collection[int]
) -> Check:
    """Whether the candidate's output was compared with the reference's, on the same inputs, in every layer.

    Args:
        suites: suites that were asked for.
        cells: what the shadow observed; None if there was none.
        claimed: phases that the candidate claims to compute.
        expected: layers that called attention.
    """
    name = "every layer's output was compared"
    if "layers" not in suites:
        return Check(
            id="layers-compared",
            title=name,
            status="not checked",
            found="the suite layers was not asked for",
            settles="--suites with layers",
        )
    if cells is None:
        found = "no server could be looked into"
        return Check(
            id="layers-compared",
            title=name,
            status="missing",
            found=found,
            settles="let assay start the reference, without a URL",
        )
    seen = {phase: _layers_of(cells, phase) for phase in claimed}
    compared = set().union(*seen.values())
    if failed := cells.failed_calls:
        found = f"the candidate did not compute {sum(e.calls for e in failed)} calls: {failed[0].text}"
        return Check(
            id="layers-compared",
            title=name,
            status="failed",
            found=found,
            settles="a candidate that computes every call",
        )
    lacking = sorted(set(expected) - compared)
    if lacking or not compared:
        found = f"{len(compared)} of {len(expected)} layers" + (f"; not {lacking[:8]}" if lacking else "")
        return Check(
            id="layers-compared",
            title=name,
            status="missing",
            found=found,
            settles="a run in which every layer is shadowed",
        )
    words = [f"{phase}: {len(layers)} layers" if layers else f"{phase}: not observed" for phase, layers in seen.items()]
    return Check(id="layers-compared", title=name, status="ok", found="; ".join(words))


def _layers_of(cells: ShadowErrors, phase: str) -> set[int]:
    table = cells.table(("layer",), {"phase": phase})
    return {int(layer) for layer, n in zip(table.axes["layer"], table.elements, strict=True) if n > 0}


def check_logits(suites: Sequence[str], scored: bool) -> list[Check]:
    """Whether logits were compared that were asked for; nothing to say where they were, or nobody asked for them."""
    if scored or "logits" not in suites:
        return []
    alone = "it is scored and shown beside the suite layers, which was not asked for"
    found = "nothing was scored" if "layers" in suites else alone
    settles = "--suites with logits and layers and some greedy prompts, on servers that assay starts"
    return [
        Check(
            id="logits-compared", title="the logits were compared", status="not checked", found=found, settles=settles
        )
    ]


def check_answers(suites: Sequence[str]) -> list[Check]:
    """A line that says so, where nobody was asked for answers: what is inside may be sound, and the answers are another matter."""
    if "mmlu" in suites:
        return []
    found, settles = "the suite mmlu was not asked for", "assay run, or --suites with mmlu"
    return [Check(id=ACCURACY_TESTED, title="accuracy was tested", status="not checked", found=found, settles=settles)]


def check_required(require: Sequence[str], ran: Sequence[str], line: str) -> list[Check]:
    """Whether the suites ran that the policy requires; `line` is the policy's."""
    return [
        Check(
            id=f"required-{suite}",
            title=f"the required suite {suite} ran",
            status="ok" if suite in ran else "missing",
            found=f"{'it ran' if suite in ran else 'it did not run'}; {line}",
            settles="" if suite in ran else f"--suites with {suite}, on servers that assay starts",
        )
        for suite in require
    ]


def check_kernel_ran(
    server: ServerManifest | None, counts: Sequence[CallCount], reference: Sequence[CallCount]
) -> list[Check]:
    """Whether the candidate's own kernel computed every phase that it claims, in every layer, and nothing else did.

    Args:
        server: the candidate's server; None if it never started.
        counts: the calls counted in it.
        reference: the calls counted in the reference's server, which say how many layers there are; may be empty.
    """
    name = "the candidate's own kernel ran in every phase that it claims"
    if server is None:
        return [
            Check(
                id="kernel-ran",
                title=name,
                status="missing",
                found="its server never started",
                settles="a run in which it starts",
            )
        ]
    if not server.claimed_phases:
        found = f"{server.backend} is a server that assay did not start, and cannot look into"
        return [
            Check(
                id="kernel-ran",
                title=name,
                status="missing",
                found=found,
                settles="let assay start the candidate, by its backend's name",
            )
        ]
    return [_check_phase(phase, server, counts, reference) for phase in server.claimed_phases]


def _check_phase(
    phase: str, server: ServerManifest, counts: Sequence[CallCount], reference: Sequence[CallCount]
) -> Check:
    id, name = f"kernel-ran-{phase}", f"the candidate's own kernel ran: {phase}"
    here = [count for count in counts if count.phase == phase]
    own = [count for count in here if count.backend == server.backend and not count.delegated_by]
    other = [count for count in here if count not in own]
    if not own:
        return Check(
            id=id,
            title=name,
            status="missing",
            found=f"not one {phase} call of {server.backend} was counted",
            settles=f"a run in which {server.backend} computes {phase}; see candidate.log for what ran instead",
        )
    calls = sum(count.calls for count in own)
    layers = {layer for count in own for layer in count.calls_by_layer}
    if other:
        found = f"{own[0].kernel} {calls:,} calls, but also {', '.join(f'{c.kernel} {c.calls:,} calls' for c in other)}"
        return Check(
            id=id, title=name, status="failed", found=found, settles="a run in which nothing else computes this phase"
        )
    expected = {layer for count in reference if count.phase == phase for layer in count.calls_by_layer}
    if expected - layers:
        found = (
            f"{own[0].kernel} ran in {len(layers)} of {len(expected)} layers; not in {sorted(expected - layers)[:8]}"
        )
        return Check(id=id, title=name, status="failed", found=found, settles="a run in which it computes every layer")
    return Check(id=id, title=name, status="ok", found=f"{own[0].kernel} {calls:,} calls in {len(layers)} layers")


def check_compiled(servers: Mapping[Role, ServerManifest], counts: Mapping[Role, Sequence[CallCount]]) -> list[Check]:
    """Whether decode ran as compiled code, mostly, wherever a server was started with ``--enable-torch-compile``.

    SGLang compiles only what it captures into CUDA graphs: without them it ignores the flag in silence, and larger batches than
    were captured run as they did before.

    Args:
        servers: by role.
        counts: the calls counted in each of them.
    """
    asked = [role for role, server in servers.items() if server.arguments.get("enable_torch_compile")]
    if not asked:
        return []
    told, met = [], True
    for role in asked:
        decode = [count for count in counts[role] if count.phase == "decode"]
        compiled = total_calls(count for count in decode if count.compiled)
        told.append(f"{compiled:,} of {total_calls(decode):,} decode calls of the {role}")
        met = met and compiled > COMPILED_SHARE * total_calls(decode)
    return [
        Check(
            id="decode-compiled",
            title="decode was compiled, as --enable-torch-compile asks",
            status="ok" if met else "missing",
            found=", ".join(told),
            settles=""
            if met
            else "CUDA graphs for batches as large as those asked for; a kernel of the contract that computes decode allows none",
        )
    ]


def check_same_servers(
    servers: Mapping[Role, ServerManifest],
    differences: Mapping[str, tuple[str, str]],
    started: bool,
    stored: bool = False,
) -> Check:
    """Whether both servers had the same weights, tokenizer and flags but for the backend.

    Args:
        servers: by role.
        differences: arguments that differ beyond the backend.
        started: whether assay started both, from one model folder; it knows nothing of any other server.
        stored: whether the reference's is that of an accepted baseline, which is of the same model by its hash.
    """
    name = "both servers had the same model and flags but for the backend"
    if len(servers) < 2:
        return Check(
            id="same-servers",
            title=name,
            status="missing",
            found="not both servers started",
            settles="a run in which both start",
        )
    if not started:
        found = "at least one server was not started by assay"
        return Check(
            id="same-servers", title=name, status="missing", found=found, settles="let assay start both servers"
        )
    if differences:
        found = "; ".join(f"{key}: {ours} against {theirs}" for key, (ours, theirs) in differences.items())
        return Check(
            id="same-servers",
            title=name,
            status="failed",
            found=found,
            settles="a run in which only the backend differs",
        )
    compared = len(servers["reference"].arguments)
    same = "one hash of the model, the stored reference's and the candidate's" if stored else "one model folder"
    return Check(id="same-servers", title=name, status="ok", found=f"{same}; {compared} server arguments agree")


def check_all_asked(asked: int, paired: int) -> Check:
    """Whether both roles answered every question."""
    name = "both servers answered every question"
    if asked and paired == asked:
        return Check(id="all-answered", title=name, status="ok", found=f"{paired} of {asked}")
    return Check(
        id="all-answered",
        title=name,
        status="missing",
        found=f"{paired} of {asked}",
        settles="the same command again goes on where it stopped",
    )


def check_cached_prefix(answers: Sequence[Answer]) -> Check:
    """Whether the candidate's questions met a cached prefix, by the server's own account."""
    name = "the cached-prefix condition was exercised"
    known = [answer for answer in answers if answer.cached_tokens is not None]
    met = [answer for answer in known if (answer.cached_tokens or 0) >= CACHED_PREFIX_TOKENS]
    found = f"{len(met)} of {len(answers)} questions had at least {CACHED_PREFIX_TOKENS} cached tokens"
    if not known:
        found = "the server did not say how many tokens were cached"
        return Check(
            id="cached-prefix",
            title=name,
            status="missing",
            found=found,
            settles="a server that reports cached tokens (--enable-cache-report)",
        )
    if len(met) < CACHED_SHARE * len(answers):
        settles = "a run with the prefix cache on (without --disable-radix-cache) and a header shared by the questions"
        return Check(id="cached-prefix", title=name, status="missing", found=found, settles=settles)
    return Check(id="cached-prefix", title=name, status="ok", found=found)


def check_cached_prefix_inside(cells: ShadowErrors) -> Check:
    """Whether calls with a cached prefix were compared, where no question was asked for its answer."""
    deepest = CACHED_PREFIX.labels[-1]
    met = int(np.nansum(cells.table((), {"prefix": deepest}).elements))
    return Check(
        id="cached-prefix",
        title="the cached-prefix condition was exercised",
        status="ok" if met else "missing",
        found=f"{'some' if met else 'no'} compared calls had {deepest} cached tokens",
        settles="" if met else "a run with the prefix cache on (without --disable-radix-cache)",
    )


@dataclass(frozen=True)
class SuiteVerdict:
    """A suite's verdict."""

    id: str
    title: str
    verdict: Verdict
    why: str


@dataclass(frozen=True)
class Judgement:
    """The verdict with its reasons, most important first."""

    verdict: Verdict
    exit_code: ExitCode
    headline: str
    reasons: tuple[str, ...]


def judge(
    candidate: str, suites: Sequence[SuiteVerdict], checks: Sequence[Check], failure: Failure | None
) -> Judgement:
    """The verdict of a run.

    A failed engine is an error, whatever was measured before. A regression stands if the two servers differed in nothing but the
    backend; conditions that were not met cannot excuse it. A pass needs every suite and every check.
    """
    if failure:
        return Judgement("error", ExitCode.NO_VERDICT, "No verdict: the run failed.", (failure.message,))
    unmet = [check for check in checks if check.status in ("failed", "missing")]
    reasons = [f"{check.title}: {check.found}. It would take {check.settles}." for check in unmet]
    regressed = [suite for suite in suites if suite.verdict == "regression"]
    if regressed and not any(check.status == "failed" for check in unmet):
        worse_than = "the reference" if any(suite.id != BASELINE for suite in regressed) else "what was accepted of it"
        return Judgement(
            "regression",
            ExitCode.REGRESSION,
            f"Do not merge: {candidate} is worse than {worse_than}.",
            (*(f"{suite.title}: {suite.why}" for suite in regressed), *reasons),
        )
    open_ = [suite for suite in suites if suite.verdict != "pass"]
    if unmet or open_ or not suites:
        more = [f"{suite.title}: {suite.why}" for suite in open_] or ([] if suites else ["No suite was run."])
        return Judgement(
            "inconclusive",
            ExitCode.NO_VERDICT,
            f"Not proven: nothing can be said of {candidate} yet.",
            (*reasons, *more),
        )
    unasked = any(check.id == ACCURACY_TESTED for check in checks)
    return Judgement(
        "pass",
        ExitCode.PASS,
        f"{candidate} holds in what was asked; whether its answers are as right was not asked."
        if unasked
        else f"{candidate} is no worse than the reference, within the stated margins.",
        tuple(f"{suite.title}: {suite.why}" for suite in suites),
    )
