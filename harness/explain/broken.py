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
    of_v = (
        not call.features and call.v.shape[2] != call.q.shape[2]
    )  # such calls are in the matrix of a kernel that declares them
    dims = {"head_dims": (192,), "head_dims_v": (128,)} if of_v else {}
    kernel = declares(features=call.features, **dims)(fault(id_))  # type: ignore[arg-type]
    kernel.__name__ = kernel.__qualname__ = name
    kernel.__module__ = __name__
    return kernel
