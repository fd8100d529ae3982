"""The example pipelines are valid: a wrong key or a missing one is found by the systems' own schemas."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from assay.harness.cli import app

CI = Path(__file__).parent.parent / "docs" / "ci"
GITHUB = ["--builtin-schema", "vendor.github-workflows"]
TIMEOUT = ["--builtin-schema", "custom.github-workflows-require-timeout"]
GITLAB = ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci"]


def check(schema: list[str], file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", *schema, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("schema", "name"), [(GITHUB, "github-actions.yml"), (TIMEOUT, "github-actions.yml"), (GITLAB, "gitlab-ci.yml")]
)
def test_example(schema: list[str], name: str) -> None:
    done = check(schema, CI / name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_broken_example_would_be_found(tmp_path: Path) -> None:
    broken = tmp_path / "workflow.yml"
    broken.write_text(
        (CI / "github-actions.yml").read_text().replace("runs-on: ubuntu-latest", "run-on: ubuntu-latest")
    )
    assert check(GITHUB, broken).returncode == 1


@pytest.mark.parametrize("name", ["github-actions.yml", "gitlab-ci.yml"])
def test_the_commands_are_ones_that_assay_takes(name: str) -> None:
    text = (CI / name).read_text()
    commands = re.findall(
        r"noxfile\.py\"? -s (\w+) -- *([^']+?)(?=\n +env:|\n +- if:|\n +artifacts:|\n  artifacts:|'\n)", text
    )
    assert len(commands) == 2, "the CPU's and the GPU's, or GitLab's and Jenkins's"
    for session, words in commands:
        assert session == "gate"
        flags = dict(re.findall(r"(--[a-z-]+) (\S+)", words))
        assert set(flags) <= gate_options()
        for flag in {"--config", "--baselines", "--out"} & set(flags):
            # nox has gone to the noxfile's folder: a relative path would be one in assay's own checkout.
            assert flags[flag].startswith('"$'), f"{flag} {flags[flag]} is relative"


def gate_options() -> set[str]:
    command = typer.main.get_command(app).commands["gate"]  # type: ignore[attr-defined]
    return {option for parameter in command.params for option in parameter.opts}
