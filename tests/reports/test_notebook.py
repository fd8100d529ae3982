from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from types import ModuleType

import assay
from assay.harness.evidence.kernel_result import KernelResult
from assay.reports.page import to_html
from assay.reports.run_report import run_document
from assay.reports.write import write_reports

DATA = Path(__file__).parents[1] / "data"


def test_a_notebook_shows_the_page(examples: ModuleType, tmp_path: Path) -> None:
    report = examples.BY_VERDICT["regression"]()
    write_reports(report, tmp_path)
    loaded = assay.Report.load(tmp_path)
    [page] = re.findall(r'srcdoc="([^"]*)"', loaded._repr_html_() or "")
    assert unescape(page) == to_html(run_document(report))


def test_each_result_of_the_public_api_has_a_page_and_a_short_repr() -> None:
    files = str(DATA / "results/lm_eval_a"), str(DATA / "results/lm_eval_b")
    results = assay.ingest(files[0]), assay.compare(*files), KernelResult(kernel="mine:forward", missing=("calls",))
    for result in results:
        assert "<title>" in unescape(result._repr_html_() or "")
        assert repr(result).startswith(f"<{type(result).__name__} {result.verdict}: ")
        assert len(repr(result)) < 300
