"""The sequence that both servers of a run were traced on, layer by layer, and the names of its traces."""

from __future__ import annotations

from assay.harness.evidence.logit_files import CacheState
from assay.harness.evidence.run_file import RunFile, RunRecord

FIRST, AGAIN = "sides", "sides-again"
"""Labels of its traces (`assay.harness.evidence.trace`): of each server, and of the reference in another batch."""


class TracedSequence(RunRecord):
    """The sequence that a server was traced on.

    Attributes:
        item: id of the prompt.
        index: index of the sequence among those that were scored.
        condition: state of the prefix cache.
    """

    item: str
    index: int
    condition: CacheState


TRACED_SEQUENCE = RunFile("traced-sequence.json", TracedSequence)
