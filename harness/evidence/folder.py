"""``runs/<id>/``: a run's folder. At any moment it holds everything measured so far, so a killed run loses nothing."""

# The states of a run's folder, and how each ends:
#   unused  no manifest.json, even if a full disk or a kill left other files of `open`: ends with the manifest, the last of them
#   open    records.jsonl and the servers' folders grow, under the lock of one process: ends with `seal`, once everything is done;
#           a failure or a kill leaves the folder open, and the next `open` of the same run resumes
#   sealed  progress.json has the hash of each file, and every reader refuses a change: ends with an `open`, which resumes
# A bench or a comparison of features (`EndedFolder`) is sealed by end.json and is never opened again. A seal is not a signature:
# somebody who also rewrites the file with the seal goes unnoticed.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from pydantic import Field

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence import jsonl
from assay.harness.evidence.counters import ADMISSIONS, Admission, CallCount, read_by_process, read_counters
from assay.harness.evidence.counters import FOLDER as COUNTERS_FOLDER
from assay.harness.evidence.fingerprint import FINGERPRINT, Fingerprint
from assay.harness.evidence.manifest import Manifest, Origin, Progress, ServerManifest, hash_items
from assay.harness.evidence.records import Answer, Item
from assay.harness.evidence.run_file import RUN_AGAIN, Kind, RunFile, RunRecord, check_run, new_nonce
from assay.harness.files import file_hash, is_unused, lock_folder, remove_unfinished, write_whole
from assay.harness.schema import read_json
from assay.harness.sides import ROLES, Role
from assay.harness.text import few

if TYPE_CHECKING:
    from filelock import FileLock

# Settings that may change when a run is resumed: how fast and how patiently it asks.
_RESUMABLE_CHANGES = {"concurrency", "servers", "startup_timeout", "request_timeout"}
_DAMAGED = "check that the path is the folder of a run, or run again with a new --out"
_ManifestKind = TypeVar("_ManifestKind", bound=Origin)
_PROGRESS = RunFile("progress.json", Progress, _DAMAGED)
# Suffixes of evidence. Logs and files that a reader adds are not evidence.
_SEALED = frozenset({".json", ".jsonl", ".safetensors", ".i64"})
# Files that hold the seal, or that are rebuilt from evidence.
_NOT_SEALED = frozenset({"progress.json", "end.json", "report.json", "invariance.json"})
_MOST_NAMES = 3


class _FolderEnd(RunRecord):
    """``end.json``, the last file written, once the whole plan is done. It has the hash of each other file."""

    sealed: dict[str, str] = Field(min_length=1)


_END = RunFile("end.json", _FolderEnd, RUN_AGAIN)


class _BoundFolder(Generic[_ManifestKind]):
    """A folder whose files all carry the nonce in its manifest, of type `kind`. Before the manifest exists, `nonce` holds it."""

    kind: ClassVar[type[Any]]

    def __init__(self, path: Path, nonce: str = "") -> None:
        self.path, self._nonce = path, nonce
        self._lock: FileLock | None = None

    @classmethod
    def new(cls, path: Path, nonce: str = "") -> Self:
        """Make a new folder, locked against other processes for as long as the result exists.

        Args:
            nonce: the nonce of the run that it belongs to, or empty for a separate folder.

        Raises:
            UsageError: the folder is not empty, or another process writes to it.
            EvidenceError: the folder cannot be created.
        """
        lock = lock_folder(path) if is_unused(path) else None
        if lock is None or not is_unused(path):
            raise UsageError(f"{path} is not empty.", "a new folder", "name another one with --out")
        folder = cls(path, nonce or new_nonce())
        folder._lock = lock
        return folder

    def manifest(self) -> _ManifestKind:
        """Read its manifest. Raises EvidenceError if it is missing, damaged, or of another run."""
        path = self.path / "manifest.json"
        manifest: _ManifestKind = read_json(path, self.kind, _DAMAGED)
        check_run(path, manifest.nonce, self._nonce)
        return manifest

    def write_manifest(self, manifest: _ManifestKind) -> None:
        """Replace its manifest. Raises EvidenceError if the disk is full or not writable."""
        manifest = manifest.model_copy(update={"nonce": self.nonce})
        write_whole(self.path / "manifest.json", manifest.model_dump_json(indent=2))

    def append_lines(self, name: str, records: Sequence[RunRecord]) -> None:
        """Append records to a file of lines. Raises EvidenceError if the disk is full or not writable."""
        jsonl.append(self.path / name, [record.model_copy(update={"run": self.nonce}) for record in records])

    def lines(self, name: str, kind: type[Kind]) -> list[Kind]:
        """Read a file of lines, if it exists. Raises EvidenceError if a line is damaged, or of another run."""
        return jsonl.read(self.path / name, kind, self.nonce)

    @property
    def nonce(self) -> str:
        """The nonce that all its evidence carries. Raises EvidenceError if the manifest is missing or damaged."""
        self._nonce = self._nonce or self.manifest().nonce
        return self._nonce


class EndedFolder(_BoundFolder[_ManifestKind]):
    """A folder that is made once and never resumed: its last file seals the others."""

    @property
    def complete(self) -> bool:
        """True if the whole plan was done."""
        return _END.read(self.path, self._nonce) is not None

    def seal(self) -> None:
        """Record completion, and the hash of each file of evidence. Raises EvidenceError if it cannot be written."""
        _END.write(self.path, _FolderEnd(sealed=_seal_of(self.path)), self.nonce)

    def check_sealed(self) -> None:
        """Raise EvidenceError if it is complete, but a file was changed, removed or added since."""
        if end := _END.read(self.path, self.nonce):
            _check_seal(self.path, end.sealed)


class EvidenceFolder(_BoundFolder[_ManifestKind]):
    """The folder of a run or a bench, with the files that both servers' processes leave there."""

    def server_folder(self, role: Role) -> Path:
        """Return the folder where a role's server writes its counters and admissions."""
        return self.path / "servers" / role

    def log(self, role: Role) -> Path:
        """Return a role's server log."""
        return self.path / f"{role}.log"

    def read(self, file: RunFile[Kind], role: Role | None = None) -> Kind | None:
        """Read a file of the run or of a role's server, if it exists. Raises EvidenceError if it is damaged."""
        place = self.server_folder(role) if role else self.path
        record = file.read(place)
        if record is not None:  # only then must the folder have a manifest with a nonce
            check_run(place / file.name, record.run, self.nonce)
        return record

    def write(self, file: RunFile[Kind], record: Kind, role: Role | None = None) -> None:
        """Replace a file of the run or of a role's server, adding the run's nonce. Raises EvidenceError if it cannot."""
        file.write(self.server_folder(role) if role else self.path, record, self.nonce)

    def fingerprints(self) -> dict[Role, Fingerprint]:
        """Read the fingerprint of each role whose server reported one. Raises EvidenceError if one is damaged."""
        read = {role: FINGERPRINT.read(self.server_folder(role), self.nonce) for role in ROLES}
        return {role: made for role, made in read.items() if made is not None}

    def counters(self, role: Role) -> list[CallCount]:
        """Read the counts of attention calls in a role's server."""
        return read_counters(self.server_folder(role) / COUNTERS_FOLDER, self.nonce)


class RunFolder(EvidenceFolder[Manifest]):
    """A run's folder, new or resumed. If returned by `open`, it is locked against other processes for as long as it exists."""

    kind = Manifest

    @classmethod
    def open(cls, path: Path, manifest: Manifest, items: Sequence[Item]) -> RunFolder:
        """Begin a run in `path`, or resume it if the same run is there.

        Raises:
            UsageError: `path` holds another run, or something else, or another process writes to it.
            EvidenceError: it cannot be written, or its evidence is not as it was when the run ended.
        """
        folder = cls(path)
        written = path / "manifest.json"
        # A run that could not write its manifest, as on a full disk, has not begun.
        if not written.exists() and not is_unused(path, remains=("items.jsonl",)):
            raise UsageError(
                f"{path} exists and is not the folder of a run.", "a new or empty folder", "name another one with --out"
            )
        folder._lock = lock_folder(path)
        remove_unfinished(path)
        if not written.exists():
            write_whole(path / "items.jsonl", jsonl.lines_of(items))
            folder._nonce = manifest.nonce
            folder.write_manifest(manifest)
            return folder
        earlier = folder.manifest()
        differing = _differing(earlier, manifest)
        if differing:
            raise UsageError(
                f"{path} holds another run: {'; '.join(differing)}.",
                "the run to resume, or a new folder",
                "name another folder with --out",
            )
        folder.check_sealed()
        jsonl.drop_cut_line(path / "records.jsonl")
        folder.update(folder.progress().model_copy(update={"failure": None, "sealed": {}}))
        return folder

    def progress(self) -> Progress:
        """Read the run's state, or return an empty one if none was written yet."""
        return self.read(_PROGRESS) or Progress()

    def update(self, progress: Progress) -> None:
        """Replace the progress."""
        self.write(_PROGRESS, progress)

    def seal(self) -> None:
        """Record the hash of each file of evidence, now that the run has ended. Raises EvidenceError if it cannot."""
        progress = self.progress()
        self.update(progress.model_copy(update={"sealed": _seal_of(self.path) | progress.stated}))

    def check_sealed(self) -> None:
        """Raise EvidenceError if the run has ended and a file was changed, removed or added since."""
        progress = self.progress()
        _check_seal(self.path, progress.sealed, progress.stated)

    def items(self) -> list[Item]:
        """Read the items that both servers are asked. Raises EvidenceError if their hash differs from the manifest's."""
        path = self.path / "items.jsonl"
        items = jsonl.read(path, Item)
        if (actual := hash_items(items)) != (expected := self.manifest().items_hash):
            raise EvidenceError(
                f"{path} holds {len(items)} items with hash {actual[:12]}.",
                f"the run's own items, with hash {expected[:12]}",
                "restore the file, or run again with a new --out",
            )
        return items

    def answers(self) -> list[Answer]:
        """Read all answers so far, each with the size of the batch that admitted its request, if the server recorded it."""
        batches = {role: self._batches(role) for role in ROLES}
        answers = self.lines("records.jsonl", Answer)
        return [
            answer.model_copy(update={"batch_size": batches[answer.role].get(answer.request_id)}) for answer in answers
        ]

    def append(self, answer: Answer) -> None:
        """Append an answer."""
        self.append_lines("records.jsonl", [answer])

    def record_server(self, server: ServerManifest) -> None:
        """Record a server's own report, replacing that of an earlier server in the same role."""
        progress = self.progress()
        others = (s for s in progress.servers if s.role != server.role)
        self.update(progress.model_copy(update={"servers": (*others, server)}))

    @property
    def baseline(self) -> Path:
        """The folder of the accepted baseline that stands in for the reference's server; it is missing without one."""
        return self.path / "baseline"

    def counters_by_process(self, role: Role) -> dict[int, list[CallCount]]:
        """Read the counts of attention calls in each process of a role's servers, by process id."""
        return read_by_process(self.server_folder(role) / COUNTERS_FOLDER, self.nonce)

    def admissions(self, role: Role) -> list[Admission]:
        """Read the prefill batches that a role's server admitted, in order."""
        return jsonl.read(self.server_folder(role) / ADMISSIONS, Admission, self.nonce)

    def _batches(self, role: Role) -> dict[str, int]:
        """Return the number of sequences in each request's first prefill batch, by request id."""
        batches: dict[str, int] = {}
        for admission in self.admissions(role):
            for rid in admission.rids:
                batches.setdefault(rid, len(admission.rids))
        return batches


def _differing(earlier: Manifest, now: Manifest) -> list[str]:
    """Describe each difference between the runs `earlier` and `now`."""
    before, after = _settings(earlier.spec), _settings(now.spec)
    changes = [
        f"{key} was {before.get(key)!r}, now {after.get(key)!r}"
        for key in sorted({*before, *after} - _RESUMABLE_CHANGES)
        if before.get(key) != after.get(key)
    ]
    compared = {
        "model's files": (earlier.model_hashes, now.model_hashes), "questions": (earlier.items_hash, now.items_hash),
        "packages": (earlier.packages, now.packages), "hardware": (earlier.hardware, now.hardware),
    }  # fmt: skip
    changes += [f"the {what} changed" for what, (old, new) in compared.items() if old != new]
    for role in ROLES:
        had, has = earlier.code.get(role, {}), now.code.get(role, {})
        parts = sorted(part for part in {**had, **has} if had.get(part) != has.get(part))
        changes += [f"the {role}'s kernel changed ({', '.join(parts)})"] if parts else []
    return changes


def _settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recorded spec by name. The names of a side's settings begin with its role."""
    flat: dict[str, Any] = {}
    for part, value in spec.items():
        inside = value if isinstance(value, Mapping) else {"": value}
        flat |= {
            f"{part} {name}".strip() if part in ROLES or not name else name: setting for name, setting in inside.items()
        }
    return flat


def _seal_of(folder: Path) -> dict[str, str]:
    """Hash each file of a run's evidence with SHA-256, by relative path.

    Raises:
        EvidenceError: a file cannot be read.
    """
    hashes = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix not in _SEALED or path.name.startswith(".") or name in _NOT_SEALED or not path.is_file():
            continue
        try:
            hashes[name] = file_hash(path)
        except OSError as error:
            raise EvidenceError(
                f"{path} cannot be read: {error.strerror}.", "evidence that can be read", "make it readable"
            ) from None
    return hashes


def _check_seal(folder: Path, sealed: Mapping[str, str], stated: Mapping[str, str] = MappingProxyType({})) -> None:
    """Refuse evidence that was changed after its run ended.

    Args:
        sealed: `_seal_of` the folder at that time, and `stated`; empty for a run that has not ended, which is not checked.
        stated: current hashes of the statements in the file with the seal.

    Raises:
        EvidenceError: a file was changed, removed or added.
    """
    if not sealed:
        return
    now = {**_seal_of(folder), **stated}
    changed = sorted(name for name in sealed.keys() & now.keys() if sealed[name] != now[name])
    removed, added = sorted(sealed.keys() - now.keys()), sorted(now.keys() - sealed.keys())
    parts = (("changed", changed), ("removed", removed), ("added", added))
    if words := [
        f"{few(names, _MOST_NAMES)} {'was' if len(names) == 1 else 'were'} {what}" for what, names in parts if names
    ]:
        raise EvidenceError(
            f"The evidence in {folder} is not as it was when the run ended: {'; '.join(words)}.",
            f"the {len(sealed)} files of the run, unchanged",
            "restore them, or run again with a new --out",
        )
