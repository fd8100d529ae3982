"""Explaining the weights of one query: as the right ones changed in one way.

Each form says what became of the weights, without saying why. All forms that fit are kept: in a short row, several do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from assay.harness.readout.forms_from_elsewhere import keys_moved, mixture, output, query, query_mixture, values_moved
from assay.harness.readout.forms_of_weights import (
    bent,
    biased,
    capped,
    constant,
    other_kv,
    pieces,
    right,
    scaled,
    seen_keys,
    slopes,
    zero,
)
from assay.harness.readout.rows import BLANK as BLANK
from assay.harness.readout.rows import CallContext as CallContext
from assay.harness.readout.rows import Fit as Fit
from assay.harness.readout.rows import Form as Form
from assay.harness.readout.rows import Row as Row
from assay.harness.readout.rows import Tolerance as Tolerance

_CHEAP: tuple[Callable[[Row], Fit | None], ...] = (zero, constant, seen_keys, other_kv, scaled)
_DEAR: tuple[Callable[[Row], Fit | None], ...] = (
    slopes,
    capped,
    biased,
    values_moved,
    keys_moved,
    mixture,
    query_mixture,
    pieces,
)
_SEVERAL: tuple[Callable[[Row], Iterator[Fit]], ...] = (bent, output, query)
"""Forms that may fit in several ways."""
_MANY_KEYS = 256
"""Keys from which on dear forms are tried only where no plain one fits."""
_SOURCES = 12
"""Most sources of a form: with equal queries, all fit."""
_NOT_LINEAR = 20
"""Multiple of `Tolerance.weight` by which weights may fail to give the output on ordinary values. Beyond it they depend on V, and
say nothing. Right float32 kernels are off by 2e-6 at most."""


def fits(row: Row) -> list[Fit]:
    """The forms that fit a query and head; only "right" where that fits, and none where no form does."""
    if found := right(row):
        return [found]
    if row.off > _NOT_LINEAR * row.tolerance.weight:
        return []
    fitting = [fit for form in _CHEAP if (fit := form(row))]
    if any(_plain(fit) for fit in fitting) and row.weights.shape[1] > _MANY_KEYS:
        return fitting
    fitting += [fit for form in _DEAR if (fit := form(row))]
    for several in _SEVERAL:
        fitting += islice(several(row), _SOURCES)
    return fitting


def _plain(fit: Fit) -> bool:
    """Whether keys are seen not at all, once or twice, and nothing else."""
    return fit.form == "keys" and fit.keys is not None and bool(np.isin(fit.keys, (0.0, 1.0, 2.0)).all())
