from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.collect.plan import prepare
from assay.harness.config import RunSpec
from assay.harness.errors import UsageError
from assay.harness.ingest.results.compare_results import PassLimits, compare, compare_two_runs
from assay.harness.ingest.results.comparison import CompareResult, load
from assay.harness.sides import ROLES

LIMITS = PassLimits()


def status(result: CompareResult, id_: str) -> str:
    return next(one.status for one in result.checks if one.id == id_)


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
    result = compare(data / "lm_eval_a", data / "lm_eval_b", LIMITS)
    assert (result.verdict, result.exit_code, result.kind) == ("regression", 1, "answers")
    assert result.overall is not None
    assert result.overall.pairs == 24
    assert result.overall.lost == len([one for one in result.flips if one.direction == "lost"]) == 7
    assert status(result, "all-paired") == "ok"
    assert status(result, "execution") == "not checked"
    assert "which kernel" in result.covers
    assert CompareResult.model_validate_json(result.model_dump_json()) == result


def test_two_equal_runs_of_enough_documents_pass(data: Path, tmp_path: Path) -> None:
    sides = [edited(data / "lm_eval_a", tmp_path / name, many) for name in "ab"]
    result = compare(*sides, LIMITS)
    assert (result.verdict, result.exit_code) == ("pass", 0)


def sgl_eval(source: Path, folder: Path, factor: float = 1.0) -> Path:
    """A run of sgl-eval of 256 documents that are answered right, with answers that are longer by this factor."""
    copy = Path(shutil.copytree(source, folder))
    path = copy / "output-rs0.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    row |= {"symbolic_correct": True, "finish_reason": "stop"}
    rows = [
        row
        | {
            "id": str(n),
            "expected_answer": str(n),
            "predicted_answer": str(n),
            "num_generated_tokens": round(factor * (40 + n % 9)),
        }
        for n in range(256)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return copy


@pytest.mark.parametrize(("factor", "verdict", "checked"), [(1.0, "pass", "ok"), (1.3, "regression", "missing")])
def test_answers_that_are_right_and_longer_are_a_regression(
    data: Path, tmp_path: Path, factor: float, verdict: str, checked: str
) -> None:
    a, b = sgl_eval(data / "sgl_eval_a", tmp_path / "a"), sgl_eval(data / "sgl_eval_b", tmp_path / "b", factor)
    result = compare(a, b, LIMITS)
    assert (result.verdict, status(result, "answer-lengths")) == (verdict, checked)
    assert result.lengths is not None
    assert result.lengths.ratio == pytest.approx(factor, abs=0.01)
    assert compare(a, b, PassLimits(length_bound=0.4)).verdict == "pass"
    if verdict == "regression":
        assert "B's answers are longer" in result.headline


def test_right_answers_that_end_otherwise_are_no_pass(data: Path, tmp_path: Path) -> None:
    a, b = sgl_eval(data / "sgl_eval_a", tmp_path / "a"), sgl_eval(data / "sgl_eval_b", tmp_path / "b")
    assert status(compare(a, b, LIMITS), "finish-reasons") == "ok"
    rows = (b / "output-rs0.jsonl").read_text().splitlines(keepends=True)
    aborted = [row.replace('"finish_reason": "stop"', '"finish_reason": "abort"') for row in rows[:20]]
    (b / "output-rs0.jsonl").write_text("".join([*aborted, *rows[20:]]))
    result = compare(a, b, LIMITS)
    assert (result.verdict, status(result, "finish-reasons")) == ("inconclusive", "failed")
    assert "abort: 0 against 20" in result.headline
    assert status(compare(data / "lm_eval_a", data / "lm_eval_b", LIMITS), "finish-reasons") == "not checked"
    assert status(compare(data / "inspect_a.eval", data / "inspect_b.eval", LIMITS), "finish-reasons") == "ok"


def test_lengths_that_a_tool_does_not_record_are_not_checked(data: Path) -> None:
    result = compare(data / "lm_eval_a", data / "lm_eval_b", LIMITS)
    assert (result.lengths, status(result, "answer-lengths")) == (None, "not checked")
    recorded = compare(data / "inspect_a.eval", data / "inspect_b.eval", LIMITS).lengths
    assert recorded is not None
    assert recorded.reference > 1


def test_a_result_that_is_compared_with_its_copy_is_no_pass(data: Path, tmp_path: Path) -> None:
    a = edited(data / "lm_eval_a", tmp_path / "a", many)
    result = compare(a, Path(shutil.copytree(a, tmp_path / "b")), LIMITS)
    assert (result.verdict, status(result, "two-results")) == ("inconclusive", "missing")
    tests = Path(shutil.copy(data / "junit_a.xml", tmp_path / "same.xml"))
    assert compare(data / "junit_a.xml", tests, LIMITS).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (lambda rows: rows[:-1], "1 in A alone"),
        (lambda rows: [rows[0] | {"prompt_hash": "x"}, *rows[1:]], "1 asked with another prompt"),
        (lambda rows: [rows[0] | {"target": "Z"}, *rows[1:]], "1 with another expected answer"),
        (lambda rows: [*rows, rows[0]], "1 more often in one than in the other"),
    ],
)
def test_a_document_that_cannot_be_paired_forbids_a_pass_and_is_named(
    data: Path, tmp_path: Path, edit: Callable[[list[dict[str, object]]], list[dict[str, object]]], found: str
) -> None:
    a = edited(data / "lm_eval_a", tmp_path / "a", many)
    b = edited(data / "lm_eval_a", tmp_path / "b", lambda rows: edit(many(rows)))
    result = compare(a, b, LIMITS)
    assert (result.verdict, result.exit_code) == ("inconclusive", 3)
    assert found in next(one.found for one in result.checks if one.id == "all-paired")
    assert found in result.headline


def test_other_shots_are_refused_with_the_reason(data: Path, tmp_path: Path) -> None:
    a, b = (edited(data / "lm_eval_a", tmp_path / name, many) for name in "ab")
    path = next(b.rglob("results_*"))
    found = json.loads(path.read_text())
    found["n-shot"]["assay_synthetic"] = 5
    path.write_text(json.dumps(found))
    result = compare(a, b, LIMITS)
    assert result.verdict == "inconclusive"
    assert result.tasks[0].pairs == 0
    assert "(n-shot) is 0 in A and 5 in B" in result.tasks[0].why


def test_several_tasks_are_decided_together_and_one_bad_one_is_not_averaged_away(data: Path, tmp_path: Path) -> None:
    for side in "ab":
        for name in ("good", "bad"):
            source = data / ("lm_eval_b" if (side, name) == ("b", "bad") else "lm_eval_a")
            copy = edited(source, tmp_path / side / name, lambda rows: many(rows) if name == "good" else rows)  # noqa: B023
            for path in copy.rglob("samples_*"):
                path.rename(path.with_name(path.name.replace("assay_synthetic", name)))
            for path in copy.rglob("results_*"):
                path.unlink()
    result = compare(tmp_path / "a", tmp_path / "b", LIMITS)
    assert {one.task: one.verdict for one in result.tasks} == {"good": "pass", "bad": "regression"}
    assert result.overall is not None
    assert result.overall.pairs == 192 + 24
    assert result.overall.verdict != "regression"
    assert result.verdict == "regression"
    assert "bad:" in result.headline


def test_a_missing_task_forbids_a_pass(data: Path, tmp_path: Path) -> None:
    a, b = (edited(data / "lm_eval_a", tmp_path / name, many) for name in "ab")
    extra = next(a.rglob("samples_*"))
    shutil.copy(extra, extra.with_name("samples_other_2026-01-01.jsonl"))
    result = compare(a, b, LIMITS)
    assert result.verdict == "inconclusive"
    assert "other is in A alone" in next(one.found for one in result.checks if one.id == "same-tasks")


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ("lm_eval_a", "serving_a.jsonl", "holds latencies"),
        ("lm_eval_a", "inspect_a.eval", "do not name documents alike"),
        ("lm_eval_a", "lm_eval_a", "named twice"),
        ("lm_eval_a", "gsm8k_test.jsonl", "not recognised"),
        ("lm_eval_a", "nothing", "no file"),
    ],
)
def test_two_different_things_are_wrong_use(data: Path, a: str, b: str, found: str) -> None:
    with pytest.raises(UsageError, match=found) as error:
        compare(data / a, data / b, LIMITS)
    assert error.value.exit_code == 2


def test_one_run_of_each_benchmark_is_a_ratio_without_a_verdict(data: Path) -> None:
    result = compare(data / "serving_a.jsonl", data / "serving_b.jsonl", LIMITS)
    assert (result.verdict, result.kind) == ("inconclusive", "latencies")
    total = next(one for one in result.latencies if one.id == "e2e")
    assert total.ratio is not None
    assert total.low is not None
    assert 5 < total.low < total.ratio < 15
    assert "run A's benchmark again" in total.why
    assert "1 in B have none" in next(one.found for one in result.checks if one.id == "all-timed")


def test_a_second_run_of_a_gives_the_floor_and_so_a_verdict(data: Path, tmp_path: Path) -> None:
    row = json.loads((data / "serving_a.jsonl").read_text())

    def scaled(factor: float) -> str:
        return json.dumps(
            row | {"ttfts": [factor * t for t in row["ttfts"]], "itls": [[factor * t for t in one] for one in row["itls"]]}
        )

    a, slow, same = tmp_path / "a.jsonl", tmp_path / "slow.jsonl", tmp_path / "same.jsonl"
    a.write_text(f"{scaled(1)}\n{scaled(1.01)}\n")
    slow.write_text(scaled(1.5) + "\n")
    same.write_text(scaled(1.02) + "\n")
    assert compare(a, slow, LIMITS).verdict == "regression"
    assert compare(a, same, LIMITS).verdict == "pass"
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(json.loads(scaled(1)) | {"max_concurrency": 8}) + "\n")
    result = compare(a, other, LIMITS)
    assert (result.verdict, result.latencies) == ("inconclusive", ())
    assert "max_concurrency 4 and 8" in result.headline


def test_tests_that_broke_are_a_regression_and_are_listed_first(data: Path) -> None:
    result = compare(data / "junit_a.xml", data / "junit_b.xml", LIMITS)
    assert result.verdict == "regression"
    assert [(one.test.rpartition("::")[2], one.a, one.b) for one in result.outcomes] == [
        ("test_cached_prefix", "passed", "failed"),
        ("test_served", "passed", "error"),
        ("test_old", "failed", "passed"),
    ]
    assert "test_only_here" in next(one.found for one in result.checks if one.id == "all-ran")


def test_a_test_that_no_longer_runs_forbids_a_pass(data: Path, tmp_path: Path) -> None:
    whole = (data / "junit_a.xml").read_text()
    same, less = tmp_path / "same.xml", tmp_path / "less.xml"
    same.write_text(whole.replace('timestamp="2026-11-22', 'timestamp="2026-11-23'))
    less.write_text(whole.replace('name="test_lengths[17]"', 'name="test_lengths[18]"'))
    assert compare(data / "junit_a.xml", same, LIMITS).verdict == "pass"
    assert compare(data / "junit_a.xml", less, LIMITS).verdict == "inconclusive"


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        (
            "</testsuite>",
            '<testcase classname="tests.new" name="collected"><error message="x"/></testcase></testsuite>',
            "none-new",
        ),
        ('failures="1"', 'failures="2"', "all-listed"),
    ],
    ids=["a new test fails", "a failure is not listed"],
)
def test_a_failure_that_a_does_not_have_forbids_a_pass(data: Path, tmp_path: Path, old: str, new: str, check: str) -> None:
    whole = (data / "junit_a.xml").read_text()
    assert old in whole
    other = tmp_path / "b.xml"
    other.write_text(whole.replace(old, new))
    result = compare(data / "junit_a.xml", other, LIMITS)
    assert (result.verdict, status(result, check)) == ("inconclusive", "missing")


def test_a_stated_score_that_the_documents_do_not_have_forbids_a_pass(data: Path, tmp_path: Path) -> None:
    a = edited(data / "lm_eval_a", tmp_path / "a", many)
    b = edited(data / "lm_eval_a", tmp_path / "b", many)
    assert compare(a, b, LIMITS).verdict == "pass"
    [results] = b.rglob("results_*")
    document = json.loads(results.read_text())
    for scores in document["results"].values():
        scores |= {name: 0.12 for name in scores if name.startswith("exact_match,")}
    results.write_text(json.dumps(document))
    result = compare(a, b, LIMITS)
    assert (result.verdict, status(result, "scores-agree")) == ("inconclusive", "missing")
    assert "B states 0.1200 for" in next(one.found for one in result.checks if one.id == "scores-agree")


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
    result = compare(run("a", 400), run("b", 300), LIMITS)
    assert result.kind == "runs"
    assert result.overall is not None
    assert (result.overall.pairs, result.overall.test) == (300, "betting")
    assert [(one.id, one.count) for one in result.overall.unpaired] == [("beyond-stop", 100)]
    assert result.overall.verdict == "pass"
    assert result.verdict == "inconclusive", "as the run itself, of which nothing but questions is there"
    assert result.headline.startswith("B's own verdict is inconclusive: ")
    assert "Each run's own report" in result.covers


def test_a_loss_between_two_runs_is_a_regression(run: Callable[..., Path]) -> None:
    result = compare(run("a", 300), run("b", 300, wrong=60), PassLimits())
    assert result.verdict == "regression"
    assert result.overall is not None
    assert result.overall.lost == 60


def test_the_headline_of_two_runs_carries_the_cause_that_is_new(run: Callable[..., Path], examples: ModuleType) -> None:
    runs = [load(run("a", 300)), load(run("b", 300, wrong=60))]
    good, bad = examples.passing(), examples.regression()
    wrong = bad.findings[0].model_copy(update={"severity": "serious", "does": "applies no causal mask"})
    bad = bad.model_copy(update={"findings": (wrong,)})
    new = compare_two_runs(*runs, LIMITS, good, bad).headline
    assert new.startswith(f"B is worse than A: {bad.candidate.backend} applies no causal mask. A loss of ")
    assert compare_two_runs(*runs, LIMITS, bad, bad).headline.startswith("B is worse than A: A loss of ")


def test_the_verdict_on_two_reports_is_that_of_the_new_run(examples: ModuleType, tmp_path: Path) -> None:
    good, bad = examples.passing(), examples.regression()
    paths = [tmp_path / f"{name}.json" for name in "ab"]
    for path, report in zip(paths, (good, bad), strict=True):
        path.write_text(report.model_dump_json())
    result = compare(*paths, LIMITS)
    assert (result.verdict, result.exit_code) == ("regression", 1)
    assert compare(*paths[::-1], LIMITS).verdict == "inconclusive", "reports have no answers"
    assert "name the folders of both runs" in next(one.settles for one in result.checks if one.id == "answers")
