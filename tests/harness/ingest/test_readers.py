"""Every reader on real files, and on damaged ones."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.errors import UsageError
from assay.harness.ingest import inspect_ai, lm_eval, simple_evals
from assay.harness.ingest.recognise import READERS, ingest
from assay.harness.ingest.result import UNKNOWN
from assay.harness.ingest.result_set import ReadResults, StatedScore
from assay.harness.ingest.source_file import SourceFile


def load(path: Path) -> ReadResults:
    source = SourceFile.of(path)
    return next(one for one in READERS if one.recognises(source)).results(source, "")


def test_lm_eval_gives_the_documents_with_their_hashes_and_the_settings_of_the_run(data: Path) -> None:
    (found,) = lm_eval.READER.results(SourceFile.of(data / "lm_eval_a"), "").sets
    assert (found.tool, found.version, found.task, found.metric) == ("lm-eval", "0.4.13", "assay_synthetic", "exact_match,letter")
    assert (found.asked.shots, found.model, found.asked.task["version"]) == (0, "tiny", "1")
    assert found.asked.generation == {"max_gen_toks": "32", "temperature": "0"}
    first = found.items[0]
    assert first.key.startswith("74c0f1c7")
    assert first.prompt_hash.startswith("67124b21")
    assert (first.target, first.parsed, first.score) == ("A", "A", 1.0)
    assert first.answer == " Rasral modnod A .\nAnswer: A"
    assert found.accuracy == 1.0


def test_lm_eval_is_read_from_either_file_alone(data: Path, tmp_path: Path) -> None:
    folder = data / "lm_eval_a" / "tiny"
    whole = lm_eval.READER.results(SourceFile.of(data / "lm_eval_a"), "").sets
    for path in (next(folder.glob("samples_*")), next(folder.glob("results_*"))):
        assert lm_eval.READER.results(SourceFile.of(path), "").sets == whole
    alone = Path(shutil.copy(next(folder.glob("samples_*")), tmp_path))
    (found,) = lm_eval.READER.results(SourceFile.of(alone), "").sets
    assert found.items == whole[0].items
    assert (found.asked.shots, found.version) == (None, "")
    assert found.asked.generation["max_gen_toks"] == "32", "of what was sent"
    alone = Path(shutil.copy(next(folder.glob("results_*")), tmp_path / "alone_2026.json"))
    reading = lm_eval.READER.results(SourceFile.of(alone), "")
    assert [one.items for one in reading.sets] == [()]
    assert reading.sets[0].score == StatedScore(value=1.0, error=0.0, questions=128)
    assert "--log_samples" in reading.notes[0]


def test_lines_that_are_no_samples_are_counted_and_quoted(data: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(next((data / "lm_eval_a").rglob("samples_*")), tmp_path))
    whole = path.read_text()
    path.write_text(whole + '{"doc_id": 24}\n{"doc_id": 25, "doc_ha')
    reading = lm_eval.READER.results(SourceFile.of(path), "")
    assert (reading.read, reading.unread) == (24, 2)
    assert [one.first for one in reading.excerpts] == [25, 26]


def test_every_filter_is_a_score_of_its_own(data: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(next((data / "lm_eval_a").rglob("samples_*")), tmp_path))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    loose = [row | {"filter": "loose", "exact_match": 0.0} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows + loose))
    reading = lm_eval.READER.results(SourceFile.of(path), "")
    assert [(one.metric, len(one.items), one.accuracy) for one in reading.sets] == [
        ("exact_match,letter", 24, 1.0), ("exact_match,loose", 24, 0.0),
    ]  # fmt: skip
    assert lm_eval.READER.results(SourceFile.of(path), "exact_match,loose").sets[0].accuracy == 0.0
    with pytest.raises(UsageError, match="no score 'acc'"):
        lm_eval.READER.results(SourceFile.of(path), "acc")


def test_two_runs_in_one_folder_are_two_results(data: Path, tmp_path: Path) -> None:
    for name in ("lm_eval_a", "lm_eval_b"):
        shutil.copytree(data / name, tmp_path / "lm" / name)
    first, second = dict.fromkeys(result_set.run for result_set in load(tmp_path / "lm").sets)
    assert first != second
    one = load(data / "lm_eval_a")
    assert [result_set.run for result_set in one.sets] == [""] * len(one.sets)


@pytest.mark.parametrize("name", ["inspect_a.eval", "inspect_a.json"])
def test_inspect_ai_gives_the_same_from_both_forms_of_a_log(data: Path, name: str) -> None:
    (found,) = load(data / name).sets
    assert (found.tool, found.version, found.task, found.metric) == ("inspect_ai", "0.3.285", "synthetic", "pattern")
    assert found.asked.generation == {"temperature": "0", "max_tokens": "32"}
    other = inspect_ai.READER.results(SourceFile.of(data / "inspect_a.json"), "").sets[0]
    without = {"settings": {}, "items": ()}
    assert found.model_copy(update=without) == other.model_copy(update=without)
    keys = sorted((item.key, item.prompt_hash, item.target, item.parsed, item.score) for item in found.items)
    assert keys == sorted((item.key, item.prompt_hash, item.target, item.parsed, item.score) for item in other.items)
    assert len(keys) == 8


def test_a_log_of_a_run_that_was_killed_is_read_and_said_to_be_one(data: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed.eval"
    members = json.loads((data / "inspect_a.json").read_text())
    with zipfile.ZipFile(killed, "w", zipfile.ZIP_DEFLATED) as file:  # as versions before 0.3.2xx compress
        file.writestr("_journal/start.json", json.dumps({"version": 2, "eval": members["eval"], "plan": members["plan"]}))
        for sample in members["samples"][:3]:
            file.writestr(f"samples/{sample['id']}_epoch_1.json", json.dumps(sample))
        file.writestr("samples/x_epoch_1.json", "{")
    reading = inspect_ai.READER.results(SourceFile.of(killed), "")
    assert (reading.read, reading.unread) == (3, 1)
    (ended,) = inspect_ai.READER.read(SourceFile.of(killed)).findings[:1]
    assert (ended.id, ended.severity) == ("evaluation-ended", "warning")
    assert "cut short" in ended.diagnosis


def test_simple_evals_is_the_same_from_the_report_and_from_the_scores_beside_it(data: Path, tmp_path: Path) -> None:
    folder = data / "simple_evals_a"
    (found,) = simple_evals.READER.results(SourceFile.of(folder / "gsm8k_tiny.html"), "").sets
    assert (found.task, found.model, len(found.items)) == ("gsm8k", "tiny", 6)
    assert found.items == simple_evals.READER.results(SourceFile.of(folder / "gsm8k_tiny.json"), "").sets[0].items
    item = found.items[0]
    assert item.target.isdigit()
    assert (item.score, item.parsed) == (0.0, None)  # SGLang writes -9999999 where it found no number
    alone = Path(shutil.copy(folder / "gsm8k_tiny.json", tmp_path))
    reading = simple_evals.READER.results(SourceFile.of(alone), "")
    assert not reading.sets[0].items
    assert "only the score is known" in reading.notes[0]


def stated_alone(path: Path, results: dict[str, object], **more: object) -> Path:
    """A results file of lm-eval without samples."""
    head = {"configs": {}, "versions": {}, "n-shot": {}, "lm_eval_version": "0.4.13"}
    path.write_text(json.dumps({"results": results} | head | more, indent=2))
    return path


def test_scores_without_samples_are_shown_and_held_against_guessing(tmp_path: Path) -> None:
    scores = {
        "mmlu": {"alias": "mmlu", "acc,none": 0.2312, "acc_stderr,none": 0.0036},
        "mmlu_anatomy": {"acc,none": 0.2, "acc_norm,none": 0.21},
        "gsm8k": {"exact_match,strict-match": 0.01},
    }
    counts = {"mmlu_anatomy": {"effective": 135}, "mmlu_rest": {"effective": 13907}, "gsm8k": {"effective": 1319}}
    inside = {"mmlu": ["mmlu_anatomy", "mmlu_rest"], "gsm8k": []}
    path = stated_alone(tmp_path / "results_x.json", scores, group_subtasks=inside, **{"n-samples": counts})
    document = lm_eval.READER.read(SourceFile.of(path))
    shown = {row[:2]: row[2:] for table in document.tables for row in table.rows}
    assert shown["mmlu", "acc,none"] == ("0.2312", "14,042")
    assert shown["gsm8k", "exact_match,strict-match"] == ("0.0100", "1,319")
    assert document.file.read == 4
    (found,) = document.findings
    assert (found.id, found.severity, found.where) == ("score-below-guessing", "serious", "mmlu")
    assert path.read_text().splitlines()[found.cites[0].first - 1].strip() == '"acc,none": 0.2312,'


def test_the_score_of_fewer_answers_than_were_asked_for_lies_between_two(data: Path, tmp_path: Path) -> None:
    log = json.loads((data / "inspect_a.json").read_text())
    for sample in log["samples"]:
        sample["scores"]["pattern"]["value"] = "C"
    for sample in log["samples"][:2]:
        sample["error"] = {"message": "timeout"}
    log["samples"][2]["scores"]["pattern"] |= {"value": "I", "answer": " "}
    log["results"]["total_samples"] = 10
    (tmp_path / "x.json").write_text(json.dumps(log))
    document = inspect_ai.READER.read(SourceFile.of(tmp_path / "x.json"))
    assert document.tables[0].rows[0][2:4] == ("6", "0.8333")
    (found,) = document.findings
    assert (found.id, found.severity) == ("score-incomplete", "warning")
    said = "0.8333 of 6; 2 of 10 failed, 2 of 10 skipped, 1 of 10 unparsed: between 0.5000 and 1.0000 of 10."
    assert found.diagnosis == said


def test_scores_of_single_subjects_are_no_finding_of_their_own(tmp_path: Path) -> None:
    scores = {"mmlu": {"acc,none": 0.5}, "mmlu_law": {"acc,none": 0.0}}
    more = {"group_subtasks": {"mmlu": ["mmlu_law"]}, "n-samples": {"mmlu_law": {"effective": 99}}}
    path = stated_alone(tmp_path / "results_x.json", scores, **more)
    assert not lm_eval.READER.read(SourceFile.of(path)).findings


def test_a_report_of_simple_evals_that_lost_a_part_or_its_score_says_so(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "simple_evals_a", tmp_path / "s")
    scores, report = tmp_path / "s" / "gsm8k_tiny.json", tmp_path / "s" / "gsm8k_tiny.html"
    scores.write_text(scores.read_text().replace('"score": 0.0', '"score": 0.5'))
    assert "0.5" in simple_evals.READER.results(SourceFile.of(scores), "").notes[0]
    whole = report.read_text()
    report.write_text(whole[: whole.rindex("<h3>Results</h3>")])
    reading = simple_evals.READER.results(SourceFile.of(report), "")
    assert (reading.read, reading.unread) == (5, 1)


@pytest.mark.parametrize("name", ["inspect_a.eval", "inspect_a.json"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.95])
def test_a_file_that_was_cut_off_never_crashes(data: Path, tmp_path: Path, name: str, share: float) -> None:
    whole, cut = (data / name).read_bytes(), tmp_path / name
    cut.write_bytes(whole[: int(len(whole) * share)])
    document = ingest([cut]).documents[0]
    assert document.file.format == UNKNOWN or document.file.unread or document.file.notes


def test_the_prompt_of_a_log_does_not_hold_the_answer(data: Path) -> None:
    a, b = (load(data / f"inspect_{side}.eval").sets[0].items for side in "ab")
    assert {item.key: item.prompt_hash for item in a} == {item.key: item.prompt_hash for item in b}
    assert [item.answer for item in a] != [item.answer for item in b]


@pytest.mark.parametrize(("metric", "parsed", "answer"), [("acc", "A", "A: 3"), ("acc_norm", "B", "B: four")])
def test_a_choice_is_the_answer_to_a_multiple_choice_question(tmp_path: Path, metric: str, parsed: str, answer: str) -> None:
    requests = {f"gen_args_{n}": {"arg_0": "2 + 2?", "arg_1": text} for n, text in enumerate((" 3", " four"))}
    row = {
        "doc_hash": "d", "prompt_hash": "p", "target_hash": "t", "doc": {"question": "2 + 2?"}, "arguments": requests,
        "resps": [[[-1.0, False]], [[-1.5, False]]], "filtered_resps": [], "filter": "none", "target": 1,
        "metrics": ["acc", "acc_norm"], "acc": 0.0, "acc_norm": 1.0,
    }  # fmt: skip
    (tmp_path / "samples_sums_2026.jsonl").write_text(json.dumps(row) + "\n")
    (item,) = lm_eval.READER.results(SourceFile.of(tmp_path / "samples_sums_2026.jsonl"), metric).sets[0].items
    assert (item.parsed, item.answer, item.target) == (parsed, f"{answer} (A -1.00, B -1.50)", "B: four")
    assert item.question == "2 + 2?"


def test_samples_without_an_output_are_refused_and_a_scorer_must_be_there(data: Path, tmp_path: Path) -> None:
    log = json.loads((data / "inspect_a.json").read_text())
    del log["samples"][1]["target"]
    (tmp_path / "x.json").write_text(json.dumps(log))
    reading = inspect_ai.READER.results(SourceFile.of(tmp_path / "x.json"), "")
    assert (reading.read, reading.unread) == (len(log["samples"]) - 1, 1)
    with pytest.raises(UsageError, match="no scorer 'patern'"):
        inspect_ai.READER.results(SourceFile.of(tmp_path / "x.json"), "patern")


def test_a_run_is_headed_by_its_own_verdict(examples: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for report, severity in ((examples.regression(), ["serious"]), (examples.passing(), [])):
        path.write_text(report.model_dump_json())
        result = ingest([path])
        assert [one.severity for one in result.documents[0].findings if one.id == "run-verdict"] == severity
        assert result.verdict == ("regression" if severity else "inconclusive")
