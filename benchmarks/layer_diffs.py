"""`assay run --suites layers,logits` of both SageAttention kernels, on the tiny model and on an 8B-shaped one with random weights.

    python benchmarks/layer_diffs.py --device cuda

Own error shows what the outputs of random weights cannot.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from common import DUMMY_WEIGHTS, assay, shaped_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only-tiny", action="store_true", help="leave out the 8B-shaped model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="assay-layer-diffs-") as made:
        folder = Path(made)
        models: list[tuple[str, list[str]]] = [("tiny", [])]
        if not args.only_tiny:
            models.append((str(shaped_model(folder / "8b")), [f"--engine-arg={DUMMY_WEIGHTS}"]))
        for number, (model, flags) in enumerate(models):
            for candidate in ("sage_attn", "sage_attn_as_shipped"):
                out = str(folder / f"{number}-{candidate}")
                begun = time.monotonic()
                code = assay(
                    "diff", "--device", args.device, "--model", model, "--candidate", candidate, *flags, "--out", out
                )
                print(f"== {model} {candidate}: exit {code}, {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
