"""Logs of engines, tests and evaluations that ended badly: the worst event heads the answer. Written as vLLM 0.6 to 0.27 logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.harness.ingest.recognise import compare, ingest
from assay.harness.ingest.result import IngestResult
from assay.harness.ingest.tensor_diff import TensorRule
from assay.reports.wording.comparison import ingest_headline

START = (
    "INFO 08-31 10:12:01 [api_server.py:1234] vLLM API server version 0.27.1\n"
    "(APIServer pid=1) INFO 08-31 10:12:01 [cli_args.py:310] non-default args: {'model': '/models/m', 'max_model_len': 32768}\n"
    "(EngineCore pid=7) INFO 08-31 10:12:18 [core.py:76] Initializing a V1 LLM engine (v0.27.1) with config: model='/models/m'\n"
)
CORE = "(EngineCore pid=7) ERROR 08-31 10:13:01 [core.py:842]"
API = "(APIServer pid=1) ERROR 08-31 10:13:02 [async_llm.py:480]"


def raised(prefix: str, exception: str, first: str = "") -> str:
    """A traceback as a logger writes it, with its prefix before each line."""
    lines = [
        *([first] if first else []), "Traceback (most recent call last):", '  File "/x/vllm/v1/engine/core.py", line 833, in run',
        "    engine_core.run_busy_loop()", "    ^^^^^^^^^^^^^^^^^^^^^^^^^^^", exception,
    ]  # fmt: skip
    return "".join(f"{prefix} {line}\n" for line in lines)


DEAD = raised(
    API,
    "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "AsyncLLM output_handler failed.",
)
FATAL = "EngineCore encountered a fatal error."
INITIALIZED = (
    "(APIServer pid=1) Traceback (most recent call last):\n"
    '(APIServer pid=1)   File "/x/vllm/v1/engine/utils.py", line 960, in wait_for_engine_startup\n'
    "(APIServer pid=1)     raise RuntimeError(\n"
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
)
MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.47 GiB. GPU 0 has a total capacity of 79.11 GiB"
ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
OLD = "ERROR 08-15 03:15:55 async_llm_engine.py:56]"


def result_of(tmp_path: Path, text: str, name: str = "server.log") -> IngestResult:
    (tmp_path / name).write_text(text)
    return ingest([tmp_path / name])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (raised(CORE, MEMORY, "EngineCore failed to start.") + INITIALIZED, MEMORY),
        (DEAD + raised(CORE, ILLEGAL, FATAL), ILLEGAL),
        (raised(CORE, "AssertionError", FATAL) + DEAD, "AssertionError"),
        (raised(CORE, "ValueError: No available memory for the cache blocks.", "EngineCore failed to start."), "No available"),
        (
            "(EngineCore pid=7) ERROR 08-31 10:13:01 [multiproc_executor.py:283] Worker proc VllmWorker-0 died unexpectedly, "
            "shutting down executor.\n" + raised(CORE, "RuntimeError: cancelled", FATAL) + DEAD,
            "Worker proc VllmWorker-0 died unexpectedly",
        ),
        ("ERROR 01-16 17:16:49 [core_client.py:605] Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.\n",
         "Engine core proc EngineCore_DP0 died"),
        (raised(OLD, "RuntimeError: CUDA error: device-side assert triggered", "Engine background task failed"), "device-side"),
        (raised("(VllmWorker rank=1 pid=9) ERROR 05-10 16:00:15 [x.py:470]", MEMORY, "WorkerProc hit an exception."), MEMORY),
        (INITIALIZED, "Engine core initialization failed"),
        ("(APIServer pid=1) ERROR 08-31 10:13:02 [serving.py:9] Error in preprocessing prompt inputs\n", "Error in preprocessing"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", ["", "vllm-1  | ", "Aug 17 18:42:18 host vllm[8052]: "])
def test_what_ended_a_vllm_server_is_the_headline(tmp_path: Path, text: str, says: str, before: str) -> None:
    lines = (START + text).splitlines()
    result = result_of(tmp_path, "".join(f"{before}{line}\n" for line in lines))
    (document,) = result.documents
    assert document.file.format == "vllm-log"
    assert says in ingest_headline(result).partition("A file cannot")[0]
    cited = [lines[cite.first - 1] for cite in document.findings[0].cites]
    assert cited, "the lines are quoted"
    assert document.file.unread == 0


def test_a_server_that_served_has_no_finding_and_its_own_warnings_are_read(tmp_path: Path) -> None:
    quiet = START + '(APIServer pid=1) INFO:     127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    result = result_of(tmp_path, quiet)
    assert (result.documents[0].findings, result.documents[0].file.unread) == ((), 0)
    scale = "(EngineCore pid=7) WARNING 08-31 10:12:58 [kv_cache.py:104] Using KV cache scaling factor 1.0 for fp8_e4m3.\n"
    risk = "(EngineCore pid=7) WARNING 08-31 10:12:58 [kv_cache.py:143] An uncalibrated q_scale may cause accuracy issues.\n"
    table = (
        "vllm (pretrained=/models/m), gen_kwargs: (None), limit: None, num_fewshot: 5, batch_size: auto\n"
        "|Tasks|Version|     Filter     |n-shot|  Metric   |   |Value |   |Stderr|\n"
        "|-----|------:|----------------|-----:|-----------|---|-----:|---|-----:|\n"
        "|gsm8k|      3|flexible-extract|     5|exact_match|↑  |{}|±  |0.0134|\n"
    )
    (warned,) = result_of(tmp_path, quiet + scale + risk + table.format(0.6131)).documents
    assert [(found.id, [cite.first for cite in found.cites]) for found in warned.findings] == [("accuracy-warned", [5, 6])]
    assert [table.rows[0][0] for table in warned.tables if table.id == "scores"] == ["gsm8k"]
    assert warned.file.unread == 0
    (tmp_path / "other.log").write_text(quiet + table.format(0.2))
    made = compare(tmp_path / "server.log", tmp_path / "other.log", 0.02, TensorRule())
    assert made.verdict == "regression", "what was printed into a log is compared"


SCHEDULER = (
    "[2025-04-23 21:31:41 TP2] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/x/sglang/srt/managers/scheduler.py", line 2015, in run_scheduler_process\n'
    "    scheduler.event_loop_normal()\n"
    "RuntimeError: CUDA error: an illegal memory access was encountered\n\n"
    "[2025-04-23 21:31:41] Received sigquit from a child process. It usually means the child failed.\n"
)
SHORT = (
    "F.                                                                       [100%]\n"
    "=================================== FAILURES ===================================\n"
    "__________________________________ test_mmlu ___________________________________\n"
    "E       assert 0.125 >= 0.6\n\n"
    "test_eval.py:3: AssertionError\n"
    "=========================== short test summary info ============================\n"
    "FAILED test_eval.py::test_mmlu - assert 0.125 >= 0.6\n"
    "1 failed, 1 passed in 0.52s\n"
)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("server.log", SCHEDULER, "illegal memory access"), ("ci.log", SHORT, "assert 0.125 >= 0.6"),
        ("ci.log", "Accuracy: 0.015\nInvalid: .720\n", "72 % of the answers are invalid"),
    ],
)  # fmt: skip
def test_what_failed_is_the_headline(tmp_path: Path, name: str, text: str, says: str) -> None:
    result = result_of(tmp_path, text, name)
    assert says in ingest_headline(result)
    assert result.documents[0].findings[0].severity in ("warning", "serious")
