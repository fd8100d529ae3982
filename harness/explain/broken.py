"""Kernels with one bug each, to see what assay reports: ``assay check assay.harness.explain.broken:mask_top_left``.

Every hypothesis has one, under its id with underscores.
"""

from __future__ import annotations

from assay.harness.attention.call import Kernel
from assay.harness.attention.kernels import declares
from assay.harness.bugs.family import BY_ID
from assay.harness.bugs.faults import fault
from assay.harness.explain.examples import example


def __getattr__(name: str) -> Kernel:
    id_ = name.replace("_", "-")
    if id_ not in BY_ID:
        raise AttributeError(f"there is no hypothesis {id_!r}")
    call = example(BY_ID[id_])
    # A kernel has calls with another head dim of V in its matrix if it declares one.
    other_v = not call.features and call.v.shape[2] != call.q.shape[2]
    declared = declares(
        features=call.features, head_dims=(192,) if other_v else None, head_dims_v=(128,) if other_v else ()
    )
    kernel = declared(fault(id_))
    kernel.__name__ = kernel.__qualname__ = name
    kernel.__module__ = __name__
    return kernel
