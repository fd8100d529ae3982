"""Evidence that does not belong to its run, or does not agree with itself: none of it may pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from assay.harness.config import RunSpec
from assay.harness.errors import EvidenceError
from assay.harness.evidence.folder import RunFolder
from assay.harness.judge.build import build
from assay.harness.run.plan import Plan, prepare
from assay.harness.sides import Role
from assay.harness.statement import state
from assay.harness.verdict import Check

QUESTIONS, GREEDY = 160, 30


@pytest.fixture(scope="module")
def plan() -> Plan:
    suites = ("accuracy", "greedy")
    return prepare(
        RunSpec.of(reference="torch_native", candidate="sage_attn", questions=QUESTIONS, greedy_prompts=GREEDY, suites=suites)
    )


@pytest.fixture(scope="module")
def complete(plan: Plan, tmp_path_factory: pytest.TempPathFactory, runs: ModuleType) -> tuple[RunFolder, RunFolder]:
    """Two complete runs of one plan, whose evidence agrees with itself."""
    places = (tmp_path_factory.mktemp(name) / "run" for name in ("run", "other"))
    one, other = (runs.complete_run(plan, place) for place in places)
    return one, other


@pytest.fixture
def sound(complete: tuple[RunFolder, RunFolder], tmp_path: Path, runs: ModuleType) -> RunFolder:
    """A copy of the first, to change."""
    folder: RunFolder = runs.copied(complete[0], tmp_path / "run")
    return folder


@pytest.fixture
def other(complete: tuple[RunFolder, RunFolder]) -> RunFolder:
    """The second."""
    return complete[1]


def checked(folder: RunFolder) -> dict[str, Check]:
    return {check.id: check for check in build(folder).checks}


def test_a_sound_run_is_bound(sound: RunFolder) -> None:
    checks = checked(sound)
    bound = ("same-servers", "calls-reconciled", "answers-parsed", "all-answered")
    assert {id_: checks[id_].status for id_ in bound} == dict.fromkeys(bound, "ok")


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def cut_items(folder: RunFolder) -> None:
    path = folder.path / "items.jsonl"
    path.write_text("".join(lines_of(path)[:100]))


def lose_questions(folder: RunFolder) -> None:
    """Remove the questions that the candidate got wrong, with their answers."""
    lost = {item.id for item in folder.items()[:50]}
    for name, key in (("items.jsonl", "id"), ("records.jsonl", "item")):
        path = folder.path / name
        path.write_text("".join(line for line in lines_of(path) if json.loads(line)[key] not in lost))


def change_an_expected_answer(folder: RunFolder) -> None:
    path = folder.path / "items.jsonl"
    first, *rest = lines_of(path)
    item = json.loads(first)
    path.write_text("".join([json.dumps(item | {"expected": "A" if item["expected"] != "A" else "B"}) + "\n", *rest]))


@pytest.mark.parametrize("tamper", [cut_items, lose_questions, change_an_expected_answer])
def test_items_that_are_not_the_runs_are_refused(sound: RunFolder, tamper: Callable[[RunFolder], None]) -> None:
    tamper(sound)
    with pytest.raises(EvidenceError, match=r"items\.jsonl"):
        build(sound)


def count_once(folder: RunFolder) -> None:
    (table,) = (folder.server_folder("candidate") / "counters").glob("*.i64")
    np.minimum(np.fromfile(table, np.int64), 1).tofile(table)


def count_one_less(folder: RunFolder) -> None:
    (table,) = (folder.server_folder("candidate") / "counters").glob("*.i64")
    calls = np.fromfile(table, np.int64).reshape(-1, 512)
    calls[0, 2] -= 1
    calls.tofile(table)


def forget_prefixes(folder: RunFolder) -> None:
    (legend,) = (folder.server_folder("candidate") / "counters").glob("*.rows.json")
    cold, warm = (counted := json.loads(legend.read_text()))["rows"]
    legend.write_text(json.dumps(counted | {"rows": [cold, warm | {"cached_prefix": False, "kernel": "another"}]}))


def admit_others(folder: RunFolder) -> None:
    admissions = folder.server_folder("candidate") / "admissions.jsonl"
    admissions.write_text(admissions.read_text().replace("candidate-accuracy", "other-accuracy", 3))


def report_other_prefixes(folder: RunFolder) -> None:
    records = folder.path / "records.jsonl"
    records.write_text(records.read_text().replace('"cached_tokens":0', '"cached_tokens":54'))


@pytest.mark.parametrize(
    ("tamper", "found", "values"),
    [
        (count_once, "prefill-calls", {"layer": 0, "cached_prefix": False, "calls": 2, "passes": 190}),
        (count_one_less, "prefill-calls", {"layer": 2, "cached_prefix": False, "calls": 189, "passes": 190}),
        (forget_prefixes, "prefill-calls", {"layer": 0, "cached_prefix": True, "calls": 0, "passes": 174}),
        (admit_others, "requests-not-admitted", {"count": 3, "answers": 190}),
        (report_other_prefixes, "other-prefixes-reported", {"count": 16, "answers": 190}),
    ],
)
def test_counts_that_do_not_agree_with_the_answers_fail(
    sound: RunFolder, tamper: Callable[[RunFolder], None], found: str, values: dict[str, object]
) -> None:
    tamper(sound)
    check = checked(sound)["calls-reconciled"]
    assert (check.status, check.outcome.id) == ("failed", "calls-disagree")
    seen = [(wrong.id, wrong.values.items()) for _, wrong in check.outcome.values["first"]]
    assert any(id_ == found and values.items() <= told for id_, told in seen), seen


def test_without_admissions_nothing_is_reconciled(sound: RunFolder) -> None:
    (sound.server_folder("candidate") / "admissions.jsonl").unlink()
    check = checked(sound)["calls-reconciled"]
    assert (check.status, check.outcome) == ("missing", state("no-request-admitted", roles=["candidate"], url=False))


@pytest.mark.parametrize("role", ["reference", "candidate"])
@pytest.mark.parametrize("what", ["counters", "admissions.jsonl"])
def test_a_server_folder_of_another_run_is_refused(sound: RunFolder, other: RunFolder, role: Role, what: str) -> None:
    theirs, ours = (folder.server_folder(role) / what for folder in (other, sound))
    if ours.is_dir():
        shutil.rmtree(ours)
        shutil.copytree(theirs, ours)
    else:
        shutil.copy(theirs, ours)
    with pytest.raises(EvidenceError, match=f"belongs to run {other.nonce}"):
        build(sound)


def test_more_changed_calls_than_calls_do_not_show_a_fault(sound: RunFolder) -> None:
    record = sound.server_folder("candidate") / "sensitivity" / "record.json"
    record.write_text(record.read_text().replace('"changed": 40', '"changed": 41'))
    assert checked(sound)["workload-sensitive"].status == "missing"


def test_the_server_of_another_candidate_proves_nothing(sound: RunFolder) -> None:
    manifest = sound.manifest()
    other = manifest.model_copy(update={"spec": {**manifest.spec, "candidate": {"backend": "triton"}}})
    (sound.path / "manifest.json").write_text(other.model_dump_json())
    check = checked(sound)["same-servers"]
    found = state("other-backend-ran", other=[("candidate", "triton", "sage_attn")])
    assert (check.status, check.outcome) == ("failed", found)


def test_a_letter_that_is_not_that_of_its_text_is_no_evidence(sound: RunFolder) -> None:
    path = sound.path / "records.jsonl"
    changed = [
        json.dumps(line | {"text": "I do not know."}) + "\n"
        if (line["role"], line["suite"]) == ("candidate", "accuracy")
        else text
        for text, line in ((text, json.loads(text)) for text in lines_of(path))
    ]  # fmt: skip
    path.write_text("".join(changed))
    report = build(sound)
    (check,) = [check for check in report.checks if check.id == "answers-parsed"]
    assert (check.status, check.outcome) == ("failed", state("answers-parsed", answers=320, otherwise=160))
