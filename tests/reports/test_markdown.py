from __future__ import annotations

import re
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from assay.harness.judge.latency_result import LatencyResult
from assay.harness.judge.report import LayersResult, Report
from assay.harness.statement import state
from assay.harness.verdict import Finding, Requirement
from assay.reports import markdown
from assay.reports.markdown import _code, _escape
from assay.reports.run_report import run_document

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=60)
MARKED = st.text(st.sampled_from(list("`*_[]()<>#|~\\-+=!&;:@1.) \n\tabw/")), max_size=40)


def to_markdown(report: Report) -> str:
    return markdown.to_markdown(run_document(report))


def _tokens(text: str) -> list[Token]:
    return [inner for token in PARSER.parse(text) for inner in (token, *(token.children or []))]


def _shown(text: str) -> str:
    return "".join(token.content for token in _tokens(text) if token.type in ("text", "code_inline", "text_special"))


def _full(
    report: Report, text: str, count: int, layers: LayersResult | None = None, latency: LatencyResult | None = None
) -> Report:
    check = Requirement(text, part=text, shown=text).check("failed", state(text))
    finding = Finding(
        id="k", title="k", severity="serious", where=text, diagnosis=text, evidence=(text,) * 9, reproduce=text, operator=text,
        picture=report.findings[0].picture,
    )  # fmt: skip
    return report.model_copy(
        update={
            "checks": (check,) * count,
            "findings": (finding,) * count,
            "suites": (*report.suites[: min(count, 1)], *[report.suites[0].model_copy(update={"flips": ()})] * (count - 1)),
            "reproduce": text,
            "layers": None if layers is None else layers.model_copy(update={"candidate_errors": (state(text),) * 9}),
            "latency": latency,
        }
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("text", ["x", "a\nb\nc\nd\ne", "`" * 50, "long " * 1_000])
def test_a_comment_stays_readable_and_below_githubs_limit(examples: ModuleType, layer_diffs: ModuleType, text: str) -> None:
    for count in (0, 1, 100):
        report = _full(examples.regression(), text, count, layer_diffs.one_head(4, 4), examples.latency(text))
        shown = to_markdown(report)
        assert len(shown) < 65_536
        assert len(shown.splitlines()) <= 220
    assert "| and 88 more, in report.html |" in shown


def test_hostile_text_shows_and_does_nothing(examples: ModuleType) -> None:
    text = to_markdown(examples.hostile())
    html = {token.content for token in _tokens(text) if token.type in ("html_inline", "html_block")}
    shown = {re.sub(r"<summary>.*</summary>", "", part.strip()) for part in html}
    assert shown <= {"<!-- -->", "<sub>", "</sub>", "<details>", "</details>"}
    assert not [token for token in _tokens(text) if token.type in ("link_open", "image")]
    texts = [token.content for token in _tokens(text) if token.type in ("text", "text_special")]
    assert any("everyone" in part for part in texts)
    assert not [part for part in texts if re.search(r"@\w|#\d|https?://|www\.\w", part)]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\ud800-\udfff]", text)


@settings(max_examples=300, deadline=None)
@given(TEXT | MARKED)
def test_escaped_text_is_shown_as_it_is(text: str) -> None:
    shown = _escape(text, 200)
    for before in ("", "- ", "**b**: "):
        tokens = _tokens(before + shown)
        allowed = {"paragraph_open", "paragraph_close", "inline", "text", "text_special", "html_inline", "strong_open"}
        allowed |= {"strong_close", "bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close"}
        assert {token.type for token in tokens} <= allowed
        assert [t.content for t in tokens if t.type == "html_inline"] == ["<!-- -->"] * shown.count("<!-- -->")
        assert sum(token.type == "list_item_open" for token in tokens) == bool(before == "- ")
    assert _shown("x " + shown).strip() == ("x " + " ".join(_plain(text).split())).strip()


def _plain(text: str) -> str:
    from assay.harness.text import visible

    return visible(text)


@settings(max_examples=200, deadline=None)
@given(TEXT | MARKED)
def test_escaped_text_stays_in_its_cell(text: str) -> None:
    tokens = _tokens(f"| a | b |\n| --- | --- |\n| {_escape(text)} | end |\n")
    cells = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "td_open"]
    assert len(cells) == 2
    assert cells[1] == "end"


@settings(max_examples=200, deadline=None)
@given(TEXT | MARKED)
def test_code_is_one_code_span(text: str) -> None:
    spans = [token for token in _tokens("x " + _code(text)) if token.type != "text"]
    assert [token.type for token in spans if token.type == "code_inline"] == ["code_inline"]
    assert spans[-2].content.strip(" ") == _plain(text).replace("\n", " ").strip(" ")


def test_numbers_and_names_stay_readable_in_the_source() -> None:
    assert _escape("sage_attn_as_shipped: 0.977, -0.05 (5 %)") == "sage_attn_as_shipped: 0.977, -0.05 (5 %)"


def test_a_command_of_several_lines_is_not_mangled(examples: ModuleType) -> None:
    report = examples.regression()
    finding = report.findings[0]

    def shown(command: str) -> str:
        return to_markdown(report.model_copy(update={"findings": (finding.model_copy(update={"reproduce": command}),)}))

    assert "`assay run    --questions 3`" in shown("assay run \\\n  --questions 3")
    assert "`grep 'a  b'`" in shown("grep 'a  b'")
    assert "the command that reproduces it is in report.html" in shown("cat <<E\nx\nE")
