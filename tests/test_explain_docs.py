"""docs/explain is what tools/explain_pages.py makes, and `assay explain` prints and draws the same pages."""

from __future__ import annotations

import importlib.util
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from assay.harness import cli
from assay.harness.explain.pages import page, titles
from assay.reports import junit, markdown, terminal
from assay.reports import page as pages
from assay.reports.run_report import run_document

ROOT = Path(__file__).parent.parent


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("explain_pages", ROOT / "tools" / "explain_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_docs_are_up_to_date() -> None:
    pages = tool().pages()
    assert {path.name for path in (ROOT / "docs" / "explain").iterdir()} == set(pages)
    for name, text in pages.items():
        assert (ROOT / "docs" / "explain" / name).read_text(encoding="utf-8") == text, "run tools/explain_pages.py"
    for id_ in titles():
        assert any(f"\n## {id_}\n" in text for text in pages.values())


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["assay", "explain", *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return int(exit_.value.code or 0)


def test_the_list_has_every_id(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch) == 0
    out = capsys.readouterr().out
    assert [id_ for id_ in titles() if not re.search(rf"^  {id_} ", out, re.MULTILINE)] == []


def test_a_page_on_a_terminal_and_as_html(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    html = tmp_path / "page.html"
    assert call(monkeypatch, "mask-top-left", "--html", str(html)) == 0
    out = capsys.readouterr().out
    assert "#ooooooooo" in out
    assert ".tril()  # <--" in out
    assert ".tril(keys - new)\n" in out
    assert "https://github.com/thu-ml/SageAttention/issues/131" in out
    assert "assay check assay.harness.explain.broken:mask_top_left" in out
    text = html.read_text(encoding="utf-8")
    for part in ("<svg", ".tril()  # &lt;--", "thu-ml/SageAttention#131", page("mask-top-left").about):
        assert part in text
    assert call(monkeypatch, "--html", str(html)) == 2
    assert call(monkeypatch, "mask-topleft") == 2
    assert "did you mean 'mask-top-left'?" in capsys.readouterr().err


def test_findings_name_their_page_everywhere(examples: ModuleType) -> None:
    report = examples.regression()
    [finding] = report.findings
    command = f"assay explain {finding.id}"
    assert finding.id in titles()
    shown = io.StringIO()
    document = run_document(report)
    terminal.render(document, Console(file=shown, width=100))
    texts = (shown.getvalue(), markdown.to_markdown(document), pages.to_html(document), junit.to_junit(document))
    for text in texts:
        assert text.count(command) == 1
