"""Reads lm-eval's ``samples_*.jsonl`` (``--log_samples``), ``results_*.json``, a folder of both, and its printed table.

Source: lm-eval 0.4.13: ``loggers/evaluation_tracker.py`` (files and folders), ``evaluator.py`` (a sample: doc_hash, prompt_hash,
target_hash, filter, metrics), ``utils.hash_string`` (SHA-256 in hexadecimal). A sample is one document under one filter, so a
file has (documents x filters) lines.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.evals.questions import prompt_hash
from assay.harness.errors import EvidenceError
from assay.harness.ingest.asked import Asked, arguments_of
from assay.harness.ingest.guessing import TaskScore, below_guessing
from assay.harness.ingest.result import Excerpt, FactTable, FileDocument
from assay.harness.ingest.result_set import (
    ReadResults,
    ResultItem,
    ResultSet,
    StatedScore,
    at,
    better_if_higher,
    cached,
    json_object,
    number,
    of_metric,
    read_object,
    results_reader,
    warning,
)
from assay.harness.ingest.source_file import SourceFile
from assay.harness.reading import whole_file
from assay.harness.text import one_line

# lm-eval's regex filters return this if an answer does not match (``filters/extraction.py``, ``fallback``).
_INVALID = "[invalid]"
_SAMPLE_KEYS = ("doc_hash", "prompt_hash", "target_hash", "resps", "filtered_resps")
_RESULT_KEYS = ("results", "configs", "versions", "n-shot")
# Metrics of log-likelihoods: each document's sum, with its number of words or bytes, or only the last word's, as in LAMBADA.
_PERPLEXITIES = ("word_perplexity", "byte_perplexity", "perplexity")
# Metrics whose task score can be computed from the samples' scores.
_OF_SAMPLES = ("acc", "exact_match", "acc_norm", *_PERPLEXITIES)
# Fields of a task's config that do not define the task, or that are compared separately.
_NAMES = ("task", "task_alias", "tag", "group", "group_alias", "metadata", "num_fewshot", "generation_kwargs")
_Json = Mapping[str, Any]


def _recognises(source: SourceFile) -> bool:
    """Recognise a sample line with three hashes, a results file with configs and versions, or a folder of such files."""
    if source.path.is_dir():
        return any(_recognises(SourceFile.of(path)) for path in _files(source.path))
    head = source.head_text.lstrip()
    if not head.startswith("{"):
        return False
    first = head.partition("\n")[0]
    if all(f'"{key}"' in first for key in _SAMPLE_KEYS[:3]):
        return True
    # The keys are megabytes apart, so the head alone does not contain them.
    if source.path.suffix != ".json" or '"results"' not in head[:200]:
        return False
    try:
        document = read_object(source.path)
    except EvidenceError:
        return False
    return all(key in document for key in _RESULT_KEYS)


def _with_scores(source: SourceFile, document: FileDocument) -> FileDocument:
    """Add the findings, and the scores of a results file that has no samples next to it."""
    pairs = [(samples, list(_scores(results))) for samples, results in _pairs(source.path) if results]
    findings = (*below_guessing(score for _, stated in pairs for score in stated), *document.findings)
    alone = [score for samples, stated in pairs if samples is None for score in stated]
    if not alone:
        return document.model_copy(update={"findings": findings})
    rows = [
        (each.task, each.metric, f"{each.score:.4f}", f"{each.questions:,}" if each.questions else "") for each in alone
    ]
    columns = ("task", "metric", "score", "questions")
    table = FactTable(id="scores", title="Scores", columns=columns, rows=tuple(rows))
    file = document.file.model_copy(update={"lines": len(alone), "read": len(alone), "unit": "score"})
    return document.model_copy(update={"file": file, "findings": findings, "tables": (*document.tables, table)})


def _results(source: SourceFile, metric: str) -> ReadResults:
    """Read every score of every task, or only the one that `metric` names, in lm-eval's spelling."""
    reading, stated = ReadResults(source, "sample"), dict[Path, _Json]()
    runs: dict[str, list[ResultSet]] = {}
    for samples, results in _pairs(source.path):
        document = stated.setdefault(results, read_object(results)) if results else {}
        if samples is not None:
            runs.setdefault(_date(samples), []).extend(_task(samples, document, metric, reading))
        else:
            reading.notes.append(f"{results} has no samples next to it: run lm-eval with --log_samples")
    for path, document in stated.items():
        if at(document, "config", "use_cache"):
            reading.findings.append(cached(path.name, "use_cache was set: answers may be"))
        # A score that no sample has, such as BLEU, is computed over all samples together.
        sets = runs.setdefault(_date(path), [])
        sampled = {score.task if metric else score.name for score in sets}
        alone = _stated_sets(path, document, metric)
        sets += [score for score in alone if (score.task if metric else score.name) not in sampled]
    # Tasks run one after the other are one result; a task that was run again starts another.
    again = max(Counter(score.name for sets in runs.values() for score in sets).values(), default=0) > 1
    of = {tuple(sorted(sets[0].asked.served.items())): sets[0] for sets in runs.values() if sets}
    if len(of) > 1 and not again:
        named = "; ".join(
            f"{score.task} of {', '.join(map(' '.join, served)) or 'an unknown model'}" for served, score in of.items()
        )
        title = "The tasks were not all run on one server"
        reading.findings.append(warning("several-servers", title, source.path.name, f"{named}."))
    reading.sets = [
        score.model_copy(update={"run": f"{score.model} {date}" if again else ""})
        for date, sets in sorted(runs.items())
        for score in sets
    ]
    return reading


def _stated_sets(path: Path, document: _Json, wanted: str) -> Iterator[ResultSet]:
    """Yield the scores of a results file, without group scores, which follow from their tasks."""
    for task, metric, score, questions in (each[:4] for each in _scores(path)):
        named = wanted in ("", metric, metric.partition(",")[0])
        if named and math.isfinite(score) and not at(document, "group_subtasks", task):
            error = number(at(document, "results", task, metric.replace(",", "_stderr,", 1)))
            stated = StatedScore(value=score, error=error, questions=questions)
            yield _set(task, metric, document).model_copy(update={"stated": stated})


def _files(folder: Path) -> list[Path]:
    return sorted([*folder.rglob("samples_*.jsonl"), *folder.rglob("results_*.json")])


def _scores(path: Path) -> Iterator[TaskScore]:
    """Yield the scores of a results file, including group scores, without standard errors."""
    text = whole_file(path).decode(errors="replace")
    document = json_object(text, str(path))
    members = document.get("group_subtasks") or {}
    grouped = {part for some in members.values() if isinstance(some, list) for part in some}
    for task, scores in (document.get("results") or {}).items():
        for metric, value in scores.items() if isinstance(scores, dict) else ():
            if isinstance(value, (int, float)) and "," in metric and "_stderr," not in metric:
                line, choices = _line(text, task, metric), at(document, "configs", task, "doc_to_choice")
                yield TaskScore(
                    task, metric, float(value), _questions(task, document), grouped=task in grouped, run=path.name,
                    cites=(Excerpt(first=line, last=line, text=f"{task}: {metric} {value:.4f}"),),
                    choices=len(choices) if isinstance(choices, list) else 0,
                )  # fmt: skip


def _questions(task: str, document: _Json, above: frozenset[str] = frozenset()) -> int:
    """Count the questions of a task or of all tasks in a group (0 if unknown). `above` holds the enclosing groups."""
    if at(document, "n-samples", task):
        return effective if isinstance(effective := at(document, "n-samples", task, "effective"), int) else 0
    inside = at(document, "group_subtasks", task)
    members = inside if isinstance(inside, list) and task not in above else ()
    return sum(_questions(str(member), document, above | {task}) for member in members)


def _line(text: str, *keys: str) -> int:
    """Return the line number of a value under "results", a task and a metric, in JSON with one key per line."""
    at = 0
    for key in ("results", *keys):
        at = max(at, text.find(f"{json.dumps(key)}:", at))
    return text.count("\n", 0, at) + 1


def _pairs(path: Path) -> Iterator[tuple[Path | None, Path | None]]:
    """Yield each samples file with its run's results file, whichever was named. Both names end in the same date."""
    files = _files(path) if path.is_dir() else [path]
    if path.is_file() and path.suffix == ".json":
        files += sorted(path.parent.glob(f"samples_*_{_date(path)}.jsonl"))
    samples = [item for item in files if item.suffix == ".jsonl"]
    for sample in samples:
        beside = sample.with_name(f"results_{_date(sample)}.json")
        yield sample, beside if beside.is_file() else None
    dated = {_date(sample) for sample in samples}
    yield from ((None, file) for file in files if file.suffix == ".json" and _date(file) not in dated)


def _date(path: Path) -> str:
    return path.stem.rpartition("_")[2]


def _samples(path: Path, reading: ReadResults) -> Iterator[dict[str, Any]]:
    """Yield the samples of a file, and count any other line as unread."""
    for line, text in SourceFile.of(path).lines():
        try:
            row, why = json.loads(text), text
        except (ValueError, RecursionError) as error:
            row, why = None, f"{error}: {text}"
        if isinstance(row, dict) and all(key in row for key in _SAMPLE_KEYS):
            reading.read += 1
            yield row
        else:
            reading.refuse(line, why)


def _task(samples: Path, document: _Json, wanted: str, reading: ReadResults) -> Iterator[ResultSet]:
    """Yield the scores of a task, beginning with the first score of the first filter."""
    name = samples.stem.removeprefix("samples_").rpartition("_")[0]
    answered = list(_samples(samples, reading))
    for metric, filter_ in _metrics(answered, wanted, samples):
        mean = number(at(document, "results", name, f"{metric},{filter_}")) if metric in _OF_SAMPLES else None
        rows = [row for row in answered if row.get("filter", "none") == filter_]
        yield _set(name, f"{metric},{filter_}", document, rows).model_copy(update={
            "stated": None if mean is None else StatedScore(value=mean), "items": tuple(_item(row, metric) for row in rows),
        })  # fmt: skip


def _set(name: str, metric: str, document: _Json, rows: Sequence[_Json] = ()) -> ResultSet:
    """Return one score of a task, with settings from the results file (empty if there is none) and from the samples' requests."""
    run, config = document.get("config") or {}, at(document, "configs", name) or {}
    base = metric.partition(",")[0]
    higher = at(document, "higher_is_better", name, base)
    sent = (part for row in rows for request in _requests(row) for part in request if isinstance(part, dict))
    template = (document["chat_template_sha"] or "none") if "chat_template_sha" in document else None
    return ResultSet(
        tool="lm-eval",
        version=str(document.get("lm_eval_version", "")),
        task=name,
        metric=metric,
        asked=Asked.of(
            document.get("model_name") or run.get("model_args"),
            run.get("model_args"),
            task={key: value for key, value in config.items() if key not in _NAMES}
            | {
                "shots": at(document, "n-shot", name),
                "template": template,
                "version": at(document, "versions", name),
                "system_instruction": document.get("system_instruction"),
            },
            # The command's settings override the task's, and the settings in the requests override both.
            generation=(config.get("generation_kwargs") or {}) | arguments_of(run.get("gen_kwargs")) | next(sent, {}),
            limits={"limit": _limit(run["limit"])} if "limit" in run else None,
            served={"engine": run.get("model")},
            answers=_questions(name, {"n-samples": document.get("n-samples")}),
        ),
        settings={"git": str(document.get("git_hash") or "")},
        higher_is_better=higher if isinstance(higher, bool) else better_if_higher(base),
    )


def _limit(limit: object) -> object:
    return "none" if limit in (None, "None") else limit


def _metrics(rows: list[dict[str, Any]], wanted: str, samples: Path) -> list[tuple[str, str]]:
    """List the metrics that some sample has a score for, each with its filter, or only the wanted metric."""
    named = [(metric, row.get("filter", "none"), row) for row in rows for metric in row.get("metrics", ())]
    with_score = {(name, f) for name, f, row in named if _score(row, name) is not None or _of_perplexity(row, name)}
    scored = [pair for pair in dict.fromkeys((name, f) for name, f, _ in named) if pair in with_score]
    # Scores from 0 to 1 can be pooled and tested exactly, so they come first.
    beyond = {name for name, _, row in named if not 0 <= (_score(row, name) or 0) <= 1}
    scored.sort(key=lambda pair: (pair[0] in _PERPLEXITIES, pair[0] in beyond))
    if not wanted:
        return scored or [("none", "none")]
    metric, _, filter_ = wanted.partition(",")
    match = [(name, f) for name, f in scored if name == metric and filter_ in ("", f)]
    if not match:
        raise of_metric(samples, "score", [f"{name},{f}" for name, f in scored], wanted)
    return match[:1]


def _score(row: _Json, metric: str) -> float | None:
    value = row.get(metric) if metric not in _PERPLEXITIES else None
    if isinstance(value, list) and value and all(isinstance(part, bool) for part in value):  # one per instruction
        value = sum(value) / len(value)
    return number(value)


def _of_perplexity(row: _Json, metric: str) -> tuple[float, int] | None:
    """Return a document's log-likelihood and its number of units, or None if the metric is not a perplexity."""
    value = row.get(metric) if metric in _PERPLEXITIES else None
    pair = value if isinstance(value, list) else [value, 1]
    total, units = map(number, pair) if len(pair) == 2 else (None, None)
    return None if total is None or not units or units < 0 else (total, int(units))


def _item(row: _Json, metric: str) -> ResultItem:
    chosen, of = _choice(row, metric), _of_perplexity(row, metric)
    wrote = "" if chosen else _first(row["resps"])
    answer, parsed, target = chosen or (wrote, _first(row["filtered_resps"]), row.get("target", ""))
    sent = [part for request in _requests(row) for part in request if not isinstance(part, dict)]
    return ResultItem(
        loglikelihood=of and of[0], units=of[1] if of else 0,
        key=str(row["doc_hash"]), question=_question(row), target=target, answer=answer,
        # lm-eval hashes only the first request.
        prompt_hash=f"{row['prompt_hash']}{prompt_hash(json.dumps(sent)) if sent else ''}",
        characters=None if chosen or of else len(wrote), parsed=None if parsed == _INVALID else parsed, score=_score(row, metric),
    )  # fmt: skip


def _first(responses: Any) -> str:
    """Return a document's response, or all of them as JSON if there are several."""
    while isinstance(responses, list) and len(responses) == 1:
        responses = responses[0]
    return responses if isinstance(responses, str) else json.dumps(responses, ensure_ascii=False)


_QUESTION = ("question", "query", "problem", "input", "prompt", "goal", "ctx", "sentence", "text")
_SHOWN = 300


def _question(row: _Json) -> str:
    """Return a sample's question: from its document, else the end of its prompt, or "" if it has neither."""
    named = [text for name in _QUESTION if isinstance(text := at(row, "doc", name), str)]
    first = next(iter(_requests(row)), ())
    return one_line(named[0] if named else str(first[0])[-_SHOWN:] if first else "", _SHOWN)


def _choice(row: _Json, metric: str) -> tuple[str, str | None, str] | None:
    """Return the model's choice with every choice's log-likelihood, the choice's letter, and the right choice.

    Return None if the sample is not from a multiple-choice task. `acc_norm` divides by the length of a choice's text.
    """
    responses = row["resps"] if isinstance(row["resps"], list) else []
    values = [_loglikelihood(response) for response in responses]
    if len(values) < 2 or any(map(math.isnan, values)):
        return None
    given = [str(request[1]).strip() if len(request) > 1 else "" for request in _requests(row)]
    texts = [*given, *[""] * len(values)][: len(values)]
    letters = [chr(ord("A") + place % 26) for place in range(len(values))]
    shown = [name if text in (name, "") else f"{name}: {text}" for name, text in zip(letters, texts, strict=True)]
    sizes = [len(text) for text in texts] if metric == "acc_norm" and all(texts) else [1] * len(values)
    scores = [value / size for value, size in zip(values, sizes, strict=True)]
    first, *tied = (place for place, score in enumerate(scores) if score == max(scores))
    each = ", ".join(f"{name} {value:.2f}" for name, value in zip(letters, values, strict=True))
    # The target is a choice's text or its index.
    target = str(row.get("target", "")).strip()
    right = texts.index(target) if target and target in texts else int(target) if target.isdigit() else len(texts)
    # If several choices tie, as when a server returns no likelihoods, the model chose none of them; lm-eval takes the first.
    parsed = None if tied else letters[first]
    return f"{shown[first]} ({each})", parsed, shown[right] if right < len(shown) else target


def _requests(row: _Json) -> list[tuple[Any, ...]]:
    """List each request's arguments: context and continuation. lm-eval 0.4.5 and later write them by name."""
    arguments = row.get("arguments")
    given = arguments.values() if isinstance(arguments, dict) else arguments if isinstance(arguments, list) else ()
    return [
        tuple(item.values() if isinstance(item, dict) else item) for item in given if isinstance(item, (dict, list))
    ]


def _loglikelihood(response: Any) -> float:
    """Return the first number in a response's nested lists, or NaN if they have none."""
    while isinstance(response, list) and response:
        response = response[0]
    try:
        return float(response)
    except (TypeError, ValueError):
        return math.nan


# The printed table (0.4.2 to 0.4.13, ``lm_eval.utils.make_table``). A line with the model and its settings precedes each table, so
# a file may hold several runs. A task has one row per filter and metric; an empty cell repeats the one above.
# vllm (pretrained=org/model,add_bos_token=true), gen_kwargs: (None), limit: 250.0, num_fewshot: 5, batch_size: auto
_RUN = re.compile(r"[\w-]+ \(.*\), gen_kwargs: .*, limit: .*, num_fewshot: .*")
_NAMED = re.compile(
    r"(?P<engine>[\w-]+) \((?P<model>.*)\), gen_kwargs: (?P<generation>.*), limit: (?P<limit>[^,]*), num_fewshot"
)
# |Tasks|Version|     Filter     |n-shot|  Metric   |   |Value|   |Stderr|
_HEAD = re.compile(
    r"\| *(?:Tasks|Groups) *\| *Version *\| *Filter *\| *n-shot *\| *Metric *\|.*\| *Value *\|.*\| *Stderr *\|"
)
_RULE = re.compile(r"\|(?: ?:?-+:? ?\|)+")
_COLUMNS = ("task", "version", "filter", "n-shot", "metric", "score", "stderr")
# Positions of the columns in a row, then of the arrow that says which way is better. The ± sign has no column.
_AT = (0, 1, 2, 3, 4, 6, 8, 5)
_SCORE = re.compile(r"-?\d+(?:\.\d+)?")
_NO_SAMPLES = (
    "printed scores have no samples, so they are compared unpaired: run lm-eval with --log_samples to pair them"
)


def is_table(source: SourceFile) -> bool:
    """Recognise a file by a table heading in its first lines."""
    return any(_HEAD.fullmatch(line.strip()) for line in source.head_text.splitlines())


class PrintedTables:
    """The tables in a text, read line by line.

    Attributes:
        runs: each run's rows, by the run's line: the values of `_COLUMNS`, the arrow, and the position.
    """

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[tuple[str, ...], Excerpt]]] = {}
        self._run, self._above = "an unnamed run", ("",) * len(_COLUMNS)

    def read(self, number: int, line: str) -> bool:
        """Read a line. Returns True if it belongs to a table."""
        text = line.strip()
        if named := _RUN.fullmatch(text):
            self._run = f"{named[0]} (line {number})"
        elif row := _row(text, self._above):
            self._above = row
            quoted = Excerpt(first=number, last=number, text=one_line(text))
            self.runs.setdefault(self._run, []).append((row, quoted))
        else:
            return bool(_RULE.fullmatch(text) or _HEAD.fullmatch(text))
        return True

    def tables(self) -> Iterator[FactTable]:
        """Yield one table per run."""
        for run, rows in self.runs.items():
            shown = tuple(row[: len(_COLUMNS)] for row, _ in rows)
            yield FactTable(id="scores", title=one_line(run, 300), columns=_COLUMNS, rows=shown, note=_NO_SAMPLES)

    def scores(self) -> Iterator[TaskScore]:
        """Yield the scores of all runs."""
        for run, (row, quoted) in ((run, each) for run, rows in self.runs.items() for each in rows):
            yield TaskScore(row[0], row[4], float(row[5]), cites=(quoted,), run=run)


def table_results(source: SourceFile, wanted: str) -> ReadResults:
    """Read the scores of all runs in the file, one per table row."""
    reading, printed = ReadResults(source, "line", notes=[_NO_SAMPLES]), PrintedTables()
    for line, text in source.lines():
        reading.read += printed.read(line, text)
    for run, rows in printed.runs.items():
        named = _NAMED.match(run)
        for task, version, filter_, shots, metric, score, error, arrow in (row for row, _ in rows):
            if wanted in ("", metric, f"{metric},{filter_}"):
                reading.sets.append(ResultSet(
                    tool="lm-eval", run=run, task=task, metric=f"{metric},{filter_}",
                    asked=Asked.of(
                        run.partition(", gen_kwargs")[0], named and named["model"], task={"shots": shots, "version": version},
                        generation=arguments_of(named and named["generation"]), served={"engine": named and named["engine"]},
                        limits={"limit": _limit(named["limit"])} if named else None,
                    ),
                    higher_is_better={"↑": True, "↓": False}.get(arrow, better_if_higher(metric)),
                    stated=StatedScore(value=float(score), error=float(error) if _SCORE.fullmatch(error) else None),
                ))  # fmt: skip
    return reading


def _row(text: str, above: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the columns of a row with a score, or None for any other line."""
    cells = [cell.strip() for cell in text.strip("|").split("|")]
    if not text.startswith("|") or len(cells) != _AT[-2] + 1 or not _SCORE.fullmatch(cells[6]):
        return None
    row = tuple(cells[place] for place in _AT)
    return tuple(cell or before for cell, before in zip(row[:2], above, strict=False)) + row[2:]


READER = results_reader("lm-eval", "lm-eval results", _recognises, _results, extend=_with_scores)
