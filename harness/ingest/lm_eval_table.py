"""The table that lm-eval prints (0.4.2 to 0.4.13, ``lm_eval.utils.make_table``): scores without samples.

A line with the model and its settings stands above each table, so a file may hold several runs. A score is known by all columns of
its row: one task has a row for each filter and metric. A cell that is empty repeats the one above.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from assay.harness.ingest.guessing import below_guessing
from assay.harness.ingest.lm_eval import SHARES
from assay.harness.ingest.result import CitedFinding, Excerpt, FactTable, FileDocument, FileRead, FormatReader
from assay.harness.ingest.source_file import SourceFile
from assay.harness.text import one_line

# vllm (pretrained=org/model,add_bos_token=true), gen_kwargs: (None), limit: 250.0, num_fewshot: 5, batch_size: auto
_RUN = re.compile(r"(?P<run>[\w-]+ \(.*\), gen_kwargs: .*, limit: .*, num_fewshot: .*)")
# |Tasks|Version|     Filter     |n-shot|  Metric   |   |Value|   |Stderr|
_HEAD = re.compile(
    r"\| *(?:Tasks|Groups) *\| *Version *\| *Filter *\| *n-shot *\| *Metric *\|.*\| *Value *\|.*\| *Stderr *\|"
)
_RULE = re.compile(r"\|(?: ?:?-+:? ?\|)+")
_COLUMNS = ("task", "version", "filter", "n-shot", "metric", "score", "stderr")
_AT = (0, 1, 2, 3, 4, 6, 8)
"""Places of the columns in a row: between them are the arrow that says which way is better, and the sign of the error."""


@dataclass
class _Printed:
    """What a file prints: the rows of each run, and the lines that belong to no table."""

    runs: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    findings: list[CitedFinding] = field(default_factory=list)
    unread: list[Excerpt] = field(default_factory=list)
    read: int = 0


def _recognises(source: SourceFile) -> bool:
    """Recognise a file by the heading of a table in its first lines."""
    return any(_HEAD.fullmatch(line.strip()) for line in source.head_text.splitlines())


def _read(source: SourceFile) -> FileDocument:
    """Read all tables of the file."""
    printed, run, above = _Printed(), "an unnamed run", ("",) * len(_COLUMNS)
    for number, line in source.lines():
        text = line.strip()
        named = _RUN.fullmatch(text)
        if named:
            run = f"{named['run']} (line {number})"
        row = _row(text, above)
        if row:
            above = row
            printed.runs.setdefault(run, []).append(row)
            printed.findings += _below_guessing(row, number, text)
        if row or named or not text or _RULE.fullmatch(text) or _HEAD.fullmatch(text):
            printed.read += 1
        else:
            printed.unread.append(Excerpt(first=number, last=number, text=one_line(text)))
    file = FileRead.of(
        source, READER.id, READER.title, printed.read, len(printed.unread), excerpts=printed.unread[:5],
        notes=("printed scores have no samples: run lm-eval with --log_samples to compare them",),
    )  # fmt: skip
    tables = tuple(
        FactTable(id="scores", title=one_line(run, 300), columns=_COLUMNS, rows=tuple(rows))
        for run, rows in printed.runs.items()
    )
    return FileDocument(file=file, tables=tables, findings=tuple(printed.findings))


def _row(text: str, above: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the columns of a row with a score; None for any other line."""
    cells = [cell.strip() for cell in text.strip("|").split("|")]
    if not text.startswith("|") or len(cells) != _AT[-1] + 1 or not re.fullmatch(r"-?\d+(?:\.\d+)?", cells[6]):
        return None
    row = tuple(cells[place] for place in _AT)
    return tuple(cell or before for cell, before in zip(row[:2], above, strict=False)) + row[2:]


def _below_guessing(row: tuple[str, ...], number: int, text: str) -> list[CitedFinding]:
    """Look for a score below guessing. Of a task in a group, which has a dash before its name, one may be so by chance."""
    task, metric, score = row[0], row[4], float(row[5])
    if task.startswith("-") or metric not in SHARES or not 0 <= score <= 1:
        return []
    cited = (Excerpt(first=number, last=number, text=one_line(text)),)
    made = below_guessing(task, score, 0, task, (), cited)
    return [made] if made else []


READER = FormatReader("lm-eval-table", "lm-eval's printed table", _recognises, _read, compared=False)
