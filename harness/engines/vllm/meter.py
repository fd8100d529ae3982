"""Meters vLLM's attention: counts calls by backend, kernel, layer and phase, and records each prefill batch.

A call that holds sequences of both phases counts once in each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from assay.harness.conditions import PHASES, has_cached_prefix
from assay.harness.engines.inside.meter import Meter, admissions
from assay.harness.engines.vllm.engine_call import Part
from assay.harness.evidence.counters import CounterRow


def note_served(layer: Any, by_phase: Mapping[str, CounterRow]) -> None:
    """Note on an attention layer who computes each phase, since vLLM's objects name its own backend where a kernel replaces it."""
    layer.assay_served = {phase: served.backend for phase, served in by_phase.items()}


def served_by(layer: Any) -> dict[str, str]:
    """Return who computes each phase of a layer: a kernel, or the backend that vLLM chose; {} if vLLM chose none."""
    backend = getattr(layer, "attn_backend", None)
    chosen = {} if backend is None else dict.fromkeys(PHASES, str(backend.get_name()))
    return chosen | getattr(layer, "assay_served", {})


@cache
def _meter(folder: Path, row: CounterRow, device: str) -> Meter:
    return Meter(folder, row, device)


def counter(folder: Path, by_phase: Mapping[str, CounterRow], device: str) -> Callable[[int, Sequence[Part]], None]:
    """Return a function that counts a call of a layer, by its number and its parts.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        by_phase: who computes each phase.
        device: torch device of the model.
    """
    meters = {phase: _meter(folder, by_phase[phase], device) for phase in PHASES}
    noted = admissions(folder)

    def count(layer: int, parts: Sequence[Part]) -> None:
        for part in parts:
            meters[part.phase].count(layer, part.phase == "decode" or has_cached_prefix(part.prefix))
            if part.phase == "extend":
                noted.note(layer, part.requests, part.new, part.prefix)

    return count
