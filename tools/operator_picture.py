"""Draw docs/operator.svg, the operator inferred from a top-left mask: ``.nox/cpu/bin/python tools/operator_picture.py``."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import fault
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.sample_calls import call_of
from assay.harness.localize.picturing import picture_of
from assay.harness.localize.reading import read
from assay.reports import svg
from assay.reports.operator_picture import caption, panels

IMAGE = Path(__file__).parent.parent / "docs" / "operator.svg"


def main() -> None:
    """Draw it, on white: an image does not follow the theme of the page around it."""
    kernel = fault("mask-top-left")

    def ask(call: AttentionCall) -> Tensor:
        return kernel(call).double()

    call = call_of([(8, 4)], (4, 2), 64, torch.float32, "cpu")
    reading = read(ask, call, range(len(call.q)))
    if reading is None:
        raise SystemExit("The kernel could not be probed; expected finite outputs.")
    picture = picture_of(reading, head=0)
    parts, x, height = ['<rect width="100%" height="100%" fill="#ffffff"/>'], 0.0, 0.0
    for panel in panels(picture):
        width, tall = map(float, re.findall(r'(?:width|height)="([\d.]+)"', panel)[:2])
        parts.append(panel.replace("<svg ", f'<svg x="{x:g}" ', 1))
        x, height = x + width + 12, max(height, tall)
    IMAGE.write_text(svg.image(x, height, caption(picture), parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
