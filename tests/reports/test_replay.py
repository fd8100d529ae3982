from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from assay.harness.errors import ExitCode
from assay.harness.evidence.kernel_result import KernelResult
from assay.harness.evidence.pack import PackManifest, Source
from assay.harness.verdict import Finding, Severity
from assay.reports.check import check_document, pack_document
from assay.reports.terminal import render


def finding(severity: Severity) -> Finding:
    return Finding(id="k", title="k", severity=severity, where="extend", diagnosis="d", evidence=("e",), reproduce="assay replay P")


@pytest.mark.parametrize(
    ("with_prefix", "findings", "code"),
    [
        (4, (), ExitCode.PASS),
        (4, (finding("info"),), ExitCode.PASS),
        (4, (finding("serious"),), ExitCode.REGRESSION),
        (0, (finding("serious"),), ExitCode.REGRESSION),
        (0, (), ExitCode.NO_VERDICT),
    ],
)
def test_a_replay_without_a_cached_prefix_is_no_pass(with_prefix: int, findings: tuple[Finding, ...], code: ExitCode) -> None:
    out = StringIO()
    replay = KernelResult(
        kernel="mine", calls=8, recorded=8, with_prefix=with_prefix, worst_own=0.5, worst_bound=1.0, findings=findings, seconds=1.0,
        missing=() if with_prefix else ("record a pack with the prefix cache on",),
    )  # fmt: skip
    assert replay.exit_code == code
    render(check_document(replay), Console(file=out), everything=True)
    assert check_document(replay).code == code
    assert ("record a pack with the prefix cache on" in check_document(replay).headline) == (code == ExitCode.NO_VERDICT)
    assert f"{with_prefix} with a cached prefix" in out.getvalue()


def test_the_command_that_replays_a_pack_can_be_pasted() -> None:
    out = StringIO()
    source = Source(engine="e", model="m", model_hash="h", reference="r")
    manifest = PackManifest(source=source, seen=0, too_large=0, calls=())
    render(pack_document(manifest, Path("my packs/one")), Console(file=out))
    assert "assay replay 'my packs/one' --candidate module:function" in out.getvalue()


@pytest.mark.parametrize(
    ("worst", "says"), [(7.0, "700 %, 7 × what rounding explains (100 %)"), (float("inf"), "an output is not finite")]
)
def test_what_the_kernel_does_is_the_answer(worst: float, says: str) -> None:
    wrong = finding("serious").model_copy(update={"does": "applies no causal mask"})
    replay = KernelResult(
        kernel="mine", calls=8, recorded=8, with_prefix=4, worst_own=worst, worst_bound=1.0, findings=(wrong,), seconds=1.0,
    )  # fmt: skip
    document = check_document(replay)
    assert document.answer == "REGRESSION   mine applies no causal mask; 8 of 8 recorded calls · 1 s · exit 1"
    assert [row.text for row in document.screen if row.label == "Error"] == [says]
