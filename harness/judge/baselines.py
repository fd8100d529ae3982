"""Baselines: which accepted results match a run, how a run differs from them, and accepting it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from assay.harness.conditions import CACHED_PREFIX, condition_id
from assay.harness.config import RunSpec, recorded_spec
from assay.harness.errors import UsageError
from assay.harness.evidence import baseline as stored
from assay.harness.evidence.baseline import Baseline, Key
from assay.harness.evidence.counters import CallCount
from assay.harness.evidence.error_table import relative_l1
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.layer_diff_record import shadow_errors_of
from assay.harness.evidence.logit_files import logits_path, write_logits
from assay.harness.evidence.manifest import Manifest, engine_label
from assay.harness.evidence.records import FLOOR_REPEAT
from assay.harness.evidence.run_file import REPEAT_RUN
from assay.harness.evidence.shadow_errors import ShadowErrors
from assay.harness.files import file_name, timestamp, write_whole
from assay.harness.fingerprint.differences import FingerprintDiff, compare_fingerprints
from assay.harness.judge.answers import pair, tally
from assay.harness.schema import Record, read_json
from assay.harness.sides import ROLES, Role
from assay.harness.verdict import Verdict

# An error that grew by less than this factor counts as unchanged: another machine computes the last digits
# differently.
_MIN_GROWTH = 1.01
# Relative L1 of rounding in float32 over a head's dimension: a smaller error counts as this much.
_MIN_OWN_ERROR = 1e-5


class Status(Record):
    """``baseline/status.json`` in a run's folder: which accepted baselines match the run.

    Attributes:
        used: role -> name of the baseline that matches.
        stale: role -> differences from the nearest baseline of its backend, if none matches: name, old and new value.
        unused: baselines of other backends or keys.
        damaged: baselines of other backends that cannot be read.
        gate: whether the candidate is compared with its own accepted baseline.
        stored_reference: whether the reference's answers came from the baseline, without a server.
    """

    used: dict[Role, str] = Field(default_factory=dict)
    stale: dict[Role, tuple[tuple[str, str, str], ...]] = Field(default_factory=dict)
    unused: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    gate: bool = True
    stored_reference: bool = False


def _key_of(manifest: Manifest, role: Role) -> Key:
    """Return the key of a role's results in a run."""
    spec = recorded_spec(manifest.spec)
    side = spec.sides[role]
    version = manifest.engines.get(role) or manifest.packages.get(side.engine) or "not installed"
    return Key(
        engine=engine_label(side.engine, version, spec.device),
        backend=side.backend,
        model_hash=manifest.model_hashes[role],
        hardware=manifest.hardware,
        flags=side.flags,
        items_hash=manifest.items_hash,
        interpreter=side.interpreter,
        packages=side.packages,
    )


def _find(keys: Mapping[Role, Key], baselines: Mapping[str, Baseline]) -> Status:
    """Match each role with a baseline, or give the reasons why the others of its backend do not match."""
    matching = {role: [name for name, b in baselines.items() if b.key == key] for role, key in keys.items()}
    used = {role: names[0] for role, names in matching.items() if names}
    stale = {}
    for role, key in keys.items():
        others = [b.key for b in baselines.values() if b.key.backend == key.backend]
        if role not in used and others:
            nearest = min(others, key=lambda other: len(key.differing(other)))
            stale[role] = tuple(key.differing(nearest))
    return Status(used=used, stale=stale, unused=tuple(name for name in baselines if name not in used.values()))


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
    if other := _key_of(manifest, "reference").differing(accepted):
        differs = "; ".join(f"{name.replace('_', ' ')} was {old}, and is {new}" for name, old, new in other)
        raise UsageError(
            f"--reference: {folder} was accepted under other conditions: {differs}.",
            "a baseline of the same engine, interpreter, packages, model, hardware, flags and questions",
            f"accept a new run, or start the reference's server: --reference={accepted.backend}",
        )


def attach_baselines(folder: RunFolder, *, gate: bool) -> Status | None:
    """Copy the baselines that match a run into its folder, so that its report needs nothing else.

    The answers, logits and fingerprint of a reference that is a baseline become the run's: no reference server is needed.

    Args:
        gate: whether the candidate is compared with its own accepted baseline.

    Returns:
        The baselines that match, or None for a run that needs none.
    """
    manifest = folder.manifest()
    spec = recorded_spec(manifest.spec)
    place = Path(spec.reference_baseline) if spec.reference_baseline else None
    if not (gate or place):
        return None
    status = Status(gate=gate)
    if gate:
        keys = {role: _key_of(manifest, role) for role in ROLES}
        known, damaged = _read_all(Path(spec.policy.baselines), keys.values())
        status = _find(keys, known).model_copy(update={"damaged": damaged})
    for role, name in status.used.items():
        stored.copy_baseline(Path(spec.policy.baselines) / name, folder.baseline(role))
    if place:
        stored.copy_baseline(place, folder.baseline("reference"))
        _adopt(folder)
        used = {**status.used, "reference": place.resolve().name}
        status = status.model_copy(update={"used": used, "stored_reference": True})
    write_whole(folder.baseline_status, status.model_dump_json(indent=1))
    return status


def _read_all(root: Path, keys: Iterable[Key]) -> tuple[dict[str, Baseline], tuple[str, ...]]:
    """Read the baselines of a folder, and list those that cannot be read."""
    known, damaged = stored.read_all(root)
    backends = {file_name(key.backend) for key in keys if key.name not in known}
    for name, error in damaged.items():
        if name.rpartition("-")[0] in backends:
            raise error
    return known, tuple(damaged)


def _adopt(folder: RunFolder) -> None:
    """Make the baseline's answers the run's own, once."""
    answered = {answer.key for answer in folder.answers()}
    for answer in stored.read_answers(folder.baseline("reference")):
        adopted = answer.model_copy(update={"role": "reference"})
        if adopted.key not in answered:
            folder.append(adopted)
    for logits in stored.read_scorings(folder.baseline("reference")):
        header = logits.header.model_copy(update={"run": folder.nonce})
        write_logits(folder.path, replace(logits, header=header))
    accepted = stored.read_baseline(folder.baseline("reference"))
    said = f"{accepted.server.engine}, stored: baseline {accepted.key.name}, accepted {accepted.accepted}"
    folder.record_server(accepted.server.model_copy(update={"role": "reference", "engine": said, "startup_s": None}))


def status_of(folder: RunFolder) -> Status | None:
    """Return the baselines that `attach_baselines` found, or None if the run needs none."""
    path = folder.baseline_status
    return read_json(path, Status, REPEAT_RUN) if path.exists() else None


def envelope_seed(folder: RunFolder) -> str:
    """Return the seed of a run's requests at the required lengths: the stored reference's, which answered them, or its own."""
    stored_reference = "reference" not in measured_roles(folder)
    return stored.read_baseline(folder.baseline("reference")).seed if stored_reference else folder.nonce


def has_stored_logits(folder: RunFolder) -> bool:
    """Return True if the reference's logits come from a baseline."""
    place = folder.baseline("reference")
    return "reference" not in measured_roles(folder) and bool(stored.read_scorings(place))


def measured_roles(folder: RunFolder) -> tuple[Role, ...]:
    """Return the roles that a run measured itself: all but a reference whose answers are stored."""
    status = status_of(folder)
    return ("candidate",) if status is not None and status.stored_reference else ROLES


def counts_of(folder: RunFolder, role: Role) -> list[CallCount]:
    """Read the attention calls counted for a role: in its server, or in that of its stored answers."""
    if role in measured_roles(folder):
        return folder.counters(role)
    return list(stored.read_baseline(folder.baseline(role)).calls)


def since_accepted(accepted: Fingerprint, made: Fingerprint) -> FingerprintDiff:
    """Compare a server (B) with the accepted one (A). Every difference counts, those in requested settings too."""
    asked = {"asked": {**accepted.asked, **made.asked}}
    return compare_fingerprints(accepted.model_copy(update=asked), made.model_copy(update=asked))


def fingerprints_of(folder: RunFolder) -> dict[Role, Fingerprint]:
    """Read the fingerprints of the roles' servers, or of the stored answers; a role may lack one."""
    made = folder.fingerprints()
    stored_roles = [role for role in ROLES if role not in measured_roles(folder)]
    accepted = {role: stored.read_baseline(folder.baseline(role)).fingerprint for role in stored_roles}
    return made | {role: fingerprint for role, fingerprint in accepted.items() if fingerprint is not None}


def own_errors_of(folder: RunFolder, role: Role) -> dict[str, float]:
    """Return the errors (relative L1) that a run measured of its candidate, over all heads, by id of layer and condition."""
    errors = shadow_errors_of(folder) if role == "candidate" else None
    return _own_errors_by_condition(errors) if errors else {}


def _own_errors_by_condition(errors: ShadowErrors) -> dict[str, float]:
    by = ("layer", "phase", "prefix")
    labels, own = [errors.cells.labels(dimension) for dimension in by], relative_l1(errors.cells.distance(by))
    places = product(*map(enumerate, labels))
    return {
        f"layer-{layer}-{phase}-{condition_id(CACHED_PREFIX.id, prefix)}": float(own[i, j, k])
        for (i, layer), (j, phase), (k, prefix) in places
        if not math.isnan(own[i, j, k])
    }


class Change(NamedTuple):
    """A number of a baseline and of the run that would replace it, each None if it was not measured."""

    name: str
    before: float | None
    now: float | None

    @property
    def worse(self) -> bool:
        """True if the run is less accurate, has a larger error, or no longer measured it."""
        if self.before is None or self.now is None:
            return self.before is not None
        if self.name == "accuracy":
            return self.now < self.before
        return not growth(self.before, self.now) <= _MIN_GROWTH


def growth(before: float, now: float) -> float:
    """Compute the factor by which an error grew."""
    return now / max(before, _MIN_OWN_ERROR)


@dataclass(frozen=True)
class Proposal:
    """A baseline to accept.

    Attributes:
        before: the accepted one with the same key, or None.
    """

    role: Role
    now: Baseline
    before: Baseline | None

    @property
    def changes(self) -> list[Change]:
        """The differences that accepting it would make."""
        old, new = ({**each.numbers, **each.own_errors} if each else {} for each in (self.before, self.now))
        return [Change(name, old.get(name), new.get(name)) for name in {**old, **new}]


def propose(folder: RunFolder, verdict: Verdict, root: Path, reason: str = "") -> list[Proposal]:
    """Propose the baselines of all roles that a run measured."""
    made = {role: _make(folder, role, verdict, reason) for role in measured_roles(folder)}
    known, _ = _read_all(root, [now.key for now in made.values()])
    return [Proposal(role, now, known.get(now.key.name)) for role, now in made.items()]


def refuse_worse(proposals: Sequence[Proposal]) -> None:
    """Refuse numbers that are worse than the accepted ones, unless there is a reason.

    Raises:
        UsageError: a number is worse, and no reason to accept it was given.
    """
    if any(change.worse for proposal in proposals if not proposal.now.reason for change in proposal.changes):
        raise UsageError(
            "Some numbers are worse than the accepted ones.",
            "numbers at least as good, or a reason",
            "fix the candidate, or accept with --widen REASON",
        )


def accept(folder: RunFolder, proposals: Sequence[Proposal], root: Path) -> list[Path]:
    """Write the baselines of a run, and return their folders."""
    refuse_worse(proposals)
    answers = folder.answers()
    return [
        stored.write_baseline(
            root,
            proposal.now,
            [answer for answer in answers if answer.role == proposal.role],
            _scorings(folder) if proposal.role == "reference" else (),
        )
        for proposal in proposals
    ]


def _scorings(folder: RunFolder) -> list[Path]:
    """List the files of the reference's logits."""
    paths = (logits_path(folder.path, "reference", repeat) for repeat in (0, FLOOR_REPEAT))
    return [path for path in paths if path.exists()]


def _make(folder: RunFolder, role: Role, verdict: Verdict, reason: str = "") -> Baseline:
    """Make a baseline of a role's results in a run."""
    if verdict not in ("pass", "regression"):
        raise UsageError(
            f"{folder.path} is {verdict}.",
            "a run with a verdict to be accepted",
            "fix the causes that its report names, and run again",
        )
    if verdict == "regression" and not reason:
        raise UsageError(
            f"{folder.path} is a regression.",
            "a run that passes, or a reason",
            "fix the candidate, or accept with --widen REASON",
        )
    manifest, answers = folder.manifest(), folder.answers()
    server = next((s for s in folder.progress().servers if s.role == role), None)
    questions, greedy = (pair(folder.items(), answers, suite).pairs for suite in ("accuracy", "greedy"))
    if server is None or role not in measured_roles(folder) or not (questions or greedy):
        raise UsageError(
            f"{folder.path} has no answers from a {role} server.",
            "a complete run that started this server",
            "run the suites accuracy or greedy, with a reference that is a backend",
        )
    numbers = {"accuracy": tally(questions, role).right / len(questions)} if questions else {}
    return Baseline(
        key=_key_of(manifest, role),
        side=recorded_spec(manifest.spec).sides[role],
        accepted=timestamp(),
        run_id=manifest.run_id,
        git=manifest.git,
        reason=reason,
        numbers=numbers,
        own_errors=own_errors_of(folder, role),
        calls=tuple(folder.counters(role)),
        server=server.model_copy(update={"launch_command": ""}),
        fingerprint=folder.fingerprints().get(role),
        seed=envelope_seed(folder),
    )
