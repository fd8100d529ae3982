"""Counts the calls that the shadow compared, by layer and condition: the process's side of `assay.harness.evidence.envelope`.

The conditions of a pass are looked up once and shared by its layers, so a call costs one addition per condition that it meets.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from assay.harness.conditions import CHUNK, ENVELOPE, ENVELOPE_OF, MIX, border_of
from assay.harness.evidence.envelope import FOLDER, EngineLimits, EnvelopeCounts, write_envelope
from assay.harness.evidence.nonce import nonce_of_process
from assay.harness.server.forward_pass import EngineCall, ForwardPass

_MIXED, _LATER = "MIXED", CHUNK.labels.index("later chunk")


class EnvelopeTally:
    """The counts of one process, in one session of the shadow.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        limits: the engine's limits.
    """

    def __init__(self, folder: Path, limits: EngineLimits) -> None:
        self._path, self._limits = folder / FOLDER / f"{os.getpid()}.json", limits
        self.clear()

    def clear(self) -> None:
        """Forget the session before."""
        self._calls: Counter[tuple[str, str, int, int]] = Counter()
        self._largest: dict[tuple[str, str, int], int] = {}
        self._prefilled: set[str] = set()
        self._decoded: Counter[str] = Counter()
        self._pass: ForwardPass | None = None
        self._values: dict[str, list[int]] = {}

    def count(self, call: EngineCall) -> None:
        """Count a call that was compared."""
        if call.forward_pass is not self._pass:
            self._pass = call.forward_pass
            self._values = self._conditions(call)
        layer = call.layer.layer_id
        for quantity, values in self._values.items():
            for index in {ENVELOPE[quantity].index(value) for value in values}:
                self._calls[call.phase, quantity, index, layer] += 1
            known = self._largest.get((call.phase, quantity, layer), 0)
            self._largest[call.phase, quantity, layer] = max(known, *values)

    def write(self) -> None:
        """Write the counts.

        Raises:
            EvidenceError: the disk is full or not writable.
        """
        calls: dict[str, dict[str, dict[str, dict[int, int]]]] = {}
        for (phase, quantity, index, layer), number in self._calls.items():
            label = ENVELOPE[quantity].labels[index]
            calls.setdefault(phase, {}).setdefault(quantity, {}).setdefault(label, {})[layer] = number
        largest: dict[str, dict[str, dict[int, int]]] = {}
        for (phase, quantity, layer), value in self._largest.items():
            largest.setdefault(phase, {}).setdefault(quantity, {})[layer] = value
        counts = EnvelopeCounts(run=nonce_of_process(), limits=self._limits, calls=calls, largest=largest)
        write_envelope(self._path, counts)

    def _conditions(self, call: EngineCall) -> dict[str, list[int]]:
        """The values of each condition that the pass meets."""
        new, prefix, requests = call.forward_pass.new, call.forward_pass.prefix, call.forward_pass.requests
        total = [n + p for n, p in zip(new, prefix, strict=True)]
        values = {"total-tokens": total, "batch": [len(new)], "border": [border_of(one) for one in total]}
        if call.phase == "decode":
            self._decoded.update(requests)
            values["depth"] = [self._decoded[request] for request in requests]
        else:
            mixed = call.batch.forward_mode.name == _MIXED
            later = [rid in self._prefilled and p > 0 for rid, p in zip(requests, prefix, strict=True)]
            # In a mixed call a sequence of one new token that was prefilled before is in decode, not a chunk.
            decoding = [mixed and n == 1 and seen for n, seen in zip(new, later, strict=True)]
            self._prefilled.update(requests)
            values |= {
                "new-tokens": list(new),
                "prefix-tokens": list(prefix),
                "chunk": [_LATER if seen and not one else 0 for seen, one in zip(later, decoding, strict=True)],
                "mix": [MIX.labels.index(_mix(prefix, any(decoding)))],
            }
        return {quantity: values[quantity] for quantity in ENVELOPE_OF[call.phase]}


def _mix(prefix: tuple[int, ...], decoding: bool) -> str:
    if decoding:
        return "extend and decode"
    if not any(prefix):
        return "no prefix"
    return "all with a prefix" if all(prefix) else "some with a prefix"
