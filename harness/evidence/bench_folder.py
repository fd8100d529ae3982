"""The folder of a bench: ``manifest.json``, ``timings.jsonl``, ``lengths.jsonl``, counters and logs of both servers."""

from __future__ import annotations

from pathlib import Path

from assay.evals.loads import Shape
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence import jsonl
from assay.harness.evidence.counters import CallCount
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import Origin, ServerManifest
from assay.harness.evidence.records import Role
from assay.harness.evidence.timings import AnswerLength, Timing
from assay.harness.files import write_whole
from assay.harness.schema import read_json

FOLDER = "bench"
MANIFEST, TIMINGS, LENGTHS, COUNTERS = "manifest.json", "timings.jsonl", "lengths.jsonl", "counters.json"


class BenchManifest(Origin):
    """What was timed, with what, on what.

    Attributes:
        seed: seed of the prompts and of the order of blocks.
        shapes: the shapes that `spec` names.
        eager: whether both servers ran without CUDA graphs.
        servers: what both servers report about themselves.
    """

    seed: int
    shapes: tuple[Shape, ...]
    eager: bool
    servers: tuple[ServerManifest, ...]


class BenchFolder:
    """A bench's folder.

    Attributes:
        path: its path.
        servers: the same folder as that of a run, for the logs and counters of both servers.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.servers = RunFolder(path)

    @classmethod
    def new(cls, path: Path) -> BenchFolder:
        """A new folder.

        Raises:
            UsageError: it is not empty.
            EvidenceError: it cannot be created.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UsageError(f"{path} is not empty.", "a new folder", "name another one with --out")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EvidenceError(
                f"{path} cannot be created: {error.strerror}.", "a writable folder", "name another --out"
            ) from error
        return cls(path)

    @property
    def complete(self) -> bool:
        """Whether the bench was played to its end: the counts of both servers are written last."""
        return (self.path / COUNTERS).exists()

    def write_manifest(self, manifest: BenchManifest) -> None:
        """Record what is timed.

        Raises:
            EvidenceError: the disk is full or not writable.
        """
        write_whole(self.path / MANIFEST, manifest.model_dump_json(indent=2))

    def manifest(self) -> BenchManifest:
        """What was timed.

        Raises:
            EvidenceError: it is missing or damaged.
        """
        do = "check that the path is the folder of a bench, or run the bench again"
        return read_json(self.path / MANIFEST, BenchManifest, do)

    def append(self, lines: list[Timing]) -> None:
        """Append a block's timings."""
        jsonl.append(self.path / TIMINGS, lines)

    def append_lengths(self, lines: list[AnswerLength]) -> None:
        """Append answer lengths."""
        jsonl.append(self.path / LENGTHS, lines)

    def timings(self) -> list[Timing]:
        """All timings."""
        return jsonl.read(self.path / TIMINGS, Timing)

    def lengths(self) -> list[AnswerLength]:
        """All answer lengths."""
        return jsonl.read(self.path / LENGTHS, AnswerLength)

    def counters(self, role: Role) -> list[CallCount]:
        """Attention calls that were counted in a role's server."""
        return self.servers.counters(role)


def bench_folder(run: RunFolder) -> BenchFolder:
    """The bench of a run; the folder need not exist yet."""
    return BenchFolder(run.path / FOLDER)
