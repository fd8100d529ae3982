"""``runs/<id>/``: a run's folder. It holds everything measured so far at any moment, so a killed run loses nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence import jsonl
from assay.harness.evidence.counters import ADMISSIONS, CallCount, read_counters
from assay.harness.evidence.counters import FOLDER as COUNTERS_FOLDER
from assay.harness.evidence.manifest import Manifest, Progress
from assay.harness.evidence.records import ROLES, Answer, Item, Role
from assay.harness.files import write_whole
from assay.harness.schema import Record

Document = TypeVar("Document", bound=Record)

# What may change when a run is resumed: how fast and how patiently it asks.
_RESUMABLE_CHANGES = {"concurrency", "servers", "startup_timeout", "request_timeout"}


class RunFolder:
    """A run's folder, new or resumed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path, manifest: Manifest, items: Sequence[Item]) -> RunFolder:
        """Begin a run in `path`, or resume it if the same run is there.

        Raises:
            UsageError: `path` holds another run, or something else.
            EvidenceError: it cannot be written.
        """
        folder = cls(path)
        if not folder._file("manifest.json").exists():
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise UsageError(
                    f"{path} exists and is not the folder of a run.",
                    "a new or empty folder",
                    "name another one with --out",
                )
            folder._make(manifest, items)
            return folder
        earlier = folder.manifest()
        differing = _differing(earlier, manifest)
        if differing:
            raise UsageError(
                f"{path} holds another run: {'; '.join(differing)}.",
                "the run that is to be resumed, or a new folder",
                "name another folder with --out",
            )
        jsonl.drop_cut_line(folder._file("records.jsonl"))
        folder.update(folder.progress().model_copy(update={"failure": None}))
        return folder

    def _make(self, manifest: Manifest, items: Sequence[Item]) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EvidenceError(
                f"{self.path} cannot be created: {error.strerror}.", "a writable folder", "name another --out"
            ) from error
        jsonl.append(self._file("items.jsonl"), items)
        self._replace("manifest.json", manifest.model_dump_json(indent=2))

    def manifest(self) -> Manifest:
        """The run's manifest.

        Raises:
            EvidenceError: it is missing or damaged.
        """
        return self._read("manifest.json", Manifest)

    def progress(self) -> Progress:
        """The state of the run; an empty one if none was written yet."""
        return self._read("progress.json", Progress) if self._file("progress.json").exists() else Progress()

    def update(self, progress: Progress) -> None:
        """Replace the progress."""
        self._replace("progress.json", progress.model_dump_json(indent=2))

    def items(self) -> list[Item]:
        """What both servers are asked."""
        return jsonl.read(self._file("items.jsonl"), Item)

    def answers(self) -> list[Answer]:
        """All answers so far, each with the size of the batch that admitted the request where the server recorded it."""
        batches = {role: self._batches(role) for role in ROLES}
        return [
            answer.model_copy(update={"batch_size": batches[answer.role].get(answer.request_id)})
            for answer in jsonl.read(self._file("records.jsonl"), Answer)
        ]

    def append(self, answer: Answer) -> None:
        """Append an answer."""
        jsonl.append(self._file("records.jsonl"), [answer])

    def server_folder(self, role: Role) -> Path:
        """The folder in which a role's server writes its counters and admissions."""
        return self.path / "servers" / role

    def log(self, role: Role) -> Path:
        """A role's server log."""
        return self.path / f"{role}.log"

    def baseline(self, role: Role) -> Path:
        """The folder of the accepted baseline with which a role is compared."""
        return self.path / "baseline" / role

    def baseline_status(self) -> str | None:
        """``baseline/status.json``; None if the run is compared with no baseline."""
        path = self.path / "baseline" / "status.json"
        return path.read_text() if path.exists() else None

    def write_baseline_status(self, text: str) -> None:
        """Write ``baseline/status.json``."""
        (self.path / "baseline").mkdir(exist_ok=True)
        self._replace("baseline/status.json", text)

    def counters(self, role: Role) -> list[CallCount]:
        """Attention calls counted in a role's server."""
        return read_counters(self.server_folder(role) / COUNTERS_FOLDER)

    def write_counters(self) -> None:
        """Write ``counters.json``, the counts of both servers, for people and other tools."""
        counts = {role: [count.model_dump() for count in self.counters(role)] for role in ROLES}
        self._replace("counters.json", json.dumps(counts, indent=2))

    def _batches(self, role: Role) -> dict[str, int]:
        """Sequences in the first prefill batch of each request, by request id."""
        path = self.server_folder(role) / ADMISSIONS
        batches: dict[str, int] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                rids = json.loads(line)["rids"] if line.endswith("}") else []
                for rid in rids:
                    batches.setdefault(rid, len(rids))
        return batches

    def _file(self, name: str) -> Path:
        return self.path / name

    def _read(self, name: str, kind: type[Document]) -> Document:
        path = self._file(name)
        try:
            return kind.model_validate_json(path.read_text())
        except (OSError, ValidationError) as error:
            raise EvidenceError(
                f"{path} cannot be read: {str(error).splitlines()[0]}.",
                "the folder of a run",
                "check the path, or run again",
            ) from None

    def _replace(self, name: str, text: str) -> None:
        write_whole(self._file(name), text)


def _differing(earlier: Manifest, now: Manifest) -> list[str]:
    """What makes `now` a different run from `earlier`, in words."""
    found = [
        f"{key} was {earlier.spec.get(key)!r} and is {now.spec.get(key)!r}"
        for key in sorted({*earlier.spec, *now.spec} - _RESUMABLE_CHANGES)
        if earlier.spec.get(key) != now.spec.get(key)
    ]
    found += [f"the {what} changed" for what, same in _same(earlier, now).items() if not same]
    return found


def _same(earlier: Manifest, now: Manifest) -> dict[str, bool]:
    return {
        "model's files": earlier.model_hash == now.model_hash,
        "questions": earlier.items_hash == now.items_hash,
        "packages": earlier.packages == now.packages,
    }
