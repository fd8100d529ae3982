"""A common form for evaluation tools' results: the answers to one task."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.ingest.asked import Asked
from assay.harness.ingest.result import CitedFinding, Excerpt, Fact, FactTable, FileDocument, FileRead, FormatReader
from assay.harness.ingest.source_file import SourceFile
from assay.harness.reading import whole_file
from assay.harness.schema import Part
from assay.harness.text import did_you_mean, one_line
from assay.harness.verdict import serious

# Most unread units quoted, and most rows in a table.
_MOST_EXCERPTS, _ROWS_SHOWN = 5, 50
MOST_UNPARSED = 0.05
"""Largest share of unparsed answers without a warning. Above it, a comparison does not reach a verdict."""
# Words in a score's name that say which way is better (lm-eval's ``api/metrics.py``, inspect_ai's ``scorer/_metrics``).
_HIGHER = frozenset(
    "acc accuracy exact em correct f1 precision recall mcc bleu sacrebleu chrf rouge rouge1 rouge2 rougel rougelsum pass "
    "likelihood loglikelihood".split()
)
_LOWER = frozenset(
    "perplexity ppl nll loss error errors wer cer ter brier mae mse rmse bits bpb hallucination hallucinations".split()
)


class ResultItem(Part):
    """One answer to one document. Texts come from outside: never trust them."""

    key: str = Field(description="the document's key within its task: its hash or its id")
    prompt_hash: str = Field("", description="hash of the prompt as sent, if the tool records it")
    turns: tuple[tuple[bool, str], ...] = Field((), description="whether asked, and hash, of each later message")
    question: str = Field("", description="the question, in one line, if the tool records it")
    target: str = Field("", description="the expected answer")
    answer: str = Field("", description="the text that the model wrote")
    parsed: str | None = Field(None, description="the tool's extracted answer; null if it or the answer is blank")
    score: float | None = Field(None, description="1 right, 0 wrong, or the tool's other value; null if not scored")
    loglikelihood: float | None = Field(None, description="of the document, if its score is a perplexity; else null")
    units: int = Field(0, description="words, bytes or documents behind the perplexity")
    tokens: int | None = Field(None, description="length of the answer; null if the tool does not record it")
    characters: int | None = Field(None, description="length of the model's text; null for multiple choice")
    finish: str = Field(
        "", description='why the answer ended: "stop", "length", "abort", or an empty string if not recorded'
    )
    repeat: int = Field(0, description="0 for the first answer to a document, then 1, 2, ...")

    @field_validator("target", "answer", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    @field_validator("score", "tokens", mode="before")
    @classmethod
    def _finite(cls, value: Any) -> float | None:
        return number(value)

    @field_validator("parsed")
    @classmethod
    def _nothing_is_taken_from_nothing(cls, parsed: str | None, info: ValidationInfo) -> str | None:
        return parsed if parsed and parsed.strip() and info.data["answer"].strip() else None

    @property
    def scored(self) -> bool:
        """True if it has a score, or a log-likelihood."""
        return self.score is not None or self.loglikelihood is not None


class StatedScore(Part):
    """A total score that the tool itself computed."""

    value: float
    error: float | None = Field(None, description="standard error; null if the tool does not state it")
    questions: int = Field(0, description="number of questions; 0 if the tool does not state it")


class ResultSet(Part):
    """One score of one task, from one tool. Unknown fields are empty; a comparison never treats them as equal."""

    tool: str
    version: str = ""
    run: str = Field("", description="the run, if the file has several")
    task: str
    metric: str = Field("", description='name of the score, such as "exact_match,strict-match"')
    asked: Asked = Field(default_factory=Asked, description="task, settings and server")
    settings: dict[str, str] = Field({}, description="other facts that the tool states about the run, for people")
    adaptive: bool = Field(False, description="whether the tool stopped asking because of the answers")
    higher_is_better: bool | None = Field(None, description="null if neither the tool nor a name says")
    stated: StatedScore | None = Field(None, description="the total that the tool itself computed")
    items: tuple[ResultItem, ...] = ()

    @property
    def model(self) -> str:
        """The tool's name for the model."""
        return self.asked.served.get("model", "")

    @property
    def top(self) -> int:
        """The best possible score of a document: 1, or 100 if some scores exceed 1, as for ROUGE."""
        return 100 if max(self.scores, default=0) > 1 else 1

    @property
    def accuracy(self) -> float | None:
        """Mean score of the scored items, or their perplexity."""
        if self.scores:
            return sum(self.scores) / len(self.scores)
        known = [(item.loglikelihood, item.units) for item in self.items if item.loglikelihood is not None]
        return perplexity(*map(sum, zip(*known, strict=True))) if known else None

    @property
    def scores(self) -> list[float]:
        """Scores of the scored items."""
        return [item.score for item in self.items if item.score is not None]

    @property
    def name(self) -> str:
        """The task with its metric, such as "gsm8k (exact_match,strict-match)"."""
        return f"{self.task} ({self.metric})" if self.metric else self.task

    @property
    def score(self) -> StatedScore | None:
        """The items' mean and standard error, or the stated score if there are no items."""
        n = len(self.scores)
        if n < 2:
            return self.stated
        return StatedScore(
            value=statistics.mean(self.scores), error=statistics.stdev(self.scores) / n**0.5, questions=n
        )

    def incomplete(self) -> CitedFinding | None:
        """Find that the score covers fewer answers than requested, or return None if it covers all and each was parsed.

        Failed, skipped and unparsed answers may be right or wrong, so the true score lies between two bounds.
        """
        lacking = {
            "failed": sum(item.score is None for item in self.items),
            "skipped": max(0, self.asked.answers - len(self.items)),
            "unparsed": sum(item.parsed is None for item in self.items if item.score == 0),
        }
        if not self.scores or not any(lacking.values()):
            return None
        of = len(self.items) + lacking["skipped"]
        named = ", ".join(f"{count:,} of {of:,} {what}" for what, count in lacking.items() if count)
        low, high = sum(self.scores) / of, (sum(self.scores) + self.top * sum(lacking.values())) / of
        serious = lacking["failed"] or lacking["skipped"] or lacking["unparsed"] > MOST_UNPARSED * of
        return CitedFinding(
            id="score-incomplete", title="Score covers fewer answers than requested", severity="warning" if serious else "info",
            where=self.name, reproduce="",
            diagnosis=f"{self.accuracy:.4f} of {len(self.scores):,}; {named}: between {low:.4f} and {high:.4f} of {of:,}.",
        )  # fmt: skip


@dataclass
class ReadResults:
    """A reader's results from one file, counted unit by unit.

    Attributes:
        source: the file.
        unit: the counted unit.
        read: number of units understood.
        unread: number of other units, which `refuse` counts and quotes.
        notes: caveats that a person must know to trust the numbers.
        findings: faults that the file shows by itself.
    """

    source: SourceFile
    unit: str = "record"
    sets: list[ResultSet] = field(default_factory=list)
    read: int = 0
    unread: int = 0
    excerpts: list[Excerpt] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    findings: list[CitedFinding] = field(default_factory=list)

    @property
    def scores(self) -> dict[str, ResultSet]:
        """Its scores, by task and metric."""
        return {result_set.name: result_set for result_set in self.sets}

    def refuse(self, number: int, text: str) -> None:
        """Count a unit that was not understood. `number` is its line, or its position from 1."""
        self.unread += 1
        if len(self.excerpts) < _MOST_EXCERPTS:
            self.excerpts.append(Excerpt(first=number, last=number, text=one_line(text, 200)))

    def file(self, format: str, title: str) -> FileRead:
        """Describe how much of the file was understood, under a format's id and title."""
        return FileRead.of(self.source, format, title, self.read, self.unread, self.unit, self.excerpts, self.notes)

    def compared(self, reader: FormatReader) -> FileRead:
        """Describe the file as one side of a comparison: the tool, the model, and the number of answers behind a score."""
        about = next((f"{of.tool} {of.version} {of.model}".split() for of in self.sets), [reader.title])
        file = self.file(reader.id, " ".join(about))
        fewer = [
            f"{made.where}: {made.diagnosis}" for made in serious(filter(None, map(ResultSet.incomplete, self.sets)))
        ]
        return file.model_copy(update={"notes": (*file.notes, *fewer)})


def perplexity(loglikelihood: float, units: float) -> float:
    """Compute the perplexity of texts with `units` units in total. On overflow it is 1e300."""
    return math.exp(min(-loglikelihood / units, math.log(1e300)))


def better_if_higher(*names: str) -> bool | None:
    """Return True if a score is better when higher, judging by words in its names, or None if they say neither or both."""
    words = {word for name in names for word in re.split(r"[^a-z0-9]+", name.lower())}
    higher, lower = not words.isdisjoint(_HIGHER), not words.isdisjoint(_LOWER)
    return None if higher == lower else higher


def number(value: object) -> float | None:
    """Return a finite number, or None for anything else, such as "N/A"."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def at(document: Any, *keys: str) -> Any:
    """Return the JSON value under nested keys, or None if a key is missing."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def of_metric(path: Path, what: str, known: Sequence[str], wanted: str) -> UsageError:
    """Make the error for a --metric that a file does not have."""
    return UsageError(
        f"{path} has no {what} {wanted!r}.",
        f"one of {', '.join(known)}" if known else "a file with scores of its samples",
        did_you_mean(wanted, known) or "give another --metric",
    )


def json_object(data: bytes | str, where: str) -> dict[str, Any]:
    """Parse a JSON object. NaN is allowed, because some tools write it.

    Raises:
        EvidenceError: the JSON is damaged, or is not an object.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{where} is not JSON: {error}.", "an undamaged file", "copy it again") from None
    if not isinstance(document, dict):
        raise EvidenceError(f"{where} is not an object.", "an undamaged file", "copy it again")
    return document


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file, or return an empty one if the file does not exist.

    Raises:
        EvidenceError: the JSON is damaged, or is not an object.
    """
    return json_object(whole_file(path), str(path)) if path.is_file() else {}


def warning(id: str, title: str, where: str, diagnosis: str) -> CitedFinding:
    """Make a finding from a tool's own doubt about its scores. `compare` then cannot pass."""
    return CitedFinding(id=id, title=title, severity="warning", where=where, diagnosis=diagnosis, reproduce="")


def cached(where: str, which: str) -> CitedFinding:
    """Find that answers came from a cache."""
    says = f"{which} from a cache, so another server may have computed them."
    return warning("answers-cached", "Answers from a cache", where, says)


def results_reader(
    id: str,
    title: str,
    recognises: Callable[[SourceFile], bool],
    results: Callable[[SourceFile, str], ReadResults],
    *,
    extend: Callable[[SourceFile, FileDocument], FileDocument] = lambda _, document: document,
) -> FormatReader:
    """Make a reader whose document is built from its results. `extend` adds content specific to the format."""

    def read(source: SourceFile) -> FileDocument:
        reading = results(source, "")
        answered = [each for each in reading.sets if each.items]
        document = FileDocument(
            file=reading.file(id, title),
            facts=tuple(fact for each in {each.task: each for each in reading.sets}.values() for fact in _facts(each)),
            tables=(_table(answered),) if answered else (),
            findings=(*reading.findings, *filter(None, (each.incomplete() for each in answered))),
        )
        return extend(source, document)

    return FormatReader(id, title, recognises, read, results)


def _facts(result_set: ResultSet) -> list[Fact]:
    asked = result_set.asked
    tokenizer = {"tokenizer": asked.task.get("tokenizer", "")}
    settings = asked.served | tokenizer | asked.generation | asked.limits | result_set.settings
    text = ", ".join(f"{name} {value}" for name, value in settings.items() if value)
    title = f"{result_set.tool} {result_set.version}, {result_set.task}"
    return [Fact(id=f"settings-of-{result_set.task}", title=title, text=text)] if text else []


def _table(sets: list[ResultSet]) -> FactTable:
    rows = [
        (
            each.task, each.metric, f"{sum(item.scored for item in each.items):,}",
            "" if each.accuracy is None else f"{each.accuracy:.4f}", "" if each.asked.shots is None else str(each.asked.shots),
            f"{sum(item.parsed is None for item in each.items):,}",
        )
        for each in sets[:_ROWS_SHOWN]
    ]  # fmt: skip
    columns = ("task", "metric", "scored", "mean score", "shots", "unparsed")
    note = f"The first {_ROWS_SHOWN} of {len(sets)} tasks." if len(sets) > _ROWS_SHOWN else ""
    return FactTable(id="results", title="Results", columns=columns, rows=tuple(rows), note=note)
