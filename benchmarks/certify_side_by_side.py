"""One certificate of the server level by several pairs of servers at once: each examines a share of the catalogue.

    python benchmarks/certify_side_by_side.py --out certificate                        # all GPUs of the machine
    python benchmarks/certify_side_by_side.py --out certificate --candidate sage_attn --gpus 4,5,6
    python benchmarks/certify_side_by_side.py --out certificate --cpu-shares 8         # on the CPU

Times of one examination are those of a machine that does several at once.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from common import HERE, assay

from assay.harness.bugs.catalogue import CATALOGUE
from assay.harness.certify.server_level import HONEST

LEVEL = ["certify", "--level", "server"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the certificate; a repeated command resumes there"
    )
    parser.add_argument("--gpus", help="numbers of the GPUs, separated by commas; by default all")
    parser.add_argument("--cpu-shares", type=int, default=0, help="shares on the CPU, in place of GPUs")
    args, more = parser.parse_known_args()
    if args.cpu_shares:
        threads = max(1, len(os.sched_getaffinity(0)) // args.cpu_shares)
        places = [{"OMP_NUM_THREADS": str(threads)}] * args.cpu_shares
        command = [*LEVEL, "--device", "cpu", *more]
    else:
        gpus = args.gpus.split(",") if args.gpus else [str(n) for n in range(torch.cuda.device_count())]
        places = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
        command = [*LEVEL, "--device", "cuda", *more]
    out: Path = args.out.resolve()
    ids = [HONEST, *CATALOGUE]

    def share(number: int) -> int:
        chosen = [word for id in ids[number :: len(places)] for word in ("--fault", id)]
        return assay(*command, *chosen, "--out", str(out / f"share-{number}"), cwd=HERE, env=places[number])

    with ThreadPoolExecutor(len(places)) as pool:
        codes = list(pool.map(share, range(len(places))))
    print(f"exit codes of the shares: {codes}")
    joined = out / "joined"
    joined.mkdir(exist_ok=True)
    results = {file.name for file in out.glob("share-*/results-*.jsonl")}
    for name in results:
        parts = sorted(out.glob(f"share-*/{name}"))
        (joined / name).write_text("".join(part.read_text() for part in parts))
    # Nothing is left to examine: this writes the certificate of all.
    raise SystemExit(assay(*command, "--out", str(joined), cwd=HERE, env=places[0]))


if __name__ == "__main__":
    main()
