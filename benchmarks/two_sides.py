"""What does `assay run` say of two sides, for treatments that are right and for seeded faults?

    python benchmarks/two_sides.py                              # on a CPU
    python benchmarks/two_sides.py --device cuda --seconds 600 --engine-arg=--sampling-backend=pytorch
    python benchmarks/two_sides.py --engine vllm --only wrong-scale,rope-base --out DIR
    python benchmarks/two_sides.py --engine vllm --only softcap-dropped,window-everywhere --model tiny-gemma2
    python benchmarks/two_sides.py --reference-engine sglang --engine vllm      # each fault of vLLM, against SGLang

Each treatment is one run with the suites greedy, logits and layers, in a folder of its own in --out; unknown flags go to each.
Its row is printed and appended to ``rows.jsonl`` as soon as it is known, also if the run failed or took longer than --seconds.
The faults of the engine are those of ``seeded_engines.py``, laid over the candidate's Python; the one in transformers is a wheel of
the installed version with one changed line. Exits with 1 if a right treatment is a regression, or a fault is not.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from common import HERE, python_path
from rich.console import Console
from rich.table import Table
from seeded_engines import FAULTS

from assay.harness.engines.model import TINY_MODEL
from assay.harness.sides import ENGINES, profile_of

CHANGED, LINE = "transformers/modeling_rope_utils.py", "        self.standardize_rope_params()\n        return kwargs\n"
SEEDED = LINE.replace("return", "self.rope_parameters['rope_theta'] *= 1.5\n        return")
COLUMNS = ("treatment", "right", "verdict", "place", "first line", "minutes")
RIGHT: dict[tuple[str, str], dict[str, str]] = {
    ("sglang", ""): {
        "chunk-size": "arg=--chunked-prefill-size=64",
        "page-size": "arg=--page-size=16",
        "fp8-kv": "arg=--kv-cache-dtype=fp8_e4m3",
    },
    ("sglang", "cpu"): {"bfloat16": "arg=--dtype=bfloat16", "variable": "env=ATEN_CPU_CAPABILITY=default"},
    ("sglang", "cuda"): {
        "variable": "env=SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE=64",
        "fp8-weights": "arg=--quantization=fp8",
        "no-cuda-graphs": "arg=--disable-cuda-graph",
        "torch-compile": "arg=--enable-torch-compile",
    },
    ("vllm", ""): {"chunk-size": "arg=--max-num-batched-tokens=64", "page-size": "arg=--block-size=64"},
}
"""Flags of the candidate by treatment, of an engine on any device and on each."""
KERNELS = {
    "kernel-mask": "sage_attn_as_shipped",
    "kernel-scale": "faulty:wrong_scale",
    "kernel-head": "faulty:head_lost",
}
"""Wrong kernels, each of which either engine can serve."""


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> list[str]:
    """Lay a wheel of these files over the candidate's Python."""
    info, path = f"{name}-{version}.dist-info", folder / f"{name}-{version}-py3-none-any.whl"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: assay\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"]).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return [f"--candidate-with={path}"]


def faulty_engine(folder: Path, engine: str, fault: str) -> list[str]:
    """Seed a fault in the candidate's engine."""
    begin = f"import seeded_fault; seeded_fault.seed({engine!r}, {fault!r})\n".encode()
    files = {"seeded_fault.py": (HERE / "seeded_engines.py").read_bytes(), "seeded_fault.pth": begin}
    return wheel(folder, "seeded_fault", f"1.0+{fault.replace('-', '.')}", files)


def faulty_transformers(folder: Path) -> list[str]:
    """Give the candidate the installed transformers with another base of RoPE."""
    installed = importlib.metadata.distribution("transformers")
    paths = [file for file in installed.files or () if file.parts[0] == "transformers" and file.suffix != ".pyc"]
    files = {str(file): Path(str(file.locate())).read_bytes() for file in paths}
    if LINE.encode() not in files[CHANGED]:
        raise ValueError(
            f"{CHANGED} of transformers {installed.version} does not have the lines that the fault changes"
        )
    files[CHANGED] = files[CHANGED].replace(LINE.encode(), SEEDED.encode())
    return wheel(folder, "transformers", f"{installed.version}+seeded", files)


def saved_in(folder: Path, dtype: str) -> list[str]:
    """Give the candidate the tiny model with its weights saved in another dtype."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY_MODEL, folder / dtype, dirs_exist_ok=True)
    tensors = {k: t.to(getattr(torch, dtype)) for k, t in load_file(TINY_MODEL / "model.safetensors").items()}
    save_file(tensors, folder / dtype / "model.safetensors", {"format": "pt"})
    config = json.loads((TINY_MODEL / "config.json").read_text()) | {"dtype": dtype}
    (folder / dtype / "config.json").write_text(json.dumps(config))
    return [f"--candidate-model={folder / dtype}"]


def treatments(options: argparse.Namespace, made: Path) -> Iterator[tuple[str, bool, Callable[[], list[str]]]]:
    """Yield the name of each treatment, whether it is right, and a function that returns its flags."""
    engine, own = options.engine, f"--candidate={profile_of(options.engine).references[options.device]}"
    for name, flag in (RIGHT.get((engine, ""), {}) | RIGHT.get((engine, options.device), {})).items():
        yield name, True, partial(list, [own, f"--candidate-{flag}"])
    if engine != options.reference_engine:
        yield "engines", True, partial(list, [own])
    if engine == "sglang":
        yield "saved-in-float32", True, partial(saved_in, made, "float32")
        yield "versions", True, partial(list, [f"--candidate-{options.other}"])
        yield "transformers-rope", False, partial(faulty_transformers, made)
    for fault in FAULTS[engine]:
        yield fault, False, lambda fault=fault: [own, *faulty_engine(made, engine, fault)]
    yield "kernel", True, partial(list, ["--candidate=faulty:right"])
    for name, kernel in KERNELS.items():
        yield name, False, partial(list, [f"--candidate={kernel}"])


def measured(flags: list[str], folder: Path, seconds: float) -> dict[str, Any]:
    """Run `assay run` for at most so many seconds, and return its row."""
    began, problem, log = time.monotonic(), "", folder.with_suffix(".log")
    command = [sys.executable, "-m", "assay", "run", *flags, f"--out={folder}"]
    with log.open("w") as output:
        variables = os.environ | {"PYTHONPATH": python_path()}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=variables, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            problem = f"not done after {seconds:g} s"
            os.killpg(process.pid, signal.SIGINT)
            process.wait(60)
    row = {"minutes": round((time.monotonic() - began) / 60, 1), "verdict": "none"}
    if not (folder / "report.json").exists():
        return row | {"first line": problem or " ".join(log.read_text().split("\n")[-4:])}
    report = json.loads((folder / "report.json").read_text())
    at, causes = (
        report["parting"] or {},
        [finding["title"] for finding in report["findings"][: min(report["causes"], 1)]],
    )
    agree = not at.get("place") or (at["place"].startswith("behind") and report["verdict"] != "regression")
    place = [] if agree else [f"{at['place']} of layer {at['layer']}: {', '.join(at['names'])}"]
    said = problem or "; ".join([report["headline"], *report["reasons"][:1]])
    return row | {"verdict": report["verdict"], "place": "; ".join([*place, *causes]), "first line": said}


def main() -> int:
    """Run the treatments one after the other, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--engine", choices=ENGINES, default="sglang", help="the candidate's engine")
    parser.add_argument("--reference-engine", choices=ENGINES, default="", help="by default the candidate's")
    parser.add_argument("--only", default="", help="names of treatments, separated by commas")
    parser.add_argument("--seconds", type=float, default=1200, help="most seconds of a run")
    parser.add_argument(
        "--other", default="with=sglang==0.5.22", help="the other version: with=REQUIREMENT or python=PATH"
    )
    parser.add_argument("--out", type=Path, default=Path("two-sides"))
    options, further = parser.parse_known_args()
    options.reference_engine = options.reference_engine or options.engine
    reference = profile_of(options.reference_engine).references[options.device]
    made, table, wrong = options.out.resolve() / "made", Table(*COLUMNS), 0
    made.mkdir(parents=True, exist_ok=True)
    always = [
        f"--device={options.device}", f"--reference-engine={options.reference_engine}", f"--candidate-engine={options.engine}",
        f"--reference={reference}", "--suites=greedy,logits,layers",
    ]  # fmt: skip
    for name, right, flags in treatments(options, made):
        if options.only and name not in options.only.split(","):
            continue
        row: dict[str, Any] = {"treatment": name, "right": right, "verdict": "none"}
        try:
            shutil.rmtree(options.out / name, ignore_errors=True)
            row |= measured([*always, *further, *flags()], options.out / name, options.seconds)
        except Exception as error:  # a row, so that the others are measured
            row["first line"] = f"{type(error).__name__}: {error}"
        wrong += (row["verdict"] == "regression") == right
        with (options.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        table.add_row(*(str(row.get(column, "")) for column in COLUMNS))
    Console(width=200).print(table)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
