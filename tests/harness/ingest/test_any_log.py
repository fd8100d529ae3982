"""The texts have the forms of the programs that their names say; they were written for these tests."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from assay.harness.ingest import any_log
from assay.harness.ingest.any_log import _fault, _figures
from assay.harness.ingest.claim import verify
from assay.harness.ingest.recognise import UNKNOWN, ingest
from assay.harness.ingest.result import FileDocument
from assay.harness.ingest.source_file import SourceFile

DATA = Path(__file__).parents[2] / "data" / "any_log"
VLLM = (DATA / "vllm.txt").read_text()
LLAMA_CPP = (DATA / "llama_cpp.txt").read_text()
TENSORRT_LLM = (DATA / "tensorrt_llm.txt").read_text()
SCORES = (DATA / "scores.txt").read_text()


def written(folder: Path, text: str) -> Path:
    path = folder / "output.txt"
    path.write_text(text)
    return path


def document(folder: Path, text: str) -> FileDocument:
    result = ingest([written(folder, text)])
    assert result.verdict == "inconclusive"
    return result.documents[0]


def rows(found: FileDocument) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for table in found.tables for row in table.rows}


def test_a_log_of_vllm_gives_its_rates_and_why_it_ended(tmp_path: Path) -> None:
    found = document(tmp_path, VLLM)
    assert found.file.format == "text"
    assert rows(found)["Avg prompt throughput"] == ("0.0 tokens/s", "0.0 tokens/s", "512.3 tokens/s", "2", "3–4")
    (trace,) = [fact for fact in found.facts if fact.id == "traceback"]
    assert trace.text.startswith("torch.AcceleratorError: CUDA error: an illegal memory access")
    assert "core.py:691 in run_engine_core" in trace.text
    assert (trace.cites[0].first, trace.cites[0].last) == (6, 9)
    assert {one.id for one in found.findings} == {"cuda-error", "error", "traceback"}
    assert (found.file.read, found.file.unread) == (8, 2)


def test_a_log_of_llama_cpp_gives_its_rates_perplexity_and_crash(tmp_path: Path) -> None:
    found = document(tmp_path, LLAMA_CPP)
    assert rows(found)["prompt eval time, rate"][0] == "97.20 tokens per second"
    assert rows(found)["PPL"][0] == "5.9070"
    assert rows(found)["tg128"][0] == "131.39 t/s"
    assert {one.id: one.cites[0].first for one in found.findings} == {"out-of-memory": 14, "crash": 15}


def test_a_report_of_tensorrt_llm_gives_its_figures_and_errors(tmp_path: Path) -> None:
    found = document(tmp_path, TENSORRT_LLM)
    assert rows(found)["Request Throughput"][0] == "43.2089 req/sec"
    assert rows(found)["Average time-to-first-token"][0] == "55.4 ms"
    assert {one.id for one in found.findings} == {"crash", "error"}


def test_scores_are_read_from_prose_and_tables(tmp_path: Path) -> None:
    found = document(tmp_path, SCORES)
    assert rows(found)["mmlu acc"][0] == "0.2312"
    assert rows(found)["Average accuracy"][0] == "0.234"
    assert rows(found)["accuracy"][0] == "23.1%"
    below = next(one for one in found.findings if one.id == "score-below-guessing")
    assert (below.severity, below.where, below.cites[0].first) == ("warning", "mmlu acc", 4)


@pytest.mark.parametrize(
    ("text", "claim", "outcome"),
    [
        (SCORES, "mmlu >= 0.5", "refuted"),
        (SCORES, "accuracy < 24 %", "confirmed"),
        (SCORES, "throughput >= 1000 tok/s", "confirmed"),
        (SCORES, "TTFT < 0.01 s", "refuted"),
        (LLAMA_CPP, "throughput >= 90 tok/s", "refuted"),
        (LLAMA_CPP, "ppl < 6", "confirmed"),
        (VLLM, "throughput >= 90 tok/s", "undecided"),
        (VLLM, "lowest throughput >= 90 tok/s", "refuted"),
        (TENSORRT_LLM, "request throughput > 40 req/s", "confirmed"),
    ],
)
def test_what_a_text_states_decides_claims(tmp_path: Path, text: str, claim: str, outcome: str) -> None:
    assert verify([written(tmp_path, text)], [claim]).claims[0].outcome == outcome


@pytest.mark.parametrize(
    "text", ["one\ntwo\n", "It took 5 minutes on 2 cores.\n", "2026-11-23 10:11:12 started\n", "step 100 of 200\n", "\n", "x = 3\n"]
)
def test_text_that_says_nothing_stays_unknown(tmp_path: Path, text: str) -> None:
    assert document(tmp_path, text).file.format == UNKNOWN


def test_bytes_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(b"accuracy: 0.5\n" + bytes(100))
    assert ingest([path]).documents[0].file.format == UNKNOWN


def test_a_traceback_without_an_end_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path, 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\n')
    assert [fact.text for fact in any_log.READER.read(SourceFile.of(path)).facts] == ["a traceback that does not end (a.py:3 in f)"]


@pytest.mark.parametrize(
    ("line", "id"),
    [
        ("RuntimeError: CUDA error: device-side assert triggered", "cuda-error"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "out-of-memory"),
        ("NCCL error in: ProcessGroupNCCL.cpp:1234, unhandled system error", "nccl-error"),
        ("Segmentation fault (core dumped)", "crash"),
        ("WARNING: nan detected in logits", "not-a-number"),
        ("2026-11-23 10:11:12,123 - ERROR - no such model", "error"),
        ("0 errors, all fine", ""),
        ("CUDA graphs captured", ""),
        ("information about banana", ""),
    ],
)
def test_faults_are_told_apart(line: str, id: str) -> None:
    assert _fault(line) == id


@pytest.mark.parametrize(
    "line",
    ["1" * 200_000, "accuracy: " + " " * 200_000 + "1", "a: 1 tok/s, " * 20_000, "|" * 200_000, "nan " * 50_000, "assert " * 30_000,
     "x (" * 60_000, "score" * 40_000, "1," * 100_000, "[" * 200_000, "NCCL " * 40_000],
)  # fmt: skip
def test_long_lines_cost_no_more_than_their_length(line: str) -> None:
    began = time.process_time()
    list(_figures(line))
    _fault(line)
    assert time.process_time() - began < 0.5


def test_a_benchmark_of_vllm_is_read_from_one_line_or_several(tmp_path: Path) -> None:
    run = {
        "date": "20261120-101112", "endpoint_type": "openai", "model_id": "m", "tokenizer_id": "m", "num_prompts": 40,
        "request_rate": "inf", "duration": 2.0, "completed": 40, "request_throughput": 20.0, "output_throughput": 812.5,
        "input_lens": [9] * 40, "output_lens": [5] * 40, "ttfts": [0.05] * 40, "itls": [[0.01] * 4] * 40, "errors": [""] * 40,
        "generated_texts": ["x" * 3000] * 40, "mean_ttft_ms": 50.0, "median_ttft_ms": 50.0, "median_itl_ms": 10.0,
    }  # fmt: skip
    for text in (json.dumps(run), json.dumps(run, indent=2)):
        path = tmp_path / "openai-infqps.json"
        path.write_text(text)
        found = ingest([path]).documents[0]
        assert (found.file.format, found.file.read) == ("serving", 1)
        (table,) = found.tables
        row = dict(zip(table.columns, table.rows[0], strict=True))
        assert (row["output_throughput"], row["median_ttft_ms"]) == ("812.5", "50")
        assert found.facts[0].title.startswith("vllm bench serve")
        assert verify([path], ["TTFT < 0.06 s"]).claims[0].outcome == "confirmed"
