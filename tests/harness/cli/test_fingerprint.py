"""``assay fingerprint`` and ``assay compare`` of fingerprints, without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.harness.errors import UsageError
from assay.harness.evidence.fingerprint import FINGERPRINT, Fingerprint


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Files of two fingerprints that differ in a package."""
    paths = []
    for version in ("2.12", "2.13"):
        path = tmp_path / f"{version}.json"
        made = Fingerprint(source="server", engine="e", model="m", packages={"torch": version}, config={"eps": "1e-05"})
        path.write_text(made.model_dump_json())
        paths.append(path)
    return paths[0], paths[1]


def test_what_differs_exits_with_1_unless_it_is_allowed(
    call: Callable[..., int], two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, cases = tmp_path / "page.html", tmp_path / "cases.xml"
    assert call("compare", *two, "--html", page, "--junit", cases) == 1
    shown = capsys.readouterr().out
    assert "torch is 2.12 in A, 2.13 in B" in shown
    assert "torch is 2.12 in A, 2.13 in B · exit 1" in shown.splitlines()[0]
    assert "torch is 2.12 in A" in page.read_text()
    assert "failure" in cases.read_text()
    assert call("compare", *two, "--allow=packages", "--all") == 0
    assert "declared by --allow packages" in capsys.readouterr().out
    assert call("compare", *two, "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["exit_code"]) == ("assay.fingerprint-diff/1", 1)


def test_a_run_is_named_by_its_folder(
    call: Callable[..., int], two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for role, path in zip(("reference", "candidate"), two, strict=True):
        made = Fingerprint.model_validate_json(path.read_text())
        FINGERPRINT.write(tmp_path / "run" / "servers" / role, made, "a-run")
    servers = tmp_path / "run" / "servers"
    assert call("compare", servers / "reference", servers / "candidate") == 1
    assert call("compare", two[1], tmp_path / "run") == 0
    assert call("compare", two[0], tmp_path / "run") == 1


def test_nothing_in_common_exits_with_3(call: Callable[..., int], two: tuple[Path, Path], tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text(Fingerprint(source="endpoint", engine="e", model="m").model_dump_json())
    assert call("compare", two[0], empty) == 3


def test_missing_packages_are_found_before_a_model_is_loaded(
    call: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(extra: str, what: str) -> None:
        raise UsageError(f"{what} needs packages that are not installed.", extra, "install them")

    monkeypatch.setattr("assay.harness.extras.require", missing)
    assert call("fingerprint") == 2
    assert "needs packages" in capsys.readouterr().err
