"""inspect_ai: ``.eval`` logs (a zip) and ``.json`` logs, read without the package.

Read in inspect_ai 0.3.285: ``log/_recorders/eval.py`` (the zip: ``header.json``, or ``_journal/start.json`` of a run that was
killed; ``samples/<id>_epoch_<n>.json``), ``log/_log.py`` (the fields; a metric has a name, a value and
parameters, and no direction), ``scorer/_metric.py`` (C, I, P, N). From 0.3.2xx on,
members are compressed with Zstandard, which Python reads from 3.14 on; here pyarrow does, which comes with the extra serve.
"""

from __future__ import annotations

import json
import math
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
    better_if_higher,
    cached,
    json_object,
    results_reader,
    warning,
)
from assay.harness.ingest.source_file import SourceFile
from assay.harness.reading import reading, whole_file
from assay.harness.text import did_you_mean

# Compression method of a zip's member (APPNOTE 6.3.10, section 4.4.5).
_ZSTANDARD = 93
# What inspect_ai calls otherwise than servers do, and what it does not know.
_FINISH = {"max_tokens": "length", "unknown": ""}
_VALUES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
# Settings of how requests are sent, which change no answer.
_SENDING = ("max_connections", "adaptive_connections", "max_retries", "timeout", "attempt_timeout", "cache", "batch")
# Settings of how an evaluation runs and is logged, and the limit, which is compared by itself.
_RUNNING = (
    "log_",
    "max_",
    "sandbox_",
    "score_",
    "limit",
    "fail_on_error",
    "continue_on_fail",
    "retry_on_error",
    "sample_id",
)
# Metrics that are the mean of the samples' scores.
_MEANS = ("accuracy", "mean")


def _recognises(source: SourceFile) -> bool:
    """Recognise a zip with a header and samples, or JSON with version, status, eval and plan."""
    if source.head.startswith(b"PK\x03\x04"):
        try:
            with zipfile.ZipFile(source.path) as file:
                names = set(file.namelist())
        except (zipfile.BadZipFile, OSError):
            return False
        return bool(names & {"header.json", "_journal/start.json"})
    head = source.head_text.lstrip()
    return head.startswith("{") and all(f'"{key}"' in head for key in ("status", "eval", "task_id", "run_id"))


def _results(source: SourceFile, metric: str) -> ReadResults:
    """Read the task of the log, by the scorer that `metric` names, or else by each of them."""
    read = ReadResults(unit="sample")
    if source.head.startswith(b"PK\x03\x04"):
        header, samples = _from_zip(source.path, read)
    else:
        header = json_object(whole_file(source.path), str(source.path))
        samples = list(enumerate(header.get("samples") or (), 1))
    evaluated = header.get("eval") or {}
    if header.get("status") != "success":
        says = f"It ended with the status {header.get('status') or 'unknown: it was cut short'}."
        title = "The evaluation did not end with success"
        read.findings.append(warning("evaluation-ended", title, source.path.name, says))
    read.findings += _doubts(source.path.name, header, [sample for _, sample in samples])
    scorers = _scorers([sample for _, sample in samples], metric, source.path)
    items: dict[str, list[ResultItem]] = {scorer: [] for scorer in scorers}
    for number, sample in samples:
        try:
            made = [_item(sample, scorer) for scorer in scorers]
            read.read += 1
        except (KeyError, TypeError, AttributeError) as error:
            read.refuse(number, f"{error!r}")
            continue
        for scorer, item in zip(scorers, made, strict=True):
            items[scorer].append(item)
    for scorer in scorers:
        higher = _better_if_higher(header, scorer, [_value(sample, scorer) for _, sample in samples])
        scored = _set(source.path, header, evaluated, scorer, items[scorer])
        read.sets.append(scored.model_copy(update={"higher_is_better": higher}))
    return read


def _doubts(where: str, header: Mapping[str, Any], samples: list[dict[str, Any]]) -> Iterator[CitedFinding]:
    """Yield what a log states against its scores: it was invalidated, they were edited, answers came from a cache."""
    if header.get("invalidated"):
        yield warning("log-invalidated", "The log was invalidated", where, "It is marked as invalidated.")
    edited = sum(
        any((score or {}).get("history") for score in (sample.get("scores") or {}).values()) for sample in samples
    )
    if edited:
        says = f"{edited:,} of {len(samples):,} samples have scores that were edited."
        yield warning("scores-edited", "Scores were edited", where, says)
    read = sum(any(event.get("cache") == "read" for event in sample.get("events") or ()) for sample in samples)
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
    if info.compress_type != _ZSTANDARD:
        with reading(f"{path}: {name}", "member of a zip"):
            return file.read(name)
    with path.open("rb") as raw:
        raw.seek(info.header_offset + 26)  # lengths of the name and of the extra field, in the local header
        raw.seek(sum(struct.unpack("<HH", raw.read(4))), 1)
        packed = raw.read(info.compress_size)
    try:
        import pyarrow
    except ImportError:
        said = f"{path}: {name} is compressed with Zstandard, and pyarrow is not installed."
        raise UsageError(said, "pyarrow", "pip install pyarrow") from None
    with (
        reading(f"{path}: {name}", "member of a zip"),
        pyarrow.CompressedInputStream(pyarrow.BufferReader(packed), "zstd") as stream,
    ):
        return bytes(stream.read(info.file_size))


def _scorers(samples: list[dict[str, Any]], wanted: str, path: Path) -> list[str]:
    """List the scorers, each part of one that gives several values as "scorer/part", or the one that is wanted."""
    given = (
        (name, (score or {}).get("value")) for sample in samples for name, score in (sample.get("scores") or {}).items()
    )
    parts = ([f"{name}/{part}" for part in value] if isinstance(value, dict) else [name] for name, value in given)
    names = list(dict.fromkeys(name for part in parts for name in part))
    if wanted and wanted not in names:
        raise UsageError(
            f"{path} has no scorer {wanted!r}.",
            f"one of {', '.join(names)}" if names else "a log with scores",
            did_you_mean(wanted, names) or "give another --metric",
        )
    return [wanted] if wanted else names or [""]


def _messages(sample: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield each message and whether it was asked; attachments stand where inspect_ai moved long texts to.

    Worked examples are messages of the assistant too. Those that the model wrote are marked; in a log without marks, they are those
    that the sample's input does not have.
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


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, sort_keys=True)
    return f"{message.get('role')}: {text}"


def _generated(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant" and bool(message.get("source") == "generate" or message.get("model"))


def _score(sample: Mapping[str, Any], scorer: str) -> tuple[Mapping[str, Any], str]:
    """Return the score of a sample by a scorer, and which part of it; "" for all of it."""
    scores = sample.get("scores") or {}
    name, _, part = (scorer, "", "") if scorer in scores else scorer.rpartition("/")
    return scores.get(name) or {}, part


def _value(sample: Mapping[str, Any], scorer: str) -> Any:
    score, part = _score(sample, scorer)
    value = score.get("value")
    return value if not part else value.get(part) if isinstance(value, dict) else None


def _better_if_higher(header: Mapping[str, Any], scorer: str, values: list[Any]) -> bool | None:
    """Return which way a scorer's values are better: C is correct; the names of the scorer and of its metrics tell of numbers."""
    given = [value for value in values if value is not None]
    if given and all(isinstance(value, str) and value in _VALUES for value in given):
        return True
    named = {scorer, *scorer.split("/", 1)}
    scores = [score for score in (header.get("results") or {}).get("scores") or () if score.get("name") in named]
    return better_if_higher(scorer, *(name for score in scores for name in score.get("metrics") or ()))


def _item(sample: Mapping[str, Any], scorer: str) -> ResultItem:
    (score, _), value = _score(sample, scorer), _value(sample, scorer)
    number = _VALUES.get(value) if isinstance(value, str) else value
    usable = isinstance(number, (bool, int, float)) and math.isfinite(number) and not sample.get("error")
    output = sample.get("output") or {}
    choices = list(output.get("choices") or ())
    message = choices[0]["message"] if choices else {}
    content = message.get("content") or message.get("tool_calls") or ""
    messages = list(_messages(sample))
    prompt = [text for _, text in takewhile(itemgetter(0), messages)]
    target, tokens = sample["target"], (output.get("usage") or {}).get("output_tokens")
    return ResultItem(
        key=str(sample["id"]),
        prompt_hash=prompt_hash("\n".join(prompt)) if sample.get("messages") else "",
        turns=tuple((asked, prompt_hash(text)) for asked, text in messages[len(prompt) :]),
        target=target if isinstance(target, str) else json.dumps(target, ensure_ascii=False),
        answer=content if isinstance(content, str) else json.dumps(content, ensure_ascii=False),
        parsed=score.get("answer"),
        score=float(number) if usable and number is not None else None,
        tokens=tokens if isinstance(tokens, int) else None,
        finish=_FINISH.get(reason := str(choices[0].get("stop_reason") or "") if choices else "", reason),
        repeat=int(sample.get("epoch", 1)) - 1,
    )


def _set(
    path: Path, header: Mapping[str, Any], evaluated: Mapping[str, Any], scorer: str, items: list[ResultItem]
) -> ResultSet:
    # The plan's settings go over the model's own (``model/_model.py``, ``merge``).
    given = (evaluated.get("model_generate_config"), (header.get("plan") or {}).get("config"))
    config = {key: value for each in given for key, value in (each or {}).items() if value is not None}
    arguments = evaluated.get("task_args") or {}
    shots = next(
        (arguments[key] for key in ("fewshot", "num_fewshot", "n_shot") if isinstance(arguments.get(key), int)), None
    )
    return ResultSet(
        tool="inspect_ai",
        version=str((evaluated.get("packages") or {}).get("inspect_ai", "")),
        task=str(evaluated.get("task", path.stem)),
        metric=scorer,
        asked=Asked.of(
            evaluated.get("model"),
            evaluated.get("model_args"),
            task=_definition(header, evaluated)
            | {
                "shots": shots,
                "template": prompt_hash(json.dumps((header.get("plan") or {}).get("steps") or [], sort_keys=True)),
                "version": evaluated.get("task_version"),
            },
            generation={key: value for key, value in config.items() if key not in _SENDING},
            limits={"limit": (evaluated.get("config") or {}).get("limit") or "none"},
            served={"base_url": evaluated.get("model_base_url")},
            answers=_asked(header, evaluated),
        ),
        stated=_stated(header, scorer),
        settings={"created": str(evaluated.get("created", ""))},
        items=tuple(items),
    )


def _definition(header: Mapping[str, Any], evaluated: Mapping[str, Any]) -> dict[str, Any]:
    """Return what defines the task."""
    dataset, config = evaluated.get("dataset") or {}, evaluated.get("config") or {}
    scores = (header.get("results") or {}).get("scores") or ()
    return {
        "task_args": evaluated.get("task_args"),
        "dataset": {name: dataset.get(name) for name in ("name", "location")},
        "scorers": evaluated.get("scorers")
        or [{"name": score.get("name"), "options": score.get("params")} for score in scores],
        "config": {key: value for key, value in config.items() if not key.startswith(_RUNNING)},
    }


def _stated(header: Mapping[str, Any], scorer: str) -> StatedScore | None:
    """Return the mean that the header states of a scorer, or of a part of one; None of repeats that are not averaged."""
    of, _, part = scorer.rpartition("/")
    for score in (header.get("results") or {}).get("scores") or ():
        named = score.get("name") == scorer or (score.get("scorer"), score.get("name")) == (of, part)
        for name in _MEANS if named and score.get("reducer") in (None, "mean") else ():
            value = ((score.get("metrics") or {}).get(name) or {}).get("value")
            if isinstance(value, (int, float)):
                return StatedScore(value=value, questions=score.get("scored_samples") or 0)
    return None


def _asked(header: Mapping[str, Any], evaluated: Mapping[str, Any]) -> int:
    """Count the answers that were asked for; 0 where the log does not tell."""
    total = (header.get("results") or {}).get("total_samples")
    if isinstance(total, int):
        return total
    ids, epochs = (evaluated.get("dataset") or {}).get("sample_ids"), (evaluated.get("config") or {}).get("epochs") or 1
    return len(ids) * epochs if isinstance(ids, list) and isinstance(epochs, int) else 0


READER = results_reader("inspect-ai", "inspect_ai log", _recognises, _results)
