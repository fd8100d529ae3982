"""Both servers' arguments -> the check that they differed in the treatment and in nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.evidence.manifest import COMMON_SETTINGS, CommonSettings, ServerManifest
from assay.harness.evidence.run_file import RUN_AGAIN
from assay.harness.fingerprint.differences import compare_fingerprints
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.sides import HIDDEN, ROLES, Role, Side, treatment
from assay.harness.text import counted, listed
from assay.harness.verdict import Check, Requirement

_SAME = Requirement(
    "same-servers",
    "the servers differed in the treatment and in nothing else",
    "the servers did not differ in the treatment alone",
)


def claim(run: RunEvidence) -> Judged:
    """Check that the servers are the same, and state what both were given so that they could be."""
    if not run.compares_servers:
        return Judged()
    check = check_same_servers(run.spec.sides, run.servers, run.argument_differences, "reference" not in run.measured)
    check = with_fingerprints(check, run.fingerprints)
    return Judged(checks=[_with_common_settings(check, run.folder.read(COMMON_SETTINGS))])


def check_same_servers(
    sides: Mapping[Role, Side],
    servers: Mapping[Role, ServerManifest],
    differences: Mapping[str, tuple[str, str]],
    stored: bool = False,
) -> Check:
    """Check that the servers differed in the treatment and in nothing else.

    Args:
        sides: what the run names, by role.
        servers: by role.
        differences: arguments that differ beyond the treatment.
        stored: whether the reference's server is the one of an accepted baseline, whose model has the same hash.
    """
    if len(servers) < 2:
        return _SAME.check("missing", "not both servers started", "start both; see the servers' logs")
    if not all(server.started for server in servers.values()):  # of other servers, nothing is known
        observed = "at least one server was not started by assay"
        return _SAME.check("missing", observed, "let assay start both servers")
    if other := _other_backends(sides, servers):
        return _SAME.check("failed", "; ".join(other), RUN_AGAIN)
    if not any(server.arguments for server in servers.values()):
        return _SAME.check("missing", "neither server reported its arguments", "use an engine that reports them")
    asked = treatment(sides["reference"], sides["candidate"])
    if differences:
        observed = "; ".join(f"{key}: {ours} against {theirs}" for key, (ours, theirs) in differences.items())
        settles = f"run again so that only {listed(list(asked)) or 'nothing'} differs"
        return _SAME.check("failed", observed, settles)
    if unseen := [name for name in asked if name.startswith("--") and _same_argument(name, servers)]:
        observed = f"both servers report the same {listed(unseen)}, which was asked to differ"
        return _SAME.check("failed", observed, "see why the engine ignores the flag")
    compared = len(servers["reference"].arguments)
    same = "the stored reference and the candidate have one model hash" if stored else "one model folder"
    return _SAME.check("ok", f"{same}; {compared} server arguments agree")


def with_fingerprints(check: Check, fingerprints: Mapping[Role, Fingerprint]) -> Check:
    """Decide the check on what the servers really served, too, where both were observed; it never becomes milder.

    Where one was not, the check says so.

    Args:
        check: `check_same_servers`, of what was asked and reported.
        fingerprints: by role; their arguments are left out, of which that check decides.
    """
    if check.status != "ok":
        return check
    if len(fingerprints) < len(ROLES):
        return check.model_copy(update={"found": f"{check.found}; what they served was not observed"})
    sides = fingerprints["reference"], fingerprints["candidate"]
    # A run that names two models compares them, however much they have in common.
    allowed = ["arguments", *(["weights"] if sides[0].model != sides[1].model else [])]
    diff = compare_fingerprints(*sides, allowed)
    if not diff.undeclared:
        agree = f"what they served agrees in {counted(len(diff.compared), 'part')}"
        return check.model_copy(update={"found": f"{check.found}; {agree}"})
    says = "; ".join(difference.says for difference in diff.undeclared)
    observed = f"of what they served (A the reference, B the candidate), {says}"
    return _SAME.check("failed", observed, "run again so that only the treatment differs; see assay fingerprint diff")


def _other_backends(sides: Mapping[Role, Side], servers: Mapping[Role, ServerManifest]) -> list[str]:
    """List the servers that ran another backend than the run names, in words."""
    return [
        f"the {role} was to be {sides[role].backend}, and its server ran {server.backend}"
        for role, server in servers.items()
        if server.backend != sides[role].backend
    ]


def _same_argument(flag: str, servers: Mapping[Role, ServerManifest]) -> bool:
    """Return True if both servers report the argument of a flag, and the same value of it, which is not hidden."""
    name = flag.removeprefix("--").replace("-", "_")
    reported = [server.arguments[name] for server in servers.values() if name in server.arguments]
    return len(reported) == len(servers) and all(value == reported[0] != HIDDEN for value in reported)


def _with_common_settings(check: Check, common: CommonSettings | None) -> Check:
    """Add to the check that both servers had the same flags what they were given so that it could be met.

    Args:
        check: `check_same_servers`.
        common: the common settings of the run; None if they were not looked for.
    """
    if common is None:
        return check
    words = list(common.because)
    if check.status == "failed":
        words += [f"not made equal: {setting}" for setting in common.impossible]
    return check.model_copy(update={"found": "; ".join([check.found, *words])})
