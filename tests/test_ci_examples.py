"""The pipelines in docs/ci, the examples and this repository are valid, and their commands do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from assay.harness.cli.app import load_command

ROOT = Path(__file__).parent.parent
CI = ROOT / "docs" / "ci"
PIPELINES = ("github-actions.yml", "gitlab-ci.yml")
GITHUB = ["--builtin-schema", "vendor.github-workflows"]
TIMEOUT = ["--builtin-schema", "custom.github-workflows-require-timeout"]
GITLAB = ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci"]
WORKFLOWS = sorted([CI / "github-actions.yml", *ROOT.glob("**/.github/workflows/*.yml")])


def check(schema: list[str], *files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", *schema, *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_workflow_is_found() -> None:
    assert len(WORKFLOWS) == 5


@pytest.mark.parametrize("schema", [GITHUB, TIMEOUT], ids=["syntax", "timeout"])
def test_github_workflows_are_valid(schema: list[str]) -> None:
    done = check(schema, *WORKFLOWS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_gitlab_pipeline_is_valid() -> None:
    done = check(GITLAB, CI / "gitlab-ci.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_broken_workflow_is_found(tmp_path: Path) -> None:
    broken = tmp_path / "workflow.yml"
    broken.write_text((CI / "github-actions.yml").read_text().replace("runs-on: ubuntu-latest", "run-on: ubuntu-latest"))
    assert check(GITHUB, *WORKFLOWS, broken).returncode == 1


@pytest.mark.parametrize("name", PIPELINES)
def test_the_commands_are_ones_that_assay_takes(name: str) -> None:
    commands = re.findall(r"noxfile\.py -s (\w+) -- *((?:\s*(?:--[a-z-]+|[^\s'-]\S*))+)", (CI / name).read_text())
    assert len(commands) == 2, "the CPU's and the GPU's, or GitLab's and Jenkins's"
    for session, words in commands:
        assert session == "gate"
        flags = set(re.findall(r"--[a-z-]+", words))
        assert "--out" in flags
        assert flags <= gate_options()


def gate_options() -> set[str]:
    return {option for parameter in load_command("gate").params for option in parameter.opts}


CHECKOUTS = sorted({path for name in PIPELINES for path in re.findall(r"-f (\S+)/noxfile\.py", (CI / name).read_text())})
"""Where the pipelines check assay out, relative to the repository that is gated."""


def nox(noxfile: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a session of this repository's noxfile as a pipeline does, from `folder`, in the environment of this test."""
    own = f"\n\ndef environment(session: nox.Session, profile: str = 'cpu') -> str:\n    return {sys.executable!r}\n"
    noxfile.parent.mkdir()
    noxfile.write_text((ROOT / "noxfile.py").read_text() + own)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "nox", "-f", str(noxfile), "-s", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("checkout", CHECKOUTS)
def test_a_session_works_in_the_folder_from_which_nox_is_called(tmp_path: Path, checkout: str) -> None:
    """As docs/ci rely on: relative paths and assay.toml are those of the repository that is gated, not of assay's checkout."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "assay.toml").write_text('[run]\nquestions = "ours"\n')
    done = nox(folder / checkout / "noxfile.py", folder, "gate", "--", "--out", "run")
    assert "assay.toml, [run]: questions is 'ours'" in done.stdout + done.stderr
    assert done.returncode == 2, "nox alone would turn a usage error into a 1, which means a regression"


def test_a_checkout_that_hides_the_package_is_a_usage_error(tmp_path: Path) -> None:
    """Python takes a folder named assay in the working directory for the package, and an ImportError would exit with 1."""
    done = nox(tmp_path / "assay" / "noxfile.py", tmp_path, "gate")
    assert "ImportError" not in done.stderr
    assert f"{tmp_path / 'assay'} hides the package" in done.stderr
    assert done.returncode == 2
