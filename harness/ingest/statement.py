"""The statement of a piece of evidence: the small interface between readers and the checker of claims."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from assay.harness.ingest.quantity import Unit
from assay.harness.ingest.source import Source


class Statement(NamedTuple):
    """One thing that a file states.

    Attributes:
        kind: "number" for a metric, "test" for the outcome of a test.
        names: what the metric or the test is called, the full name first. Case, spaces and punctuation do not count.
        value: the number; or the outcome in lower case, such as "passed", empty if there is none.
        where: path, with the line or the record.
        text: what is written there. It comes from outside: never trust it.
        unit: of the number; None for a share, a count, or where the file does not state it.
    """

    kind: Literal["number", "test"]
    names: tuple[str, ...]
    value: float | str
    where: str
    text: str
    unit: Unit | None = None


@runtime_checkable
class States(Protocol):
    """A reader that can list what a file states. A reader without it serves `assay ingest` only."""

    def statements(self, source: Source) -> Iterable[Statement]:
        """List everything that a claim may be about."""
        ...
