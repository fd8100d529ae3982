"""Layer substitution inside a server: in chosen layers the model uses the candidate's output instead of the reference's.

The reference runs first, so K and V are in the pool. Phases that the candidate does not compute stay with the reference.
There is no silent fallback: a candidate that raises, or returns an output of another shape or dtype, stops the server.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from assay.harness.attention.call import KernelRefused
from assay.harness.conditions import has_cached_prefix
from assay.harness.engines.inside.candidates import Candidate, output_of
from assay.harness.engines.inside.control import Setting, substitution_folder
from assay.harness.engines.inside.observed_call import ObservedCall
from assay.harness.evidence.counters import CounterFile, CounterRow


class Substitution:
    """Substitutes in one process, and counts the substituted calls by phase and layer for each setting of the control.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        candidate: computes instead of the reference; None if the server has no candidate.
    """

    def __init__(self, folder: Path, candidate: Candidate | None) -> None:
        self._folder, self._candidate = folder, candidate
        self._token = ""
        self._counters: CounterFile | None = None

    def output(self, call: ObservedCall, out: Tensor, reference: str, setting: Setting) -> Tensor:
        """Return the output for the model: the candidate's, in the shape of `out`, or `out` in a phase that it does not compute.

        Args:
            call: a call of a substituted layer.

        Raises:
            KernelRefused: there is no candidate, or its output has another size or dtype. Also whatever the candidate raises.
        """
        if self._candidate is None:
            raise KernelRefused(
                "a layer is to be substituted but the server has no candidate; start it with ASSAY_SHADOW"
            )
        if call.phase not in self._candidate.computes.phases:
            return out
        got = output_of(self._candidate, call, out)
        self._count(call, reference, setting.token)
        return got.contiguous()

    def _count(self, call: ObservedCall, reference: str, token: str) -> None:
        assert self._candidate is not None
        if self._counters is None or token != self._token:
            self._token = token
            self._counters = CounterFile(substitution_folder(self._folder, token), str(os.getpid()))
        row = CounterRow(
            backend=reference,
            kernel=self._candidate.name,
            phase=call.phase,
            cached_prefix=call.phase == "decode" or has_cached_prefix(call.forward_pass.prefix),
        )
        self._counters.add(self._counters.row(row), call.layer)
