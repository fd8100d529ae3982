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
    folder.baseline_status.parent.mkdir()
    folder.baseline_status.write_text("{}")
    folder.seal()
    build(folder)
    return folder


@pytest.fixture
def sealed(finished: RunFolder, tmp_path: Path, runs: ModuleType) -> RunFolder:
    """A copy of the finished run."""
    folder: RunFolder = runs.copied(finished, tmp_path / "run")
    return folder


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    made = json.loads(path.read_text())
    change(made)
    path.write_text(json.dumps(made))


def spec(part: str, **changed: Any) -> Tamper:
    return lambda folder: edit_json(folder.path / "manifest.json", lambda made: made["spec"][part].update(changed))


def counters(change: Callable[[np.ndarray], np.ndarray]) -> Tamper:
    def tamper(folder: RunFolder) -> None:
        (table,) = (folder.server_folder("candidate") / "counters").glob("*.i64")
        change(np.fromfile(table, np.int64)).tofile(table)

    return tamper


def records(change: Callable[[list[str]], list[str]]) -> Tamper:
    def tamper(folder: RunFolder) -> None:
        path = folder.path / "records.jsonl"
        path.write_text("".join(change(lines(path))))

    return tamper


def swap_roles(made: list[str]) -> list[str]:
    other = {"reference": "candidate", "candidate": "reference"}
    swapped = [json.loads(line) for line in made]
    return [json.dumps(one | {"role": other[one["role"]]}) + "\n" for one in swapped]


def correct_an_answer(made: list[str]) -> list[str]:
    return [line.replace('"finish_reason":"stop"', '"finish_reason":"length"', 1) for line in made]


def not_a_number(made: list[str]) -> list[str]:
    return [line.replace('"latency_s":0.1', '"latency_s":NaN') for line in made]


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
    "margin": (spec("policy", margin=0.1), "manifest.json was changed"),
    "greedy-margin": (spec("policy", greedy_margin=0.5), "manifest.json was changed"),
    "logits-limit": (spec("policy", logits_limit=1.0), "manifest.json was changed"),
    "envelope": (spec("policy", envelope_tokens=128), "manifest.json was changed"),
    "suites": (spec("workload", suites=["greedy"]), "manifest.json was changed"),
    "noise": (
        lambda folder: edit_json(folder.path / "manifest.json", lambda made: made["noise"].update(candidate="fp8_kv")),
        "manifest.json was changed",
    ),
    "counters-doubled": (counters(lambda calls: 2 * calls), ".i64 was changed"),
    "counters-negative": (counters(lambda calls: -calls), ".i64 was changed"),
    "counters-huge": (counters(lambda calls: calls + 2**62), ".i64 was changed"),
    "counters-added": (add_counters, "were added"),
    "record-removed": (records(lambda made: made[:-1]), "records.jsonl was changed"),
    "record-twice": (records(lambda made: [*made, made[-1]]), "records.jsonl was changed"),
    "roles-swapped": (records(swap_roles), "records.jsonl was changed"),
    "answers-corrected": (records(correct_an_answer), "records.jsonl was changed"),
    "not-a-number": (records(not_a_number), "records.jsonl was changed"),
    "servers-swapped": (swap_servers, "were changed"),
    "server-elsewhere": (link_elsewhere, "were removed"),
    "server-removed": (remove("servers/reference"), "were removed"),
    "matrix-removed": (remove("matrix.json"), "matrix.json was removed"),
    "baselines-removed": (remove("baseline"), "baseline/status.json was removed"),
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


def test_a_run_that_was_changed_is_not_resumed(sealed: RunFolder, plan: Plan) -> None:
    records(lambda made: made[:-1])(sealed)
    with pytest.raises(EvidenceError, match=r"records\.jsonl was changed"):
        open_folder(plan, sealed.path)


def test_a_resumed_run_is_open_again(sealed: RunFolder, plan: Plan) -> None:
    folder = open_folder(plan, sealed.path)
    assert folder.progress().sealed == {}
    folder.write(MATRIX, KernelResult(kernel="sage_attn", shapes="float32"))
    build(folder)


def test_reports_logs_and_notes_are_not_sealed(sealed: RunFolder) -> None:
    for name in ("report.json", "report.html", "candidate.log", "notes.txt", "counters.json"):
        (sealed.path / name).write_text("something")
    build(sealed)


def test_a_run_that_goes_on_is_judged_as_it_is(plan: Plan, tmp_path: Path, runs: ModuleType) -> None:
    folder = runs.complete_run(plan, tmp_path / "run")
    records(lambda made: made[:-1])(folder)
    assert build(folder).verdict == "inconclusive"
