"""A result in a notebook: its page, in a separate frame."""

from __future__ import annotations

from html import escape
from importlib import import_module

from pydantic import BaseModel

from assay.reports.page import to_html

# By class: the module of this room and the function that makes its document.
_DOCUMENTS = {
    "KernelResult": ("check", "check_document"),
    "Report": ("run_report", "run_document"),
    "InvarianceResult": ("invariance", "invariance_document"),
    "Comparison": ("compare", "compare_document"),
    "IngestResult": ("ingest", "ingest_document"),
    "SweepResult": ("sweep", "sweep_document"),
}


def page(result: BaseModel) -> str | None:
    """Return the page of a result as a frame that isolates its style and script, or None if it has no page."""
    if (known := _DOCUMENTS.get(type(result).__name__)) is None:
        return None
    module, function = known
    document = getattr(import_module(f"assay.reports.{module}"), function)(result)
    return f'<iframe srcdoc="{escape(to_html(document))}" style="width:100%;height:40rem;border:0"></iframe>'
