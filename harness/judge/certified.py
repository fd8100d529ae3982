"""Does a certificate say what the harness catches in this run's envelope? The check ``certificate``."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from assay.harness.config import RunSpec
from assay.harness.errors import EvidenceError
from assay.harness.evidence.certificate import FILE, Certificate, read_certificate
from assay.harness.verdict import Check, CheckStatus

CHECK = "certificate"
_TITLE = "a certificate says which faults the harness catches in this envelope"


def check_certificate(spec: RunSpec, engines: Collection[str]) -> Check:
    """The certificate that the policy names, if it was made where the run was. It does not forbid a pass, unless it is damaged.

    Args:
        spec: the run's.
        engines: engines of its servers, such as "SGLang 0.5.23".
    """
    path = Path(spec.certificate) if spec.certificate else Path(spec.baselines) / FILE
    if not path.exists():
        settles = f"make one with assay certify, and name it: {spec.policy_line('certificate')}"
        return _check("missing" if spec.certificate else "not checked", f"there is no {path}", settles)
    try:
        found = read_certificate(path)
    except EvidenceError as error:
        return _check("missing", error.found, error.do)
    if differing := _differences(found, spec, engines):
        return _check("not checked", f"{path} was made elsewhere: {'; '.join(differing)}", "certify this envelope")
    if found.verdict != "pass":
        return _check(
            "not checked", f"{path} is no proof: {_counts(found)}", "see what was not caught, and certify again"
        )
    return _check("ok", f"{_counts(found)}, on {found.made[:10]}")


def _differences(found: Certificate, spec: RunSpec, engines: Collection[str]) -> list[str]:
    """How the envelope of a certificate differs from a run's."""
    made = found.envelope
    pairs: list[tuple[str, str, str]] = [("device", made.device, spec.device)]
    if made.level == "server":
        pairs += [("model", made.model, spec.model)]
        pairs += [("engine", made.engine.partition(",")[0], engine) for engine in engines]
    differing = [f"{what} {there} instead of {here}" for what, there, here in pairs if there != here]
    if made.longest < spec.envelope:
        differing.append(f"to {made.longest} tokens instead of {spec.envelope}")
    return differing


def _counts(found: Certificate) -> str:
    caught, missed, alarms = (len(found.having(outcome)) for outcome in ("caught", "missed", "false alarm"))
    left = len(found.left) + len(found.having("crash", "time-out"))
    text = f"{caught} of {caught + missed} faults caught, {alarms} false alarms"
    return text + f", {left} not examined" * (left > 0)


def _check(status: CheckStatus, found: str, settles: str = "") -> Check:
    return Check(id=CHECK, title=_TITLE, status=status, found=found, settles=settles)
