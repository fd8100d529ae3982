"""The check ``certificate``: does a certificate state what the harness catches in this run's envelope?"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from assay.harness.conditions import PHASES
from assay.harness.errors import EvidenceError
from assay.harness.evidence.certificate import FILE, Certificate, installed_version, read_certificate, source_hash
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.text import listed
from assay.harness.verdict import Check, CheckStatus, Requirement

_CERTIFIED = Requirement("certificate", "a certificate states which faults the harness catches in this envelope")


_Part = tuple[str, str, str, bool]
"""What a certificate and a run may have in common: its name, there, here, and whether they agree."""


def claim(run: RunEvidence) -> Judged:
    """Check that a certificate states what the harness catches where the run was made."""
    return Judged(checks=[_check_certificate(run)])


def _check_certificate(run: RunEvidence) -> Check:
    """Check that the policy's certificate was made where the run was. It does not rule out a pass, unless it is damaged.

    A certificate is cited only if everything agrees: level, device, machine, engine, reference, model, dtype, noise family and
    assay's own code; if it reaches as far as the policy's envelope, in every phase that the candidate claims; and if the whole
    catalogue was examined. Faults that the declared noise hides do not forbid that; they are counted as missed.
    """
    policy = run.spec.policy
    path = Path(policy.certificate or Path(policy.baselines) / FILE)
    if not path.exists():
        settles = f"make one with {_command(run)}, and name it: {policy.line('certificate')}"
        status: CheckStatus = "missing" if policy.certificate else "not checked"
        return _CERTIFIED.check(status, f"there is no {path}", settles)
    try:
        certificate = read_certificate(path)
    except EvidenceError as error:
        return _CERTIFIED.check("missing", error.found, error.do)
    parts = _parts(certificate, run)
    if elsewhere := _differing(parts):
        settles = f"certify this envelope: {_command(run)}"
        return _CERTIFIED.check("not checked", f"{path} was made elsewhere: {elsewhere}", settles)
    if certificate.not_asked:
        left_out = (
            f"{len(certificate.not_asked)} of the catalogue were left out, for example {certificate.not_asked[0]}"
        )
        return _CERTIFIED.check("not checked", f"{path} is no proof: {left_out}", "certify without --fault")
    if certificate.verdict != "pass":
        settles = "see what was not caught, and certify again"
        return _CERTIFIED.check("not checked", f"{path} is no proof: {_counts(certificate)}", settles)
    return _CERTIFIED.check("ok", f"{_counts(certificate)}, on {certificate.made[:10]}; {_envelope(parts)}")


def _differing(parts: Sequence[_Part]) -> str:
    """Describe what differs between a certificate and a run, and what does not; empty if nothing differs."""
    differing = [
        f"{name} {made or 'not recorded'} instead of {here}" for name, made, here, agrees in parts if not agrees
    ]
    same = [name for name, _, _, agrees in parts if agrees]
    return "; ".join(differing) + (f"; the same: {listed(same)}" if same else "") if differing else ""


def _command(run: RunEvidence) -> str:
    """Return the command that makes a certificate of the noise of the run's candidate: only a kernel declares one."""
    of_kernel = f" --candidate {shlex.quote(run.spec.candidate.backend)}" if run.manifest.noise.get("candidate") else ""
    return f"assay certify --level server{of_kernel}"


def _parts(certificate: Certificate, run: RunEvidence) -> Sequence[_Part]:
    """Compare what a certificate depends on, there and here."""
    made, spec, manifest = certificate.envelope, run.spec, run.manifest
    pairs = [("level", made.level, "server"), ("device", made.device, spec.device)]
    if spec.device == "cuda":  # the hardware then starts with the GPU's name
        same = bool(made.machine) and manifest.hardware.partition(";")[0] == made.machine
        pairs.append(("GPU", made.machine, made.machine if same else manifest.hardware))
    if made.level == "server":
        engines = {server.engine.partition(" on ")[0] for server in run.servers.values()}
        pairs += [("engine", made.engine, engine) for engine in sorted(engines)]
        pairs += [
            ("reference", made.reference, spec.reference.backend),
            ("model", _model(made.model, made.model_hash), _model(spec.reference.model, manifest.model_hash)),
        ]
    pairs.append(("noise family", made.noise or "exact", manifest.noise.get("candidate") or "exact"))
    pairs.append(("assay", f"{made.version} ({made.source})".strip(), f"{installed_version()} ({source_hash()})"))
    parts = [(name, there, here, there == here) for name, there, here in pairs]
    dtype = run.errors.headers[0].dtype if run.errors is not None else ""
    parts.append(("dtype", listed(list(made.dtypes)), dtype or "none that was compared", dtype in made.dtypes))
    phases, tokens = made.phases or PHASES, spec.policy.envelope_tokens
    parts.append(("phases", listed(phases), listed(run.claimed), set(run.claimed) <= set(phases)))
    parts.append(("reach", f"to {made.longest:,} tokens", f"to {tokens:,} tokens", made.longest >= tokens))
    return parts


def _model(name: str, hash: str) -> str:
    return f"{name} ({hash[:12] or 'no hash'})"


def _envelope(parts: Sequence[_Part]) -> str:
    """Describe what a certificate and a run have in common."""
    return "made in this envelope: " + ", ".join(f"{name} {there}" for name, there, _, _ in parts)


def _counts(certificate: Certificate) -> str:
    caught, missed, alarms = (len(certificate.having(outcome)) for outcome in ("caught", "missed", "false alarm"))
    left = len(certificate.left) + len(certificate.having("crash", "time-out"))
    hidden = [fault.id for fault in certificate.examined if fault.hidden]
    text = f"{caught} of {caught + missed} faults caught"
    text += (
        f", {len(hidden)} hidden by the noise of {certificate.envelope.noise} ({', '.join(hidden)})" if hidden else ""
    )
    return text + f", {alarms} false alarms" + f", {left} not examined" * (left > 0)
