from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.harness.cli.output import errors

COMMAND = ("check",)
"""What `call` begins with."""
KERNELS = """
from assay.harness.attention.call import KernelRefused
from assay.harness.attention.bugs.faults import fault, rounded_oracle

_top_left = fault("mask-top-left")


def right(call):
    return rounded_oracle(call)


def wrong(call):
    return _top_left(call)


def refuses(call):
    raise KernelRefused("not today")
"""


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "checked_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


@pytest.mark.parametrize(
    ("kernel", "code"), [*(pytest.param(*one, marks=pytest.mark.slow) for one in (("right", 0), ("wrong", 1))), ("refuses", 3)]
)
def test_exit_codes(call: Callable[..., int], kernel: str, code: int) -> None:
    some = ("--phase", "decode", "--dtype", "float32", "--case", "1+16-", "--read-out", "0")
    assert call(f"checked_kernels:{kernel}", *some) == code


@pytest.mark.usefixtures("jobs_here")
def test_github_gets_annotations_and_a_summary(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert call("checked_kernels:wrong", "--case", "extend-41+1-one", "--read-out", "0", "--json") == 1
    out, err = capsys.readouterr()
    assert re.findall(r"^::(\w+) title=(\S*)", err, re.MULTILINE) == [("error", "assay%3A"), ("error", "assay")]
    assert "::error" not in out
    assert (tmp_path / "summary.md").read_text().startswith("## ❌ Regression: checked")


@pytest.mark.usefixtures("jobs_here")
def test_one_case_can_be_run_again(call: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert call("checked_kernels:wrong", "--case", "extend-41+1-one", "--read-out", "0", "--all") == 1
    out = capsys.readouterr().out
    assert "new+prefix 41+1" in out
    first, *_ = out.splitlines()
    assert first.startswith("REGRESSION   checked_kernels:wrong applies a top-left causal mask; wrong on 1 of 1 call · ")
    assert first.endswith(" · exit 1")


@pytest.mark.usefixtures("few_experiments")
def test_the_test_is_a_file_that_fails_and_a_right_kernel_has_none(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.harness.checks.check._ASSERTED_S", 0.0)
    some = ("--phase", "decode", "--dtype", "float32", "--case", "1+16-", "--read-out", "0", "--test", "test_it.py")
    assert call("checked_kernels:right", *some) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Test         none: no wrong call is known"
    assert not (tmp_path / "test_it.py").exists()
    assert call("checked_kernels:wrong", *some) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "Test         test_it.py"
    written = (tmp_path / "test_it.py").read_text()
    with pytest.raises(AssertionError, match=r"explains? at most"):
        exec(compile(f"{written}\ntest_the_kernel_is_correct()\n", "test_it.py", "exec"), {})


@pytest.mark.slow
def test_a_wrong_kernel_is_read_and_what_was_found_before_is_said_first(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    some = ("checked_kernels:wrong", "--case", "extend-41+1-one")
    assert call(*some, "--read-out", "30") == 1
    said = capsys.readouterr()
    assert "\nObserved     " in said.out
    assert "; wrong on 1 of 1 call; " in said.err
    assert "Reading what it computes, for at most 30 s." in said.err
    assert call(*some, "--read-out", "0") == 1
    said = capsys.readouterr()
    assert "causal mask aligned" not in said.out
    assert said.err == ""


@pytest.mark.usefixtures("jobs_here")
def test_progress_is_shown_on_a_terminal_and_a_short_check_is_silent_elsewhere(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("checked_kernels:right", "--phase", "decode", "--case", "1+2200") == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(errors, "_force_terminal", True)
    assert call("checked_kernels:right", "--phase", "decode", "--case", "1+2200") == 0
    said = capsys.readouterr()
    assert said.err.startswith("\x1b[?25l"), "a line that moves, and is gone in the end"
    assert "runs of the kernel" not in said.out + said.err


@pytest.mark.usefixtures("jobs_here")
def test_junit_has_one_failure_for_one_cause(call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    some = ("checked_kernels:wrong", "--case", "extend-41+", "--dtype", "float32", "--read-out", "0")
    assert call(*some, "--junit", "junit.xml") == 1
    assert "JUnit        junit.xml" in capsys.readouterr().out
    [case] = ET.fromstring((tmp_path / "junit.xml").read_text()).iter("testcase")
    [failure] = case
    assert failure.tag == "failure"
    assert re.match(r"causal mask top-left; \d+ of \d+ calls: checked_kernels:wrong is wrong on ", failure.get("message", ""))
    assert "assay check checked_kernels:wrong" in (failure.text or "")
    assert call("checked_kernels:right", "--phase", "decode", "--case", "1+16-", "--junit", "right.xml") == 0
    [case] = ET.fromstring((tmp_path / "right.xml").read_text()).iter("testcase")
    assert [one.tag for one in case] == ["system-out"]
