"""simple-evals: the HTML report, which has the answers, and the JSON beside it, which has the score alone.

Read in openai/simple-evals (``common.py``, ``simple_evals.py``) and in SGLang 0.5.23 (``test/simple_eval_common.py``,
``test/run_eval.py``), which write the same: for each example the prompt's messages, the sampled message, the correct answer, the
extracted one and the score, all escaped. Neither the settings nor the version are recorded; the name of the file has the evaluation
and the model, ``<eval>_<model>.html``.
"""

from __future__ import annotations

import json
import math
import statistics
from html.parser import HTMLParser
from pathlib import Path

from assay.evals.questions import prompt_hash
from assay.harness.ingest.asked import Asked
from assay.harness.ingest.result_set import (
    ReadResults,
    ResultItem,
    ResultSet,
    StatedScore,
    read_object,
    results_reader,
)
from assay.harness.ingest.source_file import SourceFile
from assay.harness.reading import whole_file

_RESULTS = {"Correct Answer:": "target", "Extracted Answer:": "parsed", "Score:": "score"}
# Extracted answers that stand for none; the number is INVALID of SGLang's GSM8K (``test/simple_eval_mixed_prefix_gsm8k.py``).
_NOTHING = ("None", "", "-9999999")


def _recognises(source: SourceFile) -> bool:
    """Recognise a report with its headings, or a JSON object of a score and its standard deviation."""
    head = source.head_text
    if "<h1>Examples</h1>" in head and "<h3>Prompt conversation</h3>" in head:
        return True
    if not head.lstrip().startswith("{") or len(source.head) > 60_000:
        return False
    try:
        document = json.loads(head)
    except ValueError:
        return False
    return isinstance(document, dict) and "score" in document and "score:std" in document


def _results(source: SourceFile, metric: str) -> ReadResults:
    """Read the evaluation of the file. Of the JSON, the report beside it is read if there is one."""
    path = source.path
    reading = ReadResults(unit="example")
    report = path if path.suffix == ".html" else path.with_suffix(".html")
    scores = path if path.suffix == ".json" else path.with_suffix(".json")
    written = read_object(scores)
    scored = [score] if isinstance(score := written.get("score"), (int, float)) else []
    items: list[ResultItem] = []
    if not report.is_file():
        reading.notes.append(
            f"the answers are in {report.name}, which is not beside {path.name}: only the score is known"
        )
    else:
        items, heading = _examples(report, reading)
        scored += heading
        _check_total(written, items, reading)
    mean = statistics.mean(given) if (given := [item.score for item in items if item.score is not None]) else 0.0
    name, _, model = path.stem.partition("_")
    reading.sets.append(
        ResultSet(
            tool="simple-evals",
            task=name,
            metric="score",
            higher_is_better=True,
            asked=Asked.of(model),
            settings={key: f"{value}" for key, value in written.items()},
            # The JSON and the report's heading state it: the one that its answers contradict.
            stated=StatedScore(value=max(scored, key=lambda value: abs(value - mean))) if scored else None,
            items=tuple(items),
        )
    )
    return reading


def _check_total(written: dict[str, object], items: list[ResultItem], reading: ReadResults) -> None:
    """Say so where the answers do not add up to the score that was written."""
    score, scores = written.get("score"), [item.score for item in items if item.score is not None]
    if isinstance(score, (int, float)) and scores and abs(sum(scores) / len(scores) - score) > 1e-6:
        reading.notes.append(
            f"the examples have a mean score of {sum(scores) / len(scores):.4f}, and the JSON states {score:.4f}"
        )


def _examples(report: Path, reading: ReadResults) -> tuple[list[ResultItem], list[float]]:
    """Return the answers of a report, and the score in its table of metrics, if it is there."""
    parser = _Report()
    parser.feed(whole_file(report).decode(errors="replace"))
    items = []
    for number, example in enumerate(parser.examples, 1):
        if example.keys() >= {"prompt", "answer", "target", "parsed", "score"}:
            items.append(_item(example))
            reading.read += 1
        else:
            reading.refuse(number, f"example {number} has only {', '.join(sorted(example)) or 'nothing'}")
    cells = dict(zip(parser.cells[::2], parser.cells[1::2], strict=False))
    try:
        return items, [float(cells["Score"])]
    except (KeyError, ValueError):
        return items, []


def _item(example: dict[str, str]) -> ResultItem:
    try:
        score = float({"True": "1", "False": "0"}.get(example["score"], example["score"]))
    except ValueError:
        score = None
    return ResultItem(
        key=prompt_hash(example["prompt"] + "\0" + example["target"]),
        prompt_hash=prompt_hash(example["prompt"]),
        target=example["target"],
        answer=example["answer"],
        parsed=None if example["parsed"] in _NOTHING else example["parsed"],
        score=score if score is not None and math.isfinite(score) else None,
        characters=len(example["answer"]),
    )


class _Report(HTMLParser):
    """Collects the examples of a report: headings open parts, ``<pre>`` has a message, ``<p>`` a result; ``<hr>`` is the end.

    The cells before them are of the table of metrics.
    """

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.examples: list[dict[str, str]] = []
        self.cells: list[str] = []
        self._now: dict[str, str] | None = None
        self._part = self._tag = self._text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("h3", "pre", "p", "td"):
            self._tag, self._text = tag, ""
        elif tag == "hr":
            self._now = None

    def handle_data(self, data: str) -> None:
        if self._tag:
            self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag != self._tag:
            return
        if tag == "h3":
            self._part = self._text.strip()
            if self._part == "Prompt conversation":
                self._now = {}
                self.examples.append(self._now)
        elif tag == "td":
            self.cells.append(self._text.strip())
        elif self._now is not None:
            self._keep(tag)
        self._tag = ""

    def _keep(self, tag: str) -> None:
        assert self._now is not None
        if tag == "pre" and self._part == "Prompt conversation":
            self._now["prompt"] = self._now.get("prompt", "") + self._text + "\n"
        elif tag == "pre" and self._part == "Sampled message":
            self._now["answer"] = self._text
        elif tag == "p" and self._part == "Results":
            for start, name in _RESULTS.items():
                if self._text.startswith(start):
                    self._now[name] = self._text[len(start) :].strip()


READER = results_reader("simple-evals", "simple-evals results", _recognises, _results)
