"""The data of `assay.reports.document.Records`: each word once, so that ten thousand rows are small."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar
from urllib.parse import quote

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from assay.harness.text import visible
from assay.reports.document import Records

_Word = TypeVar("_Word", bound=Hashable)


def records_data(block: Records) -> Markup:
    """Return the rows as JSON for the page's script: of each column its words, and by row the index of its word.

    A link often holds the row's last word: then only what stands around it is written, once.
    """
    columns = [_indexed([visible(row[at]) for row in block.rows]) for at in range(len(block.columns))]
    around = []
    for row, link in zip(block.rows, block.links, strict=True):
        before, last, after = link.partition(quote(row[-1]))
        around.append((before, after) if last else ("", "") if not link else (link, None))
    kinds, links = _indexed(around)
    data = {
        "filters": list(block.filters), "verdict": block.verdict, "columns": list(block.columns),
        "words": [words for words, _ in columns], "rows": [at for _, at in columns], "around": kinds, "links": links,
    }  # fmt: skip
    return htmlsafe_json_dumps(data, separators=(",", ":"))


def _indexed(words: Sequence[_Word]) -> tuple[list[_Word], list[int]]:
    """Return the different words, and the index of each among them."""
    known: dict[_Word, int] = {}
    indices = [known.setdefault(word, len(known)) for word in words]
    return list(known), indices
