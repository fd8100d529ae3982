"""Features of attention in real servers: right and wrong kernels against references, in the tiny models of other families.

    python benchmarks/feature_servers.py                      # on a CPU: triton, interpreted; four minutes a row
    python benchmarks/feature_servers.py --device cuda --references triton fa3 flashinfer --jobs 8

Each row is one server of the reference with the candidate in its shadow (`assay run --suites layers`, which also substitutes each
layer once), and a replay of the pack that it recorded. A right kernel must pass, and each fault must be a regression in the layers
that ask for the feature. With --bisect, the layers of the faults are also found by substitution. A reference that ignores what the
model asks for ends its row with exit code 2, as it should.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from common import HERE
from common import assay as run_assay
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from assay.evals.tiny_model import families
from assay.harness.backend import Backend
from assay.harness.collect.asked import unmet as unmet_asks
from assay.harness.engines.model import model_shape

WINDOWS, ALL, TWO = (0, 2), (0, 1, 2, 3), (0, 1)
"""Layers with a window in all families that have windows, all layers, and the two of DeepSeek: with an MLP, and with experts."""
CANDIDATES: dict[str, dict[str, Sequence[int]]] = {
    "gemma2": {"right": (), "short_window": WINDOWS, "without_window": WINDOWS, "without_cap": ALL},
    "gemma3": {"right": (), "first_keys": WINDOWS},
    "gpt-oss": {"right": (), "short_window": WINDOWS, "without_sinks": ALL},
    "qwen3": {"right": (), "steep": (1,)},
    "deepseek-v2": {"right": (), "without_rope_dims": TWO, "scale_of_576": TWO, "scale_of_576_in_layer_1": (1,)},
    "fp8-kv": {
        "right": (), "without_scales": ALL, "scales_twice": ALL, "k_scale_for_v": ALL, "k_scale_for_v_in_layer_1": (1,),
        "triton": (), "torch_native": ALL,
    },
}  # fmt: skip
"""Kernels of `faulty` for each family, and backends of SGLang, with the layers in which they are wrong."""
NATIVE = ("triton", "torch_native")
"""Those that are backends: a replay takes none."""
FLAGS = {
    "gpt-oss": ["--engine-arg=--disable-hybrid-swa-memory"],
    "fp8-kv": ["--engine-arg=--kv-cache-dtype=fp8_e4m3"],
}
"""Flags of families. With a memory pool of its own for layers with a window, SGLang caches no short prefixes of a long prompt, so
that the envelope cannot be covered, and no run can pass."""
OF_DEVICE = {
    "cpu": {
        "fp8-kv": ["--engine-arg=--dtype=float16", "--request-timeout", "1800"],
        "deepseek-v2": ["--request-timeout", "1800", "--max-tokens", "12"],
    },
    "cuda": {
        family: ["--engine-arg=--mem-fraction-static=0.07", "--engine-arg=--max-total-tokens=65536"]
        for family in CANDIDATES
    },
}
"""More flags of families by device: no quantised checkpoint is in float32, and several servers share a GPU."""
COLUMNS = (
    "family", "reference", "candidate", "exit", "worst own error", "wrong layers", "finding", "replay", "bisection", "s",
    "expected",
)  # fmt: skip


def model_of(family: str, device: str, folder: Path) -> Path:
    """Return the tiny model of a family. On a GPU its dtype is that of most kernels, bfloat16.

    That of DeepSeek has two layers: on a CPU, a prefill behind a prefix takes Triton's interpreter seconds in each.
    """
    if device == "cpu" and family != "deepseek-v2":
        return families.tiny_model(family)
    made = folder / family
    if not made.exists():
        families.make(family, made)
        config = json.loads((made / "config.json").read_text())
        config |= {"dtype": "bfloat16"} if device == "cuda" else {}
        if family == "deepseek-v2":
            config["num_hidden_layers"] = len(TWO)
            weights = load_file(made / "model.safetensors")
            kept = {name: weights[name] for name in weights if not re.search(r"layers\.[23]\.", name)}
            save_file(kept, made / "model.safetensors", {"format": "pt"})
        (made / "config.json").write_text(json.dumps(config))
    return made


def assay(folder: Path, *arguments: str) -> int:
    """Run ``assay`` with `faulty` importable; return its exit code.

    SGLang takes ``triton_kernels.py`` of this folder for the package of that name, so the folder itself is not on the path.
    """
    shutil.copy(HERE / "faulty.py", folder)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return run_assay(*arguments, env={"PYTHONPATH": path})


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file; empty if there is none."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


@cache
def no_reference(reference: str, model: Path, flags: tuple[str, ...]) -> str:
    """Say why a backend can be no reference for a model, as it ignores what the layers ask for; empty if it can."""
    found = unmet_asks({"reference": Backend.parse(reference)}, {"reference": model_shape(model, flags).asks})
    return "; ".join(text for _, fatal, text in found if fatal)


def row(family: str, reference: str, candidate: str, device: str, folder: Path, bisect: bool) -> tuple[list[str], bool]:
    """Run one row: its cells, and whether all is as expected."""
    start, wrong = time.monotonic(), CANDIDATES[family][candidate]
    model, is_native = model_of(family, device, folder), candidate in NATIVE
    kernel = candidate if is_native else f"faulty:{candidate}"
    out = folder / f"{family}-{reference}-{candidate}"
    servers = ["--device", device, "--model", str(model), "--reference", reference, "--candidate", kernel]
    more = FLAGS.get(family, []) + OF_DEVICE[device].get(family, [])
    servers += more
    flags = tuple(word.removeprefix("--engine-arg=") for word in more if word.startswith("--engine-arg="))
    short = ["--envelope-tokens", "128"] if device == "cpu" else []
    code = assay(folder, "run", *servers, *short, "--suites", "layers", "--out", str(out), "--quiet")
    report = read(out / "report.json")
    metrics = {one["id"]: one["text"] for suite in report.get("suites", ()) for one in suite["metrics"]}
    found = wrong_layers(out, report)
    pack = next(iter(out.glob("servers/*/pack")), None)
    replayed = assay(folder, "replay", str(pack), "--candidate", kernel, "--quiet") if pack and not is_native else None
    restored = None
    if bisect and wrong and pack:
        at = ["--out", str(out / "bisection"), "--by", "text", "--questions", "24", "--quiet"]
        assay(folder, "bisect", "layers", *servers, *at)
        restored = sorted(one["layer"] for one in read(out / "bisection" / "bisect.json").get("restored", ()))
    refused = no_reference(reference, model, flags) if code == 2 else ""
    judged = 1 if wrong else 0
    expected = (2, None, []) if refused else (judged, None if is_native else judged, list(wrong))
    right = (code, replayed, found) == expected and (not restored or set(restored) <= set(wrong))
    named = next((one["title"] for one in report.get("findings", ()) if one["severity"] == "serious"), "")
    unmet = "; ".join(
        f"{one['id']}: {one['found']}" for one in report.get("checks", ()) if one["status"] in ("missing", "failed")
    )
    failure = (report.get("failure") or {}).get("found", "")
    cells = [
        family, reference, candidate, str(code), metrics.get("worst-own-error", "-"), ", ".join(map(str, found)) or "none",
        refused or named or failure or unmet or ("nothing" if report else "no report"), "-" if replayed is None else str(replayed),
        "-" if restored is None else ", ".join(map(str, restored)), f"{time.monotonic() - start:.0f}", "yes" if right else "NO",
    ]  # fmt: skip
    return cells, right


def wrong_layers(out: Path, report: dict[str, Any]) -> list[int]:
    """List the layers of a run whose own error, or that of a recorded call, is out of bounds."""
    from assay.harness.evidence.folder import RunFolder
    from assay.harness.evidence.kernel_result import CAUSE
    from assay.harness.evidence.shadow_errors import read_shadow_errors
    from assay.harness.judge.truth_bounds import LAYER, compare_with_noise

    if not report.get("layers"):
        return []
    against = compare_with_noise(read_shadow_errors(out / "servers" / "reference"))
    cause = RunFolder(out, "").read(CAUSE)
    found = {bound.layer for bound in cause.bounds if bound.worst > 1} if cause else set()
    for measured in (against.cells, against.queries):
        found |= {int(layer) for layer in measured.index[measured.flagged][:, LAYER]}
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--families", nargs="+", choices=sorted(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--references", nargs="+", default=["triton"])
    parser.add_argument("--candidates", nargs="+", help="kernels of faulty.py; by default those of each family")
    parser.add_argument("--bisect", action="store_true", help="find the wrong layers by substitution too")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time")
    parser.add_argument("--out", type=Path, help="folder of the runs; by default a temporary one")
    args = parser.parse_args()
    folder = args.out or Path(tempfile.mkdtemp(prefix="feature-servers-"))
    folder.mkdir(parents=True, exist_ok=True)
    table, right = Table(*COLUMNS), True
    for family in args.families:
        model_of(family, args.device, folder.absolute())  # made once, before there are several rows at a time
    rows = [
        (family, reference, candidate)
        for family in args.families
        for reference in args.references
        for candidate in CANDIDATES[family]
        if not args.candidates or candidate in args.candidates
    ]

    def run(asked: tuple[str, str, str]) -> tuple[list[str], bool]:
        cells, expected = row(*asked, args.device, folder.absolute(), args.bisect)
        print(" | ".join(cells), flush=True)
        return cells, expected

    with ThreadPoolExecutor(args.jobs) as pool:
        for cells, expected in pool.map(run, rows):
            table.add_row(*cells)
            right &= expected
    Console(width=220).print(table)
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
