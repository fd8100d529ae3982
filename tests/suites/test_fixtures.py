"""The fixtures of a comparison: in a test file of one's own, and in ``pytest suites``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from assay.harness.config import _GATE_FLAGS, RUN_FLAGS, flag
from assay.suites.conftest import pytest_addoption


class Options:
    """Takes the place of pytest's parser and keeps the flags that it is given."""

    def __init__(self) -> None:
        self.flags: set[str] = set()

    def getgroup(self, *_: str) -> Options:
        return self

    def addoption(self, name: str, **_: Any) -> None:
        self.flags.add(name)


def test_the_flags_are_those_of_a_run_and_none_that_would_be_ignored() -> None:
    options = Options()
    pytest_addoption(cast(pytest.Parser, options))
    assert {flag(name) for name in RUN_FLAGS} == options.flags - {"--out"}
    assert not options.flags & {flag(name) for name in _GATE_FLAGS}


def test_servers_in_turn_are_refused_since_the_tests_use_both(
    python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    root = Path(__file__).parents[2]
    flags = ["--servers=in-turn", "--candidate=torch_native", "--startup-timeout=1", f"--out={tmp_path / 'run'}"]
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(root / "suites"), *flags, cwd=root)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "--servers" in done.stdout
    assert not (tmp_path / "run").exists()


OWN = """
import urllib.request
from urllib.error import HTTPError

import pytest


def test_both_answer(reference_server, candidate_server):
    assert reference_server.url != candidate_server.url
    for server in (reference_server, candidate_server):
        assert server.chat("Say yes.") == "yes"
        assert server.generate("and on") == "AND ON"
        assert [model.id for model in server.client.models.list()] == [server.model]


def test_a_key_is_needed(candidate_server):
    asked = f"{candidate_server.url}/server_info"
    assert urllib.request.urlopen(urllib.request.Request(asked, headers=candidate_server.headers)).status == 200
    with pytest.raises(HTTPError, match="401"):
        urllib.request.urlopen(asked)


def test_the_run(assay_run):
    assert [suite.id for suite in assay_run.suites] == ["accuracy"]
    assert assay_run.candidate.backend == "triton"


def test_of_something_else():
    assert False
"""


@pytest.fixture(scope="module")
def own(
    python: Callable[..., subprocess.CompletedProcess[str]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs pytest in a folder with a test file of its own, on servers of the stand-in for SGLang."""
    folder, root = tmp_path_factory.mktemp("own"), Path(__file__).parents[2]
    (folder / "test_own.py").write_text(OWN)
    (folder / "assay.toml").write_text("[run]\nquestions = 48\nsuites = 'accuracy'\n[policy]\nmargin = 0.1\n")
    path = os.pathsep.join([str(root / "tests/stand_ins/engine"), str(root)])
    flags = ["-q", "-rA", "-p", "assay.suites.plugin", "-p", "no:cacheprovider", "--assay-reference=torch_native"]
    command = ("-m", "pytest", *flags, "--rootdir", str(folder), "--assay-candidate")

    def run(candidate: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        given = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path, **environment}
        return python(*command, candidate, *arguments, cwd=folder, env=given, timeout=120)

    return run


def test_both_servers_and_their_run_are_fixtures_of_any_test(own: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = own("triton")
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_own.py::test_of_something_else" in done.stdout
    assert done.returncode == 1, "the exit code is that of the tests, not that of the run"


@pytest.mark.parametrize(
    ("candidate", "failure", "says"),
    [
        ("triton", "candidate:dies-starting", "out of memory, says the stand-in"),
        ("no.such:kernel", "", "assay: --candidate: kernel"),
    ],
)
def test_what_cannot_be_served_fails_only_the_tests_that_need_it(
    own: Callable[..., subprocess.CompletedProcess[str]], candidate: str, failure: str, says: str
) -> None:
    done = own(candidate, "-k", "key or else", STAND_IN_FAILS=failure)
    assert done.returncode == 1
    assert "1 failed" in done.stdout
    assert "1 error" in done.stdout
    assert says in done.stdout
    assert "Traceback" not in done.stdout
