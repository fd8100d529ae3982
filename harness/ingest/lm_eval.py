"""lm-eval: ``samples_*.jsonl`` of ``--log_samples``, ``results_*.json``, their folder, and the table that it prints.

Read in lm-eval 0.4.13: ``loggers/evaluation_tracker.py`` (files and folders), ``evaluator.py`` (a sample: doc_hash, prompt_hash,
target_hash, filter, metrics), ``utils.hash_string`` (SHA-256 in hexadecimal). A sample is one document under one filter, so a
file has as many lines as documents times filters.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from assay.evals.questions import prompt_hash
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.ingest.asked import Asked, arguments_of
from assay.harness.ingest.guessing import TaskScore, below_guessing
from assay.harness.ingest.result import (
    Excerpt,
    FactTable,
    FileDocument,
)
from assay.harness.ingest.result_set import (
    ReadResults,
    ResultItem,
    ResultSet,
    StatedScore,
    better_if_higher,
    cached,
    json_object,
    json_rows,
    read_object,
    results_reader,
    warning,
)
from assay.harness.ingest.source_file import SourceFile
from assay.harness.reading import whole_file
from assay.harness.text import did_you_mean, one_line

# What lm-eval's regex filters give for an answer in which they find nothing (``filters/extraction.py``, ``fallback``).
_INVALID = "[invalid]"
_SAMPLE_KEYS = ("doc_hash", "prompt_hash", "target_hash", "resps", "filtered_resps")
_RESULT_KEYS = ("results", "configs", "versions", "n-shot")
# Metrics that are a share of right answers. `acc_norm` is one too, and of the same answers as `acc`.
_SHARES = ("acc", "exact_match")
# Metrics whose score of a task is the mean of its samples.
_MEANS = (*_SHARES, "acc_norm")
# Metrics of log-likelihoods: of each document the sum, with its words or bytes; of a last word, as in LAMBADA, alone.
_PERPLEXITIES = ("word_perplexity", "byte_perplexity", "perplexity")
_TABLES = (("scores", "Scores", False), ("scores-in-groups", "Scores of the tasks in groups", True))
# What a task's config names and does not define it by, or what is compared by itself.
_NAMES = ("task", "task_alias", "tag", "group", "group_alias", "metadata", "num_fewshot", "generation_kwargs")


def _recognises(source: SourceFile) -> bool:
    """Recognise a sample's line with three hashes, a results file with configs and versions, or a folder with such files."""
    if source.path.is_dir():
        return any(_recognises(SourceFile.of(path)) for path in _files(source.path))
    head = source.head_text.lstrip()
    if not head.startswith("{"):
        return False
    first = head.partition("\n")[0]
    return all(f'"{key}"' in first for key in _SAMPLE_KEYS[:3]) or _is_results(source.path, head)


def _with_scores(source: SourceFile, document: FileDocument) -> FileDocument:
    """Add the findings, and the scores that a results file states where it has no samples beside it."""
    pairs = [(samples, _scores(results)) for samples, results in _pairs(source.path) if results]
    scores = [(score, samples is None) for samples, stated in pairs for score in stated]
    findings = below_guessing(filter(None, (_beside_guessing(score) for score, _ in scores)))
    alone = [score for score, is_alone in scores if is_alone]
    document = document.model_copy(update={"findings": (*findings, *document.findings)})
    if not alone:
        return document
    tables = [
        FactTable(id=id, title=title, columns=("task", "metric", "score", "questions"), rows=tuple(
            (score.task, score.metric, f"{score.value:.4f}", f"{score.questions:,}" if score.questions else "")
            for score in alone if score.grouped == inside
        ))
        for id, title, inside in _TABLES
    ]  # fmt: skip
    file = document.file.model_copy(update={"lines": len(alone), "read": len(alone), "unit": "score"})
    return document.model_copy(
        update={"file": file, "tables": (*document.tables, *(table for table in tables if table.rows))}
    )


def _results(source: SourceFile, metric: str) -> ReadResults:
    """Read every score of all tasks of the files, or the one that `metric` names as lm-eval does."""
    reading, stated = ReadResults(unit="sample"), dict[Path, Mapping[str, Any]]()
    runs: dict[str, list[ResultSet]] = {}
    for samples, results in _pairs(source.path):
        document = stated.setdefault(results, read_object(results)) if results else {}
        if samples is not None:
            runs.setdefault(_date(samples), []).extend(_task(samples, document, metric, reading))
        else:
            reading.notes.append(f"{results} has no samples beside it: run lm-eval with --log_samples")
    for path, document in stated.items():
        if (document.get("config") or {}).get("use_cache"):
            reading.findings.append(cached(path.name, "use_cache was set: answers may be"))
        # What no sample has, such as BLEU, is of all samples together.
        sets = runs.setdefault(_date(path), [])
        sampled = {score.task if metric else score.name for score in sets}
        alone = _stated_sets(path, document, metric)
        sets += [score for score in alone if (score.task if metric else score.name) not in sampled]
    # Tasks that were run one after the other are one result, and a task that was run again is another one.
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


def _stated_sets(path: Path, document: Mapping[str, Any], wanted: str) -> Iterator[ResultSet]:
    """Yield the scores of a results file: those of groups follow from their tasks, so they are left out."""
    members = document.get("group_subtasks") or {}
    for score in _scores(path):
        named = wanted in ("", score.metric, score.metric.partition(",")[0])
        if named and math.isfinite(score.value) and not members.get(score.task):
            error = document["results"][score.task].get(score.metric.replace(",", "_stderr,", 1))
            stated = StatedScore(value=score.value, error=_number(error), questions=score.questions)
            yield _set(score.task, score.metric, document).model_copy(update={"stated": stated})


def _number(value: object) -> float | None:
    """Return a finite number; None for anything else, such as "N/A"."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _files(folder: Path) -> list[Path]:
    return sorted([*folder.rglob("samples_*.jsonl"), *folder.rglob("results_*.json")])


def _is_results(path: Path, head: str) -> bool:
    # The keys are far apart in a file of megabytes: the head alone does not hold them.
    if path.suffix != ".json" or '"results"' not in head[:200]:
        return False
    try:
        document = read_object(path)
    except EvidenceError:
        return False
    return all(key in document for key in _RESULT_KEYS)


class _Score(NamedTuple):
    """A score that a results file states: of a task or a group, of so many questions, 0 if the file does not state it."""

    task: str
    metric: str
    value: float
    questions: int
    line: int
    grouped: bool
    choices: int
    run: str


def _scores(path: Path) -> Iterator[_Score]:
    """Yield the scores of a results file: those of groups too, and without the standard errors."""
    text = whole_file(path).decode(errors="replace")
    document = json_object(text, str(path))
    members = document.get("group_subtasks") or {}
    grouped = {part for some in members.values() if isinstance(some, list) for part in some}
    for task, scores in (document.get("results") or {}).items():
        for metric, value in scores.items() if isinstance(scores, dict) else ():
            if isinstance(value, (int, float)) and "," in metric and "_stderr," not in metric:
                of = _questions(task, document.get("n-samples") or {}, members, frozenset())
                choices = ((document.get("configs") or {}).get(task) or {}).get("doc_to_choice")
                count = len(choices) if isinstance(choices, list) else 0
                yield _Score(
                    task, metric, float(value), of, _line(text, task, metric), task in grouped, count, path.name
                )


def _questions(task: str, counts: Mapping[str, Any], members: Mapping[str, Any], above: frozenset[str]) -> int:
    """Count the questions of a task, or of all tasks of a group; `above` are the groups that it is in."""
    count = counts.get(task)
    if isinstance(count, dict):
        return effective if isinstance(effective := count.get("effective"), int) else 0
    inside = members.get(task)
    if task in above or not isinstance(inside, list):
        return 0
    return sum(_questions(member, counts, members, above | {task}) for member in inside if isinstance(member, str))


def _beside_guessing(score: _Score) -> TaskScore | None:
    """Return a share of right answers; not of a task in a group, whose score is of more questions."""
    base = score.metric.partition(",")[0]
    if score.grouped or base not in _SHARES or not 0 <= score.value <= 1:
        return None
    said = Excerpt(first=score.line, last=score.line, text=f"{score.task}: {score.metric} {score.value:.4f}")
    read = base == "exact_match"
    return TaskScore(
        score.task, score.value, score.questions, score.task, (said,), choices=score.choices, read=read, run=score.run
    )


def _line(text: str, *keys: str) -> int:
    """Return the line of a value, in JSON with a key a line: of `results`, a task, and a metric."""
    at = 0
    for key in ("results", *keys):
        at = max(at, text.find(f"{json.dumps(key)}:", at))
    return text.count("\n", 0, at) + 1


def _pairs(path: Path) -> Iterator[tuple[Path | None, Path | None]]:
    """Yield each samples file with the results file of its run, whichever was named: both names end in the same date."""
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


def _task(samples: Path, document: Mapping[str, Any], wanted: str, reading: ReadResults) -> Iterator[ResultSet]:
    """Yield the scores of a task, the first one of the first filter first."""
    name = samples.stem.removeprefix("samples_").rpartition("_")[0]
    answered = [row for _, row in json_rows(SourceFile.of(samples), _SAMPLE_KEYS, reading)]
    for metric, filter_ in _metrics(answered, wanted, samples):
        stated = (
            _number(document.get("results", {}).get(name, {}).get(f"{metric},{filter_}"))
            if metric in (*_MEANS, *_PERPLEXITIES)
            else None
        )
        rows = [row for row in answered if row.get("filter", "none") == filter_]
        yield _set(name, f"{metric},{filter_}", document, rows).model_copy(update={
            "stated": None if stated is None else StatedScore(value=stated), "items": _items(rows, metric),
        })  # fmt: skip


def _set(name: str, metric: str, document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] = ()) -> ResultSet:
    """Return what a results file states of a task, and its samples' requests, for one of its scores; empty if there is no file."""
    run, config = document.get("config") or {}, (document.get("configs") or {}).get(name) or {}
    higher = (document.get("higher_is_better") or {}).get(name) or {}
    base = metric.partition(",")[0]
    return ResultSet(
        tool="lm-eval",
        version=str(document.get("lm_eval_version", "")),
        task=name,
        metric=metric,
        asked=Asked.of(
            document.get("model_name") or run.get("model_args"),
            run.get("model_args"),
            task={
                **{key: value for key, value in config.items() if key not in _NAMES},
                "shots": document.get("n-shot", {}).get(name),
                "template": (document["chat_template_sha"] or "none") if "chat_template_sha" in document else None,
                "version": document.get("versions", {}).get(name),
                "system_instruction": document.get("system_instruction"),
            },
            # The task's own, over them those of the command, and over both what was sent.
            generation={
                **(config.get("generation_kwargs") or {}),
                **arguments_of(run.get("gen_kwargs")),
                **next(
                    (part for row in rows for request in _requests(row) for part in request if isinstance(part, dict)),
                    {},
                ),
            },
            limits={"limit": _limit(run["limit"])} if "limit" in run else None,
            served={"engine": run.get("model")},
            answers=_questions(name, document.get("n-samples") or {}, {}, frozenset()),
        ),
        settings={"git": str(document.get("git_hash") or "")},
        higher_is_better=higher[base] if isinstance(higher.get(base), bool) else better_if_higher(base),
    )


def _limit(limit: object) -> object:
    return "none" if limit in (None, "None") else limit


def _metrics(rows: list[dict[str, Any]], wanted: str, samples: Path) -> list[tuple[str, str]]:
    """List the metrics that have a score of a sample, each with its filter, or the one that is wanted."""
    named = [(metric, row.get("filter", "none"), row) for row in rows for metric in row.get("metrics", ())]
    with_score = {(name, f) for name, f, row in named if _score(row, name) is not None or _of_perplexity(row, name)}
    scored = [pair for pair in dict.fromkeys((name, f) for name, f, _ in named) if pair in with_score]
    # Scores from 0 to 1 can be pooled and have the exact test, so they lead.
    beyond = {name for name, _, row in named if not 0 <= (_score(row, name) or 0) <= 1}
    scored.sort(key=lambda pair: (pair[0] in _PERPLEXITIES, pair[0] in beyond))
    if not wanted:
        return scored or [("none", "none")]
    metric, _, filter_ = wanted.partition(",")
    match = [(name, f) for name, f in scored if name == metric and filter_ in ("", f)]
    if not match:
        known = [f"{name},{f}" for name, f in scored]
        raise UsageError(
            f"{samples} has no score {wanted!r} for each sample.",
            f"one of {', '.join(known)}" if known else "a file with scores",
            did_you_mean(wanted, known) or "give another --metric",
        )
    return match[:1]


def _score(row: Mapping[str, Any], metric: str) -> float | None:
    value = row.get(metric) if metric not in _PERPLEXITIES else None
    if (
        isinstance(value, list) and value and all(isinstance(part, bool) for part in value)
    ):  # such as of each instruction
        value = sum(value) / len(value)
    return _number(value)


def _of_perplexity(row: Mapping[str, Any], metric: str) -> tuple[float, int] | None:
    """Return the log-likelihood of a document, and how many units it is of; None where the metric is no perplexity."""
    value = row.get(metric) if metric in _PERPLEXITIES else None
    pair = value if isinstance(value, list) else [value, 1]
    total, units = map(_number, pair) if len(pair) == 2 else (None, None)
    return None if total is None or not units or units < 0 else (total, int(units))


def _items(rows: list[dict[str, Any]], metric: str) -> tuple[ResultItem, ...]:
    items = []
    for row in rows:
        given = _choices(row)
        if given:  # of a multiple-choice task: the answer is the choice, beside the log-likelihood of each
            each = ", ".join(f"{choice.letter} {choice.loglikelihood:.2f}" for choice in given)
            (chosen, *tied), target = _chosen(given, metric), _target(given, row.get("target", ""))
            answer = f"{chosen.shown} ({each})"
            parsed = None if tied else chosen.letter
        else:
            answer, parsed, target = _first(row["resps"]), _first(row["filtered_resps"]), str(row.get("target", ""))
        of = _of_perplexity(row, metric)
        sent = [part for request in _requests(row) for part in request if not isinstance(part, dict)]
        items.append(ResultItem(
            loglikelihood=of and of[0], units=of[1] if of else 0,
            key=str(row["doc_hash"]), question=_question(row), target=target, answer=answer,
            # The hash that lm-eval writes is of the first request alone.
            prompt_hash=f"{row['prompt_hash']}{prompt_hash(json.dumps(sent)) if sent else ''}",
            characters=None if given or of else len(_first(row["resps"])),
            parsed=None if parsed == _INVALID else parsed, score=_score(row, metric),
        ))  # fmt: skip
    return tuple(items)


def _first(responses: Any) -> str:
    """Return the first response of a document; all of them, as JSON, where there are several."""
    while isinstance(responses, list) and len(responses) == 1:
        responses = responses[0]
    return responses if isinstance(responses, str) else json.dumps(responses, ensure_ascii=False)


_QUESTION = ("question", "query", "problem", "input", "prompt", "goal", "ctx", "sentence", "text")
_SHOWN = 300


class _Choice(NamedTuple):
    """One choice of a question: its letter, its text, and the log-likelihood that the model gives it."""

    letter: str
    text: str
    loglikelihood: float

    @property
    def shown(self) -> str:
        """The letter, with the text where it adds to it."""
        return self.letter if self.text in (self.letter, "") else f"{self.letter}: {self.text}"


def _question(row: Mapping[str, Any]) -> str:
    """Return the question of a sample: that of its document, or else the end of its prompt; empty if neither is there."""
    doc = row.get("doc")
    named = [doc[name] for name in _QUESTION if isinstance(doc.get(name), str)] if isinstance(doc, dict) else []
    if named:
        return one_line(named[0], _SHOWN)
    first = next(iter(_requests(row)), ())
    return one_line(str(first[0])[-_SHOWN:], _SHOWN) if first else ""


def _choices(row: Mapping[str, Any]) -> tuple[_Choice, ...]:
    """List the choices of a sample, in order; empty if it is not of a multiple-choice task."""
    responses = row.get("resps")
    scores = [_loglikelihood(response) for response in responses] if isinstance(responses, list) else []
    if len(scores) < 2 or any(map(math.isnan, scores)):
        return ()
    given = [str(request[1]).strip() if len(request) > 1 else "" for request in _requests(row)]
    named = zip_longest(given[: len(scores)], scores, fillvalue="")
    return tuple(_Choice(chr(ord("A") + at % 26), str(text), float(score)) for at, (text, score) in enumerate(named))


def _chosen(given: Sequence[_Choice], metric: str) -> list[_Choice]:
    """Return the choice that the model takes by a metric: `acc_norm` divides by the length of the text.

    Of several, as of a server that returns no likelihoods, the model took none, and lm-eval takes the first.
    """
    by_length = metric == "acc_norm" and all(choice.text for choice in given)
    each = [choice.loglikelihood / (len(choice.text) if by_length else 1) for choice in given]
    return [choice for choice, value in zip(given, each, strict=True) if value == max(each)]


def _target(given: Sequence[_Choice], written: object) -> str:
    """Return the right choice with its letter: `written` is its index or its text."""
    text = str(written).strip()
    if text.isdigit() and int(text) < len(given) and all(choice.text != text for choice in given):
        return given[int(text)].shown
    return next((choice.shown for choice in given if text and choice.text == text), text)


def _requests(row: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """List the arguments of each request: the context and the continuation; lm-eval 0.4.5 and later name them."""
    arguments = row.get("arguments")
    given = arguments.values() if isinstance(arguments, dict) else arguments if isinstance(arguments, list) else ()
    return [
        tuple(item.values() if isinstance(item, dict) else item) for item in given if isinstance(item, (dict, list))
    ]


def _loglikelihood(response: Any) -> float:
    """Return the first number of a response, however deep it lies in lists; NaN if it is none."""
    while isinstance(response, list) and response:
        response = response[0]
    try:
        return float(response)
    except (TypeError, ValueError):
        return math.nan


# The printed table (0.4.2 to 0.4.13, ``lm_eval.utils.make_table``). A line with the model and its settings stands above each, so a
# file may hold several runs. One task has a row for each filter and metric; a cell that is empty repeats the one above.
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
# Places of the columns in a row, and of the arrow that says which way is better; the sign of the error is no column.
_AT = (0, 1, 2, 3, 4, 6, 8, 5)
_SCORE = re.compile(r"-?\d+(?:\.\d+)?")
_NO_SAMPLES = (
    "printed scores have no samples, so they are compared unpaired: run lm-eval with --log_samples to pair them"
)


def is_table(source: SourceFile) -> bool:
    """Recognise a file by the heading of a table in its first lines."""
    return any(_HEAD.fullmatch(line.strip()) for line in source.head_text.splitlines())


class PrintedTables:
    """The tables of a text, a line at a time.

    Attributes:
        runs: the rows of each run by its line: those of `_COLUMNS`, the arrow, and the place.
    """

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[tuple[str, ...], Excerpt]]] = {}
        self._run, self._above = "an unnamed run", ("",) * len(_COLUMNS)

    def read(self, number: int, line: str) -> bool:
        """Read a line. Returns True if it is of a table."""
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
        """Yield a table of each run."""
        for run, rows in self.runs.items():
            shown = tuple(row[: len(_COLUMNS)] for row, _ in rows)
            yield FactTable(id="scores", title=one_line(run, 300), columns=_COLUMNS, rows=shown, note=_NO_SAMPLES)

    def shares(self) -> Iterator[tuple[str, str, float, Excerpt]]:
        """Yield the shares of right answers: run, task, value and place."""
        for run, (row, quoted) in ((run, each) for run, rows in self.runs.items() for each in rows):
            task, metric, score = row[0], row[4], float(row[5])
            if metric in _SHARES and 0 <= score <= 1:
                yield run, task, score, quoted


def table_results(source: SourceFile, wanted: str) -> ReadResults:
    """Read the scores of all runs of the file: a row each, by all columns."""
    reading, printed = ReadResults(unit="line", notes=[_NO_SAMPLES]), PrintedTables()
    for number, line in source.lines():
        reading.read += printed.read(number, line)
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
    """Return the columns of a row with a score; None for any other line."""
    cells = [cell.strip() for cell in text.strip("|").split("|")]
    if not text.startswith("|") or len(cells) != _AT[-2] + 1 or not _SCORE.fullmatch(cells[6]):
        return None
    row = tuple(cells[place] for place in _AT)
    return tuple(cell or before for cell, before in zip(row[:2], above, strict=False)) + row[2:]


READER = results_reader("lm-eval", "lm-eval results", _recognises, _results, extend=_with_scores)
