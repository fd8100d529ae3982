"""What each process of a server observed -> one fingerprint, in which a parameter that they share is whole again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from assay.harness.evidence.fingerprint import Fingerprint, Weight
from assay.harness.fingerprint.weights import added, same_bytes


def joined(of_ranks: Sequence[Fingerprint]) -> Fingerprint:
    """Join what the processes of a server observed, in the order of ranks: the first tells what all have alike.

    Of parameters, what each holds whole is kept, and sums and projections of the pieces are added up, each piece once. Where it is
    not known which pieces the processes hold, sums alone are, and each process's part stays beside them. Position ids are those of
    the first that computed a request: with data-parallel attention the others compute none.
    """
    first = of_ranks[0]
    positions = next((made.positions for made in of_ranks if made.positions), first.positions)
    if len(of_ranks) == 1:
        return first
    by_name: dict[str, list[Weight]] = {}
    for weight in (weight for made in of_ranks for weight in made.weights or ()):
        by_name.setdefault(weight.name, []).append(weight)
    weights = tuple(_merged(parts) for parts in by_name.values())
    return first.model_copy(update={"positions": positions, "weights": None if first.weights is None else weights})


def _merged(parts: Sequence[Weight]) -> Weight:
    first = parts[0]
    alike = all(same_bytes(first, part) for part in parts)
    if alike and not any(part.held for part in parts):
        return first
    digest = (
        first.digest
        if alike and not first.held
        else hashlib.sha256(" ".join(part.digest for part in parts).encode()).hexdigest()[:16]
    )
    update = _united(parts) or {
        "sums": added([part.sums for part in parts]),
        "projections": (),
        "whole": (),
        "held": tuple(parts) if all(part.projections for part in parts) else (),
        "ranks": len(parts),
    }
    return first.model_copy(update={**update, "digest": digest})


def _united(parts: Sequence[Weight]) -> dict[str, object]:
    """Return what changes where the pieces of all processes make up the whole; nothing where they do not, or are not known."""
    whole = parts[0].whole
    pieces: dict[str, Weight] = {}
    differ = False
    for piece in (piece for part in parts for piece in part.held or (part,)):
        differ |= not same_bytes(pieces.setdefault(piece.name, piece), piece)
    held = sum(math.prod(piece.shape) for piece in pieces.values())
    if not whole or any(part.whole != whole for part in parts) or held != math.prod(whole):
        return {}
    return {
        "sums": added([piece.sums for piece in pieces.values()]),
        "projections": added([piece.projections for piece in pieces.values()]),
        "held": (),
        "ranks": 1 if len(pieces) == 1 else len(parts),
        "copies_differ": differ,
    }
