"""``assay explain``: every id that a finding may have is explained, and listed in docs/bugs.md."""

from __future__ import annotations

import ast
import importlib
import io
import re
from pathlib import Path
from types import ModuleType

from rich.console import Console

from assay.harness.attention.bugs.family import FAMILY
from assay.harness.judge import layer_verdict
from assay.harness.verdict import OPERATOR
from assay.reports import junit, markdown, page, terminal
from assay.reports.explain import explanation, titles
from assay.reports.run_report import run_document

ROOT = Path(__file__).parents[2]
ROOMS = ("checks", "drivers", "judge", "localize", "readout", "run")


def known() -> list[str]:
    return [id_ for kind in titles().values() for id_ in kind]


def given_ids() -> set[str]:
    """Every id that the code gives to a finding as a constant."""
    found: set[str] = set()
    for path in (path for room in ROOMS for path in (ROOT / "harness" / room).rglob("*.py")):
        module = f"assay.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}"
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "Finding":
                [id_] = [keyword.value for keyword in call.keywords if keyword.arg == "id"]
                found |= {ast.literal_eval(one) for one in ast.walk(id_) if isinstance(one, ast.Constant) and one.value}
                names = {one.id for one in ast.walk(id_) if isinstance(one, ast.Name) and one.id.isupper()}
                found |= {getattr(importlib.import_module(module), name) for name in names}
    return found


def test_every_finding_is_explained_and_listed() -> None:
    ids = given_ids()
    assert {"accuracy", "contract-broken", "unexplained", "noise-missing"} <= ids
    ids |= {layer_verdict.OUT_OF_BOUNDS, layer_verdict.GAIN, layer_verdict.TOO_QUIET, layer_verdict.WRONG_REFERENCE, OPERATOR}
    ids |= {bug.id for bug in FAMILY}
    assert not ids - set(known())
    listed = re.findall(r"`([^`\s]+)`", (ROOT / "docs" / "bugs.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(known()), "docs/bugs.md lists each of them once"


def test_a_known_bug_is_explained_by_its_record() -> None:
    for bug in FAMILY:
        text = explanation(bug.id)
        assert text.startswith(f"{bug.id}: {bug.title}\n")
        assert bug.measured in text
        assert ("# <--" in text) == (bug.code is not None)
    text = explanation("mask-top-left")
    assert ".tril()  # <--\n" in text
    assert ".tril(keys - new)\n" in text
    assert "https://github.com/thu-ml/SageAttention/issues/131" in text


def test_findings_name_their_explanation_in_every_medium(examples: ModuleType) -> None:
    report = examples.regression()
    [finding] = report.findings
    assert finding.id in known()
    shown = io.StringIO()
    document = run_document(report)
    terminal.render(document, Console(file=shown, width=100))
    for text in (shown.getvalue(), markdown.to_markdown(document), page.to_html(document), junit.to_junit(document)):
        assert text.count(f"assay explain {finding.id}") == 1
