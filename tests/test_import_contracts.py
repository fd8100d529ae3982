"""The import contracts of pyproject.toml: they cover every room, hold, and each turns red on an import that breaks it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("harness", "evals", "suites", "reports")
CONTRACTS: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]

BREACHES = [
    ("layers", "harness/stats/__init__.py", "assay.harness.localize.bounds"),
    ("order-of-drivers", "harness/drivers/sweep/spec.py", "assay.harness.drivers.bisect.layer_task"),
    ("inside-an-engine", "harness/engines/inside/meter.py", "assay.harness.engines.base"),
    ("attention-is-pure", "harness/attention/oracle.py", "transformers"),
    ("evals-stand-alone", "evals/greedy.py", "assay.harness.text"),
    ("reports-at-the-edges", "harness/run/bench.py", "assay.reports.write"),
    ("reports-only-render", "reports/markdown.py", "assay.harness.engines.sglang.launch"),
    ("reports-decide-nothing", "reports/markdown.py", "assay.harness.judge.build"),
    ("reports-decide-nothing", "reports/markdown.py", "assay.harness.judge.decide"),
    ("reports-decide-nothing", "reports/markdown.py", "assay.harness.judge.baselines"),
    ("reports-only-render", "reports/markdown.py", "assay.harness.run.bench"),
    ("reports-decide-nothing", "reports/markdown.py", "assay.harness.judge.answers"),
    ("reports-decide-nothing", "reports/markdown.py", "assay.harness.stats.share"),
    ("judge-reads-evidence", "harness/judge/build.py", "assay.harness.run.collect"),
    ("judge-reads-evidence", "harness/judge/build.py", "assay.harness.run.bench"),
    ("judge-reads-evidence", "harness/judge/build.py", "assay.harness.engines.client"),
    ("judge-reads-evidence", "harness/judge/build.py", "assay.harness.engines.process"),
    ("judge-reads-evidence", "harness/judge/build.py", "assay.harness.engines.sglang.server"),
    ("judge-reads-evidence", "harness/judge/build.py", "assay.harness.checks.check"),
    ("judge-reads-evidence", "harness/judge/build.py", "assay.harness.engines.inside.shadow"),
    ("one-room-knows-sglang", "harness/engines/remote.py", "sglang"),
    ("one-room-knows-sglang", "harness/engines/inside/meter.py", "sglang"),
    ("base-install", "harness/localize/bounds.py", "pandas"),
    ("read-out-behind-a-door", "harness/checks/replay.py", "assay.harness.readout.readout"),
    ("ingest-at-the-edges", "suites/plugin.py", "assay.harness.ingest.recognise"),
    ("readers-in-one-table", "harness/ingest/source_file.py", "assay.harness.ingest.mlc_trace"),
]
"""For each contract a module, and an import in it that the contract forbids."""


def rooms_of(layers: list[str]) -> set[str]:
    return {room.strip().strip("()") for layer in layers for room in re.split(r"[|:]", layer)}


def test_every_room_has_its_place_among_the_layers() -> None:
    (layers,) = [contract["layers"] for contract in CONTRACTS if contract["id"] == "layers"]
    there = {f"assay.{room}" for room in ROOMS if room != "harness"}
    for path in (ROOT / "harness").iterdir():
        if path.name not in ("__init__.py", "__pycache__") and (path.is_dir() or path.suffix == ".py"):
            there.add(f"assay.harness.{path.stem}")
    assert rooms_of(layers) == there


def test_each_contract_has_a_breach_that_shows_it_work() -> None:
    assert {contract["id"] for contract in CONTRACTS} == {contract for contract, _, _ in BREACHES}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree, where imports can be planted."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ROOMS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "model"))
    shutil.copytree(ROOT / "assay", folder / "assay", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def lint(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", *arguments]
    env = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_the_contracts_hold(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout
    assert f"{len(CONTRACTS)} kept, 0 broken" in done.stdout


@pytest.fixture(scope="module")
def broken(copy: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """The contracts where all breaches are planted at once, and by id what is said of each that is broken."""
    before = {file: (copy / file).read_text() for _, file, _ in BREACHES}
    try:
        for _, file, forbidden in BREACHES:
            with (copy / file).open("a") as source:
                source.write(f"\n\ndef _planted() -> None:\n    import {forbidden}\n")
        done = lint(copy)
    finally:
        for file, source_before in before.items():
            (copy / file).write_text(source_before)
    details = done.stdout.partition("Broken contracts")[2]
    starts = {one["id"]: found.start() for one in CONTRACTS if (found := re.search(rf"^{re.escape(one['name'])}$", details, re.M))}
    ends = sorted(starts.values())
    return done, {id_: details[start : next((end for end in ends if end > start), None)] for id_, start in starts.items()}


def test_every_contract_turns_red(broken: tuple[subprocess.CompletedProcess[str], dict[str, str]]) -> None:
    assert broken[0].returncode == 1, broken[0].stdout
    assert f"0 kept, {len(CONTRACTS)} broken" in broken[0].stdout


@pytest.mark.parametrize(("contract", "file", "forbidden"), BREACHES)
def test_a_contract_turns_red(
    broken: tuple[subprocess.CompletedProcess[str], dict[str, str]], contract: str, file: str, forbidden: str
) -> None:
    """By this import, in this file: the contract's own part of the report names both."""
    importer = "assay." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    name = forbidden if forbidden.startswith("assay.") else forbidden.split(".")[0]
    assert re.search(rf"{re.escape(importer)} -> {re.escape(name)} \(l\.", broken[1].get(contract, "")), broken[0].stdout


def test_judging_needs_no_torch() -> None:
    """A report is made again in a second or two, and importing torch takes longer than that."""
    modules = [f"assay.harness.judge.{path.stem}" for path in (ROOT / "harness" / "judge").glob("*.py")]
    code = f"import sys, importlib\nfor name in {modules!r}: importlib.import_module(name)\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
