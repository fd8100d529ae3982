"""The verdict on a trace: was all of it understood, and does it keep the rules of the state machine?"""

from __future__ import annotations

from assay.harness.ingest.result import Document
from assay.harness.verdict import Verdict, serious


def verdict_of(document: Document) -> Verdict:
    """Return the verdict: "regression" if a rule is broken, "inconclusive" if part of it was not understood or it is empty."""
    if serious(document.findings):
        return "regression"
    return "inconclusive" if document.file.unread or not document.file.read else "pass"
