from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections import Counter
from html.parser import HTMLParser
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.harness.judge.report import DivergenceRow, Report
from assay.harness.statement import state
from assay.reports import page, suite_section
from assay.reports.run_report import run_document
from assay.reports.wording.requirements import said_check
from assay.reports.wording.say import measured_of, say
from assay.reports.wording.verdict import headline, suite_title

VOID = {"meta", "link", "input", "br", "img", "hr", "wbr"}


def to_html(report: Report) -> str:
    return page.to_html(run_document(report))


class Page(HTMLParser):
    """Elements and texts of a page, read as a browser reads them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    @property
    def text(self) -> str:
        return "".join(text for tag, texts in self.texts.items() if tag not in ("script", "style") for text in texts)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def _with_text(report: Report, text: str) -> Report:
    suite = report.suites[0]
    flip = suite.flips[0].model_copy(
        update=dict.fromkeys(("item", "group", "prompt", "expected", "reference_text", "candidate_text"), text)
    )
    suite = suite.model_copy(update={"flips": (flip,), "why": (state("why", text=text),), "conditions": ()})
    return report.model_copy(update={"suites": (suite,), "run_id": text, "treatment": {}})


def test_a_page_has_its_verdict_for_heading_makes_no_request_and_is_the_same_again(any_report: Report) -> None:
    html = to_html(any_report)
    assert html == to_html(any_report)
    page = Page(html)
    assert [text.strip() for text in page.texts["h1"]] == [any_report.verdict.capitalize()]
    assert [a for a in page.all("header") if a.get("class") == f"verdict {any_report.verdict}"]
    assert page.unbalanced == []
    assert page.open == []
    for _, attributes in page.elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "data:")), (name, value)
    assert "@import" not in html
    assert "url(" not in html


def test_everything_that_was_found_is_on_the_page(any_report: Report) -> None:
    text = re.sub(r"\s+", " ", Page(to_html(any_report)).text)
    wanted: list[str] = [headline(any_report).replace("->", "→"), any_report.reproduce, f"Exit code {any_report.exit_code}"]
    for check in any_report.checks:
        wanted += said_check(check)[1:]
    for finding in any_report.findings:
        wanted += [finding.where, finding.diagnosis, finding.reproduce, *finding.evidence]
    for suite in any_report.suites:
        wanted += [
            suite_title(suite),
            say(*suite.why),
            *(measured_of(m).text for m in suite.metrics),
            *(c.bucket for c in suite.conditions),
        ]
    for server in (any_report.reference, any_report.candidate):
        wanted += [server.launch_command, *(call.kernel for call in server.calls)]
        wanted += [f"delegated by {call.delegated_by}" for call in server.calls if call.delegated_by]
    assert [word for word in wanted if re.sub(r"\s+", " ", word) not in text] == []


def test_the_figures_of_a_suite_end_without_a_separator(examples: ModuleType) -> None:
    report = examples.passing()
    suites = tuple(suite.model_copy(update={"flips": (), "divergences": ()}) for suite in report.suites)
    shown = to_html(report.model_copy(update={"suites": suites}))
    assert re.findall(r'<span class="quiet">(bound[^<]*)</span></a>', shown)[-1] == "bound ≤ 10"


def test_a_number_and_its_percent_sign_stay_on_one_line(examples: ModuleType) -> None:
    suite = examples.regression().suites[0].model_copy(update={"why": (state("Lost 12 % of them."),)})
    report = examples.regression().model_copy(update={"suites": (suite,)})
    assert "Lost 12\N{NO-BREAK SPACE}% of them." in to_html(report)


def _section(page: str, id_: str) -> str:
    (section,) = re.findall(rf'<section aria-labelledby="{id_}">.*?</section>', page, re.DOTALL)
    return html.unescape(section)


def test_the_cause_comes_first_with_its_picture_and_what_to_do(examples: ModuleType) -> None:
    report = examples.regression()
    does = {"does": "masks wrongly", "diagnosis": "Computes something.", "operator": "query i sees keys j <= i"}
    finding = report.findings[0].model_copy(update=does)
    page = to_html(report.model_copy(update={"findings": (finding, *report.findings[1:])}))
    cause = _section(page, "cause")
    assert [part in cause for part in ("Computes something.", "query i sees keys j <= i", "<svg")] == [True] * 3
    assert f"{finding.where}:" not in cause, "the sentence says where"
    steps = _section(page, "next")
    assert [command in steps for command in (finding.reproduce, report.reproduce)] == [True, True]
    assert page.count("Computes something.") == 1


def test_questions_begin_with_what_sets_them_apart_and_right_ones_can_be_read(examples: ModuleType) -> None:
    report = examples.regression()
    first, second, *_ = report.suites[0].flips
    asked = [
        flip.model_copy(update={"prompt": f"Answer with a letter. {words}"}) for flip, words in ((first, "Who?"), (second, "Why?"))
    ]
    steady = (asked[1].model_copy(update={"direction": "both right"}),)
    suite = report.suites[0].model_copy(update={"flips": (asked[0],), "steady": steady})
    page = to_html(report.model_copy(update={"suites": (suite,)}))
    assert re.findall(r'<span class="item">([^<]*)', page) == ["Who?", "Why?"]
    assert re.findall(r'<option value="(lost|both right)"', page) == ["lost", "both right"]


def test_the_contents_lead_to_every_section_in_their_order(any_report: Report) -> None:
    page = to_html(any_report)
    (contents,) = re.findall(r'<nav class="contents".*?</nav>', page, re.DOTALL)
    led_to = re.findall(r'href="#([^"]+)"', contents)
    assert led_to
    assert [id_ for id_ in led_to if f'id="{id_}"' not in page] == []
    assert re.findall(r'<section[^>]* aria-labelledby="([^"]+)"', page) == led_to


def test_policy_admits_this_style_and_this_script_only(examples: ModuleType) -> None:
    page = to_html(examples.hostile())
    policy = next(a["content"] for a in Page(page).all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_hostile_text_stays_text(examples: ModuleType) -> None:
    page = Page(to_html(examples.hostile()))
    assert page.unbalanced == []
    assert page.all("img") == []
    assert [a.get("type", "runs") for a in page.all("script")] == ["application/json", "runs"]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    data, script = page.texts["script"]
    assert "window.pwned=1" not in "".join([script, *page.texts["style"]])
    assert "<" not in data
    assert json.loads(data)[0]["title"].startswith("layer × head: </script>")
    assert "<img src=x onerror=" in page.text
    assert "{{7*7}}" in page.text
    assert "␛[2J" in page.text
    assert "[U+202E]evil" in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\ud800-\udfff]", page.text)


@settings(max_examples=20, deadline=None)
@given(text=st.text(st.characters(codec=None, exclude_categories=()), max_size=40) | st.sampled_from(["'\"><b a=", "</pre>"]))
def test_any_text_leaves_the_elements_as_they_are(examples: ModuleType, text: str) -> None:
    base = examples.passing()
    expected = [tag for tag, _ in Page(to_html(_with_text(base, "x"))).elements if tag != "wbr"]
    page = to_html(_with_text(base, text))
    page.encode()
    assert [tag for tag, _ in Page(page).elements if tag != "wbr"] == expected  # where a long name may be broken


def test_leading_newlines_of_an_answer_are_kept(examples: ModuleType) -> None:
    page = to_html(_with_text(examples.passing(), "\n\nfirst"))
    # A parser drops one newline after <pre>; the text's own two must follow it.
    assert '<pre class="model" tabindex="0">\n\n\nfirst</pre>' in page


def test_five_thousand_flips_are_capped_and_the_rest_is_named(examples: ModuleType) -> None:
    report = examples.many_flips(5_000)
    page = to_html(report)
    parsed = Page(page)
    shown = [a for a in parsed.all("details") if "data-direction" in a]
    assert len(shown) == suite_section._FLIPS_SHOWN
    kinds = Counter((a["data-direction"], a["data-group"]) for a in shown)
    assert set(kinds) == {(flip.direction, flip.group) for flip in report.suites[0].flips}
    assert max(kinds.values()) - min(kinds.values()) <= 1
    items = re.findall(r"mmlu-\d{5}", page)
    assert items == sorted(items)
    assert "256 of 5,000" in parsed.text
    assert "the other 4,744 are in" in re.sub(r"\s+", " ", parsed.text)
    assert "records.jsonl" in parsed.text
    assert len(page) < 2_000_000


@pytest.mark.parametrize(
    ("reference", "candidate", "common", "reference_rest", "candidate_rest"),
    [
        ("a bird sings", "a bear sings", "a ", "bird sings", "bear sings"),
        ("same", "same and more", "", "same", "same and more"),
        ("same ", "same and", "same ", "", "and"),
        ("same\nline", "same\nlone", "same\n", "line", "lone"),
        ("", "x", "", "", "x"),
        ("x y", "x y", "x ", "y", "y"),
    ],
)
def test_split_divergence(reference: str, candidate: str, common: str, reference_rest: str, candidate_rest: str) -> None:
    divergence = DivergenceRow(
        item="i", kind="apart", position=1, gap=None, prompt="", reference_text=reference, candidate_text=candidate,
        candidate_cached_tokens=None,
    )  # fmt: skip
    assert suite_section._split_divergence(divergence) == (common, reference_rest, candidate_rest)


def test_the_logits_of_a_suite_are_a_table_in_its_section(layer_diffs: ModuleType, examples: ModuleType) -> None:
    rows = (layer_diffs.logits_row("cold", 0.00012, 0.998), layer_diffs.logits_row("cached", 4.83, 0.031))
    report = examples.passing()
    suite = report.suites[0].model_copy(update={"id": "logits", "title": "Logits", "logits": rows})
    page = to_html(report.model_copy(update={"suites": (suite,), "layers": None}))
    assert page.count('<table class="logits">') == 1
    assert ">4.83<" in page
    assert "The reference&#39;s 20 most probable tokens are compared one by one" in page.replace("'", "&#39;")
