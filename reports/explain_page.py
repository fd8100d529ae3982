"""The page of a hypothesis or a finding as HTML."""

from __future__ import annotations

from pathlib import Path

from assay.harness.explain.pages import Page
from assay.harness.explain.snippets import FORM_WORDS
from assay.harness.files import write_whole
from assay.reports import explain_text
from assay.reports.page import to_page


def write_explanation(page: Page, path: Path) -> None:
    """Write the page.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(path, to_html(page))


def to_html(page: Page) -> str:
    """One self-contained page."""
    code = page.code
    return to_page(
        "explain.html.jinja",
        None,
        page=page,
        effect=explain_text.effect(page),
        shapes="" if code is None else FORM_WORDS[code.form],
        wrong="" if code is None else explain_text.marked(code.wrong, code.right),
        reports=[(explain_text.short(address), address) for address in page.reports],
        no_report=explain_text.NO_REPORT,
    )
