"""Forced decode: a server writes prescribed tokens, one by one, each in a separate decode pass.

A request whose id begins with `FORCED_REQUEST` gets its next tokens from ``forced.json`` in the server's folder: id -> the tokens
of the whole sequence. The model's own choice is still computed and its log-probabilities returned as ever; only the token that goes
into the next pass is replaced. Everything else that is on (chunks, overlap, CUDA graphs, retraction) stays on. Speculation verifies
drafts without this sampler, so nothing is forced there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.harness.engines.inside.control import FORCED_REQUEST
from assay.harness.files import write_whole

_FILE = "forced.json"


def tell(folder: Path, sequences: Mapping[str, Sequence[int]]) -> None:
    """Set the tokens that a server, given by its folder, writes from now on: id of a request -> tokens of its prompt and answer.

    Raises:
        EvidenceError: it cannot be written.
    """
    write_whole(folder / _FILE, json.dumps({name: list(ids) for name, ids in sequences.items()}), durable=False)


def install(folder: Path) -> None:
    """Let this process write prescribed tokens."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    told = _Told(folder)

    def sample(original: Any, runner: Any, logits_output: Any, forward_batch: Any) -> Any:
        tokens = original(runner, logits_output, forward_batch)
        rids = list(forward_batch.rids or ())
        if any(rid.startswith(FORCED_REQUEST) for rid in rids):
            decodes = forward_batch.forward_mode.is_decode()
            places = forward_batch.positions if decodes else forward_batch.seq_lens - 1
            for row, (rid, place) in enumerate(zip(rids, places.tolist(), strict=False)):
                ids = told.sequence(rid)
                if place + 1 < len(ids):
                    tokens[row] = ids[place + 1]
        return tokens

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.sample", sample, HookType.AROUND)


class _Told:
    def __init__(self, folder: Path) -> None:
        self._file = folder / _FILE
        self._sequences: dict[str, list[int]] = {}

    def sequence(self, rid: str) -> Sequence[int]:
        """Return the tokens of a request's whole sequence, or none if they were not prescribed."""
        if rid.startswith(FORCED_REQUEST) and rid not in self._sequences and self._file.exists():
            self._sequences = json.loads(self._file.read_bytes())
        return self._sequences.get(rid, ())
