from __future__ import annotations

import io
import re
from types import ModuleType

import pytest
from rich.console import Console

from assay.harness.judge.report import Report
from assay.harness.text import percent
from assay.reports.run_report import MAX_LAYERS, run_document
from assay.reports.summary import suite_line
from assay.reports.terminal import render


def _printed(report: Report, terminal: bool, width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="")
    render(
        run_document(report),
        Console(file=stream, force_terminal=terminal, width=width, legacy_windows=False),
    )
    stream.flush()
    return raw.getvalue().decode(encoding)


def _uncoloured(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("terminal", [True, False])
def test_says_verdict_why_suites_calls_and_what_is_not_met(any_report: Report, terminal: bool) -> None:
    text = re.sub(r"\s+", " ", _uncoloured(_printed(any_report, terminal)))
    wanted = [any_report.verdict.upper(), f"exit code {any_report.exit_code}", any_report.headline, *any_report.reasons]
    for suite in any_report.suites:
        wanted += [*suite.title.split(), suite.verdict, suite_line(suite).differences, suite_line(suite).measured]
    for call in (*any_report.reference.calls, *any_report.candidate.calls):
        wanted.append(call.sentence)
    for finding in any_report.findings:
        wanted += [finding.where, finding.diagnosis, f"$ {finding.reproduce}", *finding.evidence]
    for check in any_report.checks:
        if check.status == "ok":
            assert check.found not in text
        else:
            wanted += [f"{check.status}: {check.title}: {check.found}", f"to resolve: {check.settles}"]
    assert [word for word in wanted if word not in text] == []


def test_counted_calls_read_as_a_sentence(examples: ModuleType) -> None:
    text = _printed(examples.passing(), terminal=False)
    assert (
        "candidate sage_attn: extend: sageattention 1.0.6 (Triton interpreter) 412 calls; "
        "decode: torch_native 1,020 calls, delegated" in text
    )
    assert "candidate sage_attn: none counted (" in _printed(examples.error(), terminal=False)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_operator_and_picture_come_before_the_evidence(examples: ModuleType, encoding: str) -> None:
    report = examples.regression()
    found = report.findings[0]
    drawn = found.picture.model_copy(update={"call": "layer 0 … extend"})
    report = report.model_copy(update={"findings": (found.model_copy(update={"picture": drawn}),)})
    text = _printed(report, terminal=False, encoding=encoding)
    parts = [
        found.diagnosis, "observed: query i does not see keys j > i", "\n  2     ###...    #.....    #oo...\n",
        "layer 0 … extend" if encoding == "utf-8" else "layer 0 ... extend", found.evidence[0],
    ]  # fmt: skip
    assert [part for part in parts if part not in text] == []
    assert sorted(parts, key=text.index) == parts


def test_plain_lines_have_no_colour_and_are_not_wrapped(any_report: Report) -> None:
    text = _printed(any_report, terminal=False, width=40)
    assert "\x1b" not in text
    lines = text.splitlines()
    for suite in any_report.suites:
        [line] = [line for line in lines if line.strip().startswith(suite.title)]
        assert f": Verdict {suite.verdict}; " in line
    assert any(line.strip() == any_report.headline for line in lines)


@pytest.mark.parametrize("width", [60, 110, 160])
def test_a_terminal_line_is_never_wider_than_the_terminal_but_a_command(examples: ModuleType, width: int) -> None:
    lines = _uncoloured(_printed(examples.regression(), terminal=True, width=width)).splitlines()
    assert [line for line in lines if len(line) > width and "$ " not in line] == []


def test_wide_terminals_get_a_table(examples: ModuleType) -> None:
    heading = re.compile("^Suite +Verdict .* Measured .interval. +Bound", re.MULTILINE)
    assert heading.search(_uncoloured(_printed(examples.regression(), terminal=True, width=120)))
    assert not heading.search(_uncoloured(_printed(examples.regression(), terminal=True, width=70)))


@pytest.mark.parametrize("terminal", [True, False])
def test_hostile_text_cannot_steer_the_terminal(examples: ModuleType, terminal: bool) -> None:
    text = _uncoloured(_printed(examples.hostile(), terminal, width=120))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u200b\ud800-\udfff]", text)
    joined = "".join(text.split())
    assert "[boldred]markup[/boldred][/]:smile:" in joined
    assert len(text) < 60_000


def test_a_stream_that_cannot_encode_signs_gets_plain_ones(examples: ModuleType) -> None:
    text = _printed(examples.regression(), terminal=False, encoding="ascii")
    assert "x REGRESSION" in text
    assert "Bound <= 5" in text
    _printed(examples.hostile(), terminal=True, encoding="ascii")


@pytest.mark.parametrize("terminal", [True, False])
def test_the_layer_diff_is_a_short_block(examples: ModuleType, layer_diffs: ModuleType, terminal: bool) -> None:
    report = examples.regression().model_copy(update={"layers": layer_diffs.seed_case()})
    text = re.sub(r"\s+", " ", _uncoloured(_printed(report, terminal, width=110)))
    assert "Layer diff Worst own error: layer 0, head 2, extend, cached prefix: 143 %, 31x its bound 4.7 %" in text
    shown = percent(layer_diffs.seed_case().grids[2].values[0][0])
    assert f"layer 0 extend, prefix 0: {shown}; extend, prefix >= 16: 143 %, out of bounds layer 1 " in text
    assert "Layer diff" not in _printed(examples.regression(), terminal)


def test_of_many_layers_the_worst_are_shown(examples: ModuleType, layer_diffs: ModuleType) -> None:
    report = examples.regression().model_copy(update={"layers": layer_diffs.one_head()})
    lines = [line.strip() for line in _printed(report, terminal=False).splitlines()]
    rows = [line for line in lines if re.match(r"layer +\d+  ", line)]
    assert len(rows) == MAX_LAYERS
    assert [row.split()[1] for row in rows if "out of bounds" in row] == ["17", "29"]
    assert [int(row.split()[1]) for row in rows] == sorted(int(row.split()[1]) for row in rows)
    assert "20 more layers, none worse, in report.html" in lines
