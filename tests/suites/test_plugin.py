"""The pytest plugin, in a pytest of its own. What docs/library.md shows is run exactly as it stands there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from assay.harness.attention.matrix import cases

DOCS = (Path(__file__).parents[2] / "docs" / "library.md").read_text()

TESTS = """
import pytest


def test_wrong(assay):
    assay.check("my_kernels:first_try")


def test_result(assay):
    result = assay.check("my_kernels:attention", phases=["decode"], case="1+16-one-")
    assert result.computed and not result.refused


def test_nothing_computed(assay):
    assay.check("refusing:kernel", phases=["decode"], dtypes=["float16"])


def test_no_such_kernel(assay):
    assay.check("no.such:kernel")
"""
REFUSING = """
from assay import KernelRefused


def kernel(call):
    raise KernelRefused("not today")
"""


Ran = tuple[subprocess.CompletedProcess[str], dict[str, ElementTree.Element]]
Run = Callable[..., Ran]


@pytest.fixture(scope="session")
def run(python: Callable[..., subprocess.CompletedProcess[str]]) -> Run:
    """A function that runs pytest in a folder with this plugin and no other; it returns the output, and the test cases by name.

    Python puts the working folder on its path for ``-m pytest``, but not for the command ``pytest``.
    """
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    flags = ("-p", "assay.suites.plugin", "--strict-markers", "--junit-xml=out.xml", "-p", "no:cacheprovider")

    def ran(folder: Path, *arguments: str, pytest: tuple[str, ...] = ("-m", "pytest")) -> Ran:
        root = () if "--rootdir" in arguments else ("--rootdir", str(folder))
        done = python(*pytest, *flags, *arguments, *root, cwd=folder, env=env, timeout=900)
        found = {}
        if (folder / "out.xml").exists():
            found = {str(case.get("name")): case for case in ElementTree.parse(folder / "out.xml").iter("testcase")}
        return done, found

    return ran


def outcome(case: ElementTree.Element) -> str:
    return next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")


@pytest.fixture(scope="module")
def documented(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every file that the documentation shows, and a kernel that refuses all calls."""
    folder = tmp_path_factory.mktemp("my_repo")
    for name, source in re.findall(r"```python\n# (\S+)\n(.*?)```", DOCS, re.DOTALL):
        (folder / name).write_text(source)
    (folder / "refusing.py").write_text(REFUSING)
    return folder


@pytest.mark.slow
def test_the_documented_example_passes_as_it_stands(run: Run, documented: Path) -> None:
    done, found = run(documented, "test_my_kernels.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcome(found["test_attention"]) == "passed"
    [line] = re.findall(r"^assay: 1 kernel, (\d+) calls, worst 0\.\d+ × its bound$", done.stdout, re.MULTILINE)
    assert int(line) == len(cases())


ONE_TEST = """
import pytest


def test_forward(assay):
    assay.check("mine:forward", phases=["decode"], case="1+16-one-")
"""


@pytest.mark.parametrize(
    ("mode", "root", "working"),
    [
        pytest.param("prepend", ".", ".", marks=pytest.mark.slow),
        pytest.param("importlib", ".", ".", marks=pytest.mark.slow),
        pytest.param("importlib", "tests", ".", marks=pytest.mark.slow),
        ("prepend", ".", "tests"),
    ],
)
def test_plain_pytest_finds_a_kernel_in_the_root_and_in_the_working_folder(
    run: Run, mode: str, root: str, working: str, tmp_path: Path
) -> None:
    """As the commands do, and whichever folder pytest is called in."""
    (tmp_path / "mine.py").write_text(
        "from assay import oracle\n\n\ndef forward(call):\n    return oracle(call).to(call.q.dtype)\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_mine.py").write_text(ONE_TEST)
    command = (str(Path(sys.executable).with_name("pytest")),)
    flags = (f"--import-mode={mode}", "--rootdir", str(tmp_path / root))
    done, found = run(tmp_path / working, *flags, str(tmp_path / "tests"), pytest=command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {outcome(case) for case in found.values()} == {"passed"}
    assert found


JOBS_HERE = """
import importlib

from assay import worker


def run(job, *, on_event, **_):
    module, _, name = job.function.partition(":")
    return worker.Done(getattr(importlib.import_module(module), name)(**job.arguments, journal=worker.Journal(on_event)))


worker.run = run
"""
"""The conftest.py of tests whose kernels end nothing: their jobs are done in the process of the tests."""


@pytest.fixture(scope="module")
def failing(run: Run, documented: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = Path(shutil.copytree(documented, tmp_path_factory.mktemp("failing") / "repo"))
    (folder / "conftest.py").write_text(JOBS_HERE)
    (folder / "test_kernels.py").write_text(TESTS)
    return run(folder, "test_kernels.py", "-k", "not test_wrong")


@pytest.mark.slow
def test_the_documented_message_is_the_message(run: Run, documented: Path) -> None:
    (documented / "test_message.py").write_text(TESTS)
    failure = run(documented, "test_message.py", "-k", "test_wrong")[1]["test_wrong"].find("failure")
    assert failure is not None
    [shown] = re.findall(r"```text\n(.*?)```", DOCS, re.DOTALL)
    for line in shown.splitlines():
        assert line in (failure.text or ""), line


def test_what_is_wrong_or_not_shown_fails(failing: Ran) -> None:
    done, found = failing
    assert done.returncode == 1
    assert outcome(found["test_result"]) == "passed"
    for name, says in (("test_nothing_computed", "no decode call was computed"), ("test_no_such_kernel", "no.such:kernel")):
        assert outcome(found[name]) == "failure"
        assert says in "".join(found[name].itertext())


def test_it_is_silent_and_light_where_it_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import sys\n\n\ndef test_it():\n    assert 'torch' not in sys.modules\n")
    command = [sys.executable, "-m", "pytest", "-p", "assay.suites.plugin", "-p", "no:cacheprovider", str(tmp_path)]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert "assay" not in done.stdout.replace(str(tmp_path), "")


def test_flags_are_its_own_and_reach_the_check(run: Run, documented: Path) -> None:
    done, _ = run(documented, "test_my_kernels.py", "--assay-device", "cuda:99")
    assert done.returncode == 1
    assert "cuda:99" in done.stdout


ENDING = """
import os, sys, unittest
import pytest
from assay import oracle


def right(call):
    return oracle(call).to(call.q.dtype)


def exits(call):
    os._exit(0)


def skips_the_test(call):
    raise unittest.SkipTest("not today")


def leaves(call):
    pytest.exit("not today", returncode=0)


def is_read():
    frame = sys._getframe()
    while frame and not frame.f_globals["__name__"].startswith("assay.harness.readout."):
        frame = frame.f_back
    return frame is not None


def skips_when_it_is_read(call):
    return pytest.skip("not today") if is_read() else right(call) * 2


def copies(call):
    os.fork()
    return right(call)
"""
TEST_ENDING = """
import os

import pytest
import torch
from assay import assert_correct
from assay.harness.attention.sample_calls import call_of
from ending import *

KERNELS = [exits, leaves]
FEW = dict(phases=["decode"], dtypes=["float32"], head_dims=[64], case="1+16-")
HERE = os.getpid()


@pytest.mark.parametrize("kernel", [*KERNELS, copies], ids=lambda kernel: kernel.__name__)
def test_check(assay, kernel):
    assay.check(kernel, **FEW)


def test_read(assay):
    assay.check(skips_when_it_is_read, **FEW, read_out=1)


@pytest.mark.parametrize("kernel", [exits, skips_the_test, leaves], ids=lambda kernel: kernel.__name__)
def test_call(kernel):
    assert_correct(kernel, call_of([(1, 4)], (2, 1), 64, torch.float32, "cpu"))


def test_right_call_of_a_kernel_that_forks():
    assert_correct(copies, call_of([(1, 4)], (2, 1), 64, torch.float32, "cpu"))


def test_closure(assay):
    assay.check(lambda call: os._exit(0), **FEW)


def test_right(assay):
    assert assay.check(lambda call: right(call), **FEW).computed
    assert os.getpid() == HERE
"""


@pytest.fixture(scope="module")
def ending(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("ending")
    (folder / "ending.py").write_text(ENDING)
    (folder / "test_ending.py").write_text(TEST_ENDING)
    return run(folder, "test_ending.py")


@pytest.mark.slow  # fast: test_a_kernel_that_exits_with_0_does_not_pass
def test_a_kernel_that_ends_its_process_or_its_test_is_no_pass(ending: Ran) -> None:
    done, found = ending
    assert done.returncode == 1, done.stdout + done.stderr
    wrong = {name: outcome(case) for name, case in found.items() if not name.startswith("test_right")}
    assert [name for name, came in wrong.items() if came != "failure"] == []
    assert {name.partition("[")[0] for name in wrong} == {"test_check", "test_call", "test_closure", "test_read"}
    assert outcome(found["test_right"]) == "passed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("test_check[exits]", "the process of the kernel exited with status 0 in layer 0 decode"),
        ("test_check[leaves]", "the kernel raised Exit: not today"),
        ("test_read", "ending:skips_when_it_is_read is wrong on "),
        ("test_check[copies]", "it forked its process"),
        ("test_call[skips_the_test]", "The kernel raised SkipTest: not today (ending.py, line 16, in skips_the_test)"),
        ("test_call[leaves]", "The kernel raised Exit: not today"),
        ("test_call[exits]", "The kernel raised SystemExit: 0"),
        ("test_closure", "the kernel raised SystemExit: 0"),
    ],
)
def test_how_a_kernel_ended_is_said(ending: Ran, name: str, says: str) -> None:
    assert says in "".join(ending[1][name].itertext())


@pytest.mark.slow
def test_a_kernel_that_forks_gives_one_verdict(ending: Ran) -> None:
    assert ending[0].stdout.count("short test summary info") == 1
