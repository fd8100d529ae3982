"""``assay fingerprint diff``, and the other forms of the command, without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from assay.harness.cli.app import app
from assay.harness.evidence.fingerprint import FINGERPRINT, Fingerprint

COMMAND = ("fingerprint",)
"""What `call` begins with."""


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Files of two fingerprints that differ in a package."""
    paths = []
    for version in ("2.12", "2.13"):
        path = tmp_path / f"{version}.json"
        made = Fingerprint(source="server", engine="SGLang 0.5.23 on cpu", model="m", packages={"torch": version})
        path.write_text(made.model_dump_json())
        paths.append(path)
    return paths[0], paths[1]


def test_what_differs_exits_with_1_unless_it_is_allowed(
    call: Callable[..., int], two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, cases = tmp_path / "page.html", tmp_path / "cases.xml"
    assert call("diff", *two, "--html", page, "--junit", cases) == 1
    shown = capsys.readouterr().out
    assert "torch is 2.12 in A, 2.13 in B" in shown
    assert "torch is 2.12 in A, 2.13 in B. (exit code 1)" in shown.splitlines()[-1]
    assert "torch is 2.12 in A" in page.read_text()
    assert "failure" in cases.read_text()
    assert call("diff", *two, "--allow=packages") == 0
    assert "declared by --allow packages" in capsys.readouterr().out
    assert call("diff", *two, "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["exit_code"]) == ("assay.fingerprint-diff/1", 1)


def test_a_run_is_named_by_its_folder(
    call: Callable[..., int], two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for role, path in zip(("reference", "candidate"), two, strict=True):
        made = Fingerprint.model_validate_json(path.read_text())
        FINGERPRINT.write(tmp_path / "run" / "servers" / role, made, "a-run")
    assert call("diff", tmp_path / "run" / "servers" / "reference", tmp_path / "run") == 1
    assert call("diff", two[1], tmp_path / "run") == 0
    done = CliRunner().invoke(app, ["compare", str(two[0]), str(tmp_path / "run")])
    assert done.exit_code == 1
    assert "torch is 2.12 in A, 2.13 in B" in done.output


def test_compare_recognises_fingerprints(two: tuple[Path, Path]) -> None:
    done = CliRunner().invoke(app, ["compare", *map(str, two)])
    assert done.exit_code == 1
    assert "torch is 2.12 in A, 2.13 in B" in done.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["diff", "a"], "diff got 1 names"),
        (["diff", "missing.json", "missing.json"], "There is no missing.json"),
        (["not-a-url"], "is no URL"),
        (["http://me:hunter2@x"], "'http://***@x' is no URL of a server"),
        (["http://x", "http://y"], "is followed by"),
        (["--allow=packages"], "--allow does nothing with a model"),
        (["diff", "a", "b", "--out=x.json"], "--out does nothing with diff"),
        (["diff", "a", "b", "--model=tiny"], "--model does nothing with diff"),
        (["diff", "a", "b", "--device=cpu"], "--device does nothing with diff"),
        (["diff", "a", "b", "--allow=nonsense"], "--allow=nonsense is no part of a fingerprint"),
        (["diff", "a", "b", "--allow=package"], "packages"),
        (["http://x", "--files"], "--files does nothing with a URL"),
        (["http://x", "--env=A=1"], "--env does nothing with a URL"),
        (["http://x", "--engine-arg=--page-size=16"], "--engine-arg does nothing with a URL"),
        (["--env=NAME", "--files"], "--env=NAME has no value"),
    ],
)
def test_wrong_uses(call: Callable[..., int], words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words) == 2
    assert says in capsys.readouterr().err


def test_a_folder_without_a_fingerprint_is_a_wrong_use(
    call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("diff", tmp_path, tmp_path) == 2
    assert "has no fingerprint.json" in capsys.readouterr().err


def test_nothing_in_common_exits_with_3(call: Callable[..., int], two: tuple[Path, Path], tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text(Fingerprint(source="files", engine="e", model="m").model_dump_json())
    assert call("diff", two[0], empty) == 3
