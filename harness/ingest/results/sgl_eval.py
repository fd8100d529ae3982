"""sgl-eval: its output folder, with ``metrics.json`` and one ``output-rs<repeat>.jsonl`` for each repeat.

Read in sgl-eval 0.1.3: ``metrics.py`` (the summary), ``pipeline/report.py`` (its provenance), ``predictions.py`` (a line: id,
expected_answer, generation, predicted_answer, symbolic_correct or another score, num_generated_tokens, finish_reason, times in
seconds since the epoch), ``types.py`` (GenConfig). The prompt as sent is not recorded: the problem and the name or text of the
prompt template stand in for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.evals.questions import prompt_hash
from assay.harness.errors import EvidenceError
from assay.harness.ingest.results.result_set import (
    ReadResults,
    ResultItem,
    ResultSet,
    json_rows,
    read_object,
    results_reader,
    texts,
)
from assay.harness.ingest.source_file import SourceFile

_SCORES = ("symbolic_correct", "is_correct", "score")
_METRIC_KEYS = ("name", "num_examples", "n_repeats", "aggregate")
_SAMPLE_KEYS = ("id", "expected_answer", "generation", "predicted_answer")


def _recognises(source: SourceFile) -> bool:
    """Recognise a folder with the two kinds of files (or one folder that has them), or one of the files."""
    if source.path.is_dir():
        return bool(_folders(source.path))
    head = source.head_text
    if source.path.suffix == ".jsonl":
        first = head.partition("\n")[0]
        return all(f'"{key}"' in first for key in _SAMPLE_KEYS)
    return head.lstrip().startswith("{") and all(f'"{key}"' in head for key in _METRIC_KEYS)


def _results(source: SourceFile, metric: str) -> ReadResults:
    """Read the benchmark of the folder. `metric` is not used: sgl-eval has one score.

    Raises:
        EvidenceError: the folder holds several runs, or its metrics.json is damaged.
    """
    found_in = _folders(source.path) if source.path.is_dir() else [source.path.parent]
    if len(found_in) > 1:
        raise EvidenceError(
            f"{source.path} holds {len(found_in)} runs: {', '.join(run.name for run in found_in[:3])}.",
            "one run",
            "name one of its folders",
        )
    folder, reading = found_in[0], ReadResults(unit="sample")
    metrics = read_object(folder / "metrics.json")
    if not metrics:
        reading.notes.append(f"{folder} has no metrics.json: model, settings and version are not known")
    if metrics.get("partial"):
        reading.notes.append(
            f"the run was cut short: {metrics.get('completed_samples')} samples of {metrics.get('planned_examples')} examples"
        )
    items = [
        _item(row, repeat)
        for repeat, path in enumerate(sorted(folder.glob("output-rs*.jsonl")))
        for _, row in json_rows(SourceFile.of(path), _SAMPLE_KEYS, reading)
    ]
    reading.sets.append(_set(folder, metrics, items))
    return reading


def _folders(path: Path) -> list[Path]:
    """Find the folders that have samples: `path`, or those below it."""
    return [file.parent for file in sorted(path.rglob("output-rs0.jsonl"))]


def _item(row: Mapping[str, Any], repeat: int) -> ResultItem:
    score = next((row[key] for key in _SCORES if isinstance(row.get(key), (bool, int, float))), None)
    problem = row.get("problem") or ""
    parsed = row["predicted_answer"]
    return ResultItem(
        key=str(row["id"]),
        prompt_hash=prompt_hash(str(problem)) if problem else "",
        target=str(row["expected_answer"]),
        answer=str(row["generation"] or ""),
        parsed=None if parsed is None else str(parsed),
        score=None if score is None or row.get("finish_reason") == "error" else float(score),
        tokens=tokens if isinstance(tokens := row.get("num_generated_tokens"), int) else None,
        finish=str(row.get("finish_reason") or ""),
        repeat=repeat,
    )


def _set(folder: Path, metrics: Mapping[str, Any], items: list[ResultItem]) -> ResultSet:
    prompt = metrics.get("prompt", {})
    preset = metrics.get("preset")
    generation = metrics.get("gen") or {}
    return ResultSet(
        source=str(folder),
        tool="sgl-eval",
        version=str(metrics.get("sgl_eval_version", "")),
        task=str(metrics.get("name", folder.name)),
        metric="correct",
        model=str(metrics.get("model", "")),
        template=prompt_hash(prompt["yaml"]) if prompt.get("yaml") else "",
        task_version=json.dumps(metrics["bench_args"], sort_keys=True) if metrics.get("bench_args") else "",
        sampling=texts(generation, sorted(generation)),
        settings=texts(metrics, ("base_url", "num_threads", "timestamp"))
        | ({"preset": json.dumps(preset, sort_keys=True)} if preset else {}),
        items=tuple(items),
        failed=sum(item.score is None for item in items),
    )


READER = results_reader("sgl-eval", "sgl-eval results", _recognises, _results)
