"""A seeded fault inside a running server: while the control names one, outputs have it. Nothing is restarted.

With the shadow off, the backend that the model uses has the fault. With the shadow on, only the candidate in it has, and its
measurements go to a separate folder (`SENSITIVITY`), which no verdict on the candidate reads.

A call that the kernel contract cannot express stays right, and is counted as such: a fault must not stop a server.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from assay.harness.attention.bugs.family import BY_ID
from assay.harness.attention.bugs.faults import seeded
from assay.harness.attention.call import KernelRefused
from assay.harness.attention.oracle import oracle
from assay.harness.engines.inside.candidates import Candidate, Computes
from assay.harness.engines.inside.observed_call import ObservedCall
from assay.harness.evidence.faults import FOLDER, SEEDED_CALLS, SeededCalls
from assay.harness.evidence.run_file import nonce_of_process


class Faults:
    """Seeds faults in one process.

    Args:
        folder: the server's folder (``ASSAY_EVIDENCE``).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fault = self._token = ""
        self._calls = self._changed = self._refused = 0
        self._why = ""

    def switch(self, fault: str, token: str) -> None:
        """Switch to a fault, or to none if `fault` is empty, under a new setting of the control."""
        if token == self._token:
            return
        self._fault, self._token = fault, token
        self._calls = self._changed = self._refused = 0
        self._why = ""

    def seeded(self, call: ObservedCall, out: Tensor, noisy: bool = False) -> Tensor:
        """Compute the output with the fault that is switched on, in the shape of `out`, [tokens, num_q_heads * head_dim_v].

        Args:
            out: its right output.
            noisy: whether `out` has the noise of a declared quantisation, which the wrong output then also gets.
        """
        self._calls += 1
        try:
            if self._fault not in BY_ID:
                raise KernelRefused(f"no bug {self._fault!r} is known to this version")
            packed = call.pack("a seeded fault")
            right = out.view(len(out), call.heads, -1)
            wrong = seeded(BY_ID[self._fault], packed, right, oracle(packed) if noisy else None)
        except KernelRefused as error:
            self._refused += 1
            self._why = self._why or str(error)
            return out
        if wrong is right:
            return out
        self._changed += 1
        return wrong.reshape(out.shape).to(out.dtype).contiguous()

    def write(self) -> None:
        """Write at the end of a pass how many calls had the fault. Raises EvidenceError if the disk is full or not writable."""
        counts = SeededCalls(
            run=nonce_of_process(),
            fault=self._fault,
            calls=self._calls,
            changed=self._changed,
            refused=self._refused,
            why=self._why,
        )
        SEEDED_CALLS.write(self._folder / FOLDER / self._token, counts)


class FaultyCandidate:
    """A candidate whose outputs have the fault that is switched on."""

    def __init__(self, candidate: Candidate, faults: Faults) -> None:
        self.name = f"{candidate.name} with a seeded fault"
        self._candidate, self._faults = candidate, faults

    @property
    def computes(self) -> Computes:
        """Phases and noise of the candidate. May raise anything."""
        return self._candidate.computes

    def run(self, call: ObservedCall) -> Tensor:
        """Compute the candidate's output with the fault. May raise anything."""
        out = self._candidate.run(call).reshape(sum(call.forward_pass.new), -1)
        return self._faults.seeded(call, out, noisy=bool(self.computes.noise))
