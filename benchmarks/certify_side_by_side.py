"""One certificate of the server level on several GPUs at once: each examines a share of the catalogue, and the results are joined.

    python benchmarks/certify_side_by_side.py --out certificate                        # all GPUs of the machine
    python benchmarks/certify_side_by_side.py --out certificate --candidate sage_attn --gpus 4,5,6

Times of one examination are those of a machine that does several at once.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from common import HERE, assay

from assay.harness.attention.faults import CATALOGUE
from assay.harness.certify.server_level import HONEST

LEVEL = ["certify", "--level", "server", "--device", "cuda"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the certificate; a repeated command resumes there"
    )
    parser.add_argument("--gpus", help="numbers of the GPUs, separated by commas; by default all")
    args, more = parser.parse_known_args()
    gpus = args.gpus.split(",") if args.gpus else [str(n) for n in range(torch.cuda.device_count())]
    out: Path = args.out.resolve()
    ids = [HONEST, *CATALOGUE]

    def share(number: int) -> int:
        chosen = [word for id in ids[number :: len(gpus)] for word in ("--fault", id)]
        folder = out / f"gpu-{gpus[number]}"
        return assay(*LEVEL, *more, *chosen, "--out", str(folder), cwd=HERE, env={"CUDA_VISIBLE_DEVICES": gpus[number]})

    with ThreadPoolExecutor(len(gpus)) as pool:
        codes = list(pool.map(share, range(len(gpus))))
    print(f"exit codes of the shares: {codes}")
    joined = out / "joined"
    joined.mkdir(exist_ok=True)
    results = {file.name for gpu in gpus for file in (out / f"gpu-{gpu}").glob("results-*.jsonl")}
    for name in results:
        parts = [out / f"gpu-{gpu}" / name for gpu in gpus]
        (joined / name).write_text("".join(part.read_text() for part in parts if part.exists()))
    # Nothing is left to examine: this writes the certificate of all.
    raise SystemExit(assay(*LEVEL, *more, "--out", str(joined), cwd=HERE, env={"CUDA_VISIBLE_DEVICES": gpus[0]}))


if __name__ == "__main__":
    main()
