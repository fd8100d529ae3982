"""Correction of p values for multiple tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def holm(p: Sequence[float]) -> list[float]:
    """Correct p values by Holm's method: compared with alpha, they keep the family-wise error rate at alpha.

    Written here because `statsmodels.stats.multitest`, which gives the same values, takes a second to import (the report of a
    finished run may take 1.5 s in total) and collects all garbage at each call.

    Source: Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6, 65-70 (1979).
    """
    order = np.argsort(p)
    raised = np.maximum.accumulate(np.asarray(p, dtype=float)[order] * np.arange(len(p), 0, -1))
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(1.0, raised)
    return [float(p) for p in corrected]
