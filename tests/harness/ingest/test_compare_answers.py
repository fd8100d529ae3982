from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from assay.harness.config import RunSpec
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.manifest import FailureResult
from assay.harness.ingest import compare_answers as module
from assay.harness.ingest import lm_eval
from assay.harness.ingest.assay_run import basis_of
from assay.harness.ingest.comparison import ComparedAnswers, Comparison
from assay.harness.ingest.recognise import compare as compare_files
from assay.harness.ingest.source_file import SourceFile
from assay.harness.ingest.tensor_diff import TensorRule
from assay.harness.run.plan import prepare
from assay.harness.sides import ROLES
from assay.harness.statement import state
from assay.harness.verdict import WORST_FIRST, Check

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


Rows = list[dict[str, Any]]


def two(data: Path, folder: Path, edit: Callable[[Rows], Rows] = lambda rows: rows, both: bool = False) -> tuple[Path, Path]:
    """Two equal runs of lm-eval of 192 documents, of which the second, or both, are edited."""
    edits = (lambda rows: edit(many(rows)) if both else many(rows)), (lambda rows: edit(many(rows)))
    a, b = (edited(data / "lm_eval_a", folder / side, each) for side, each in zip("ab", edits, strict=True))
    return a, b


def test_two_lm_eval_runs_of_the_seed_case_are_a_regression(data: Path) -> None:
    result = compare(data / "lm_eval_a", data / "lm_eval_b")
    assert (result.verdict, result.exit_code, result.kind) == ("regression", 1, "answers")
    assert answers(result).overall.pairs == 24
    assert answers(result).overall.lost == len([one for one in answers(result).flips if one.direction == "lost"]) == 7
    assert answers(result).overall.b_error == pytest.approx(0.0948, abs=1e-4)
    assert [(one.id, one.count) for one in answers(result).overall.unpaired] == [("skipped-in-a", 104), ("skipped-in-b", 104)]
    assert (status(result, "execution"), status(result, "finish-reasons")) == ("not checked", "not checked")
    assert [why.id for why in result.why] == ["accuracy-lost"]
    assert Comparison.model_validate_json(result.model_dump_json()) == result


def test_two_equal_runs_of_enough_documents_pass(data: Path, tmp_path: Path) -> None:
    result = compare(*two(data, tmp_path))
    assert (result.verdict, result.exit_code, unmet(result)) == ("pass", 0, [])
    assert [why.id for why in result.why] == ["accuracy-kept"]


def with_samples(path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """A log of inspect_ai, each of whose samples was edited."""
    log = json.loads(path.read_text())
    for sample in log["samples"]:
        edit(sample)
    path.write_text(json.dumps(log))
    return path


def without_events(sample: dict[str, Any]) -> str:
    """A sample without the events of its session: two thirds of its text, of which only what came from a cache is read."""
    return json.dumps(sample | {"events": []})


def inspect_log(data: Path, path: Path, factor: float = 1.0, ends: str = "stop", counted: int = 0) -> Path:
    """A log of inspect_ai of 256 documents that are answered right, with answers that are longer by this factor; 20 end so.

    The server counts so many tokens more than it wrote.
    """
    log = json.loads((data / "inspect_a.json").read_text())
    text, log["samples"] = without_events(log["samples"][0]), []
    for n in range(256):
        sample = json.loads(text) | {"id": str(n), "target": str(n)}
        sample["scores"]["pattern"] |= {"value": "C", "answer": str(n)}
        tokens = round(factor * (40 + n % 9))
        sample["output"]["usage"]["output_tokens"] = tokens + counted
        sample["output"]["choices"][0]["message"]["content"] = "so " * tokens
        sample["output"]["choices"][0]["stop_reason"] = ends if n < 20 else "stop"
        log["samples"].append(sample)
    log["eval"]["created"] = path.name
    path.write_text(json.dumps(log))
    return path


@pytest.mark.parametrize(
    ("factor", "counted", "verdict"),
    [
        (1.0, 0, "pass"), (1.3, 0, "regression"), (1.3, 2, "regression"),
        # Equal texts are equally long, however a server counts their tokens.
        (1.0, 2, "pass"), (1.0, 3, "inconclusive"), (1.0, 9, "inconclusive"),
    ],
)  # fmt: skip
def test_answers_that_are_right_and_longer_are_a_regression(
    data: Path, tmp_path: Path, factor: float, counted: int, verdict: str
) -> None:
    a, b = inspect_log(data, tmp_path / "a.json"), inspect_log(data, tmp_path / "b.json", factor, counted=counted)
    result = compare(a, b)
    lengths = answers(result).lengths
    assert lengths is not None
    assert (result.verdict, status(result, "answer-lengths")) == (verdict, "ok" if verdict == "pass" else "missing")
    assert lengths.ratio == pytest.approx(factor, abs=0.01 if not counted else 0.1)
    if factor == 1.0:
        assert (lengths.recounted, lengths.ratio) == (counted or None, 1.0)
    elif not counted:
        assert (result.why[0].values["whose"], [why.id for why in result.why]) == ("B", ["lengths-beyond", "accuracy-kept"])


def broken_log(data: Path, path: Path, ends: str = "stop") -> Path:
    """A log of which three in four answers are wrong, and long."""
    wrong = {"value": "I", "answer": "?"}
    log = inspect_log(data, path, 1.4, ends)
    return with_samples(log, lambda sample: int(sample["id"]) < 192 and sample["scores"]["pattern"].update(wrong))


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


_CUT = {"gen_args_0": {"arg_0": "the end", "arg_1": {"temperature": 0.0}}}


@pytest.mark.parametrize(
    ("edit", "count", "why"),
    [
        (lambda rows: rows[:-1], 1, "only-in-a"), (lambda rows: [rows[0] | {"prompt_hash": "x"}, *rows[1:]], 1, "other-prompt"),
        (lambda rows: [rows[0] | {"target": "Z"}, *rows[1:]], 1, "other-target"), (lambda rows: [*rows, rows[0]], 1, "repeated"),
        # Requests that were cut are other prompts, whatever hash is written.
        (lambda rows: [row | {"arguments": _CUT} for row in rows], 192, "other-prompt"),
    ],
)  # fmt: skip
def test_a_document_that_cannot_be_paired_forbids_a_pass_and_is_named(
    data: Path, tmp_path: Path, edit: Callable[[Rows], Rows], count: int, why: str
) -> None:
    result = compare(*two(data, tmp_path, edit))
    assert (result.verdict, result.exit_code, unmet(result)) == ("inconclusive", 3, ["all-paired"])
    (gap,) = check(result, "all-paired").outcome.values["gaps"]
    assert gap[:3] == [count, why, "assay_synthetic"]


def test_other_shots_are_refused_with_the_reason(data: Path, tmp_path: Path) -> None:
    a, b = two(data, tmp_path)
    changed(next(b.rglob("results_*")), **{"n-shot": {"assay_synthetic": 5}})
    result = compare(a, b)
    (task,) = answers(result).tasks
    assert (result.verdict, task.pairs) == ("inconclusive", 0)
    assert task.differs == (state("tasks-differ", what="shots", a="0", b="5"),)
    assert task.why == (state("not-same-question", differs=task.differs), task.why[1])
    assert task.why[1].id == "scores-unpaired"
    assert check(result, "same-settings").outcome.values["differs"] == [["assay_synthetic", list(task.differs)]]


def test_of_several_tasks_the_worst_comes_first(tmp_path: Path) -> None:
    """Scores of several tasks without samples, all worse."""
    sides = {"a": (0.9, 0.9, 0.9), "b": (0.8, 0.2, 0.7)}
    for name, scores in sides.items():
        folder = lm_run(tmp_path / name, {"acc": share(900)}, samples=False)
        stated = {f"t{n}": {"acc,none": score, "acc_stderr,none": 0.0095} for n, score in enumerate(scores)}
        changed(folder / "results_2026.json", results=stated)
    assert [why.values["task"][:2] for why in compare(*(tmp_path / name for name in sides)).why] == ["t1", "t2", "t0"]


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
    assert (why.id, why.values["task"], [one.id for one in why.values["why"]]) == (
        "of-task", "bad (exact_match,letter)", ["accuracy-lost"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ("lm_eval_a", "inspect_a.eval", "are of different kinds: lm-eval results and inspect_ai log"),
        ("lm_eval_a", "lm_eval_a", "named twice"),
        ("lm_eval_a", "gsm8k_test.jsonl", "not recognised"),
        ("lm_eval_a", "nothing", "does not exist"),
    ],
)
def test_two_different_things_are_wrong_use(data: Path, a: str, b: str, found: str) -> None:
    with pytest.raises(UsageError, match=found) as error:
        compare(data / a, data / b)
    assert error.value.exit_code == 2


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


def test_two_runs_have_the_cause_that_is_new(
    run: Callable[..., Path], examples: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = run("a", 300), run("b", 300, wrong=60)
    result = compare(a, b)
    assert (result.verdict, answers(result).overall.lost, result.cause) == ("regression", 60, None)
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


def test_a_side_says_of_how_many_its_score_is(data: Path, tmp_path: Path) -> None:
    a, b = (inspect_log(data, tmp_path / f"{name}.json") for name in "ab")
    with_samples(b, lambda sample: int(sample["id"]) < 64 and sample.update(error={"message": "timeout"}))
    result = compare(a, b)
    assert (result.verdict, result.a.notes) == ("inconclusive", ())
    assert result.b.notes == ("synthetic (pattern): 1.0000 of 192; 64 of 256 failed: between 0.7500 and 1.0000 of 256.",)


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


def test_prompts_that_were_not_recorded_are_not_checked_and_forbid_no_pass(data: Path, tmp_path: Path) -> None:
    unrecorded = {"prompt_hash": "", "arguments": {}}
    result = compare(*two(data, tmp_path, lambda rows: [row | unrecorded for row in rows], both=True))
    assert (result.verdict, status(result, "same-prompts")) == ("pass", "not checked")


def test_a_missing_task_forbids_a_pass(data: Path, tmp_path: Path) -> None:
    a, b = two(data, tmp_path)
    extra = next(a.rglob("samples_*"))
    shutil.copy(extra, extra.with_name("samples_other_2026-01-01.jsonl"))
    result = compare(a, b)
    assert (result.verdict, status(result, "same-tasks")) == ("inconclusive", "missing")
    assert check(result, "same-tasks").outcome.values["only"] == [["other (exact_match,letter)", "A"]]


def lm_run(
    folder: Path, scores: dict[str, list[float]], lower: tuple[str, ...] = (), limit: float | None = None, shots: int = 0,
    samples: bool = True, asked: int = 0,
) -> Path:  # fmt: skip
    """A run of lm-eval on the task "t" with these scores of each document, by metric, and what it states of them."""
    folder.mkdir()
    count = len(next(iter(scores.values())))
    rows = [
        {
            "doc_hash": str(n), "prompt_hash": "p", "target_hash": "t", "target": str(n), "resps": [["x"]], "filtered_resps": ["x"],
            "filter": "none", "metrics": list(scores), **{name: values[n] for name, values in scores.items()},
        }
        for n in range(count)
    ]  # fmt: skip
    stated = {f"{name},none": sum(values) / count for name, values in scores.items()}
    errors = {
        f"{name}_stderr,none": (sum((v - sum(values) / count) ** 2 for v in values) / (count - 1) / count) ** 0.5
        for name, values in scores.items()
    }
    document = {
        "results": {"t": stated | errors}, "configs": {"t": {}}, "versions": {"t": 1}, "n-shot": {"t": shots},
        "higher_is_better": {"t": {name: name not in lower for name in scores}}, "config": {"limit": limit},
        "n-samples": {"t": {"original": 9000, "effective": asked or count}}, "date": str(folder),
    }  # fmt: skip
    (folder / "results_2026.json").write_text(json.dumps(document))
    if samples:
        (folder / "samples_t_2026.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def share(right: int, of: int = 1000) -> list[float]:
    return [float(n < right) for n in range(of)]


def errors_of(rate: float) -> list[float]:
    return [rate + 0.1 * (n % 3 - 1) for n in range(600)]


_BOTH, _ALONE, _ROUGE, _SIGNED = share(800), {"samples": False}, [41.5] * 1000, [-3.0, 5.0] * 500
_LOWER: dict[str, Any] = {"lower": ("wer",)}
_UNPAIRED, _LIMITED = ["all-paired"], ["same-settings", "all-paired"]
_SETTINGS = {"limit": {"what": "limit", "a": "400", "b": "300"}, "shots": {"what": "shots", "a": "0", "b": "1"}}


@pytest.mark.parametrize(
    ("a", "b", "options", "tasks", "why", "missing"),
    [
        # Of which lower is better.
        ({"wer": errors_of(0.3)}, {"wer": errors_of(0.7)}, (_LOWER, _LOWER), "regression", "accuracy-lost", []),
        ({"wer": errors_of(0.7)}, {"wer": errors_of(0.3)}, (_LOWER, _LOWER), "pass", "accuracy-kept", []),
        ({"wer": errors_of(0.3)}, {"wer": errors_of(0.7)}, (_LOWER | _ALONE,) * 2, "regression", "scores-unpaired", _UNPAIRED),
        ({"wer": errors_of(0.7)}, {"wer": errors_of(0.3)}, (_LOWER | _ALONE,) * 2, "inconclusive", "scores-unpaired", _UNPAIRED),
        # Every stated score is tested, and a regression of any rules out a pass.
        ({"acc": _BOTH, "acc_norm": _BOTH}, {"acc": _BOTH, "acc_norm": share(799)}, ({}, {}), "pass pass", "accuracy-kept", []),
        ({"acc": _BOTH, "acc_norm": _BOTH}, {"acc": _BOTH, "acc_norm": share(0)}, ({}, {}), "pass regression", "of-task", []),
        ({"acc": _BOTH, "acc_norm": _BOTH}, {"acc": _BOTH}, ({}, {}), "pass", "accuracy-kept", ["same-tasks"]),
        # Points of 100, of either side; of no scale, compared unpaired.
        ({"rouge": _ROUGE, "acc": _BOTH}, {"rouge": _ROUGE, "acc": _BOTH}, ({}, {}), "pass pass", "accuracy-kept", []),
        ({"rouge": _ROUGE, "acc": _BOTH}, {"rouge": [2.5] * 1000, "acc": _BOTH}, ({}, {}), "pass regression", "of-task", []),
        ({"rouge": _ROUGE, "acc": _BOTH}, {"rouge": [0.9] * 1000, "acc": _BOTH}, ({}, {}), "pass regression", "of-task", []),
        ({"acc": _BOTH, "d": _SIGNED}, {"acc": _BOTH, "d": _SIGNED}, ({}, {}), "pass inconclusive", "accuracy-kept", _UNPAIRED),
        # Without samples.
        ({"acc": _BOTH}, {"acc": share(600)}, (_ALONE, _ALONE), "regression", "scores-unpaired", _UNPAIRED),
        ({"acc": _BOTH}, {"acc": _BOTH}, (_ALONE, _ALONE), "inconclusive", "scores-unpaired", _UNPAIRED),
        # Other settings are the first line, and hide no loss.
        ({"acc": _BOTH}, {"acc": share(200)}, (_ALONE, _ALONE | {"shots": 1}), "inconclusive", "shots scores-unpaired",
         ["same-settings"]),
        ({"acc": share(400, 400)}, {"acc": share(300, 300)}, ({"limit": 400}, {"limit": 300}), "pass", "limit accuracy-kept",
         _LIMITED),
        ({"acc": share(400, 400)}, {"acc": share(100, 300)}, ({"limit": 400}, {"limit": 300}), "regression", "limit accuracy-lost",
         _LIMITED),
        ({"acc": share(180, 400)}, {"acc": share(100, 300)}, ({"limit": 400} | _ALONE, {"limit": 300} | _ALONE), "inconclusive",
         "limit scores-unpaired", _LIMITED),
        # Asked for, and answered by neither.
        ({"acc": share(400, 400)}, {"acc": share(400, 400)}, ({"asked": 480},) * 2, "pass", "accuracy-kept", _UNPAIRED),
    ],
)  # fmt: skip
def test_what_lm_eval_states_of_a_task(
    tmp_path: Path, a: dict[str, list[float]], b: dict[str, list[float]], options: tuple[dict[str, Any], ...], tasks: str, why: str,
    missing: list[str],
) -> None:  # fmt: skip
    result = compare(lm_run(tmp_path / "a", a, **options[0]), lm_run(tmp_path / "b", b, **options[1]))
    named, said = answers(result).tasks, why.split()
    assert (" ".join(task.verdict for task in named), unmet(result)) == (tasks, missing)
    worst = next((verdict for verdict in WORST_FIRST if verdict in tasks.split()), "")
    assert result.verdict == (worst if worst == "regression" or not missing else "inconclusive")
    assert [each.id for each in result.why] == (["not-same-question"] if len(said) > 1 else []) + said[-1:]
    if len(said) > 1:
        assert [each.values for each in result.why[0].values["differs"]] == [_SETTINGS[said[0]]]
    means = {name: (sum(a[name]) / len(a[name]), sum(b[name]) / len(b[name])) for name in a if name in b}
    scale = 100 if "rouge" in a else 1
    for task in named:
        before, after = means[task.metric.partition(",")[0]]
        lost = (after - before) if task.metric.startswith("wer") else before - after
        assert task.loss == pytest.approx(lost / (scale if task.metric.startswith("rouge") else 1), abs=1e-3)


def test_an_unpaired_difference_has_an_interval_and_one_metric_can_be_asked_for(tmp_path: Path) -> None:
    a, b = (
        lm_run(tmp_path / name, {"acc": share(right), "acc_norm": share(600)}, samples=False)
        for name, right in (("a", 800), ("b", 600))
    )
    task = answers(compare(a, b)).tasks[0]
    assert (task.test, task.pairs, task.low, task.high) == (
        "unpaired",
        0,
        pytest.approx(0.161, abs=2e-3),
        pytest.approx(0.239, abs=2e-3),
    )
    (only,) = answers(compare_files(a, b, MARGIN, TensorRule(), "acc_norm")).tasks
    assert only.verdict == "inconclusive"


def test_a_stated_score_that_no_sample_has_is_tested_unpaired(tmp_path: Path) -> None:
    sides = [lm_run(tmp_path / name, {"acc": share(800)}) for name in "ab"]
    for side, bleu in zip(sides, (35.2, 5.2), strict=True):
        stated = {"acc,none": 0.8, "bleu,none": bleu, "bleu_stderr,none": 0.4}
        changed(side / "results_2026.json", results__t=stated)
    result = compare(*sides)
    assert [(one.metric, one.test, one.verdict) for one in answers(result).tasks] == [
        ("acc,none", "exact", "pass"), ("bleu,none", "unpaired", "regression"),
    ]  # fmt: skip
    assert result.verdict == "regression"


def test_the_alpha_is_shared_by_all_scores(tmp_path: Path) -> None:
    a, b = share(900), share(900)
    b[:30] = [0.0] * 30
    alone = compare(lm_run(tmp_path / "a", {"acc": a}), lm_run(tmp_path / "b", {"acc": b}))
    scores = dict.fromkeys(("x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9"), a)
    many = compare(lm_run(tmp_path / "aa", {"acc": a} | scores), lm_run(tmp_path / "bb", {"acc": b} | scores))
    assert 0.005 < answers(alone).overall.p_regression <= 0.05
    assert (alone.verdict, many.verdict) == ("regression", "inconclusive")


def test_the_second_scorer_of_a_log_is_tested(data: Path, tmp_path: Path) -> None:
    a, b = (inspect_log(data, tmp_path / f"{name}.json") for name in "ab")
    for path, right in ((a, "C"), (b, "I")):
        judged = {"value": {"style": right, "facts": "C"}, "answer": "x"}
        with_samples(path, lambda sample, judged=judged: sample["scores"].update(judge=judged))
    result = compare(a, b)
    assert {one.metric: one.verdict for one in answers(result).tasks} == {
        "pattern": "pass", "judge/style": "regression", "judge/facts": "pass",
    }  # fmt: skip
    assert result.verdict == "regression"


TABLE = """vllm (pretrained=org/model), gen_kwargs: (None), limit: 250.0, num_fewshot: 5, batch_size: auto
|Tasks|Version|     Filter     |n-shot|  Metric   |   |Value|   |Stderr|
|-----|------:|----------------|-----:|-----------|---|----:|---|-----:|
|gsm8k|      3|flexible-extract|     5|exact_match|{}|{}|±  |0.0259|
|     |       |strict-match    |     5|exact_match|{}|{}|±  |0.0257|
"""


def table(path: Path, first: float, second: float, arrow: str = "↑") -> Path:
    path.write_text(TABLE.format(arrow, first, arrow, second))
    return path


def test_printed_tables_are_compared_unpaired_by_all_columns_of_their_rows(tmp_path: Path) -> None:
    a, b = table(tmp_path / "a.txt", 0.212, 0.208), table(tmp_path / "b.txt", 0.824, 0.816)
    better, worse = compare(a, b), compare(b, a)
    assert [(one.task, one.metric, one.test) for one in answers(better).tasks] == [
        ("gsm8k", "exact_match,flexible-extract", "unpaired"), ("gsm8k", "exact_match,strict-match", "unpaired"),
    ]  # fmt: skip
    assert (better.verdict, worse.verdict) == ("inconclusive", "regression")
    overall = answers(better).overall
    assert (overall.low, overall.high) == (pytest.approx(-0.68, abs=5e-3), pytest.approx(-0.54, abs=5e-3))
    assert compare(table(tmp_path / "c.txt", 0.2, 0.2, "↓"), table(tmp_path / "d.txt", 0.8, 0.8, "↓")).verdict == "regression"


def test_a_file_with_two_printed_runs_is_refused_with_their_names(tmp_path: Path) -> None:
    a, b = table(tmp_path / "a.txt", 0.824, 0.816), table(tmp_path / "b.txt", 0.212, 0.208)
    both = tmp_path / "both.txt"
    both.write_text("hf" + a.read_text().removeprefix("vllm") + b.read_text())
    with pytest.raises(UsageError, match=r"holds 2 runs: hf \(.*vllm \("):
        compare(a, both)
    a.write_text(a.read_text() + "\n".join(b.read_text().splitlines()[1:]))
    with pytest.raises(EvidenceError, match=r"several scores of gsm8k .exact_match,flexible-extract."):
        compare(a, b)


def scored(data: Path, path: Path, values: list[object], scorer: str = "judge", metric: str = "mean") -> Path:
    """A log of inspect_ai of one scorer, with these values of its samples."""
    log = json.loads((data / "inspect_a.json").read_text())
    text, log["samples"] = without_events(log["samples"][0]), []
    mean = sum({"C": 1.0, "I": 0.0}.get(str(value), value) for value in values) / len(values)  # type: ignore[misc]
    for n, value in enumerate(values):
        sample = json.loads(text) | {"id": str(n), "target": str(n), "scores": {scorer: {"value": value, "answer": "x"}}}
        log["samples"].append(sample)
    log["results"] |= {
        "total_samples": len(values),
        "scores": [{"name": scorer, "scorer": scorer, "params": {}, "metrics": {metric: {"name": metric, "value": mean}}}],
    }
    log["eval"]["created"] = path.name
    path.write_text(json.dumps(log))
    return path


@pytest.mark.parametrize(
    ("scorer", "metric", "values", "falls", "rises"),
    [
        ("judge", "mean", (0.7, 0.3), "inconclusive", "inconclusive"),
        ("word_error_rate", "mean", (0.7, 0.3), "pass", "regression"),
        ("perplexity", "perplexity_per_token", (0.7, 0.3), "pass", "regression"),
        ("judge", "accuracy", (0.7, 0.3), "regression", "pass"), ("f1", "mean", (0.7, 0.3), "regression", "pass"),
        ("f1_error", "mean", (0.7, 0.3), "inconclusive", "inconclusive"), ("judge", "mean", ("C", "I"), "regression", "pass"),
    ],
)  # fmt: skip
def test_a_score_without_a_recorded_direction_is_never_better_or_worse(
    data: Path, tmp_path: Path, scorer: str, metric: str, values: tuple[object, object], falls: str, rises: str
) -> None:
    high, low = (
        scored(data, tmp_path / f"{side}.json", [values[(n % 5 == 0) != side] for n in range(200)], scorer, metric)
        for side in (0, 1)
    )
    for a, b, verdict in ((high, low, falls), (low, high, rises)):
        result = compare(a, b)
        assert result.verdict == verdict
        if falls == rises:
            assert [(why.id, why.values["either_way"]) for why in result.why] == [("scores-unpaired", True)]


def changed(path: Path, **parts: object) -> Path:
    """A file of JSON with other parts, each under the names that lead to it, joined by two underscores."""
    document = json.loads(path.read_text())
    for names, value in parts.items():
        part = document
        *outer, last = names.split("__")
        for name in outer:
            part = part.setdefault(name, {})
        part[last] = value
    path.write_text(json.dumps(document))
    return path


def lm_pair(folder: Path, **parts: object) -> tuple[Path, Path]:
    """Two equal runs of lm-eval with settings; of the second, these parts of its results file are others."""
    sides = [lm_run(folder / side, {"acc": share(800)}) for side in "ab"]
    config = {
        "dataset_path": "org/set", "dataset_kwargs": {"data_files": {"test": "/a/t.jsonl"}}, "metadata": {"base_url": "a"},
        "metric_list": [{"metric": "acc", "aggregation": "mean"}], "process_results": "<function score at 0x7f10>", "repeats": 1,
        "filter_list": [{"name": "none", "filter": [{"function": "regex", "regex_pattern": "Answer: ([A-D])"}]}],
        "generation_kwargs": {"temperature": 0.0},
    }  # fmt: skip
    for side in sides:
        changed(side / "results_2026.json", configs__t=config, chat_template_sha=None)
    changed(sides[1] / "results_2026.json", **parts)
    return sides[0], sides[1]


def inspect_pair(data: Path, folder: Path, **parts: object) -> tuple[Path, Path]:
    """Two equal logs of inspect_ai; of the second, these parts are others."""
    a, b = (inspect_log(data, folder / f"{side}.json") for side in "ab")
    return a, changed(b, **parts)


_REGEX = {"function": "regex", "regex_pattern": "([A-D])"}
_STATED = [{"name": "pattern", "scorer": "pattern", "metrics": {"accuracy": {"name": "accuracy", "value": 0.2}}}]


@pytest.mark.parametrize(
    ("part", "value", "missing"),
    [
        # Another definition of the task: the end of the setting's name.
        ("configs__t__filter_list", [{"name": "none", "filter": [_REGEX]}], "regex_pattern"),
        ("configs__t__metric_list", [{"metric": "acc", "aggregation": "mean", "ignore_case": True}], "metric_list.0.ignore_case"),
        ("configs__t__process_results", "def score(doc): return 1", "process_results"), ("configs__t__repeats", 5, "repeats"),
        ("configs__t__generation_kwargs", {}, "temperature"), ("configs__t__dataset_path", "org/other", "dataset_path"),
        ("configs__t__process_docs", "x", "process_docs"), ("chat_template_sha", "abc", "template"),
        ("config__model_args", "pretrained=m,max_model_len=512", "max_model_len"),
        ("eval__scorers", [{"name": "pattern", "options": {"pattern": "."}}], "scorers"),
        ("eval__task_args", {"cot": True}, "task_args.cot"), ("eval__dataset__name", "other", "dataset.name"),
        ("plan__config__temperature", None, "temperature"), ("eval__config__epochs", 3, "config.epochs"),
        # Places and names are none.
        ("configs__t__process_results", "<function score at 0x7fff>", ""), ("configs__t__metadata", {"base_url": "b"}, ""),
        ("configs__t__unsafe_code", False, ""), ("configs__t__task_alias", "T", ""), ("eval__created", "x", ""),
        ("configs__t__dataset_kwargs", {"data_files": {"test": "/elsewhere/t.jsonl"}}, ""),
        # What a file states against itself: a word of the check.
        ("config__use_cache", "/tmp/cache", "files-sound: from a cache"), ("status", "cancelled", "files-sound: status cancelled"),
        ("status", "error", "files-sound: status error"), ("invalidated", True, "files-sound: invalidated"),
        ("results__scores", _STATED, "scores-agree: 0.2"),
    ],
)  # fmt: skip
def test_what_defines_a_task_and_what_speaks_against_a_score_forbid_a_pass(
    data: Path, tmp_path: Path, part: str, value: object, missing: str
) -> None:
    of_lm_eval = part.startswith(("config", "chat"))
    result = compare(*(lm_pair(tmp_path, **{part: value}) if of_lm_eval else inspect_pair(data, tmp_path, **{part: value})))
    check_, _, says = missing.rpartition(": ")
    assert (result.verdict, unmet(result)) == (("inconclusive", [check_ or "same-settings"]) if missing else ("pass", []))
    if check_:
        assert says in str(check(result, check_).outcome.values)
    elif missing:
        differs = result.why[0].values["differs"][0].values
        assert (result.why[0].id, differs["a"] != differs["b"]) == ("not-same-question", True)
        assert says in (differs.get("setting") or differs["what"])


def test_settings_that_one_side_does_not_record_are_said(tmp_path: Path) -> None:
    a, b = lm_pair(tmp_path)
    (b / "results_2026.json").unlink()
    result = compare(a, b)
    assert (result.verdict, status(result, "same-settings")) == ("inconclusive", "missing")
    assert check(result, "same-settings").outcome == state("settings-not-recorded", sides=["B"])
    (a / "results_2026.json").unlink()
    assert status(compare(a, b), "same-settings") == "not checked", "of neither"


def test_a_later_run_without_samples_is_another_run_of_the_folder(tmp_path: Path) -> None:
    a, b = lm_pair(tmp_path)
    shutil.copy(b / "results_2026.json", b / "results_2027.json")
    with pytest.raises(UsageError, match="2 runs"):
        compare(a, b)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"scores": {"pattern": {"value": "C", "answer": "x", "history": [{"value": "I"}]}}}, "edited scores"),
        ({"events": [{"event": "model", "cache": "read"}]}, "from a cache"),
    ],
)  # fmt: skip
def test_edited_scores_and_answers_from_a_cache_forbid_a_pass(
    data: Path, tmp_path: Path, change: dict[str, object], found: str
) -> None:
    a, b = inspect_pair(data, tmp_path)
    with_samples(b, lambda sample: sample["id"] == "7" and sample.update(change))
    result = compare(a, b)
    assert (result.verdict, unmet(result)) == ("inconclusive", ["files-sound"])
    assert found in check(result, "files-sound").outcome.values["doubts"][0][2]


def simple(path: Path, heading: float | None = None, blank: int = 0) -> Path:
    """A report of simple-evals of 200 right answers, with this score in its heading."""
    message = "<h3>{}</h3><pre>{}</pre>".format
    examples = "<hr>".join(
        message("Prompt conversation", f"Question {n}?") + message("Sampled message", "" if n < blank else f"{path} {n}")
        + f"<h3>Results</h3><p>Correct Answer: {n}</p><p>Extracted Answer: {n}</p><p>Score: 1.0</p>"
        for n in range(200)
    )  # fmt: skip
    cells = "" if heading is None else f"<table><tr><td><b>Score</b></td><td>{heading}</td></tr></table>"
    path.write_text(f"<h1>Metrics</h1>{cells}<h1>Examples</h1>{examples}")
    return path


def test_the_heading_of_simple_evals_must_agree_and_nothing_is_taken_from_a_blank_message(tmp_path: Path) -> None:
    a, same = simple(tmp_path / "t_a.html", 1.0), simple(tmp_path / "t_b.html", 1.0)
    assert compare(a, same).verdict == "pass"
    other = compare(a, simple(tmp_path / "t_c.html", 0.2))
    assert (other.verdict, unmet(other)) == ("inconclusive", ["scores-agree"])
    blank = compare(a, simple(tmp_path / "t_d.html", 1.0, blank=20))
    assert (blank.verdict, [why.id for why in blank.why]) == ("inconclusive", ["answers-unparsed"])


def choices(folder: Path, likelihoods: list[list[float]]) -> Path:
    """Samples of lm-eval with four choices, of which the first is always right, and these log-likelihoods."""
    folder.mkdir()
    rows = [
        {
            "doc_hash": str(n), "prompt_hash": str(n), "target_hash": "0", "target": 0, "filter": "none", "metrics": ["acc"],
            "arguments": {str(at): {"arg_0": f"Q{n}", "arg_1": f" choice {n} {at}"} for at in range(4)},
            "resps": [[[each, False]] for each in four], "filtered_resps": [], "acc": float(four[0] == max(four)),
        }
        for n, four in enumerate(likelihoods)
    ]  # fmt: skip
    (folder / "samples_t_2026.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_task_whose_first_choice_is_always_right_shows_no_pass(tmp_path: Path) -> None:
    right, wrong = [-1.0, -2.0, -3.0, -4.0], [-3.0, -1.0, -2.0, -4.0]
    a = choices(tmp_path / "a", [right] * 180 + [wrong] * 120)
    same = compare(a, choices(tmp_path / "same", [[-0.9, *right[1:]]] * 180 + [wrong] * 120))
    assert (same.verdict, [(why.id, why.values["chance"]) for why in same.why]) == ("inconclusive", [("no-headroom", 1.0)])
    assert compare(a, choices(tmp_path / "worse", [right] * 100 + [wrong] * 200)).verdict == "regression"
    none = compare(a, choices(tmp_path / "none", [[0.0] * 4] * 300))
    assert (none.verdict, answers(none).flips[0].direction) == ("inconclusive", "gained")


def test_of_equal_likelihoods_no_choice_was_taken(tmp_path: Path) -> None:
    apart = [[float(-(at != n % 4)) for at in range(4)] for n in range(300)]
    a = choices(tmp_path / "a", apart)
    b = choices(tmp_path / "b", [[float("-inf")] * 4] * 9)
    taken, tied = (lm_eval.READER.results(SourceFile.of(path), "").sets[0].items for path in (a, b))
    assert {item.parsed for item in taken} == set("ABCD")
    assert {item.parsed for item in tied} == {None}


def wikitext(folder: Path, factor: float, noise: float = 0.0, documents: int = 62) -> Path:
    """A run of lm-eval on texts, whose log-likelihoods are multiplied by this factor."""
    rng = np.random.default_rng(len(folder.name))
    folder.mkdir()
    words = [50 + 37 * n % 400 for n in range(documents)]
    sums = [-3.0 * count * (1 + n % 5 / 50) * factor * (1 + noise * rng.standard_normal()) for n, count in enumerate(words)]
    rows = [
        {
            "doc_hash": str(n), "prompt_hash": "p", "target_hash": "t", "target": f"page {n}", "resps": [[total]],
            "filtered_resps": [total], "filter": "none", "metrics": ["word_perplexity"], "word_perplexity": [total, count],
        }
        for n, (total, count) in enumerate(zip(sums, words, strict=True))
    ]  # fmt: skip
    (folder / "samples_wikitext_2026.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "results": {"wikitext": {"word_perplexity,none": math.exp(-sum(sums) / sum(words)), "word_perplexity_stderr,none": "N/A"}},
        "configs": {"wikitext": {"task": "wikitext", "output_type": "loglikelihood_rolling"}}, "versions": {}, "n-shot": {},
        "higher_is_better": {"wikitext": {"word_perplexity": False}}, "config": {},
    }  # fmt: skip
    (folder / "results_2026.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    ("factor", "noise", "documents", "verdict", "outcome"),
    [
        (1.0001, 1e-4, 62, "pass", "within"), (1 + math.log(1.35) / 3.12, 0.01, 62, "regression", "worse"),
        (0.05, 0.0, 62, "inconclusive", "changed"), (1.0, 0.0, 5, "inconclusive", "undecided"),
        (1.004, 0.02, 20, "inconclusive", "undecided"),
    ],
)  # fmt: skip
def test_perplexities_are_compared_document_by_document(
    tmp_path: Path, factor: float, noise: float, documents: int, verdict: str, outcome: str
) -> None:
    a, b = wikitext(tmp_path / "a", 1.0, 0.0, documents), wikitext(tmp_path / "b", factor, noise, documents)
    result = compare(a, b)
    (task,) = answers(result).tasks
    assert (task.test, task.pairs, task.why[0].values["outcome"]) == ("bootstrap", documents, outcome)
    assert result.verdict == verdict
    if outcome == "worse":
        assert task.b / task.a == pytest.approx(1.35, abs=0.02)
        assert task.low < 0.35 < task.high
    if outcome == "within":
        changed(b / "results_2026.json", results__wikitext={"word_perplexity,none": 60.0})
        assert unmet(compare(a, b)) == ["scores-agree"]


def test_a_perplexity_beside_scores_must_pass_too(tmp_path: Path) -> None:
    for side, factor, right in (("a", 1.0, 800), ("b", 0.05, 800)):
        (tmp_path / side).mkdir()
        lm_run(tmp_path / side / "t", {"acc": share(right)})
        wikitext(tmp_path / side / "w", factor)
    result = compare(tmp_path / "a", tmp_path / "b")
    assert (answers(result).overall.pairs, answers(result).overall.verdict, result.verdict) == (1000, "pass", "inconclusive")
    assert result.why[0].values["task"] == "wikitext (word_perplexity,none)"


def test_another_score_that_changed_and_has_no_direction_forbids_a_pass(data: Path, tmp_path: Path) -> None:
    a, b = inspect_pair(data, tmp_path)
    for path, value in ((a, 0.05), (b, 0.9)):
        toxic = {"value": value, "answer": "x"}
        with_samples(path, lambda sample, toxic=toxic: sample["scores"].update(toxic=toxic))
    result = compare(a, b)
    assert (answers(result).overall.verdict, result.verdict) == ("pass", "inconclusive")
    assert check(result, "all-paired").outcome.values["gaps"][0][1:3] == ["no-direction", "synthetic (toxic)"]


def test_every_answer_to_a_repeated_document_counts(data: Path, tmp_path: Path) -> None:
    a, b = two(data, tmp_path, lambda rows: [*rows, *rows], both=True)
    _, worse = two(data, tmp_path / "c", lambda rows: [*rows, *(row | {"exact_match": 0.0} for row in rows)])
    assert answers(compare(a, b)).overall.again == 192
    result = compare(a, worse)
    assert (result.verdict, answers(result).overall.lost, answers(result).overall.test) == ("regression", 192, "betting")


def test_tasks_of_two_servers_in_one_folder_are_no_pass(tmp_path: Path) -> None:
    for side, models in (("a", ("ref", "ref")), ("b", ("new", "ref"))):
        (tmp_path / side).mkdir()
        for at, model in enumerate(models):
            folder = lm_run(tmp_path / side / str(at), {"acc": share(800)})
            changed(folder / "results_2026.json", model_name=model)
            for path in folder.iterdir():
                path.write_text(path.read_text().replace('"t"', f'"t{at}"'))
                path.rename(path.with_name(path.name.replace("_t_", f"_t{at}_").replace("2026", f"2026-0{at + 1}")))
    result = compare(tmp_path / "a", tmp_path / "b")
    assert (result.verdict, unmet(result)) == ("inconclusive", ["files-sound"])
    ((side, _, said),) = check(result, "files-sound").outcome.values["doubts"]
    assert (side, "t0 of" in said, "model new" in said) == ("B", True, True)


def test_answers_of_lm_eval_are_as_long_as_what_the_model_wrote(data: Path, tmp_path: Path) -> None:
    result = compare(*two(data, tmp_path, lambda rows: [row | {"resps": [["the " * 400]]} for row in rows]))
    assert (result.verdict, status(result, "answer-lengths")) == ("regression", "missing")
    lengths = answers(result).lengths
    assert lengths and (lengths.candidate, lengths.recounted) == (1600, 0.0)  # noqa: PT018


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("part", ["example", "question"])
def test_worked_examples_and_what_follows_them_are_of_the_prompt(data: Path, tmp_path: Path, part: str, marked: bool) -> None:
    def log(name: str, example: str = "A", hint: str = "") -> Path:
        def edit(sample: dict[str, Any]) -> None:
            shown = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": example}]
            asked, answer = sample["messages"]
            asked["content"] += hint
            answer = answer if marked else {"role": "assistant", "content": f"{name} {answer['content']}"}
            sample.update(input=[*shown, asked], messages=[*shown, asked, answer])

        return with_samples(inspect_log(data, tmp_path / f"{name}.json"), edit)

    a = log("a")
    result = compare(a, log("b", "another") if part == "example" else log("b", hint=" A hint."))
    assert (result.verdict, [gap.id for gap in answers(result).overall.unpaired]) == ("inconclusive", ["other-prompt"])
    assert compare(a, log("same")).verdict == "pass"


def test_ends_of_every_epoch_count_and_those_of_one_document_count_once(data: Path, tmp_path: Path) -> None:
    def epochs(name: str, end: Callable[[int, int], str]) -> Path:
        path = inspect_log(data, tmp_path / f"{name}.json")
        samples = json.loads(path.read_text())["samples"]
        changed(path, samples=[sample | {"epoch": epoch} for epoch in (1, 2, 3, 4) for sample in samples])
        return with_samples(path, lambda each: each["output"]["choices"][0].update(stop_reason=end(int(each["id"]), each["epoch"])))

    a = epochs("a", lambda number, _: "tool_calls" if number in (1, 2) else "stop")
    filtered = compare(a, epochs("b", lambda number, epoch: "content_filter" if (number, epoch) == (5, 3) else "stop"))
    assert status(filtered, "finish-reasons") == "failed"
    # Five documents of 256 that end otherwise four times each: 20 of 0 answers would be p = 2e-6.
    calls = compare(a, epochs("c", lambda number, _: "tool_calls" if number < 7 else "stop"))
    assert status(calls, "finish-reasons") == "ok"


def test_what_served_differently_is_said(tmp_path: Path) -> None:
    result = compare(*lm_pair(tmp_path, config__model_args="pretrained=m,quantization=fp8", model_name="m"))
    (note,) = result.notes
    assert (result.verdict, [each[0] for each in note.values["changed"]]) == ("pass", ["model", "pretrained", "quantization"])


@pytest.mark.parametrize(
    ("answer", "turn", "reason"), [("Which?", "Say A.", ["other-prompt"]), ("What?", "Say A.", []), ("Which?", "Go on.", [])]
)
def test_a_later_turn_that_follows_the_same_answers_is_of_the_prompt(
    data: Path, tmp_path: Path, answer: str, turn: str, reason: list[str]
) -> None:
    def log(side: str, said: str, asked: str) -> Path:
        tool = {"role": "tool", "content": f"result {side}"}
        between = [{"role": "assistant", "source": "generate", "content": said}, {"role": "user", "content": asked}, tool]
        path = inspect_log(data, tmp_path / f"{side}.json")
        return with_samples(path, lambda each: each["messages"].__setitem__(slice(-1, -1), between))

    result = compare(log("a", "Which?", "Go on."), log("b", answer, turn))
    assert [gap.id for gap in answers(result).overall.unpaired] == reason
