"""A freeze of what is decided: stable from run to run, and red as soon as a decision changes."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # it makes and judges runs
REPORT: dict[str, Any] = {
    "verdict": "regression",
    "exit_code": 1,
    "created": "2026-01-01T00:00:00Z",
    "reasons": ["The loss is 85.5 points.", "Something that no check says took 3.1 s in /tmp/x/run."],
    "checks": [{"id": "kernel-ran", "title": "t", "status": "ok", "found": "it was counted"}],
    "suites": [
        {
            "id": "accuracy", "verdict": "regression", "why": "The loss is 85.5 points.",
            "metrics": [{"id": "loss", "value": 0.85512, "low": None}],
        },
    ],
    "deep": {"within": [{"id": "mask", "severity": "serious", "where": "layer 1", "diagnosis": "it has no mask"}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def characterise() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("tools")
        return importlib.import_module("characterise")


@pytest.fixture
def frozen(characterise: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A function that freezes one recorded run and gives the tool's exit code."""
    monkeypatch.setattr(os, "environ", os.environ.copy())

    def freeze(*words: str | Path) -> int:
        return int(characterise.main(["--only", "runs/evidence/nothing", *map(str, words)]))

    return freeze


def test_what_is_decided_is_found_wherever_it_stands(characterise: ModuleType) -> None:
    assert characterise.essence(REPORT) == {
        "verdict": "regression",
        "exit_code": 1,
        "checks": ["kernel-ran ok"],
        "suites": ["accuracy regression"],
        "numbers": ["loss [0.855, None, None, None]"],
        "findings": ["mask serious layer 1"],
        "reasons": ["suites: accuracy", "Something that no check says took <time> in <folder>"],
    }


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("verdict",), "pass"),
        (("exit_code",), 3),
        (("checks", 0, "status"), "missing"),
        (("suites", 0, "verdict"), "pass"),
        (("suites", 0, "metrics", 0, "value"), 0.851),
        (("deep", "within", 0, "severity"), "warning"),
        (("reasons",), []),
    ],
)
def test_a_changed_decision_is_a_difference(characterise: ModuleType, at: tuple[Any, ...], value: object) -> None:
    changed = json.loads(json.dumps(REPORT))
    *path, last = at
    place = changed
    for step in path:
        place = place[step]
    place[last] = value
    before, after = ({"runs/x": characterise.essence(one)} for one in (REPORT, changed))
    assert characterise.differences(before, before, {}) == []
    (line, *_) = characterise.differences(before, after, {})
    assert line.startswith("runs/x: ")


def test_a_table_lists_what_may_be_called_otherwise(characterise: ModuleType) -> None:
    changed = json.loads(json.dumps(REPORT).replace('"accuracy"', '"questions"').replace("no check says", "no check states"))
    before, after = ({"runs/x": characterise.essence(one)} for one in (REPORT, changed))
    assert len(characterise.differences(before, after, {})) == 2
    renames = {"words": {"suites: accuracy": "suites: questions", "check says": "check states"}, "ids": {"accuracy": "questions"}}
    assert characterise.differences(before, after, renames) == []
    assert characterise.differences(before, after, {"changed": {"runs/x": "a reason"}}) == []


def test_cases_that_are_gone_or_new_are_differences(characterise: ModuleType) -> None:
    one = {"runs/x": characterise.essence(REPORT)}
    assert characterise.differences(one, {}, {}) == ["runs/x: is gone"]
    assert characterise.differences({}, one, {}) == ["runs/x: is new"]


def test_a_refusal_is_kept_in_its_three_parts(characterise: ModuleType) -> None:
    said = "assay: --x is 3.\nExpected: at most 2\nWhat to do: give 2\n"
    assert characterise.parts(said) == {"found": "assay: --x is 3.", "expected": "at most 2", "do": "give 2"}


def test_a_verdict_that_changed_is_seen(frozen: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tmp_path / "before.json"
    assert frozen("--out", before) == 0
    made = json.loads(before.read_text())
    assert made["runs/evidence/nothing"]["verdict"] == "inconclusive"
    assert frozen("--against", before) == 0
    made["runs/evidence/nothing"]["verdict"] = "pass"
    before.write_text(json.dumps(made))
    assert frozen("--against", before) == 1
    assert 'runs/evidence/nothing: verdict: "pass" -> "inconclusive"' in capsys.readouterr().out
