"""Draw docs/operator.svg, what was read off a kernel whose mask is top-left: ``.nox/cpu/bin/python tools/operator_picture.py``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import fault
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.sample_calls import call_of
from assay.harness.localize.picturing import picture_of
from assay.harness.localize.reading import read
from assay.reports.operator_picture import svg

IMAGE = Path(__file__).parent.parent / "docs" / "operator.svg"


def main() -> None:
    """Draw it, on white: an image does not follow the theme of the page around it."""
    kernel = fault("mask-top-left")

    def ask(call: AttentionCall) -> Tensor:
        return kernel(call).double()

    call = call_of([(8, 4)], (4, 2), 64, torch.float32, "cpu")
    reading = read(ask, call, range(len(call.q)))
    if reading is None:
        raise SystemExit("The kernel could not be read; expected finite outputs.")
    head, _, rest = svg(picture_of(reading, head=0)).partition("><title>")
    IMAGE.write_text(f'{head}><rect width="100%" height="100%" fill="#ffffff"/><title>{rest}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
