"""Reads inspect_ai's ``.eval`` logs (a zip) and ``.json`` logs without the package.

Source: inspect_ai 0.3.285: ``log/_recorders/eval.py`` (the zip: ``header.json``, or ``_journal/start.json`` if the run was killed;
``samples/<id>_epoch_<n>.json``), ``log/_log.py`` (the fields; a metric has a name, a value and parameters, but no direction),
``scorer/_metric.py`` (C, I, P, N). From 0.3.2xx on, members are compressed with Zstandard. Python reads it from 3.14 on; until
then pyarrow does, which the extra "serve" installs.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator, Mapping
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

from assay.evals.questions import prompt_hash
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.ingest.asked import Asked
from assay.harness.ingest.result import CitedFinding
from assay.harness.ingest.result_set import (
    ReadResults,
    ResultItem,
    ResultSet,
    StatedScore,
    at,
    better_if_higher,
    cached,
    json_object,
    of_metric,
    results_reader,
    warning,
)  # fmt: skip
from assay.harness.ingest.source_file import SourceFile
from assay.harness.reading import reading, whole_file

_ZIP = b"PK\x03\x04"
# Compression method of a zip member (APPNOTE 6.3.10, section 4.4.5).
_ZSTANDARD = 93
# inspect_ai's names for finish reasons that differ from the servers' names.
_FINISH = {"max_tokens": "length", "unknown": ""}
_VALUES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
# Settings of how an evaluation runs and logs. The limit is here too, because it is compared separately.
_RUNNING = (
    "log_", "max_", "sandbox_", "score_", "limit", "fail_on_error", "continue_on_fail", "retry_on_error", "sample_id",
)  # fmt: skip
# Metrics that are the mean of the samples' scores.
_MEANS = ("accuracy", "mean")
_Json = Mapping[str, Any]


def _recognises(source: SourceFile) -> bool:
    """Recognise a zip with a header and samples, or JSON with version, status, eval and plan."""
    if source.head.startswith(_ZIP):
        try:
            with zipfile.ZipFile(source.path) as file:
                return bool({"header.json", "_journal/start.json"} & set(file.namelist()))
        except (zipfile.BadZipFile, OSError):
            return False
    head = source.head_text.lstrip()
    return head.startswith("{") and all(f'"{key}"' in head for key in ("status", "eval", "task_id", "run_id"))


def _results(source: SourceFile, metric: str) -> ReadResults:
    """Read the log's task, scored by the scorer that `metric` names, or by each scorer if it is empty."""
    read, path = ReadResults(source, "sample"), source.path
    if source.head.startswith(_ZIP):
        header, numbered = _from_zip(path, read)
    else:
        header = json_object(whole_file(path), str(path))
        numbered = list(enumerate(header.get("samples") or (), 1))
    samples = [sample for _, sample in numbered]
    read.findings += _doubts(path.name, header, samples)
    scorers = _scorers(samples)
    if metric and metric not in scorers:
        raise of_metric(path, "scorer", scorers, metric)
    items: dict[str, list[ResultItem]] = {scorer: [] for scorer in ([metric] if metric else scorers or [""])}
    for number, sample in numbered:
        try:
            made = [_item(sample, scorer) for scorer in items]
        except (KeyError, TypeError, AttributeError) as error:
            read.refuse(number, f"{error!r}")
            continue
        read.read += 1
        for of_scorer, item in zip(items.values(), made, strict=True):
            of_scorer.append(item)
    for scorer, of_scorer in items.items():
        higher = _better_if_higher(header, scorer, [_score(sample, scorer)[1] for sample in samples])
        read.sets.append(_set(path, header, scorer).model_copy(
            update={"higher_is_better": higher, "items": tuple(of_scorer)}
        ))  # fmt: skip
    return read


def _doubts(where: str, header: _Json, samples: list[dict[str, Any]]) -> Iterator[CitedFinding]:
    """Yield a log's reasons to doubt its scores: an early end, invalidation, edited scores, or cached answers."""
    if header.get("status") != "success":
        says = f"It ended with the status {header.get('status') or 'unknown: it was cut short'}."
        yield warning("evaluation-ended", "The evaluation did not end with success", where, says)
    if header.get("invalidated"):
        yield warning("log-invalidated", "The log was invalidated", where, "It is marked as invalidated.")
    edited = sum(any(at(score, "history") for score in (at(each, "scores") or {}).values()) for each in samples)
    if edited:
        says = f"{edited:,} of {len(samples):,} samples have edited scores."
        yield warning("scores-edited", "Scores were edited", where, says)
    read = sum(any(event.get("cache") == "read" for event in each.get("events") or ()) for each in samples)
    if read:
        yield cached(where, f"answers to {read:,} of {len(samples):,} samples were read")


def _from_zip(path: Path, read: ReadResults) -> tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]:
    samples = []
    try:
        with zipfile.ZipFile(path) as file:
            names = file.namelist()
            start = "header.json" if "header.json" in names else "_journal/start.json"
            header = json_object(_member(path, file, start), start)
            for number, name in enumerate([name for name in names if name.startswith("samples/")], 1):
                try:
                    samples.append((number, json_object(_member(path, file, name), name)))
                except EvidenceError as error:
                    read.refuse(number, f"{name}: {error.found}")
    except zipfile.BadZipFile as error:
        raise EvidenceError(f"{path} is damaged: {error}.", "a zip", "copy the log again") from None
    return header, samples


def _member(path: Path, file: zipfile.ZipFile, name: str) -> bytes:
    info = file.getinfo(name)
    with reading(f"{path}: {name}", "member of a zip"):
        if info.compress_type != _ZSTANDARD:
            return file.read(name)
        try:
            import pyarrow
        except ImportError:
            said = f"{path}: {name} is compressed with Zstandard, and pyarrow is not installed."
            raise UsageError(said, "pyarrow", "pip install pyarrow") from None
        with path.open("rb") as raw:
            raw.seek(info.header_offset + 26)  # lengths of the name and of the extra field, in the local header
            raw.seek(sum(struct.unpack("<HH", raw.read(4))), 1)
            packed = raw.read(info.compress_size)
        with pyarrow.CompressedInputStream(pyarrow.BufferReader(packed), "zstd") as stream:
            return bytes(stream.read(info.file_size))


def _scorers(samples: list[dict[str, Any]]) -> list[str]:
    """List the scorers. A scorer with several values appears as "scorer/part" for each of them."""
    given = ((name, at(score, "value")) for each in samples for name, score in (at(each, "scores") or {}).items())
    parts = ([f"{name}/{part}" for part in value] if isinstance(value, dict) else [name] for name, value in given)
    return list(dict.fromkeys(name for part in parts for name in part))


def _messages(sample: _Json) -> Iterator[tuple[bool, str]]:
    """Yield each message and whether it was asked, with attachments (long texts that inspect_ai moves) put back.

    Worked examples are assistant messages too. Messages that the model wrote are marked; in a log without marks, they are the
    messages that are not in the sample's input.
    """
    attached, messages, given = sample.get("attachments") or {}, sample.get("messages") or [], sample.get("input")
    told = [_text(message) for message in given] if isinstance(given, list) else []
    marked = any(map(_generated, messages))
    for message in messages:
        text, role = _text(message), message.get("role")
        written = role == "tool" or (role == "assistant" and (_generated(message) if marked else text not in told))
        for key, value in attached.items():
            text = text.replace(f"attachment://{key}", value)
        yield not written, text


def _text(message: _Json) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, sort_keys=True)
    return f"{message.get('role')}: {text}"


def _generated(message: _Json) -> bool:
    return message.get("role") == "assistant" and bool(message.get("source") == "generate" or message.get("model"))


def _score(sample: _Json, scorer: str) -> tuple[_Json, Any]:
    """Return a sample's score by a scorer, or by a part of a scorer, and the score's value."""
    scores = sample.get("scores") or {}
    name, _, part = (scorer, "", "") if scorer in scores else scorer.rpartition("/")
    score = scores.get(name) or {}
    return score, at(score, "value", part) if part else score.get("value")


def _better_if_higher(header: _Json, scorer: str, values: list[Any]) -> bool | None:
    """Return True if higher values are better, or None if unknown. For numbers, the scorer's and metrics' names decide."""
    given = [value for value in values if value is not None]
    if given and all(isinstance(value, str) and value in _VALUES for value in given):
        return True
    named = {scorer, *scorer.split("/", 1)}
    scores = [score for score in at(header, "results", "scores") or () if score.get("name") in named]
    return better_if_higher(scorer, *(name for score in scores for name in score.get("metrics") or ()))


def _item(sample: _Json, scorer: str) -> ResultItem:
    (score, value), output, messages = _score(sample, scorer), sample.get("output") or {}, list(_messages(sample))
    first: _Json = next(iter(output.get("choices") or ()), {})
    message = first["message"] if first else {}
    prompt = [text for _, text in takewhile(itemgetter(0), messages)]
    reason = str(first.get("stop_reason") or "")
    return ResultItem(
        key=str(sample["id"]),
        prompt_hash=prompt_hash("\n".join(prompt)) if messages else "",
        turns=tuple((asked, prompt_hash(text)) for asked, text in messages[len(prompt) :]),
        target=sample["target"],
        answer=message.get("content") or message.get("tool_calls") or "",
        parsed=score.get("answer"),
        score=None if sample.get("error") else _VALUES.get(value) if isinstance(value, str) else value,
        tokens=at(output, "usage", "output_tokens"),
        finish=_FINISH.get(reason, reason),
        repeat=int(sample.get("epoch", 1)) - 1,
    )


def _set(path: Path, header: _Json, scorer: str) -> ResultSet:
    evaluated = header.get("eval") or {}
    # The plan's settings override the model's own (``model/_model.py``, ``merge``).
    given = (evaluated.get("model_generate_config"), at(header, "plan", "config"))
    shots = (at(evaluated, "task_args", name) for name in ("fewshot", "num_fewshot", "n_shot"))
    return ResultSet(
        tool="inspect_ai",
        version=str(at(evaluated, "packages", "inspect_ai") or ""),
        task=str(evaluated.get("task", path.stem)),
        metric=scorer,
        asked=Asked.of(
            evaluated.get("model"),
            evaluated.get("model_args"),
            task=_definition(header, evaluated)
            | {
                "shots": next((shot for shot in shots if isinstance(shot, int)), None),
                "template": prompt_hash(json.dumps(at(header, "plan", "steps") or [], sort_keys=True)),
                "version": evaluated.get("task_version"),
            },
            generation={key: value for each in given for key, value in (each or {}).items() if value is not None},
            limits={"limit": at(evaluated, "config", "limit") or "none"},
            served={"base_url": evaluated.get("model_base_url")},
            answers=_asked(header, evaluated),
        ),
        stated=_stated(header, scorer),
        settings={"created": str(evaluated.get("created", ""))},
    )


def _definition(header: _Json, evaluated: _Json) -> dict[str, Any]:
    """Return the settings that define the task."""
    scores = at(header, "results", "scores") or ()
    return {
        "task_args": evaluated.get("task_args"),
        "dataset": {name: at(evaluated, "dataset", name) for name in ("name", "location")},
        "scorers": evaluated.get("scorers")
        or [{"name": score.get("name"), "options": score.get("params")} for score in scores],
        "config": {k: v for k, v in (evaluated.get("config") or {}).items() if not k.startswith(_RUNNING)},
    }


def _stated(header: _Json, scorer: str) -> StatedScore | None:
    """Return the header's mean for a scorer or a part of one, or None if its repeats are not averaged."""
    of, _, part = scorer.rpartition("/")
    for score in at(header, "results", "scores") or ():
        named = score.get("name") == scorer or (score.get("scorer"), score.get("name")) == (of, part)
        for name in _MEANS if named and score.get("reducer") in (None, "mean") else ():
            if isinstance(value := at(score, "metrics", name, "value"), (int, float)):
                return StatedScore(value=value, questions=score.get("scored_samples") or 0)
    return None


def _asked(header: _Json, evaluated: _Json) -> int:
    """Count the answers requested, or return 0 if the log does not say."""
    total = at(header, "results", "total_samples")
    if isinstance(total, int):
        return total
    ids, epochs = at(evaluated, "dataset", "sample_ids"), at(evaluated, "config", "epochs") or 1
    return len(ids) * epochs if isinstance(ids, list) and isinstance(epochs, int) else 0


READER = results_reader("inspect-ai", "inspect_ai log", _recognises, _results)
