"""Real processes: the origin of a kernel's module, and the measurement of a kernel that fails."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from assay.harness.attention.matrix import cases
from assay.harness.attention.sample_calls import call_of
from assay.harness.bisect.commits import probe_calls
from assay.harness.bisect.commits.measure import BrokenEnvironment, Forks, run_build
from assay.harness.bisect.commits.probe import ProbeTask
from assay.harness.bisect.commits.probe_calls import choose_calls, matrix_calls, read_calls, recorded_calls, write_calls
from assay.harness.bisect.commits.state import Measurement
from assay.harness.errors import UsageError

LENS = [[(9, 0)], [(5, 20)], [(3, 7), (4, 0)]]


@pytest.fixture(scope="module")
def forks() -> Forks:
    return Forks()


@pytest.fixture
def tree(tmp_path: Path, histories: ModuleType) -> Path:
    made = tmp_path / "tree"
    made.mkdir()
    (made / "attn.py").write_text(histories.source(0, mask_wrong=False))
    return made


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    asked = recorded_calls([call_of(lens, (4, 2), 16, torch.float32, "cpu", seed=i) for i, lens in enumerate(LENS)])
    write_calls(tmp_path / "calls", asked)
    return tmp_path / "calls"


def task(tree: Path, calls: Path | None, kernel: str = "attn:forward", name_bug: bool = False) -> ProbeTask:
    return ProbeTask(tree, (".", "src"), kernel, calls, tree.parent / "result.json", tree.parent / "log", name_bug, "assay again")


def test_a_kernel_is_measured_and_its_bug_named(forks: Forks, tree: Path, calls: Path, histories: ModuleType) -> None:
    right = forks.run(task(tree, calls), 60)
    assert (right.status, right.origin) == ("measured", "attn.py")
    assert len(right.rows) == len(LENS)
    assert [row.condition["prefix"] for row in right.rows] == ["0", ">= 16", "2-15"]
    assert all(max(row.own) <= row.bound == row.rounding for row in right.rows)
    (tree / "attn.py").write_text(histories.source(0, mask_wrong=True))  # as long as before, and in the same second
    wrong = forks.run(task(tree, calls, name_bug=True), 60)
    assert [max(row.own) > row.bound for row in wrong.rows] == [False, True, True]
    assert [finding.id for finding in wrong.findings] == ["mask-top-left"]
    assert wrong.findings[0].reproduce == "assay again"
    assert wrong.operator == (wrong.findings[0].operator,) != ("",)
    assert wrong.findings[0].picture is not None
    assert not list(tree.rglob("*.pyc")), "bytecode of one commit would be used for another"


@pytest.mark.few(1)
@pytest.mark.parametrize(("ends", "limit"), [("os._exit(0)", 60), ("time.sleep(600)", 8)])
def test_a_kernel_that_does_not_survive_being_read_was_measured(
    forks: Forks, tree: Path, calls: Path, histories: ModuleType, ends: str, limit: float
) -> None:
    asked = {sum(new for new, _ in lens) for lens in LENS}
    (tree / "attn.py").write_text(
        f"import os, time\n{histories.source(0, mask_wrong=True)}\n\ndef fatal(call):\n"
        f"    if call.q.shape[0] not in {asked}:\n        {ends}\n    return forward(call)\n"
    )
    found = forks.run(task(tree, calls, "attn:fatal", name_bug=True), limit)
    assert (found.status, [finding.id for finding in found.findings]) == ("measured", ["mask-top-left"])
    assert found.operator == ()
    assert len(found.rows) == len(LENS)


def test_a_module_from_elsewhere_is_not_the_commits(
    forks: Forks, tree: Path, calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, histories: ModuleType
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "attn.py").write_text(histories.source(1, mask_wrong=True))
    (elsewhere / "other.py").write_text(histories.source(1, mask_wrong=True))
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [str(elsewhere), "", *sys.path])
    ours = forks.run(task(tree, calls), 60)
    assert (ours.status, ours.origin) == ("measured", "attn.py")
    assert all(max(row.own) <= row.bound for row in ours.rows), "the correct one, from the tree"
    theirs = forks.run(task(tree, calls, "other:forward"), 60)
    assert theirs.status == "import"
    assert f"module other came from {elsewhere / 'other.py'}" in theirs.reason


def test_a_package_under_src_and_its_late_imports(forks: Forks, tree: Path, calls: Path, tmp_path: Path) -> None:
    package = tree / "src" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "kernel.py").write_text("def forward(call):\n    from mine.late import run\n    return run(call)\n")
    text = (tree / "attn.py").read_text()
    (package / "late.py").write_text(text + "\nrun = forward\n")
    measured = forks.run(task(tree, calls, "mine.kernel:forward"), 60)
    assert (measured.status, measured.origin) == ("measured", "src/mine/kernel.py")
    # The same package, extended to another folder at run time, as a .pth file or a build may do.
    other = tmp_path / "other"
    other.mkdir()
    (other / "late.py").write_text(text + "\nrun = forward\n")
    (package / "late.py").unlink()
    (package / "__init__.py").write_text(f"__path__.append({str(other)!r})\n")
    stretched = forks.run(task(tree, calls, "mine.kernel:forward"), 60)
    assert stretched.status == "import"
    assert "came from" in stretched.reason


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        ("def forward(call:\n", "import", "SyntaxError"),
        ("import no_such_package\n", "import", "no_such_package"),
        ("raise SystemExit(0)\n", "import", "SystemExit"),
        ("forward = 3\n", "import", "expected a function"),
        ("def forward(call):\n    raise RuntimeError('no such tile')\n", "raised", "no such tile"),
        ("def forward(call):\n    return call.q[:1]\n", "raised", "expected torch.float32 [9, 4, 16]"),
        ("import os, signal\n\ndef forward(call):\n    os.kill(os.getpid(), signal.SIGSEGV)\n", "died", "SIGSEGV"),
    ],
)
def test_a_kernel_that_fails_is_a_result(forks: Forks, tree: Path, calls: Path, text: str, status: str, reason: str) -> None:
    (tree / "attn.py").write_text(text)
    measured = forks.run(task(tree, calls), 60)
    assert measured.status == status
    assert reason in measured.reason


def test_a_kernel_that_hangs_is_killed_with_its_children(forks: Forks, tree: Path, calls: Path) -> None:
    mark = tree.parent / "pid"
    (tree / "attn.py").write_text(
        "import subprocess, time\n\ndef forward(call):\n"
        f"    open({str(mark)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n    time.sleep(600)\n"
    )
    measured = forks.run(task(tree, calls), 3)
    assert (measured.status, measured.reason) == ("died", "it did not finish within 3 s")
    child = Path(f"/proc/{mark.read_text()}/stat")
    for _ in range(50):
        if not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("its child is still running")


def test_every_process_is_fresh_and_has_its_own_random_state(forks: Forks, tree: Path) -> None:
    (tree / "attn.py").write_text(
        "import random, sys\nimport numpy, torch\n"
        "print(random.random(), numpy.random.rand(), float(torch.rand(1)), 'seen' in vars(sys))\nsys.seen = True\n"
        "forward = print\n"
    )
    for _ in range(2):
        assert forks.run(task(tree, None), 60).status == "measured"
    first, second = (line.split() for line in (tree.parent / "log").read_text().splitlines())
    assert first[3] == second[3] == "False", "nothing is inherited from an earlier process"
    assert all(a != b for a, b in zip(first[:3], second[:3], strict=True))


def test_a_result_that_cannot_be_written_blames_the_environment(forks: Forks, tree: Path, calls: Path) -> None:
    nowhere = Path("/proc/no-such-folder/result.json")  # not even root can create that folder
    broken = ProbeTask(tree, (".",), "attn:forward", calls, nowhere, tree.parent / "log")
    with pytest.raises(BrokenEnvironment, match="without a result"):
        forks.run(broken, 60)


def test_builds(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run_build("", tmp_path, 5, log)[0] == ""
    assert run_build("echo built > made", tmp_path, 5, log)[0] == ""
    assert (tmp_path / "made").exists()
    assert "exited with 3: no tile" in run_build("echo no tile; exit 3", tmp_path, 5, log)[0]
    assert "was not found" in run_build("no-such-compiler --now", tmp_path, 5, log)[0]
    assert "did not finish within 0 s" in run_build("sleep 60", tmp_path, 0.2, log)[0]
    with pytest.raises(BrokenEnvironment, match="128"):
        run_build("exit 128", tmp_path, 5, log)


def test_calls_survive_a_round_trip(tmp_path: Path) -> None:
    asked = call_of([(3, 4)], (2, 1), 8, torch.bfloat16, "cpu")
    write_calls(tmp_path / "calls", [(asked, {"phase": "extend"})])
    [(back, condition)] = read_calls(tmp_path / "calls", "cpu")
    assert torch.equal(back.k, asked.k)
    assert (condition, back.spec) == ({"phase": "extend"}, asked.spec)


def test_calls_are_chosen_by_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_calls, "cases", lambda seed: cases(("extend",), seed=seed)[::9] + cases(("decode",), seed=seed)[:9])
    every = matrix_calls(0)
    some = choose_calls(every, ["phase=extend", "prefix=1", "prefix=128"], 0)
    assert {condition["prefix"] for _, condition in some} == {"1", "128"}
    assert {call.phase for call, _ in some} == {"extend"}
    assert len(choose_calls(every, [], 7)) == 7
    with pytest.raises(UsageError, match="prefix= one of"):
        choose_calls(every, ["prefix=3"], 0)
    with pytest.raises(UsageError, match="with axis one of"):
        choose_calls(every, ["moon=full"], 0)


def test_a_measurement_that_is_not_finite_survives_a_round_trip(tmp_path: Path) -> None:
    text = Measurement(status="measured", seconds=float("inf")).model_dump_json()
    assert Measurement.model_validate_json(text).seconds == float("inf")
    assert os.environ.get("TRITON_INTERPRET") == "1", "set before kernels import Triton"
