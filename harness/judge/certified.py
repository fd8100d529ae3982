"""The check ``certificate``: does a certificate state what the harness catches in this run's envelope?"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from assay.harness.conditions import PHASES
from assay.harness.errors import EvidenceError
from assay.harness.evidence.certificate import FILE, Certificate, installed_version, read_certificate, source_hash
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.policy import Policy
from assay.harness.sides import Side
from assay.harness.text import listed
from assay.harness.verdict import Check, CheckStatus, Requirement

_CERTIFIED = Requirement("certificate", "a certificate states which faults the harness catches in this envelope")


@dataclass(frozen=True)
class RunEnvelope:
    """The envelope of a run, as far as a certificate depends on it.

    Attributes:
        device: of both servers.
        reference: the reference's side.
        candidate: the candidate's backend.
        engines: engines of its servers, such as "SGLang 0.5.23".
        hardware: of the machine; on CUDA it starts with the GPU's name.
        model_hash: hash of the model's files.
        dtype: dtype of the compared calls; empty if none was compared.
        noise: noise family that the candidate declares; empty for rounding alone. Only a kernel declares one.
        phases: phases that the candidate claims.
        version: version of assay that judges.
        source: hash of its source code.
    """

    device: str
    reference: Side
    candidate: str
    engines: frozenset[str]
    hardware: str
    model_hash: str
    dtype: str
    noise: str
    phases: tuple[str, ...]
    version: str
    source: str


class _Part(NamedTuple):
    """One thing that a certificate and a run may have in common.

    Attributes:
        name: in words.
        made: in the certificate.
        here: in the run.
        agrees: whether they are the same.
    """

    name: str
    made: str
    here: str
    agrees: bool


def claim(run: RunEvidence) -> Judged:
    """Check that a certificate states what the harness catches where the run was made."""
    ran = RunEnvelope(
        device=run.spec.device,
        reference=run.spec.reference,
        candidate=run.spec.candidate.backend,
        engines=frozenset(server.engine.partition(" on ")[0] for server in run.servers.values()),
        hardware=run.manifest.hardware,
        model_hash=run.manifest.model_hash,
        dtype=run.errors.headers[0].dtype if run.errors is not None else "",
        noise=run.manifest.noise.get("candidate", ""),
        phases=tuple(run.claimed),
        version=installed_version(),
        source=source_hash(),
    )
    return Judged(checks=[check_certificate(run.spec.policy, ran)])


def check_certificate(policy: Policy, ran: RunEnvelope) -> Check:
    """Check that the policy's certificate was made where the run was. It does not rule out a pass, unless it is damaged.

    A certificate is cited only if everything agrees: level, device, machine, engine, reference, model, dtype, noise family and
    assay's own code; if it reaches as far as the policy's envelope, in every phase that the candidate claims; and if the whole
    catalogue was examined. Faults that the declared noise hides do not forbid that; they are counted as missed.

    Args:
        policy: of the run.
        ran: where the run was made.
    """
    path = Path(policy.certificate or Path(policy.baselines) / FILE)
    if not path.exists():
        settles = f"make one with {_command(ran)}, and name it: {policy.line('certificate')}"
        status: CheckStatus = "missing" if policy.certificate else "not checked"
        return _CERTIFIED.check(status, f"there is no {path}", settles)
    try:
        certificate = read_certificate(path)
    except EvidenceError as error:
        return _CERTIFIED.check("missing", error.found, error.do)
    parts = _parts(certificate, ran, policy.envelope_tokens)
    if elsewhere := _differing(parts):
        settles = f"certify this envelope: {_command(ran)}"
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
        f"{part.name} {part.made or 'not recorded'} instead of {part.here}" for part in parts if not part.agrees
    ]
    same = [part.name for part in parts if part.agrees]
    return "; ".join(differing) + (f"; the same: {listed(same)}" if same else "") if differing else ""


def _command(ran: RunEnvelope) -> str:
    """Return the command that makes a certificate of the noise of the run's candidate."""
    return "assay certify --level server" + (f" --candidate {shlex.quote(ran.candidate)}" if ran.noise else "")


def _parts(certificate: Certificate, ran: RunEnvelope, tokens: int) -> Sequence[_Part]:
    """Compare what a certificate depends on, there and here, up to so many tokens."""
    made = certificate.envelope
    pairs = [("level", made.level, "server"), ("device", made.device, ran.device)]
    if ran.device == "cuda":
        pairs.append(("GPU", made.machine, made.machine if _is_gpu_of(made.machine, ran.hardware) else ran.hardware))
    if made.level == "server":
        pairs += [("engine", made.engine, engine) for engine in sorted(ran.engines)]
        pairs += [
            ("reference", made.reference, ran.reference.backend),
            ("model", _model(made.model, made.model_hash), _model(ran.reference.model, ran.model_hash)),
        ]
    pairs.append(("noise family", made.noise or "exact", ran.noise or "exact"))
    pairs.append(("assay", f"{made.version} ({made.source})".strip(), f"{ran.version} ({ran.source})"))
    parts = [_Part(name, there, here, there == here) for name, there, here in pairs]
    dtypes = listed(list(made.dtypes))
    parts.append(_Part("dtype", dtypes, ran.dtype or "none that was compared", ran.dtype in made.dtypes))
    phases = made.phases or PHASES
    parts.append(_Part("phases", listed(phases), listed(ran.phases), set(ran.phases) <= set(phases)))
    reach = f"to {made.longest:,} tokens"
    parts.append(_Part("reach", reach, f"to {tokens:,} tokens", made.longest >= tokens))
    return parts


def _model(name: str, hash: str) -> str:
    return f"{name} ({hash[:12] or 'no hash'})"


def _is_gpu_of(machine: str, hardware: str) -> bool:
    return bool(machine) and hardware.partition(";")[0] == machine


def _envelope(parts: Sequence[_Part]) -> str:
    """Describe what a certificate and a run have in common."""
    return "made in this envelope: " + ", ".join(f"{part.name} {part.made}" for part in parts)


def _counts(certificate: Certificate) -> str:
    caught, missed, alarms = (len(certificate.having(outcome)) for outcome in ("caught", "missed", "false alarm"))
    left = len(certificate.left) + len(certificate.having("crash", "time-out"))
    hidden = [fault.id for fault in certificate.examined if fault.hidden]
    text = f"{caught} of {caught + missed} faults caught"
    text += (
        f", {len(hidden)} hidden by the noise of {certificate.envelope.noise} ({', '.join(hidden)})" if hidden else ""
    )
    return text + f", {alarms} false alarms" + f", {left} not examined" * (left > 0)
