from __future__ import annotations

import base64
import hashlib
import math
import re
import xml.etree.ElementTree as ET

import pytest

from assay.harness.bisect.commits.state import BisectResult, BisectSpec, BisectState, Change, CommitInfo, CommitProbe, RangeCommit
from assay.harness.verdict import Finding
from assay.reports import page
from assay.reports.commit_bisection import _error_chart, bisection_document
from assay.reports.svg import PALETTE

HASHES = [f"{i:02x}" * 20 for i in range(10, 31)]


def state(outcome: str = "found", text: str = "Tile by 64") -> BisectState:
    probes = (
        CommitProbe(number=1, commit=HASHES[0], purpose="good-end", outcome="good", worst=0.4, where="call 0, head 1", seconds=0.4),
        CommitProbe(
            number=2, commit=HASHES[20], purpose="bad-end", outcome="bad", worst=math.inf, where="call 1, head 0", seconds=0.5
        ),
        CommitProbe(number=3, commit=HASHES[10], purpose="search", outcome="skip", reason=f"build: {text}", seconds=0.1),
        CommitProbe(number=4, commit=HASHES[11], purpose="search", outcome="bad", worst=1.5e6, where="call 1, head 0", seconds=0.4),
    )  # fmt: skip
    found = outcome == "found"
    note = CommitInfo(
        commit=HASHES[11], subject=text, body=text, author="A <a@b.c>", date="2026-01-02", diffstat="attn.py | 2 +-",
        parents=(HASHES[10],),
    )  # fmt: skip
    finding = Finding(
        id="mask-missing",
        title="no mask",
        severity="serious",
        where="layer 0",
        diagnosis=text,
        evidence=(text,),
        reproduce="assay bisect",
    )
    result = BisectResult.model_validate(
        {
            "outcome": outcome, "suspects": (HASHES[11],) if found else (HASHES[10], HASHES[11]), "confidence": 0.9931,
            "misclassification": (0.04, 0.05), "repeated": 9, "outvoted": 1, "commit": note if found else None, "checked": "it was",
            "changes": (Change(axis="prefix", failing=("1",), values=("0", "1"), new=("1",)),) if found else (),
            "findings": (finding,) if found else (), "notes": ("the history is monotone",),
        }
    )  # fmt: skip
    spec = BisectSpec(repo="/r", good=HASHES[0], bad=HASHES[20], kernel="attn:forward")
    history = tuple(RangeCommit(commit=c, subject=text, parents=(i - 1,) if i else ()) for i, c in enumerate(HASHES[1:]))
    return BisectState(spec=spec, command="assay bisect commits", history=history, probes=probes, result=result)


def to_html(made: BisectState) -> str:
    return page.to_html(bisection_document(made))


def test_the_page_names_the_commit_and_shows_every_probe() -> None:
    page = to_html(state())
    assert f"{HASHES[11][:12]} is the culprit among 20 commits, with probability 0.9931." in page
    assert "Newly out of bounds at prefix 1; never at 0." in page
    assert "attn.py | 2 +-" in page
    assert page.count(">not finite</td>") == 1
    assert page.count("<tr>") == 1 + 4
    assert ">good end</td>" in page


@pytest.mark.parametrize(("outcome", "heading"), [("ambiguous", "Ambiguous"), ("flaky", "Too flaky")])
def test_a_page_without_a_commit_lists_the_suspects(outcome: str, heading: str) -> None:
    page = to_html(state(outcome))
    assert f'<h1 id="verdict">{heading}</h1>' in page
    assert page.count(f"<code>{HASHES[10][:12]}</code> Tile by 64") == 2, "once among the suspects, once among the probes"


def test_commit_messages_stay_text_and_no_other_script_may_run() -> None:
    page = to_html(state(text="<script>alert(1)</script>\u202e"))
    assert page.count("<script>") == 1
    assert "[U+202E]" in page
    assert "\u202e" not in page
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    script = re.search(r"<script>(.*?)</script>", page, re.S)
    assert policy
    assert script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in policy[1].replace("&#43;", "+")
    assert "default-src &#39;none&#39;" in policy[1]
    assert "http://" not in page.replace("http://www.w3.org/", "")


def test_the_chart_has_a_mark_for_each_probe_and_a_line_for_the_commit() -> None:
    made = state()
    assert made.result
    svg = _error_chart(made, made.result)
    root = ET.fromstring(svg)
    assert root.get("aria-label") == "worst own error by commit, 20 commits: 1 good, 2 bad, 1 skip"
    assert set(re.findall(r'(?:fill|stroke)="(#[^"]+)"', svg)) <= set(PALETTE.values())
    line = PALETTE["chart-candidate"]
    assert svg.count(f'stroke="{line}"') == 1
    ambiguous = state("ambiguous")
    assert ambiguous.result
    assert _error_chart(ambiguous, ambiguous.result).count(f'stroke="{line}"') == 2
    assert _error_chart(made.model_copy(update={"probes": ()}), made.result) == ""
