"""The outcome of making a dump a replay pack."""

from __future__ import annotations

from dataclasses import dataclass

from assay.harness.evidence.pack import PackManifest


@dataclass(frozen=True)
class Imported:
    """A pack that was made of a dump.

    Attributes:
        manifest: of the pack.
        passes: forward passes, or calls, that were read.
        checked: calls in the pack whose dumped output agrees with the truth for these q, k and v.
        with_prefix: calls in the pack with a cached prefix.
        refused: why something is not in the pack, with the number of times.
    """

    manifest: PackManifest
    passes: int
    checked: int
    with_prefix: int
    refused: tuple[tuple[str, int], ...]
