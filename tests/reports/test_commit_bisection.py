from __future__ import annotations

import math

from assay.harness.drivers.bisect.commits.state import BisectResult, BisectSpec, BisectState, CommitInfo, CommitProbe
from assay.harness.verdict import Finding
from assay.reports import page
from assay.reports.bisection import bisection_document

HASHES = [f"{i:02x}" * 20 for i in range(10, 31)]


def state(outcome: str = "found", text: str = "Tile by 64") -> BisectState:
    probes = (
        CommitProbe(
            number=1, commit=HASHES[0], purpose="good-end", came_out="good", worst=0.4, own=0.004, where="call 0, head 1",
            seconds=0.4,
        ),
        CommitProbe(
            number=2, commit=HASHES[20], purpose="bad-end", came_out="bad", worst=math.inf, own=math.inf, where="call 1, head 0",
            seconds=0.5,
        ),
        CommitProbe(
            number=3, commit=HASHES[10], purpose="search", came_out="skip", status="build", reason=text, seconds=0.1
        ),
        CommitProbe(
            number=4, commit=HASHES[11], purpose="search", came_out="bad", worst=1.5e6, own=1.5e4, where="call 1, head 0",
            seconds=0.4,
        ),
    )  # fmt: skip
    found = outcome == "found"
    note = CommitInfo(
        commit=HASHES[11], subject=text, body=text, author="A <a@b.c>", date="2026-01-02", diffstat="attn.py | 2 +-",
        parents=(HASHES[10],),
    )  # fmt: skip
    finding = Finding(
        id="mask-missing", title="no mask", severity="serious", where="layer 0", diagnosis=text, evidence=(text,), reproduce="again"
    )
    result = BisectResult.model_validate(
        {
            "outcome": outcome, "suspects": (HASHES[11],) if found else (HASHES[10], HASHES[11]),
            "commit": note if found else None, "unclassified": 1,
            "findings": (finding,) if found else (),
        }
    )  # fmt: skip
    spec = BisectSpec(repo="/r", good=HASHES[0], bad=HASHES[20], kernel="attn:forward")
    history = dict.fromkeys(HASHES[1:], text)
    return BisectState(spec=spec, command="assay bisect commits", history=history, probes=probes, result=result)


def test_the_page_names_the_commit_and_shows_every_probe() -> None:
    document = bisection_document(state())
    html = page.to_html(document)
    assert document.code == 0
    assert f"{HASHES[11][:12]} is the culprit among 20 commits." in html
    assert f"Checked: the commit was bad; its parent {HASHES[10][:12]} was skip." in html
    assert "Note: 1 commit could not be classified." in html
    assert "call 0, head 1: error 0.4\N{NO-BREAK SPACE}%, 0.4 times its bound" in html
    assert "attn.py | 2 +-" in html
    assert html.count("error not finite, not finite") == 1
    assert html.count("<tr>") == 1 + 4


def test_without_a_culprit_the_suspects_are_listed() -> None:
    document = bisection_document(state("ambiguous"))
    html = page.to_html(document)
    assert document.code == 3
    assert '<h1 id="verdict">Ambiguous</h1>' in html
    assert html.count(f"<code>{HASHES[10][:12]}</code> Tile by 64") == 2, "once among the suspects, once among the probes"


def test_commit_messages_stay_text() -> None:
    html = page.to_html(bisection_document(state(text="<script>alert(1)</script>\u202e")))
    assert html.count("<script>") == 1
    assert "[U+202E]" in html
    assert "\u202e" not in html
