"""Reads simple-evals' HTML report, which has the answers, and the JSON next to it, which has only the score.

Sources: openai/simple-evals (``common.py``, ``simple_evals.py``) and SGLang 0.5.23 (``test/simple_eval_common.py``,
``test/run_eval.py``). Both write the same, all of it escaped: for each example, the prompt's messages, the sampled message, the
correct answer, the extracted answer and the score. They do not record settings or a version. The file name has the evaluation
and the model: ``<eval>_<model>.html``.
"""

from __future__ import annotations

import html
import json
import re
import statistics

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

# Texts in the report are escaped, so these marks never occur inside a text.
_PROMPT, _PARTS = "<h3>Prompt conversation</h3>", ("<h3>Sampled message</h3>", "<h3>Results</h3>")
_STATED = ("Correct Answer", "Extracted Answer", "Score")
_MESSAGE = re.compile("<pre>(.*?)</pre>", re.DOTALL)
_RESULT = re.compile(f"<p>({'|'.join(_STATED)}):(.*?)</p>", re.DOTALL)
_HEADING = re.compile(r"<td>(?:<b>)?Score(?:</b>)?</td>\s*<td>\s*([-+.\deE]+)\s*</td>")
# Extracted answers that mean "no answer". The number is INVALID in SGLang's GSM8K (``test/simple_eval_mixed_prefix_gsm8k.py``).
_NOTHING = ("None", "", "-9999999")


def _recognises(source: SourceFile) -> bool:
    """Recognise a report by its headings, or a JSON object with a score and its standard deviation."""
    head = source.head_text
    if "<h1>Examples</h1>" in head and _PROMPT in head:
        return True
    if not head.lstrip().startswith("{") or len(source.head) > 60_000:
        return False
    try:
        document = json.loads(head)
    except ValueError:
        return False
    return isinstance(document, dict) and "score" in document and "score:std" in document


def _results(source: SourceFile, metric: str) -> ReadResults:
    """Read the file's evaluation. For a JSON file, read the report next to it if there is one."""
    path, reading = source.path, ReadResults(source, "example")
    report = path if path.suffix == ".html" else path.with_suffix(".html")
    written = read_object(path if path.suffix == ".json" else path.with_suffix(".json"))
    scored = [score] if isinstance(score := written.get("score"), (int, float)) else []
    items: list[ResultItem] = []
    if report.is_file():
        text = whole_file(report).decode(errors="replace")
        head, *examples = text.split(_PROMPT)
        items = [item for number, part in enumerate(examples, 1) if (item := _item(number, part, reading))]
        scored += [float(heading[1])] if (heading := _HEADING.search(head)) else []
    else:
        reading.notes.append(
            f"the answers are in {report.name}, which is not next to {path.name}: only the score is known"
        )
    given = [item.score for item in items if item.score is not None]
    mean = statistics.mean(given) if given else 0.0
    if given and isinstance(score, (int, float)) and abs(mean - score) > 1e-6:
        reading.notes.append(f"the examples have a mean score of {mean:.4f}, but the JSON states {score:.4f}")
    name, _, model = path.stem.partition("_")
    reading.sets.append(ResultSet(
        tool="simple-evals", task=name, metric="score", higher_is_better=True, asked=Asked.of(model), items=tuple(items),
        settings={key: f"{value}" for key, value in written.items()},
        # The JSON and the report's heading both state a score. Keep the one that the answers contradict more.
        stated=StatedScore(value=max(scored, key=lambda value: abs(value - mean))) if scored else None,
    ))  # fmt: skip
    return reading


def _item(number: int, example: str, reading: ReadResults) -> ResultItem | None:
    """Read an example, given the text after its prompt's heading."""
    prompt, _, rest = example.partition(_PARTS[0])
    sampled, _, results = rest.partition(_PARTS[1])
    asked, answers = ([html.unescape(text) for text in _MESSAGE.findall(part)] for part in (prompt, sampled))
    stated = {name: html.unescape(text).strip() for name, text in _RESULT.findall(results)}
    if not (asked and answers and len(stated) == len(_STATED)):
        reading.refuse(number, f"example {number} lacks its prompt, its answer or a result")
        return None
    reading.read += 1
    target, parsed, score = (stated[name] for name in _STATED)
    sent = "".join(f"{text}\n" for text in asked)
    return ResultItem(
        key=prompt_hash(f"{sent}\0{target}"), prompt_hash=prompt_hash(sent), target=target, answer=answers[-1],
        parsed=None if parsed in _NOTHING else parsed, score=_score(score),
        characters=len(answers[-1]),
    )  # fmt: skip


def _score(text: str) -> float | None:
    try:
        return float({"True": "1", "False": "0"}.get(text, text))
    except ValueError:
        return None


READER = results_reader("simple-evals", "simple-evals results", _recognises, _results)
