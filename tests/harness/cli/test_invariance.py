"""``assay invariance`` on the command line: what is refused before anything starts, and a stored folder that is judged again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.evidence.invariance import InvarianceFolder
from assay.harness.judge.invariance_result import InvarianceResult
from assay.reports.wording.verdict import headline


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--features", "prefix-cach"), "did you mean 'prefix-cache'?"),
        (("--features", "hicache"), "hicache cannot be switched here: not on cpu: it copies with CUDA."),
        (("--together",), "--features"),
        (("--reference", "http://127.0.0.1:1"), "is the URL"),
    ],
)
def test_wrong_use(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: tuple[str, ...], says: str
) -> None:
    assert call("invariance", *flags, "--out", str(tmp_path / "out")) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("decode", "code"), [(0.0, 0), (0.5, 1)])
def test_a_stored_folder_is_judged_again(
    call: Callable[..., int], tmp_path: Path, arm_records: ModuleType, decode: float, code: int
) -> None:
    arm_records.write(InvarianceFolder.new(tmp_path / "out"), [arm_records.arm("prefix-cache", decode=decode)])
    assert call("report", str(tmp_path / "out")) == code
    result = InvarianceResult.model_validate_json((tmp_path / "out" / "invariance.json").read_text())
    assert result.exit_code == code
    page = (tmp_path / "out" / "invariance.html").read_text().replace("\xa0", " ")  # a number stays with its unit
    assert headline(result) in page


def test_a_stored_folder_of_a_comparison_that_ended_early_has_no_verdict(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, arm_records: ModuleType
) -> None:
    arm_records.write(InvarianceFolder.new(tmp_path / "out"), [arm_records.arm("prefix-cache")], ended=False)
    assert call("report", str(tmp_path / "out")) == 3
    assert "it ended early, after 4 variants" in " ".join(capsys.readouterr().out.split())
