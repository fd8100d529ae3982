"""The checks: requirements of a pass that no suite measures. Pure functions of the evidence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from assay.harness.conditions import CACHED_PREFIX, CACHED_PREFIX_TOKENS, MIN_CACHED_SHARE, PHASES
from assay.harness.config import RunSpec
from assay.harness.evidence.counters import CallCount, total_calls
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.evidence.records import Answer
from assay.harness.evidence.run_file import RUN_AGAIN
from assay.harness.evidence.shadow_errors import DIMENSIONS, ShadowErrors
from assay.harness.sides import Role
from assay.harness.text import listed, one_line, percent, ranges
from assay.harness.verdict import Check, Requirement

RESUME = "repeat the run's command with --out set to its folder, which resumes"
"""What settles a check of which a resumed run makes the evidence."""
_COMPARED = Requirement("layers-compared", "every layer's output was compared with the truth")
_SCORED = Requirement("logits-compared", "the logits were compared")
_TESTED = Requirement("accuracy-tested", "accuracy was tested")
_POLICY = Requirement("policy", "no limit of the policy is wider than its default")
_RAN = Requirement("kernel-ran", "the candidate's own kernel ran in every phase that it claims")
_COMPILED = Requirement("decode-compiled", "decode ran compiled, as --enable-torch-compile asks")
_SAME = Requirement("same-servers", "the servers differed in the treatment and in nothing else")
_ANSWERED = Requirement("all-answered", "both servers answered every question")
_PREFIX = Requirement("cached-prefix", "the cached-prefix condition was exercised")
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
    if "layers" not in suites:
        return _COMPARED.check("not checked", "the suite layers was not requested", "add layers to --suites")
    if errors is None and has_url:
        settles = "let assay start the reference, without a URL"
        return _COMPARED.check("missing", "no server could be instrumented", settles)
    if errors is None:
        return _COMPARED.check("missing", "no call was compared", RESUME)
    if failed := errors.failed_calls:
        found = f"the candidate did not compute {sum(call.calls for call in failed)} calls: {failed[0].text}"
        return _COMPARED.check("failed", found, "fix the candidate so that it computes every call")
    if untested := {layer: why for header in errors.headers for layer, why in header.untested.items()}:
        layer, why = min(untested.items())
        found = f"calls of layers {ranges(untested)} could not be compared; layer {layer}: {one_line(why)}"
        return _COMPARED.check("missing", found, "run so that the kernel contract can express every call")
    covered = [_coverage(errors, phase, expected) for phase in claimed]
    return _COMPARED.met(
        bool(covered) and all(met for _, met in covered),
        "; ".join(words for words, _ in covered) or "no phase is claimed",
        "run so that each of these is shadowed; the report lists why calls were not observed",
    )


def _coverage(errors: ShadowErrors, phase: str, expected: Collection[int]) -> tuple[str, bool]:
    """Describe which layers and heads of a phase were compared with the truth, and return True with it if these are all.

    The processes that share a layer's heads say how many there are; a layer that none of them saw is missing anyway.
    """
    at_layer, at_head = (DIMENSIONS.index(name) for name in ("layer", "head"))
    index, members = errors.truth.index, errors.truth.candidate_honest.shape[1]
    here = index[index[:, DIMENSIONS.index("phase")] == PHASES.index(phase)] if members > 1 else index[:0]
    seen = {(int(row[at_layer]), int(row[at_head])) for row in here}
    if not seen:
        return f"{phase}: not observed", False
    lacking = {(layer, head) for layer in expected for head in range(errors.heads.get(layer, 1))} - seen
    if not lacking:
        return f"{phase}: {len(expected)} layers", bool(expected)
    layers, heads = ({place[axis] for place in lacking} for axis in (0, 1))
    return f"{phase}: not layer {ranges(layers)}, head {ranges(heads)}", False


def check_logits(suites: Sequence[str], scored: bool) -> list[Check]:
    """Report that logits were requested and nothing was scored; empty where they were compared, or not requested."""
    if scored or "logits" not in suites:
        return []
    settles = "let assay start both servers, without a URL, or leave logits out of --suites"
    return [_SCORED.check("missing", "nothing was scored", settles)]


def check_accuracy_tested(suites: Sequence[str]) -> list[Check]:
    """Report that accuracy was not tested; empty where it was. Own errors within bounds prove nothing about answers."""
    if "mmlu" in suites:
        return []
    found, settles = "the suite mmlu was not requested", "assay run, or add mmlu to --suites"
    return [_TESTED.check("not checked", found, settles)]


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
    if not weakened:
        return _POLICY.check("ok", "margins, error rates and envelope are the defaults, or stricter")
    settles = "leave lines of policy out for a verdict by the defaults; to accept a kernel's noise, name it in [policy.bounds]"
    return _POLICY.check("not checked", "; ".join(weakened), settles)


def check_required(require: Sequence[str], ran: Sequence[str], line: str) -> list[Check]:
    """Check that the suites ran that the policy requires; `line` is the policy's."""
    return [
        Requirement(f"required-{suite}", f"the required suite {suite} ran").met(
            suite in ran,
            f"{'it ran' if suite in ran else 'it did not run'}; {line}",
            f"add {suite} to --suites, on servers that assay starts",
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
        settles = "start it; see candidate.log for why it did not"
        return [_RAN.check("missing", "its server never started", settles)]
    if not server.started:
        found = f"{server.backend} is a server that assay did not start and cannot instrument"
        return [_RAN.check("missing", found, "let assay start the candidate, by its backend's name")]
    return [_check_phase(phase, server, counts, reference) for phase in server.claimed_phases]


def _check_phase(
    phase: str, server: ServerManifest, counts: Sequence[CallCount], reference: Sequence[CallCount]
) -> Check:
    ran = _RAN.of(phase)
    here = [count for count in counts if count.phase == phase]
    own = [count for count in here if count.backend == server.backend and not count.delegated_by]
    other = [count for count in here if count not in own]
    if not own:
        settles = f"run so that {server.backend} computes {phase}; see candidate.log for what ran instead"
        return ran.check("missing", f"no {phase} call of {server.backend} was counted", settles)
    calls, layers = total_calls(own), _layers(own)
    if other:
        found = f"{own[0].kernel} {calls:,} calls, but also {', '.join(f'{c.kernel} {c.calls:,} calls' for c in other)}"
        return ran.check("failed", found, f"run so that nothing else computes {phase}")
    expected = _layers(count for count in reference if count.phase == phase)
    if lacking := sorted(expected - layers):
        found = f"{own[0].kernel} ran in {len(layers)} of {len(expected)} layers; not in {lacking[:8]}"
        return ran.check("failed", found, "run so that it computes every layer")
    return ran.check("ok", f"{own[0].kernel} {calls:,} calls in {len(layers)} layers")


def _layers(counts: Iterable[CallCount]) -> set[int]:
    return {layer for count in counts for layer in count.calls_by_layer}


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
    found = f"{', '.join(shares)}; more than {percent(_MIN_COMPILED_SHARE)} of each are needed"
    settles = "capture CUDA graphs for batches this large; a kernel of the contract that computes decode allows none"
    return [_COMPILED.met(met, found, settles)]


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
    if len(servers) < 2:
        return _SAME.check("missing", "not both servers started", "start both; see the servers' logs")
    if not all(server.started for server in servers.values()):  # of other servers, nothing is known
        found = "at least one server was not started by assay"
        return _SAME.check("missing", found, "let assay start both servers")
    if other := [
        f"the {role} was to be {spec.side(role).backend}, and its server ran {server.backend}"
        for role, server in servers.items()
        if server.backend != spec.side(role).backend
    ]:
        return _SAME.check("failed", "; ".join(other), RUN_AGAIN)
    if not any(server.arguments for server in servers.values()):
        return _SAME.check("missing", "neither server reported its arguments", "use an engine that reports them")
    if differences:
        found = "; ".join(f"{key}: {ours} against {theirs}" for key, (ours, theirs) in differences.items())
        settles = f"run again so that only {listed(list(spec.treatment)) or 'nothing'} differs"
        return _SAME.check("failed", found, settles)
    if unseen := [name for name in spec.treatment if name.startswith("--") and _same_argument(name, servers)]:
        found = f"both servers report the same {listed(unseen)}, which was asked to differ"
        return _SAME.check("failed", found, "see why the engine ignores the flag")
    compared = len(servers["reference"].arguments)
    same = "the stored reference and the candidate have one model hash" if stored else "one model folder"
    return _SAME.check("ok", f"{same}; {compared} server arguments agree")


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
    found, settles = f"{answered} of {asked}", "repeat the command, which resumes where it stopped"
    if mismatched:
        found += f"; answers to another prompt: {len(mismatched)}, the first to {mismatched[0]}"
        settles = "run again with a new --out: these answers do not belong to this run's questions"
    return _ANSWERED.met(bool(asked) and answered == asked and not mismatched, found, settles)


def check_cached_prefix(answers: Sequence[Answer]) -> Check:
    """Check that enough of the candidate's questions hit a cached prefix, as the server reports."""
    known = [answer for answer in answers if answer.cached_tokens is not None]
    met = [answer for answer in known if (answer.cached_tokens or 0) >= CACHED_PREFIX_TOKENS]
    found = (
        f"{len(met)} of {len(answers)} questions had at least {CACHED_PREFIX_TOKENS} cached tokens; "
        f"{percent(MIN_CACHED_SHARE)} of them are needed"
    )
    if not answers:
        return _PREFIX.check("missing", "no question was answered", RESUME)
    if not known:
        found = "the server did not report how many tokens were cached"
        return _PREFIX.check("missing", found, "use a server that reports cached tokens (--enable-cache-report)")
    settles = "keep the prefix cache on (without --disable-radix-cache), and questions that share a header"
    return _PREFIX.met(len(met) >= MIN_CACHED_SHARE * len(answers), found, settles)


def check_cached_prefix_of_layers(errors: ShadowErrors) -> Check:
    """Check that the layer diff compared calls with a cached prefix, where no question was asked."""
    longest = CACHED_PREFIX.labels[-1]
    met = bool(np.nansum(errors.table((), {"prefix": longest}).elements))
    found = f"{'some' if met else 'no'} compared calls had {longest} cached tokens"
    return _PREFIX.met(met, found, "keep the prefix cache on (without --disable-radix-cache)")
