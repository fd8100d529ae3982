"""Triton's interpreter, for kernels on a machine without a GPU. Imports torch only when asked."""

from __future__ import annotations

import os

from assay.harness.attention.interpreter_bfloat16 import BFLOAT16_BROKEN as BFLOAT16_BROKEN
from assay.harness.attention.interpreter_bfloat16 import refuse_broken_bfloat16
from assay.harness.attention.interpreter_bounds import check_bounds
from assay.harness.attention.interpreter_rounding import round_to_nearest
from assay.harness.attention.interpreter_speed import speed_up_interpreter


def interpret_without_gpu() -> None:
    """Have Triton kernels interpreted where there is no GPU. Call it before a kernel is imported: Triton decides then."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        round_to_nearest()
        speed_up_interpreter()
        check_bounds()
        refuse_broken_bfloat16()
