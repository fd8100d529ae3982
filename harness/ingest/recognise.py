"""Which reader takes a file: by its content, never by its name alone."""

from __future__ import annotations

from typing import Protocol

from assay.harness.ingest.result import Document
from assay.harness.ingest.source import Source


class FileReader(Protocol):
    """Reads one format.

    Attributes:
        id: of the format, kebab-case and stable.
        title: for people.
    """

    id: str
    title: str

    def recognises(self, source: Source) -> bool:
        """Whether the file is of this format, from `Source.head`, or from the names in a folder."""
        ...

    def read(self, source: Source) -> Document:
        """Read all of it."""
        ...
