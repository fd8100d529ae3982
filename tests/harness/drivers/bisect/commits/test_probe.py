"""Real processes: the origin of a kernel's module, and the measurement of a kernel that fails."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.drivers.bisect.commits import bisection as measuring
from assay.harness.drivers.bisect.commits.bisection import BrokenEnvironment, _build, _measure
from assay.harness.drivers.bisect.commits.probe import chosen_calls
from assay.harness.drivers.bisect.commits.state import BisectSpec, Measurement

COUNT = 6
"""Calls of a probe, of which the first and the last phases have a cached prefix."""


@pytest.fixture
def tree(tmp_path: Path, histories: ModuleType) -> Path:
    made = tmp_path / "tree"
    made.mkdir()
    (made / "attn.py").write_text(histories.source(0, mask_wrong=False))
    return made


def run(tree: Path, kernel: str = "attn:forward", name_bug: bool = False) -> Measurement:
    settings = {"repo": "r", "good": "g", "bad": "b", "kernel": kernel, "calls": COUNT}
    spec = BisectSpec.model_validate(settings)
    return _measure(spec, tree, tree.parent / "log", name_bug=name_bug, reproduce="again")


@pytest.mark.slow  # fast: test_a_module_from_elsewhere_is_not_the_commits
def test_a_kernel_is_measured_and_its_bug_named(tree: Path, histories: ModuleType) -> None:
    right = run(tree)
    assert (right.status, right.origin) == ("measured", "attn.py")
    assert right.worst is not None
    assert right.worst <= 1
    (tree / "attn.py").write_text(histories.source(0, mask_wrong=True))  # as long as before, and in the same second
    wrong = run(tree, name_bug=True)
    assert wrong.worst is not None
    assert wrong.worst > 1
    assert [finding.id for finding in wrong.findings] == ["mask-top-left"]
    assert wrong.findings[0].reproduce == "again"
    assert wrong.findings[0].operator
    assert wrong.findings[0].picture is not None
    assert not list(tree.rglob("*.pyc")), "bytecode of one commit would be used for another"


@pytest.mark.slow  # fast: a kernel that is killed
def test_a_kernel_that_does_not_survive_being_read_was_measured(tree: Path, histories: ModuleType) -> None:
    asked = {call.q.shape[0] for call in chosen_calls("", COUNT)}
    (tree / "attn.py").write_text(
        f"import os\n{histories.source(0, mask_wrong=True)}\n\ndef fatal(call):\n"
        f"    if call.q.shape[0] not in {asked}:\n        os._exit(0)\n    return forward(call)\n"
    )
    found = run(tree, "attn:fatal", name_bug=True)
    assert (found.status, [finding.id for finding in found.findings]) == ("measured", ["mask-top-left"])
    assert found.worst is not None


def test_a_module_from_elsewhere_is_not_the_commits(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, histories: ModuleType
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "attn.py").write_text(histories.source(1, mask_wrong=True))
    (elsewhere / "other.py").write_text(histories.source(1, mask_wrong=True))
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [str(elsewhere), "", *sys.path])
    ours = run(tree)
    assert (ours.status, ours.origin) == ("measured", "attn.py")
    assert ours.outcome("skip") == "good", "the correct one, from the tree"
    theirs = run(tree, "other:forward")
    assert theirs.status == "import"
    assert f"module other came from {elsewhere / 'other.py'}" in theirs.reason


@pytest.mark.slow  # fast: test_a_module_from_elsewhere_is_not_the_commits
def test_a_package_under_src_and_its_late_imports(tree: Path, tmp_path: Path) -> None:
    package = tree / "src" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "kernel.py").write_text("def forward(call):\n    from mine.late import run\n    return run(call)\n")
    text = (tree / "attn.py").read_text()
    (package / "late.py").write_text(text + "\nrun = forward\n")
    measured = run(tree, "mine.kernel:forward")
    assert (measured.status, measured.origin) == ("measured", "src/mine/kernel.py")
    # The same package, extended to another folder at run time, as a .pth file or a build may do.
    other = tmp_path / "other"
    other.mkdir()
    (other / "late.py").write_text(text + "\nrun = forward\n")
    (package / "late.py").unlink()
    (package / "__init__.py").write_text(f"__path__.append({str(other)!r})\n")
    stretched = run(tree, "mine.kernel:forward")
    assert stretched.status == "import"
    assert "came from" in stretched.reason


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        ("def forward(call:\n", "import", "SyntaxError"),
        ("raise SystemExit(0)\n", "import", "SystemExit"),
        ("forward = 3\n", "import", "expected a function"),
        ("def forward(call):\n    raise RuntimeError('no such tile')\n", "raised", "no such tile"),
        ("import os, signal\n\ndef forward(call):\n    os.kill(os.getpid(), signal.SIGSEGV)\n", "died", "SIGSEGV"),
        ("import os\n\ndef forward(call):\n    os._exit(0)\n", "died", "exited with status 0"),
    ],
)
def test_a_kernel_that_fails_is_a_result(tree: Path, text: str, status: str, reason: str) -> None:
    (tree / "attn.py").write_text(text)
    measured = run(tree)
    assert measured.status == status
    assert reason in measured.reason


@pytest.mark.slow  # fast: tests of the worker, and of builds
def test_a_kernel_that_hangs_is_killed_with_its_children(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_LIMIT_S", 15.0)
    mark = tree.parent / "pid"
    (tree / "attn.py").write_text(
        "import subprocess, time\n\ndef forward(call):\n"
        f"    open({str(mark)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n    time.sleep(600)\n"
    )
    measured = run(tree)
    assert (measured.status, measured.reason) == ("died", "it did not finish within 15 s")
    child = Path(f"/proc/{mark.read_text()}/stat")
    for _ in range(50):
        if not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("its child is still running")


def test_a_probe_that_fails_itself_blames_the_environment(tree: Path) -> None:
    tree.rename(tree.parent / "gone")
    with pytest.raises(BrokenEnvironment, match="before it had measured anything"):
        run(tree)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("echo built > made", ""), ("echo no tile; exit 3", "exited with 3: no tile"),
        ("no-such-compiler --now", "exited with 127"), ("sleep 60", "did not finish within 0 s"),
    ],
)  # fmt: skip
def test_builds(tmp_path: Path, command: str, why: str) -> None:
    said = _build(command, tmp_path, tmp_path / "log", 0.4 if "sleep" in command else 60)
    assert (why in said) if why else not said
    assert (tmp_path / "made").exists() == ("made" in command)


def test_a_build_that_exits_with_128_blames_the_environment(tmp_path: Path) -> None:
    with pytest.raises(BrokenEnvironment, match="128"):
        _build("exit 128", tmp_path, tmp_path / "log")


def test_as_many_calls_are_chosen_as_were_asked_for() -> None:
    assert len(chosen_calls("", 7)) == 7
