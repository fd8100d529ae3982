"""``sglang.benchmark.serving`` (``sglang.bench_serving``) and ``vllm bench serve``: a JSON object for each run of the benchmark.

Read in SGLang 0.5.23, ``benchmark/serving.py``: the summary, in ms, is always written; the lists of requests (``ttfts``, ``itls``
and lengths, in seconds and tokens) with ``--output-details``. The time of a request is its time to the first token plus the times
between tokens. A request that failed has an error text and zeros. vLLM's benchmark (``benchmarks/serve.py``, 0.11) descends from
the same script: ``--save-result`` writes one object with the same names, the lists with ``--save-detailed``, before the summary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from assay.harness.ingest.results.result_set import (
    ReadResults,
    ResultSet,
    json_object,
    json_rows,
    results_reader,
    texts,
)
from assay.harness.ingest.source_file import SourceFile
from assay.harness.reading import whole_file

_KEYS = ("request_throughput", "mean_ttft_ms", "median_itl_ms")
_LISTS = ("ttfts", "itls", "input_lens", "output_lens")
_SETTINGS = ("backend", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len", "random_input_len",
             "random_output_len", "random_range_ratio", "num_prompts", "seed", "tag", "model_id", "endpoint_type",
             "burstiness")  # fmt: skip
_VLLM = ("model_id", "tokenizer_id", "num_prompts", "request_throughput")
_SHOWN = ("completed", "request_throughput", "output_throughput", "median_ttft_ms", "median_tpot_ms", "median_itl_ms",
          "median_e2e_latency_ms", "p99_ttft_ms", "p99_e2e_latency_ms")  # fmt: skip


def _recognises(source: SourceFile) -> bool:
    """Recognise a JSON object with the benchmark's throughput and latencies, or with vLLM's names of model and tokenizer."""
    head = source.head_text.lstrip()
    first = head.partition("\n")[0]
    by_line = all(f'"{key}"' in first for key in _KEYS)
    return head.startswith("{") and (by_line or all(f'"{key}"' in head for key in _VLLM))


def _results(source: SourceFile, metric: str) -> ReadResults:
    """Make a set for each run of the file, in its order."""
    reading = ReadResults(unit="run")
    for number, row in _rows(source, reading):
        reading.sets.append(_set(source, row, number))
    if any(not result_set.requests for result_set in reading.sets):
        reading.notes.append("no times of single requests: run the benchmark with --output-details")
    return reading


def _rows(source: SourceFile, reading: ReadResults) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """Read the runs of a file: one a line, or one object over several lines."""
    if source.head_text.strip().partition("\n")[0].rstrip() != "{":
        return json_rows(source, _KEYS, reading)
    row = json_object(whole_file(source.path), str(source.path))
    if not all(key in row for key in _KEYS):
        reading.refuse(1, f"without {', '.join(key for key in _KEYS if key not in row)}")
        return ()
    reading.read += 1
    return ((1, row),)


def _set(source: SourceFile, row: Mapping[str, Any], line: int) -> ResultSet:
    listed = all(isinstance(row.get(key), list) for key in _LISTS)
    errors = row.get("errors") or []
    info = row.get("server_info") or {}
    return ResultSet(
        source=f"{source.path}:{line}",
        tool="vllm bench serve" if "tokenizer_id" in row else "sglang.benchmark.serving",
        version=str(info.get("version", "")) if isinstance(info, dict) else "",
        kind="latencies",
        task=str(row.get("dataset_name", "serving")),
        settings=texts(row, _SETTINGS),
        figures={key: _text(row[key]) for key in _SHOWN if row.get(key) is not None},
        latencies=_latencies(row) if listed else {},
        requests=tuple(zip(row["input_lens"], row["output_lens"], strict=False)) if listed else (),
        failed=sum(bool(error) for error in errors),
    )


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _latencies(row: Mapping[str, Any]) -> dict[str, tuple[float | None, ...]]:
    """Compute the times of each request: to the first token, of an output token, and of the whole, in seconds."""
    errors = row.get("errors") or [""] * len(row["ttfts"])
    first: list[float | None] = []
    between: list[float | None] = []
    total: list[float | None] = []
    for ttft, itl, tokens, error in zip(row["ttfts"], row["itls"], row["output_lens"], errors, strict=False):
        fine = not error and ttft > 0
        first.append(float(ttft) if fine else None)
        total.append(float(ttft + sum(itl)) if fine else None)
        between.append(sum(itl) / (tokens - 1) if fine and tokens > 1 and itl else None)
    return {"ttft": tuple(first), "tpot": tuple(between), "e2e": tuple(total)}


READER = results_reader("serving", "Results of a serving benchmark", _recognises, _results)
