"""Layer substitution inside a server: in chosen layers the model uses the candidate's output in place of the reference's.

The reference has run before, so K and V are in the pool, and the phases that the candidate does not compute stay the reference's.
Nothing falls back in silence: a candidate that raises, or returns what is no such output, stops the server.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from assay.harness.attention.call import KernelRefused
from assay.harness.evidence.counters import CounterFile, CounterRow
from assay.harness.server.candidates import Candidate
from assay.harness.server.control import Setting, substitution_folder
from assay.harness.server.passes import EngineCall


class Substitution:
    """One process's substitutions, counted by phase and layer for each setting of the control.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
        candidate: what computes in place of the reference; None where the server was given none.
    """

    def __init__(self, folder: Path, candidate: Candidate | None) -> None:
        self._folder, self._candidate = folder, candidate
        self._token = ""
        self._counters: CounterFile | None = None

    def output(self, call: EngineCall, out: Tensor, reference: str, setting: Setting) -> Tensor:
        """What the model uses: the candidate's output, shaped as the reference's, or `out` in a phase that it does not compute.

        Args:
            call: a call of a layer that is substituted.
            out: the reference's output, [tokens, ...].
            reference: name of the backend that computed it.
            setting: the control that asks for this.

        Raises:
            KernelRefused: there is no candidate, or its output has another size or dtype. What the candidate raises.
        """
        if self._candidate is None:
            raise KernelRefused("a layer was to be substituted and there is no candidate; start with ASSAY_SHADOW")
        if call.phase not in self._candidate.phases:
            return out
        got = self._candidate.run(call)
        if (got.shape[0], got.numel(), got.dtype) != (out.shape[0], out.numel(), out.dtype):
            raise KernelRefused(
                f"{self._candidate.name} returned {got.dtype} {list(got.shape)} in layer {call.layer.layer_id}; "
                f"expected {out.dtype} {list(out.shape)}"
            )
        self._count(call, reference, setting.token)
        return got.reshape(out.shape).contiguous()

    def _count(self, call: EngineCall, reference: str, token: str) -> None:
        assert self._candidate is not None
        if self._counters is None or token != self._token:
            self._token = token
            self._counters = CounterFile(substitution_folder(self._folder, token), str(os.getpid()))
        row = CounterRow(
            backend=reference, kernel=self._candidate.name, phase=call.phase, cached_prefix=any(call.now.prefix)
        )
        self._counters.add(self._counters.row(row), call.layer.layer_id)
