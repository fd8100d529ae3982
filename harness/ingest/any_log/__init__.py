"""Text that no other reader knows: logs of other engines, output of benchmarks and evaluations, one's own notes of a run."""

from __future__ import annotations

from assay.harness.ingest.any_log.reader import AnyLog

READER = AnyLog()
