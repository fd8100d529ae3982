"""A reference whose results were accepted: it stands in for the reference's server, and `assay gate accept` writes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.harness.config import RunSpec, recorded_spec
from assay.harness.errors import UsageError
from assay.harness.evidence import baseline as stored
from assay.harness.evidence.baseline import Baseline, Key
from assay.harness.evidence.counters import CallCount
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.logit_files import logits_path, write_logits
from assay.harness.evidence.manifest import Manifest, engine_label
from assay.harness.evidence.records import FLOOR_REPEAT
from assay.harness.files import timestamp
from assay.harness.judge.answers import pair
from assay.harness.sides import ROLES, Role
from assay.harness.verdict import Verdict


def _key_of(manifest: Manifest) -> Key:
    """Return the key of the reference's results in a run."""
    spec = recorded_spec(manifest.spec)
    side = spec.reference
    version = manifest.engines.get("reference") or manifest.packages.get(side.engine) or "not installed"
    return Key(
        engine=engine_label(side.engine, version, spec.device),
        backend=side.backend,
        model_hash=manifest.model_hashes["reference"],
        hardware=manifest.hardware,
        flags=side.flags,
        items_hash=manifest.items_hash,
        interpreter=side.interpreter,
        packages=side.packages,
    )


def with_stored_reference(spec: RunSpec) -> RunSpec:
    """Return a spec whose reference is the side of a baseline, where ``--reference`` names the folder of one.

    What was set for the reference besides the folder stays, and must agree with what was accepted (`check_stored_reference`).

    Raises:
        EvidenceError: the baseline is damaged.
    """
    folder = spec.reference.backend
    if not (Path(folder) / stored.FILE).is_file():
        return spec
    side = stored.read_baseline(Path(folder)).side
    given = {name: getattr(spec.reference, name) for name in spec.reference.model_fields_set - {"backend"}}
    changed: dict[str, Any] = {"reference": side.model_copy(update=given), "reference_baseline": folder}
    if spec.candidate.backend == folder:  # a candidate with settings of its own begins as the reference is
        changed["candidate"] = spec.candidate.model_copy(update={"backend": side.backend})
    return spec.model_copy(update=changed)


def check_stored_reference(manifest: Manifest) -> None:
    """Refuse a run whose stored reference was accepted under other conditions.

    Raises:
        UsageError: engine, interpreter, packages, model, hardware, flags or questions differ.
        EvidenceError: the baseline is damaged.
    """
    folder = recorded_spec(manifest.spec).reference_baseline
    if not folder:
        return
    accepted = stored.read_baseline(Path(folder)).key
    if other := _key_of(manifest).differing(accepted):
        differs = "; ".join(f"{name.replace('_', ' ')} was {old}, and is {new}" for name, old, new in other)
        raise UsageError(
            f"--reference: {folder} was accepted under other conditions: {differs}.",
            "a baseline of the same engine, interpreter, packages, model, hardware, flags and questions",
            f"accept a new run, or start the reference's server: --reference={accepted.backend}",
        )


def adopt_reference(folder: RunFolder) -> bool:
    """Copy the baseline that stands in for a run's reference into its folder, so that its report needs nothing else.

    Its answers, logits and fingerprint become the run's: no reference server is needed.

    Returns:
        True if the reference is stored; False for a run that starts its server.
    """
    place = recorded_spec(folder.manifest().spec).reference_baseline
    if place:
        stored.copy_baseline(Path(place), folder.baseline)
        _adopt(folder)
    return bool(place)


def _adopt(folder: RunFolder) -> None:
    """Make the baseline's answers the run's own, once."""
    answered = {answer.key for answer in folder.answers()}
    for answer in stored.read_answers(folder.baseline):
        adopted = answer.model_copy(update={"role": "reference"})
        if adopted.key not in answered:
            folder.append(adopted)
    for logits in stored.read_scorings(folder.baseline):
        header = logits.header.model_copy(update={"run": folder.nonce})
        write_logits(folder.path, replace(logits, header=header))
    accepted = stored.read_baseline(folder.baseline)
    said = f"{accepted.server.engine}, stored: baseline {accepted.key.name}, accepted {accepted.accepted}"
    folder.record_server(accepted.server.model_copy(update={"role": "reference", "engine": said, "startup_s": None}))


def envelope_seed(folder: RunFolder) -> str:
    """Return the seed of a run's requests at the required lengths: the stored reference's, which answered them, or its own."""
    return folder.nonce if "reference" in measured_roles(folder) else stored.read_baseline(folder.baseline).seed


def has_stored_logits(folder: RunFolder) -> bool:
    """Return True if the reference's logits come from a baseline."""
    return "reference" not in measured_roles(folder) and bool(stored.read_scorings(folder.baseline))


def measured_roles(folder: RunFolder) -> tuple[Role, ...]:
    """Return the roles that a run measured itself: all but a reference whose answers are stored."""
    return ("candidate",) if recorded_spec(folder.manifest().spec).reference_baseline else ROLES


def counts_of(folder: RunFolder, role: Role) -> list[CallCount]:
    """Read the attention calls counted for a role: in its server, or in that of its stored answers."""
    return (
        folder.counters(role) if role in measured_roles(folder) else list(stored.read_baseline(folder.baseline).calls)
    )


def fingerprints_of(folder: RunFolder) -> dict[Role, Fingerprint]:
    """Read the fingerprints of the roles' servers, or of the stored answers; a role may lack one."""
    made = folder.fingerprints()
    if "reference" not in measured_roles(folder) and (accepted := stored.read_baseline(folder.baseline).fingerprint):
        made["reference"] = accepted
    return made


def accept(folder: RunFolder, verdict: Verdict, root: Path) -> Path:
    """Write the reference of a run as a baseline into the folder of all of them, and return its own folder.

    Raises:
        UsageError: the run has no verdict, or started no server of the reference.
    """
    answers = [answer for answer in folder.answers() if answer.role == "reference"]
    scorings = (logits_path(folder.path, "reference", repeat) for repeat in (0, FLOOR_REPEAT))
    return stored.write_baseline(root, _make(folder, verdict), answers, [path for path in scorings if path.exists()])


def _make(folder: RunFolder, verdict: Verdict) -> Baseline:
    """Make a baseline of the reference's results in a run."""
    if verdict not in ("pass", "regression"):
        raise UsageError(
            f"{folder.path} is {verdict}.",
            "a run with a verdict to be accepted",
            "fix the causes that its report names, and run again",
        )
    manifest, answers = folder.manifest(), folder.answers()
    server = next((server for server in folder.progress().servers if server.role == "reference"), None)
    answered = any(pair(folder.items(), answers, suite).pairs for suite in ("accuracy", "greedy"))
    if server is None or "reference" not in measured_roles(folder) or not answered:
        raise UsageError(
            f"{folder.path} has no answers from a reference server.",
            "a complete run that started this server",
            "run the suites accuracy or greedy, with a reference that is a backend",
        )
    return Baseline(
        key=_key_of(manifest),
        side=recorded_spec(manifest.spec).reference,
        accepted=timestamp(),
        run_id=manifest.run_id,
        git=manifest.git,
        calls=tuple(folder.counters("reference")),
        server=server.model_copy(update={"launch_command": ""}),
        fingerprint=folder.fingerprints().get("reference"),
        seed=envelope_seed(folder),
    )
