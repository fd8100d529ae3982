from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest

from assay.harness.ingest.guessing import TaskScore, below_guessing
from assay.harness.ingest.recognise import ingest
from assay.harness.ingest.result import FileDocument

RUN = "{} (pretrained=org/model), gen_kwargs: (None), limit: 250.0, num_fewshot: 5, batch_size: auto\n"
HEAD = """|Tasks|Version|     Filter     |n-shot|  Metric   |   |Value|   |Stderr|
|-----|------:|----------------|-----:|-----------|---|----:|---|-----:|
"""
ROWS = """|gsm8k|      3|flexible-extract|     5|exact_match|↑  |{}|±  |0.0259|
|     |       |strict-match    |     5|exact_match|↑  |{}|±  |   N/A|
"""


def read(tmp_path: Path, text: str) -> FileDocument:
    (tmp_path / "out.txt").write_text(text)
    return ingest([tmp_path / "out.txt"]).documents[0]


def test_each_run_of_a_file_is_a_table_of_its_own_and_no_two_rows_are_merged(tmp_path: Path) -> None:
    text = (
        RUN.format("hf") + HEAD + ROWS.format("0.212", "0.208") + "\n" + RUN.format("vllm") + HEAD + ROWS.format("0.824", "0.816")
    )
    document = read(tmp_path, text)
    assert (document.file.format, document.file.read, document.file.unread) == ("lm-eval-table", 11, 0)
    one, two = (table for table in document.tables if table.id == "scores")
    assert [row[0:3] + row[5:] for row in one.rows] == [
        ("gsm8k", "3", "flexible-extract", "0.212", "0.0259"),
        ("gsm8k", "3", "strict-match", "0.208", "N/A"),
    ]
    assert [row[5] for row in two.rows] == ["0.824", "0.816"]
    assert one.title.startswith("hf (")
    assert two.title.startswith("vllm (")


def test_a_warning_of_the_engine_beside_a_table_is_found(tmp_path: Path) -> None:
    log = (
        "INFO [cache.py:214] Using fp8 data type to store kv cache. It may cause accuracy drop without a proper scaling factor.\n"
        "WARNING [kv_cache.py:143] Using uncalibrated q_scale 1.0 with fp8 attention. This may cause accuracy issues.\n"
        "INFO [x.py:1] Higher accuracy is better.\n"
    )
    (found,) = read(tmp_path, log + RUN.format("vllm") + HEAD + ROWS.format("0.6", "0.6")).findings
    assert (found.id, [cite.first for cite in found.cites]) == ("accuracy-warned", [2, 1])
    assert "uncalibrated q_scale" in found.diagnosis, "the worst comes first"


@pytest.mark.parametrize(("task", "found"), [("mmlu", ["score-below-guessing"]), (" - law", []), ("gsm8k", [])])
def test_a_score_below_guessing_is_found_but_not_of_a_task_in_a_group(tmp_path: Path, task: str, found: list[str]) -> None:
    row = f"|{task}|2|none|0|acc|↑|0.2312|±|0.0036|\n"
    assert [one.id for one in read(tmp_path, HEAD + row).findings] == found


def test_the_output_of_sglangs_gsm8k_names_unparsed_answers_beside_the_accuracy(tmp_path: Path) -> None:
    document = read(tmp_path, "Accuracy: 0.015\nInvalid: 0.720\nLatency: 115.612 s\nOutput throughput: 886.120 token/s\n")
    assert document.file.unread == 0
    (metrics,) = [table for table in document.tables if table.id == "metrics"]
    assert [row[:2] for row in metrics.rows] == [
        ("Accuracy", "0.015"), ("Invalid", "0.72"), ("Latency", "115.612"), ("Output throughput", "886.12"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("task", "share"),
    [
        ("mmlu", 0.25), ("MMLU_anatomy", 0.25), ("mmlu_pro_law", 0.1), ("mmlu_prox_en", 0.1), ("mmlu_prox_lite_de", 0.1),
        ("mmlux", 0.0), ("gsm8k", 0.0),
    ],
)  # fmt: skip
def test_guessing_is_known_by_the_longest_name_or_by_the_choices(task: str, share: float) -> None:
    assert TaskScore(task, "", 0.0).guess == share
    assert TaskScore(task, "", 0.0, choices=5).guess == 0.2


@pytest.mark.parametrize(
    ("task", "score", "severity"), [("mmlu", 0.125, "serious"), ("mmlu", 0.24, "info"), ("mmlu", 0.26, ""), ("gsm8k", 0.0, "")]
)
def test_a_score_below_guessing_has_its_exact_p_value(task: str, score: float, severity: str) -> None:
    made = below_guessing([TaskScore(task, "", score, 64)])
    assert [each.severity for each in made] == ([severity] if severity else [])
    for each in made:
        exact = binomtest(round(64 * score), 64, 0.25, alternative="less").pvalue
        assert f"p = {exact:.2g}" in each.evidence[0]


def test_scores_of_a_file_share_the_level_and_the_best_reading_of_a_task_counts() -> None:
    low = TaskScore("mmlu_law", "acc,none", 0.15, 100)
    others = [TaskScore(f"mmlu_{n}", "acc,none", 0.25, 100) for n in range(19)]
    assert [[each.severity for each in below_guessing(scores)] for scores in ([low], [low, *others])] == [["serious"], ["info"]]
    strict, loose = (TaskScore("gpqa", "exact_match,none", score, 198) for score in (0.04, 0.36))
    assert below_guessing([strict, loose]) == []
    (alone,) = below_guessing([strict])
    assert (alone.severity, "an unexpected form" in alone.diagnosis) == ("warning", True)
    of_another = below_guessing([strict._replace(run="b"), loose._replace(run="a")])
    assert [each.severity for each in of_another] == ["warning"], "of another run"


def test_files_of_a_model_that_guesses_are_seldom_called_a_regression() -> None:
    random, files = np.random.default_rng(0), 400
    shared = single = 0
    for _ in range(files):
        scores = [TaskScore(f"mmlu_{n}", "", float(random.binomial(100, 0.25)) / 100, 100) for n in range(20)]
        shared += any(each.severity == "serious" for each in below_guessing(scores))
        single += any(each.severity == "serious" for score in scores for each in below_guessing([score]))
    assert shared <= 0.05 * files
    assert single > 0.3 * files, "each with the level for itself"
