"""Counts the calls that the shadow compared, by layer and condition: the process's side of `assay.harness.evidence.envelope`."""

from __future__ import annotations

from pathlib import Path

from assay.harness.engines.inside.observed_call import ForwardPass, ObservedCall
from assay.harness.evidence.envelope import ENVELOPE_FILES, EngineLimits
from assay.harness.evidence.envelope_counting import EnvelopeCounting, Values
from assay.harness.evidence.nonce import nonce_of_process


class EnvelopeTally:
    """The counts of one process, in one session of the shadow.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        limits: the engine's limits.
    """

    def __init__(self, folder: Path, limits: EngineLimits) -> None:
        self._folder, self._limits = folder, limits
        self.clear()

    def clear(self) -> None:
        """Forget the session before."""
        self._counting = EnvelopeCounting(self._limits)
        self._pass: ForwardPass | None = None
        self._values: Values = {}

    def count(self, call: ObservedCall) -> None:
        """Count a call that was compared."""
        of_pass = call.forward_pass
        if of_pass is not self._pass:
            self._pass = of_pass
            if call.phase == "decode":
                self._values = self._counting.decode(of_pass.prefix, of_pass.requests, in_graph=of_pass.in_graph)
            else:
                self._values = self._counting.extend(
                    of_pass.new, of_pass.prefix, of_pass.requests, mixed=of_pass.mixed, in_graph=of_pass.in_graph
                )
        self._counting.count(call.phase, call.layer, self._values)

    def write(self) -> None:
        """Write the counts.

        Raises:
            EvidenceError: the disk is full or not writable.
        """
        ENVELOPE_FILES.write(self._folder, self._counting.counts(nonce_of_process()))
