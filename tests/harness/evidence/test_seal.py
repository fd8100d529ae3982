"""A finished run whose evidence was changed afterwards: none of it is judged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from assay.harness.config import RunSpec
from assay.harness.errors import EvidenceError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.kernel_result import MATRIX, KernelResult
from assay.harness.judge.build import build
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.run_folder import open_folder

Tamper = Callable[[RunFolder], None]


@pytest.fixture(scope="module")
def plan() -> Plan:
    suites = ("accuracy", "greedy")
    return prepare(RunSpec.of(reference="torch_native", candidate="sage_attn", questions=32, greedy_prompts=8, suites=suites))


@pytest.fixture(scope="module")
def finished(plan: Plan, tmp_path_factory: pytest.TempPathFactory, runs: ModuleType) -> RunFolder:
    """A finished run, which can be judged."""
    folder: RunFolder = runs.complete_run(plan, tmp_path_factory.mktemp("finished") / "run")
    folder.write(MATRIX, KernelResult(kernel="sage_attn", shapes="float32", calls=1, worst_own=0.5, worst_bound=1.0))
    folder.baseline.mkdir()
    (folder.baseline / "baseline.json").write_text("{}")
    folder.seal()
    build(folder)
    return folder


@pytest.fixture
def sealed(finished: RunFolder, tmp_path: Path, runs: ModuleType) -> RunFolder:
    """A copy of the finished run."""
    folder: RunFolder = runs.copied(finished, tmp_path / "run")
    return folder


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    made = json.loads(path.read_text())
    change(made)
    path.write_text(json.dumps(made))


def widen_the_margin(folder: RunFolder) -> None:
    edit_json(folder.path / "manifest.json", lambda made: made["spec"]["policy"].update(margin=0.1))


def double_counters(folder: RunFolder) -> None:
    (table,) = (folder.server_folder("candidate") / "counters").glob("*.i64")
    (2 * np.fromfile(table, np.int64)).tofile(table)


def drop_a_record(folder: RunFolder) -> None:
    path = folder.path / "records.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def swap_servers(folder: RunFolder) -> None:
    reference, candidate = folder.server_folder("reference"), folder.server_folder("candidate")
    reference.rename(folder.path / "other")
    candidate.rename(reference)
    (folder.path / "other").rename(candidate)


def link_elsewhere(folder: RunFolder) -> None:
    elsewhere = folder.path.parent / "elsewhere"
    shutil.move(folder.server_folder("candidate"), elsewhere)
    os.symlink(elsewhere, folder.server_folder("candidate"))


def add_counters(folder: RunFolder) -> None:
    place = folder.server_folder("candidate") / "counters"
    for path in list(place.iterdir()):
        shutil.copy(path, place / path.name.replace("1.", "2.", 1))


def add_a_cause(folder: RunFolder) -> None:
    (folder.path / "cause.json").write_text("{}")


def claim_no_phase(folder: RunFolder) -> None:
    def change(made: Any) -> None:
        for server in made["servers"]:
            server["claimed_phases"] = []

    edit_json(folder.path / "progress.json", change)


def remove(name: str) -> Tamper:
    def tamper(folder: RunFolder) -> None:
        path = folder.path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return tamper


TAMPERED: dict[str, tuple[Tamper, str]] = {
    "margin": (widen_the_margin, "manifest.json was changed"),
    "counters-doubled": (double_counters, ".i64 was changed"),
    "counters-added": (add_counters, "were added"),
    "record-removed": (drop_a_record, "records.jsonl was changed"),
    "servers-swapped": (swap_servers, "were changed"),
    "server-elsewhere": (link_elsewhere, "were removed"),
    "server-removed": (remove("servers/reference"), "were removed"),
    "baselines-removed": (remove("baseline"), "baseline/baseline.json was removed"),
    "fault-removed": (remove("servers/candidate/sensitivity"), "servers/candidate/sensitivity/record.json was removed"),
    "cause-added": (add_a_cause, "cause.json was added"),
    "phases-unclaimed": (claim_no_phase, "progress.json was changed"),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_a_finished_run_that_was_changed_is_not_judged(sealed: RunFolder, case: str) -> None:
    tamper, found = TAMPERED[case]
    tamper(sealed)
    with pytest.raises(EvidenceError) as raised:
        build(RunFolder(sealed.path))
    assert found in raised.value.found
    assert raised.value.expected.endswith("files of the run, unchanged")
    assert "--out" in raised.value.do


def test_a_resumed_run_is_open_again(sealed: RunFolder, plan: Plan) -> None:
    folder = open_folder(plan, sealed.path)
    assert folder.progress().sealed == {}
    folder.write(MATRIX, KernelResult(kernel="sage_attn", shapes="float32"))
    build(folder)


def test_reports_logs_and_notes_are_not_sealed(sealed: RunFolder) -> None:
    for name in ("report.json", "report.html", "candidate.log", "notes.txt"):
        (sealed.path / name).write_text("something")
    build(sealed)
