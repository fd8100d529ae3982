from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.config import RunSpec
from assay.harness.errors import UsageError
from assay.harness.evidence.manifest import FailureResult
from assay.harness.ingest import compare_answers as module
from assay.harness.ingest.assay_run import basis_of
from assay.harness.ingest.comparison import ComparedAnswers, Comparison
from assay.harness.ingest.recognise import compare as compare_files
from assay.harness.ingest.tensor_diff import TensorRule
from assay.harness.run.plan import prepare
from assay.harness.sides import ROLES
from assay.harness.statement import state
from assay.harness.verdict import Check

MARGIN = 0.02


def compare(a: Path, b: Path, margin: float = MARGIN) -> Comparison:
    return compare_files(a, b, margin, TensorRule())


def answers(result: Comparison) -> ComparedAnswers:
    assert result.answers is not None
    return result.answers


def check(result: Comparison, id_: str) -> Check:
    return next(one for one in result.checks if one.id == id_)


def status(result: Comparison, id_: str) -> str:
    return check(result, id_).status


def unmet(result: Comparison) -> list[str]:
    return [one.id for one in result.checks if one.status in ("missing", "failed")]


def edited(source: Path, folder: Path, edit: Callable[[list[dict[str, object]]], list[dict[str, object]]]) -> Path:
    """A run of lm-eval as another one, at another date, with other samples."""
    copy = Path(shutil.copytree(source, folder))
    for path in copy.rglob("results_*"):
        path.write_text(re.sub(r'"date": [\d.]+', f'"date": {hash(folder)}', path.read_text()))
    path = next(copy.rglob("samples_*"))
    rows = edit([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return copy


def many(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """The samples of 192 documents: those of 24, under other hashes."""
    return [row | {"doc_hash": f"{copy}-{row['doc_hash']}"} for copy in range(8) for row in rows]


def test_two_lm_eval_runs_of_the_seed_case_are_a_regression(data: Path) -> None:
    result = compare(data / "lm_eval_a", data / "lm_eval_b")
    assert (result.verdict, result.exit_code, result.kind) == ("regression", 1, "answers")
    assert answers(result).overall.pairs == 24
    assert answers(result).overall.lost == len([one for one in answers(result).flips if one.direction == "lost"]) == 7
    assert status(result, "all-paired") == "ok"
    assert status(result, "execution") == "not checked"
    assert [why.id for why in result.why] == ["accuracy-lost"]
    assert Comparison.model_validate_json(result.model_dump_json()) == result


def test_two_equal_runs_of_enough_documents_pass(data: Path, tmp_path: Path) -> None:
    sides = [edited(data / "lm_eval_a", tmp_path / name, many) for name in "ab"]
    result = compare(*sides)
    assert (result.verdict, result.exit_code, unmet(result)) == ("pass", 0, [])
    assert [why.id for why in result.why] == ["accuracy-kept"]


def inspect_log(data: Path, path: Path, factor: float = 1.0, ends: str = "stop") -> Path:
    """A log of inspect_ai of 256 documents that are answered right, with answers that are longer by this factor; 20 end so."""
    log = json.loads((data / "inspect_a.json").read_text())
    text, log["samples"] = json.dumps(log["samples"][0]), []
    for n in range(256):
        sample = json.loads(text) | {"id": str(n), "target": str(n)}
        sample["scores"]["pattern"] |= {"value": "C", "answer": str(n)}
        sample["output"]["usage"]["output_tokens"] = round(factor * (40 + n % 9))
        sample["output"]["choices"][0]["stop_reason"] = ends if n < 20 else "stop"
        log["samples"].append(sample)
    log["eval"]["created"] = path.name
    path.write_text(json.dumps(log))
    return path


@pytest.mark.parametrize(("factor", "verdict", "checked"), [(1.0, "pass", "ok"), (1.3, "regression", "missing")])
def test_answers_that_are_right_and_longer_are_a_regression(
    data: Path, tmp_path: Path, factor: float, verdict: str, checked: str
) -> None:
    a, b = inspect_log(data, tmp_path / "a.json"), inspect_log(data, tmp_path / "b.json", factor)
    result = compare(a, b)
    assert (result.verdict, status(result, "answer-lengths")) == (verdict, checked)
    assert answers(result).lengths is not None
    assert answers(result).lengths.ratio == pytest.approx(factor, abs=0.01)
    first, *others = result.why
    if verdict == "regression":
        assert (first.id, first.values["whose"], [why.id for why in others]) == ("lengths-beyond", "B", ["accuracy-kept"])


def broken_log(data: Path, path: Path, ends: str = "stop") -> Path:
    """A log of which three in four answers are wrong, and long."""
    log = json.loads(inspect_log(data, path, 1.4, ends).read_text())
    for sample in log["samples"][:192]:
        sample["scores"]["pattern"] |= {"value": "I", "answer": "?"}
    path.write_text(json.dumps(log))
    return path


@pytest.mark.parametrize("ends", ["stop", "abort"])
def test_the_lengths_of_wrong_answers_are_no_measure_of_their_repair(data: Path, tmp_path: Path, ends: str) -> None:
    broken, repaired = broken_log(data, tmp_path / "a.json", ends), inspect_log(data, tmp_path / "b.json")
    result = compare(broken, repaired)
    assert result.verdict != "regression"
    assert (status(result, "answer-lengths"), status(result, "finish-reasons")) == ("not checked", "not checked")
    assert check(result, "answer-lengths").outcome == state("lengths-no-measure", why="gain")
    worse = compare(repaired, broken)
    assert (worse.verdict, status(worse, "answer-lengths")) == ("regression", "missing")


def test_a_result_that_is_compared_with_its_copy_is_no_pass(data: Path, tmp_path: Path) -> None:
    a = edited(data / "lm_eval_a", tmp_path / "a", many)
    result = compare(a, Path(shutil.copytree(a, tmp_path / "b")))
    assert (result.verdict, status(result, "two-results")) == ("inconclusive", "missing")
    assert check(result, "two-results").outcome.values == {"same": True}


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda rows: rows[:-1], "only-in-a"),
        (lambda rows: [rows[0] | {"prompt_hash": "x"}, *rows[1:]], "other-prompt"),
        (lambda rows: [rows[0] | {"target": "Z"}, *rows[1:]], "other-target"),
        (lambda rows: [*rows, rows[0]], "repeated"),
    ],
)
def test_a_document_that_cannot_be_paired_forbids_a_pass_and_is_named(
    data: Path, tmp_path: Path, edit: Callable[[list[dict[str, object]]], list[dict[str, object]]], why: str
) -> None:
    a = edited(data / "lm_eval_a", tmp_path / "a", many)
    b = edited(data / "lm_eval_a", tmp_path / "b", lambda rows: edit(many(rows)))
    result = compare(a, b)
    assert (result.verdict, result.exit_code) == ("inconclusive", 3)
    (gap,) = check(result, "all-paired").outcome.values["gaps"]
    assert (gap[:3], unmet(result)) == ([1, why, "assay_synthetic"], ["all-paired"])


def test_other_shots_are_refused_with_the_reason(data: Path, tmp_path: Path) -> None:
    a, b = (edited(data / "lm_eval_a", tmp_path / name, many) for name in "ab")
    path = next(b.rglob("results_*"))
    found = json.loads(path.read_text())
    found["n-shot"]["assay_synthetic"] = 5
    path.write_text(json.dumps(found))
    result = compare(a, b)
    assert result.verdict == "inconclusive"
    assert answers(result).tasks[0].pairs == 0
    (refused,) = answers(result).tasks[0].refused
    assert refused == state("tasks-differ", what="shots", a=0, b=5)
    assert answers(result).tasks[0].why == (state("task-refused", refused=[refused]),)
    assert check(result, "same-settings").outcome.values["refused"] == [["assay_synthetic", [refused]]]


def test_several_tasks_are_decided_together_and_one_bad_one_is_not_averaged_away(data: Path, tmp_path: Path) -> None:
    for side in "ab":
        for name in ("good", "bad"):
            source = data / ("lm_eval_b" if (side, name) == ("b", "bad") else "lm_eval_a")
            copy = edited(source, tmp_path / side / name, lambda rows: many(rows) if name == "good" else rows)  # noqa: B023
            for path in copy.rglob("samples_*"):
                path.rename(path.with_name(path.name.replace("assay_synthetic", name)))
            for path in copy.rglob("results_*"):
                path.unlink()
    result = compare(tmp_path / "a", tmp_path / "b")
    assert {one.task: one.verdict for one in answers(result).tasks} == {"good": "pass", "bad": "regression"}
    assert answers(result).overall.pairs == 192 + 24
    assert answers(result).overall.verdict != "regression"
    assert result.verdict == "regression"
    (why,) = result.why
    assert (why.id, why.values["task"], [one.id for one in why.values["why"]]) == ("task-worse", "bad", ["accuracy-lost"])


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ("lm_eval_a", "inspect_a.eval", "do not name things alike"),
        ("lm_eval_a", "lm_eval_a", "named twice"),
        ("lm_eval_a", "gsm8k_test.jsonl", "not recognised"),
        ("lm_eval_a", "nothing", "no file"),
    ],
)
def test_two_different_things_are_wrong_use(data: Path, a: str, b: str, found: str) -> None:
    with pytest.raises(UsageError, match=found) as error:
        compare(data / a, data / b)
    assert error.value.exit_code == 2


def test_a_stated_score_that_the_documents_do_not_have_forbids_a_pass(data: Path, tmp_path: Path) -> None:
    a = edited(data / "lm_eval_a", tmp_path / "a", many)
    b = edited(data / "lm_eval_a", tmp_path / "b", many)
    assert compare(a, b).verdict == "pass"
    [results] = b.rglob("results_*")
    document = json.loads(results.read_text())
    for scores in document["results"].values():
        scores |= {name: 0.12 for name in scores if name.startswith("exact_match,")}
    results.write_text(json.dumps(document))
    result = compare(a, b)
    assert (result.verdict, status(result, "scores-agree")) == ("inconclusive", "missing")
    assert check(result, "scores-agree").outcome.values["apart"] == [["B", 0.12, "assay_synthetic", 1.0]]


@pytest.fixture
def run(runs: ModuleType, tmp_path: Path) -> Callable[..., Path]:
    """Writes a run of two equal servers whose candidate answers some questions wrongly."""

    def write(name: str, questions: int, wrong: int = 0) -> Path:
        spec = RunSpec.of(reference="torch_native", candidate="triton", suites=("accuracy",), questions=questions)
        folder = runs.complete_run(prepare(spec), tmp_path / name)
        path = folder.path / "records.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in [one for one in rows if one["role"] == ROLES[1]][:wrong]:
            letter = "B" if row["parsed"] == "A" else "A"
            row.update(text=f"Answer: {letter}", parsed=letter)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Path(folder.path)

    return write


def test_two_runs_are_compared_over_the_beginning_that_both_asked(run: Callable[..., Path]) -> None:
    result = compare(run("a", 400), run("b", 300))
    assert result.kind == "runs"
    assert (answers(result).overall.pairs, answers(result).overall.test) == (300, "betting")
    assert [(one.id, one.count) for one in answers(result).overall.unpaired] == [("beyond-stop", 100)]
    assert answers(result).overall.verdict == "pass"
    assert result.verdict == "inconclusive", "as the run itself, of which nothing but questions is there"
    assert check(result, "own-verdict").outcome == state("own-verdict", verdict="inconclusive", of=["kernel-executed-extend"])


def test_a_loss_between_two_runs_is_a_regression(run: Callable[..., Path]) -> None:
    result = compare(run("a", 300), run("b", 300, wrong=60))
    assert result.verdict == "regression"
    assert answers(result).overall.lost == 60


def test_two_runs_have_the_cause_that_is_new(
    run: Callable[..., Path], examples: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = run("a", 300), run("b", 300, wrong=60)
    good, bad = examples.passing(), examples.regression()
    wrong = bad.findings[0].model_copy(update={"severity": "serious", "does": "applies no causal mask"})
    bad = bad.model_copy(update={"findings": (wrong,)})
    monkeypatch.setattr(module, "report_of", lambda source: good if source.path == a else bad)
    expected = state("new-cause", candidate=bad.candidate.backend, does="applies no causal mask")
    assert compare(a, b).cause == expected
    monkeypatch.setattr(module, "report_of", lambda source: bad)
    assert compare(a, b).cause is None


def test_the_verdict_on_two_reports_is_that_of_the_new_run(examples: ModuleType, tmp_path: Path) -> None:
    good, bad = examples.passing(), examples.regression()
    paths = [tmp_path / f"{name}.json" for name in "ab"]
    for path, report in zip(paths, (good, bad), strict=True):
        path.write_text(report.model_dump_json())
    result = compare(*paths)
    assert (result.verdict, result.exit_code) == ("regression", 1)
    assert compare(*paths[::-1]).verdict == "inconclusive", "reports have no answers"
    assert (status(result, "answers"), result.why) == ("missing", ())
    assert check(result, "own-verdict").outcome == state("own-verdict", verdict="regression", of=["accuracy", "greedy"])


def test_a_run_has_its_verdict_from_its_cause_or_from_suites_and_unmet_checks(examples: ModuleType) -> None:
    bad = examples.regression()
    assert (basis_of(examples.passing()), basis_of(bad)) == ([], ["accuracy", "greedy"])
    wrong = bad.findings[0].model_copy(update={"severity": "serious", "title": "top-left mask"})
    assert basis_of(bad.model_copy(update={"findings": (wrong,), "causes": 1})) == ["top-left mask"]
    unmet = (bad.checks[0].model_copy(update={"status": "missing"}), *bad.checks[1:])
    undecided = bad.model_copy(update={"verdict": "inconclusive", "suites": (), "checks": unmet})
    assert basis_of(undecided) == [bad.checks[0].id]
    failure = FailureResult(kind="engine", cause="", found="The server died.", do="restart it", details="")
    assert basis_of(bad.model_copy(update={"verdict": "error", "failure": failure})) == ["The server died"]


def test_answers_that_end_otherwise_are_no_pass(data: Path, tmp_path: Path) -> None:
    a, b = (inspect_log(data, tmp_path / f"{ends}.json", ends=ends) for ends in ("stop", "abort"))
    result = compare(a, b)
    assert (result.verdict, status(result, "finish-reasons")) == ("inconclusive", "failed")


def test_a_first_run_that_failed_measures_no_lengths(
    run: Callable[..., Path], examples: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = run("a", 300), run("b", 300)
    path = a / "records.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | {"completion_tokens": 60}) + "\n" for row in rows))
    assert status(compare(a, b), "answer-lengths") == "missing"
    reports = {a: examples.regression(), b: examples.passing()}
    monkeypatch.setattr(module, "report_of", lambda source: reports[source.path])
    result = compare(a, b)
    assert result.verdict == "pass"
    assert check(result, "answer-lengths").outcome == state("lengths-no-measure", why="failed")


def test_what_a_tool_does_not_record_is_not_checked(data: Path) -> None:
    result = compare(data / "lm_eval_a", data / "lm_eval_b")
    assert (status(result, "finish-reasons"), status(result, "answer-lengths")) == ("not checked", "not checked")


def test_prompts_that_were_not_recorded_are_not_checked_and_forbid_no_pass(data: Path, tmp_path: Path) -> None:
    def unrecorded(rows: list[dict[str, object]]) -> list[dict[str, object]]:
        return [row | {"prompt_hash": ""} for row in many(rows)]

    result = compare(*(edited(data / "lm_eval_a", tmp_path / name, unrecorded) for name in "ab"))
    assert (result.verdict, status(result, "same-prompts")) == ("pass", "not checked")


def test_a_missing_task_forbids_a_pass(data: Path, tmp_path: Path) -> None:
    a, b = (edited(data / "lm_eval_a", tmp_path / name, many) for name in "ab")
    extra = next(a.rglob("samples_*"))
    shutil.copy(extra, extra.with_name("samples_other_2026-01-01.jsonl"))
    result = compare(a, b)
    assert (result.verdict, status(result, "same-tasks")) == ("inconclusive", "missing")
    assert check(result, "same-tasks").outcome.values["only"] == [["other", "A"]]
