"""A bench's folder, in its run's: ``manifest.json``, ``timings.jsonl``, both servers' counters, fingerprints and logs, and
``end.json``, which seals them.
"""

from __future__ import annotations

from assay.evals.loads import Shape
from assay.harness.evidence.folder import EndedFolder, EvidenceFolder, RunFolder
from assay.harness.evidence.manifest import Origin, ServerManifest
from assay.harness.evidence.run_file import RunRecord
from assay.harness.sides import Role


class Stream(RunRecord):
    """A streamed answer, with the arrival times of its tokens.

    Attributes:
        sent_s: time of sending, in seconds of the client's clock.
        latency_s: seconds from sending to the end of the answer.
        chunk_s: seconds from sending to each chunk with a token. The first is the time to first token.
        chunk_tokens: tokens of the answer up to and including each chunk.
        prompt_tokens: tokens of the prompt, as the server reports.
        completion_tokens: tokens of the answer, as the server reports.
        cached_tokens: prompt tokens from the prefix cache, or None if the server does not report them.
    """

    sent_s: float
    latency_s: float
    chunk_s: tuple[float, ...]
    chunk_tokens: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


class Timing(Stream):
    """One timed request.

    Attributes:
        role: role of the server.
        again: whether it belongs to the role's second block in the round. The reference's two blocks give the floor.
        round: number of the round. Each round plays every load once.
        block: number of the block, in playing order.
        shape: name of the load's shape.
        concurrency: largest number of requests in flight.
        index: number of the request in its block.
    """

    role: Role
    again: bool = False
    round: int
    block: int
    shape: str
    concurrency: int
    index: int


_FOLDER = "bench"
TIMINGS = "timings.jsonl"
"""File of lines: one `Timing` per line."""


class BenchManifest(Origin):
    """The record of a bench: its loads, software and machine.

    Attributes:
        seed: seed of the prompts and of the order of blocks.
        shapes: the shapes that `spec` names.
        eager: whether both servers ran without CUDA graphs.
        servers: both servers' own reports.
    """

    seed: int
    shapes: tuple[Shape, ...]
    eager: bool
    servers: tuple[ServerManifest, ...]


class BenchFolder(EvidenceFolder[BenchManifest], EndedFolder[BenchManifest]):
    """A bench's folder."""

    kind = BenchManifest


def bench_folder(run: RunFolder) -> BenchFolder:
    """Return the bench of a run, bound to the run's nonce. The folder need not exist yet."""
    return BenchFolder(run.path / _FOLDER, run.nonce)
