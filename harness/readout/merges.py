"""Split attention whose parts are merged with wrong weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from assay.harness.localize.reading import Numbers
from assay.harness.readout.features import Ints
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Queries, einsum

LAWS = ("equal", "max", "base2", "base-e", "next head", "mean")
"""See `Merged.law`: log-sum-exps that are lost, replaced by the maximum, read in the wrong base (kernels that use exp2 store them
in base 2), or those of another head; and K that is smoothed by parts, which shifts the scores of each."""
PART_LAWS = ("cached base2", "cached base-e", "new base2", "new base-e")
"""The same where only cached, or only new keys go through a kernel that uses another base, which is how the two are cascaded."""
BLOCKS = (0, 8, 16, 32, 64, 128, 256)
"""See `Merged.block`: tiles and splits of common kernels."""


@dataclass(frozen=True)
class Merged(Effect):
    """Parts of the keys are merged with wrong weights.

    Attributes:
        block: keys of a part; 0 for cached and new keys.
        law: "equal", all parts count alike; "base2" or "base-e", their log-sum-exp is taken for that of the other base ("cached
            base2" or "new base2" and so on, that of cached or new keys alone); "max", their largest score in place of their
            log-sum-exp; "next head", that of the next q head; "mean", each part's scores lose their mean over its keys' K.
    """

    block: int
    law: str
    cost: float = 1.5

    def outputs(self, queries: Queries) -> Numbers:
        return queries.attended(queries.own_scores + self.offsets(queries))

    def offsets(self, queries: Queries) -> Numbers:
        """What is added to each score, [rows, heads, total_k]."""
        label, cached = self._parts(queries)
        found = np.zeros_like(queries.own_scores)
        logits = np.where(queries.visible[:, None], queries.own_scores, -np.inf)
        for one in np.unique(label):
            here = label == one
            if self.law == "mean":
                k = queries.k[here].mean(0)[queries.own]  # [heads, dim]
                found[:, :, here] = -queries.call.scale * einsum("thd,hd->th", queries.q, k)[..., None]
            elif not self.law.startswith("new " if cached[here].any() else "cached "):
                found[:, :, here] = self._offset(logits[:, :, here])[..., None]
        return found

    def _parts(self, queries: Queries) -> tuple[Ints, Ints]:
        """A number for the part of each packed key, and whether a key is cached, int64 [total_k]."""
        starts = np.array(queries.call.cu_seqlens_k.tolist())
        of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        j = np.arange(len(of)) - starts[of]
        cached = (j < np.array(queries.call.prefixes)[of]).astype(np.int64)
        part = j // self.block if self.block else 1 - cached
        return of * (part.max() + 1) + part, cached

    def _offset(self, logits: Numbers) -> Numbers:
        """What is added to the scores of a part, [rows, heads, keys] -> [rows, heads]; 0 for parts that are not seen."""
        top = logits.max(-1)
        safe = np.where(np.isfinite(top), top, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            lse = np.log(np.exp(logits - safe[..., None]).sum(-1)) + safe
            off = {
                "equal": -lse,
                "max": safe - lse,
                "base2": lse * (1 / math.log(2) - 1),
                "base-e": lse * (math.log(2) - 1),
                "next head": np.roll(lse, -1, 1) - lse,
            }[self.law.removeprefix("cached ").removeprefix("new ")]
        return np.where(np.isfinite(off), off, 0.0)
