"""The example pipelines are valid: a wrong key or a missing one is found by the systems' own schemas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
