"""The checks: requirements of a pass that no suite measures. Pure functions of the evidence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from assay.harness.conditions import CACHED_PREFIX, CACHED_PREFIX_TOKENS, MIN_CACHED_SHARE, PHASES
from assay.harness.config import RunSpec
from assay.harness.evidence.counters import CallCount, total_calls
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.evidence.records import Answer
from assay.harness.evidence.shadow_errors import DIMENSIONS, ShadowErrors
from assay.harness.sides import Role
from assay.harness.text import listed, one_line, percent, ranges
from assay.harness.verdict import Check

_MIN_COMPILED_SHARE = 0.5
"""More than this share of each server's decode calls must have been compiled: capturing graphs alone compiles some."""


def check_layers(
    suites: Sequence[str],
    errors: ShadowErrors | None,
    claimed: Sequence[str],
    expected: Collection[int],
    *,
    has_url: bool = False,
) -> Check:
    """Check that the candidate's output was compared with the truth, on the same inputs, in every claimed phase, layer and head.

    Args:
        suites: suites that were requested.
        errors: the candidate's errors on the reference's inputs; None without a layer diff.
        claimed: phases that the candidate claims to compute.
        expected: layers that called attention.
        has_url: whether a role is a server that assay did not start.
    """
    id_, title = "layers-compared", "every layer's output was compared with the truth"
    if "layers" not in suites:
        found = "the suite layers was not requested"
        return Check(id=id_, title=title, status="not checked", found=found, settles="add layers to --suites")
    if errors is None:
        found, settles = "no server could be instrumented", "let assay start the reference, without a URL"
        if not has_url:
            found, settles = (
                "no call was compared",
                "repeat the run's command with --out set to its folder, which resumes",
            )
        return Check(id=id_, title=title, status="missing", found=found, settles=settles)
    if failed := errors.failed_calls:
        found = f"the candidate did not compute {sum(one.calls for one in failed)} calls: {failed[0].text}"
        settles = "fix the candidate so that it computes every call"
        return Check(id=id_, title=title, status="failed", found=found, settles=settles)
    if untested := {layer: why for header in errors.headers for layer, why in header.untested.items()}:
        layer, why = min(untested.items())
        found = f"calls of layers {ranges(untested)} could not be compared; layer {layer}: {one_line(why)}"
        settles = "run so that the kernel contract can express every call"
        return Check(id=id_, title=title, status="missing", found=found, settles=settles)
    covered = [_coverage(errors, phase, expected) for phase in claimed]
    complete = bool(covered) and all(met for _, met in covered)
    return Check(
        id=id_,
        title=title,
        status="ok" if complete else "missing",
        found="; ".join(words for words, _ in covered) or "no phase is claimed",
        settles=""
        if complete
        else "run so that each of these is shadowed; the report lists why calls were not observed",
    )


def _coverage(errors: ShadowErrors, phase: str, expected: Collection[int]) -> tuple[str, bool]:
    """Describe which layers and heads of a phase were compared with the truth, and return True with it if these are all.

    The processes that share a layer's heads say how many there are; a layer that none of them saw is missing anyway.
    """
    layer, head = (DIMENSIONS.index(name) for name in ("layer", "head"))
    index, members = errors.truth.index, errors.truth.candidate_honest.shape[1]
    here = index[index[:, DIMENSIONS.index("phase")] == PHASES.index(phase)] if members > 1 else index[:0]
    seen = {(int(row[layer]), int(row[head])) for row in here}
    if not seen:
        return f"{phase}: not observed", False
    lacking = {(one, number) for one in expected for number in range(errors.heads.get(one, 1))} - seen
    if not lacking:
        return f"{phase}: {len(expected)} layers", bool(expected)
    layers, heads = ({place[axis] for place in lacking} for axis in (0, 1))
    return f"{phase}: not layer {ranges(layers)}, head {ranges(heads)}", False


def check_logits(suites: Sequence[str], scored: bool) -> list[Check]:
    """Report that logits were requested and nothing was scored; empty where they were compared, or not requested."""
    if scored or "logits" not in suites:
        return []
    return [
        Check(
            id="logits-compared",
            title="the logits were compared",
            status="missing",
            found="nothing was scored",
            settles="let assay start both servers, without a URL, or leave logits out of --suites",
        )
    ]


def check_accuracy_tested(suites: Sequence[str]) -> list[Check]:
    """Report that accuracy was not tested; empty where it was. Own errors within bounds prove nothing about answers."""
    if "mmlu" in suites:
        return []
    return [
        Check(
            id="accuracy-tested",
            title="accuracy was tested",
            status="not checked",
            found="the suite mmlu was not requested",
            settles="assay run, or add mmlu to --suites",
        )
    ]


def only_declared(bounds: Mapping[str, float], noise: Mapping[Role, str]) -> list[str]:
    """List noise of the candidate that the kernel alone declares: it widens every bound, and no line of policy states it.

    Args:
        bounds: the policy's, by noise family.
        noise: the family that each role's backend declares; empty for rounding alone.
    """
    declared = noise.get("candidate", "")
    return [f"noise = {declared} (declared by the kernel alone)"] if declared and declared not in bounds else []


def check_policy(weakened: Sequence[str]) -> Check:
    """Check that the policy is as strict as the default. A weaker one is the user's to choose, and is not chosen in silence.

    Args:
        weakened: the lines of policy that pass more than their defaults do, and what `only_declared` found.
    """
    id_, title = "policy", "no limit of the policy is wider than its default"
    if not weakened:
        return Check(
            id=id_, title=title, status="ok", found="margins, error rates and envelope are the defaults, or stricter"
        )
    settles = "leave lines of policy out for a verdict by the defaults; to accept a kernel's noise, name it in [policy.bounds]"
    return Check(id=id_, title=title, status="not checked", found="; ".join(weakened), settles=settles)


def check_required(require: Sequence[str], ran: Sequence[str], line: str) -> list[Check]:
    """Check that the suites ran that the policy requires; `line` is the policy's."""
    return [
        Check(
            id=f"required-{suite}",
            title=f"the required suite {suite} ran",
            status="ok" if suite in ran else "missing",
            found=f"{'it ran' if suite in ran else 'it did not run'}; {line}",
            settles="" if suite in ran else f"add {suite} to --suites, on servers that assay starts",
        )
        for suite in require
    ]


def check_kernel_ran(
    server: ServerManifest | None, counts: Sequence[CallCount], reference: Sequence[CallCount]
) -> list[Check]:
    """Check that the candidate's own kernel computed every phase that it claims, in every layer, and nothing else did.

    Args:
        server: the candidate's server; None if it never started.
        counts: the calls counted in it.
        reference: the calls counted in the reference's server, which say how many layers there are; may be empty.
    """
    if server is None:
        return [_kernel_unknown("its server never started", "start it; see candidate.log for why it did not")]
    if not server.started:
        found = f"{server.backend} is a server that assay did not start and cannot instrument"
        return [_kernel_unknown(found, "let assay start the candidate, by its backend's name")]
    return [_check_phase(phase, server, counts, reference) for phase in server.claimed_phases]


_KERNEL_RAN = "the candidate's own kernel ran in every phase that it claims"


def _kernel_unknown(found: str, settles: str) -> Check:
    return Check(id="kernel-ran", title=_KERNEL_RAN, status="missing", found=found, settles=settles)


def _check_phase(
    phase: str, server: ServerManifest, counts: Sequence[CallCount], reference: Sequence[CallCount]
) -> Check:
    id_, title = f"kernel-ran-{phase}", f"{_KERNEL_RAN}: {phase}"
    here = [count for count in counts if count.phase == phase]
    own = [count for count in here if count.backend == server.backend and not count.delegated_by]
    other = [count for count in here if count not in own]
    if not own:
        return Check(
            id=id_,
            title=title,
            status="missing",
            found=f"no {phase} call of {server.backend} was counted",
            settles=f"run so that {server.backend} computes {phase}; see candidate.log for what ran instead",
        )
    calls = sum(count.calls for count in own)
    layers = {layer for count in own for layer in count.calls_by_layer}
    if other:
        found = f"{own[0].kernel} {calls:,} calls, but also {', '.join(f'{c.kernel} {c.calls:,} calls' for c in other)}"
        settles = f"run so that nothing else computes {phase}"
        return Check(id=id_, title=title, status="failed", found=found, settles=settles)
    expected = {layer for count in reference if count.phase == phase for layer in count.calls_by_layer}
    if expected - layers:
        found = (
            f"{own[0].kernel} ran in {len(layers)} of {len(expected)} layers; not in {sorted(expected - layers)[:8]}"
        )
        settles = "run so that it computes every layer"
        return Check(id=id_, title=title, status="failed", found=found, settles=settles)
    return Check(id=id_, title=title, status="ok", found=f"{own[0].kernel} {calls:,} calls in {len(layers)} layers")


def check_compiled(servers: Mapping[Role, ServerManifest], counts: Mapping[Role, Sequence[CallCount]]) -> list[Check]:
    """Check that decode ran mostly as compiled code, in each server that was started with ``--enable-torch-compile``.

    SGLang compiles only what it captures into CUDA graphs: without them it silently ignores the flag, and batches larger than
    the captured ones run uncompiled.

    Args:
        servers: by role.
        counts: the calls counted in each of them.
    """
    asked = [role for role, server in servers.items() if server.arguments.get("enable_torch_compile")]
    if not asked:
        return []
    shares, met = [], True
    for role in asked:
        decode = [count for count in counts[role] if count.phase == "decode"]
        compiled = total_calls(count for count in decode if count.compiled)
        shares.append(f"{compiled:,} of {total_calls(decode):,} decode calls of the {role}")
        met = met and compiled > _MIN_COMPILED_SHARE * total_calls(decode)
    return [
        Check(
            id="decode-compiled",
            title="decode ran compiled, as --enable-torch-compile asks",
            status="ok" if met else "missing",
            found=f"{', '.join(shares)}; more than {percent(_MIN_COMPILED_SHARE)} of each are needed",
            settles=""
            if met
            else "capture CUDA graphs for batches this large; a kernel of the contract that computes decode allows none",
        )
    ]


def check_same_servers(
    spec: RunSpec,
    servers: Mapping[Role, ServerManifest],
    differences: Mapping[str, tuple[str, str]],
    stored: bool = False,
) -> Check:
    """Check that the servers differed in the treatment and in nothing else.

    Args:
        spec: what the run names.
        servers: by role.
        differences: arguments that differ beyond the treatment.
        stored: whether the reference's server is the one of an accepted baseline, whose model has the same hash.
    """
    id_, title = "same-servers", "the servers differed in the treatment and in nothing else"
    if len(servers) < 2:
        found, settles = "not both servers started", "start both; see the servers' logs"
        return Check(id=id_, title=title, status="missing", found=found, settles=settles)
    if not all(server.started for server in servers.values()):  # of other servers, nothing is known
        found = "at least one server was not started by assay"
        return Check(id=id_, title=title, status="missing", found=found, settles="let assay start both servers")
    other = [
        f"the {role} was to be {spec.side(role).backend}, and its server ran {server.backend}"
        for role, server in servers.items()
        if server.backend != spec.side(role).backend
    ]
    if other:
        found, settles = "; ".join(other), "run again with a new --out"
        return Check(id=id_, title=title, status="failed", found=found, settles=settles)
    if not any(server.arguments for server in servers.values()):
        found, settles = "neither server reported its arguments", "use an engine that reports them"
        return Check(id=id_, title=title, status="missing", found=found, settles=settles)
    if differences:
        found = "; ".join(f"{key}: {ours} against {theirs}" for key, (ours, theirs) in differences.items())
        settles = f"run again so that only {listed(list(spec.treatment)) or 'nothing'} differs"
        return Check(id=id_, title=title, status="failed", found=found, settles=settles)
    if unseen := [name for name in spec.treatment if name.startswith("--") and _same_argument(name, servers)]:
        found = f"both servers report the same {listed(unseen)}, which was asked to differ"
        return Check(id=id_, title=title, status="failed", found=found, settles="see why the engine ignores the flag")
    compared = len(servers["reference"].arguments)
    same = "the stored reference and the candidate have one model hash" if stored else "one model folder"
    return Check(id=id_, title=title, status="ok", found=f"{same}; {compared} server arguments agree")


def _same_argument(flag: str, servers: Mapping[Role, ServerManifest]) -> bool:
    """Return True if both servers report the argument of a flag, and the same value of it."""
    name = flag.removeprefix("--").replace("-", "_")
    reported = [server.arguments[name] for server in servers.values() if name in server.arguments]
    return len(reported) == len(servers) and all(value == reported[0] for value in reported)


def check_all_answered(asked: int, answered: int, mismatched: Sequence[str]) -> Check:
    """Check that both roles answered every question.

    Args:
        asked: questions, counted once for each role.
        answered: answers to these questions, with the same prompt.
        mismatched: items that a role answered with another prompt.
    """
    complete = bool(asked) and answered == asked and not mismatched
    found, settles = f"{answered} of {asked}", "repeat the command, which resumes where it stopped"
    if mismatched:
        found += f"; answers to another prompt: {len(mismatched)}, the first to {mismatched[0]}"
        settles = "run again with a new --out: these answers do not belong to this run's questions"
    return Check(
        id="all-answered",
        title="both servers answered every question",
        status="ok" if complete else "missing",
        found=found,
        settles="" if complete else settles,
    )


def check_cached_prefix(answers: Sequence[Answer]) -> Check:
    """Check that enough of the candidate's questions hit a cached prefix, as the server reports."""
    known = [answer for answer in answers if answer.cached_tokens is not None]
    met = [answer for answer in known if (answer.cached_tokens or 0) >= CACHED_PREFIX_TOKENS]
    found = (
        f"{len(met)} of {len(answers)} questions had at least {CACHED_PREFIX_TOKENS} cached tokens; "
        f"{percent(MIN_CACHED_SHARE)} of them are needed"
    )
    if not answers:
        settles = "repeat the run's command with --out set to its folder, which resumes"
        return _cached_prefix(False, "no question was answered", settles)
    if not known:
        found = "the server did not report how many tokens were cached"
        return _cached_prefix(False, found, "use a server that reports cached tokens (--enable-cache-report)")
    settles = "keep the prefix cache on (without --disable-radix-cache), and questions that share a header"
    return _cached_prefix(len(met) >= MIN_CACHED_SHARE * len(answers), found, settles)


def check_cached_prefix_of_layers(errors: ShadowErrors) -> Check:
    """Check that the layer diff compared calls with a cached prefix, where no question was asked."""
    longest = CACHED_PREFIX.labels[-1]
    met = bool(np.nansum(errors.table((), {"prefix": longest}).elements))
    found = f"{'some' if met else 'no'} compared calls had {longest} cached tokens"
    return _cached_prefix(met, found, "keep the prefix cache on (without --disable-radix-cache)")


def _cached_prefix(met: bool, found: str, settles: str) -> Check:
    return Check(
        id="cached-prefix",
        title="the cached-prefix condition was exercised",
        status="ok" if met else "missing",
        found=found,
        settles="" if met else settles,
    )
