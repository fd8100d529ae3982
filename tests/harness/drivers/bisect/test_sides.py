"""Two sides as differences: each is named, and the reference with all of them is the candidate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from assay.harness.drivers.bisect.sides import SidePair
from assay.harness.drivers.bisect.sides_task import Difference
from assay.harness.engines.environments import Interpreter
from assay.harness.sides import Side

HERE = (Path("."), Path("."))


def python(path: str, version: tuple[int, int, int] = (3, 11, 7), **packages: str) -> Interpreter:
    there = {name: (number, f"/{path}/{name}.dist-info") for name, number in packages.items()}
    return Interpreter(path=path, version=version, base=path, prefix=path, places=(), packages=there, missing=())


def folder(place: Path, config: dict[str, Any], **files: str) -> Path:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (place / name.replace("_json", ".json").replace("_safetensors", ".safetensors").replace("_md", ".md")).write_text(text)
    return place


def labels(pair: SidePair) -> list[str]:
    return [each.label for each in pair.differences()]


def applied(pair: SidePair, tmp_path: Path, *names: str) -> Side:
    return pair.applied([each for each in pair.differences() if each.label in names], tmp_path / "models")


def test_settings_are_named_and_applied_one_by_one(tmp_path: Path) -> None:
    reference = Side(backend="torch_native", flags=("--a=1", "--b", "x", "--c"), environment={"X": "1", "Y": "2"})
    candidate = Side(backend="triton", flags=("--b", "y", "z", "--a=1", "--d"), environment={"X": "3", "TOKEN": "secret"})
    pair = SidePair(reference, candidate, HERE)
    every = [
        "backend torch_native -> triton", "--b=y z", "without --c", "--d",
        "environment.TOKEN=***", "environment.X=3", "without environment.Y",
    ]  # fmt: skip
    assert labels(pair) == every
    assert applied(pair, tmp_path) == reference
    some = applied(pair, tmp_path, "--b=y z", "without --c", "environment.X=3", "without environment.Y")
    assert some == Side(backend="torch_native", flags=("--a=1", "--b", "y", "z"), environment={"X": "3"})
    whole = applied(pair, tmp_path, *every)
    assert (whole.backend, sorted(whole.flags), whole.environment) == ("triton", sorted(candidate.flags), candidate.environment)


def test_packages_of_two_environments_are_taken_one_by_one(tmp_path: Path) -> None:
    ours = python("/a/bin/python", transformers="5.2.0", numpy="1", old="3")
    theirs = python("/b/bin/python", transformers="5.3.0", numpy="1", new="1")
    (tmp_path / "a").mkdir()
    candidate = Side(backend="b", interpreter="/b/bin/python")
    pair = SidePair(Side(backend="b"), candidate, HERE, (ours, theirs.model_copy(update={"packages": theirs.packages | {
        "numpy": ours.packages["numpy"]}})))  # fmt: skip
    assert labels(pair) == ["new absent -> 1", "transformers 5.2.0 -> 5.3.0"]
    assert pair.left_out == ("old",)
    assert applied(pair, tmp_path, "transformers 5.2.0 -> 5.3.0") == Side(backend="b", packages=("transformers @ /b/bin/python",))


def test_packages_that_were_asked_for_stay_as_they_were_asked(tmp_path: Path) -> None:
    reference, candidate = (Side(backend="b", packages=(f"a=={version}", f"c-d=={version}")) for version in (1, 2))
    pythons = python("/a/bin/python", a="1", **{"c-d": "1"}), python("/b/bin/python", a="2", **{"c-d": "2"})
    pair = SidePair(reference, candidate, HERE, pythons)
    assert applied(pair, tmp_path, "c-d 1 -> 2").packages == ("a==1", "c-d==2")


def test_pythons_of_two_versions_are_one_difference(tmp_path: Path) -> None:
    pythons = python("/a/bin/python", a="1"), python("/b/bin/python", (3, 12, 0), a="2")
    candidate = Side(backend="b", interpreter="/b/bin/python", packages=("c",))
    pair = SidePair(Side(backend="b"), candidate, HERE, pythons)
    assert labels(pair) == ["Python 3.11.7 -> 3.12.0"]
    assert applied(pair, tmp_path, "Python 3.11.7 -> 3.12.0") == candidate


def test_packages_of_one_version_differ_by_their_content(tmp_path: Path) -> None:
    for name, text in (("a", "x = 1"), ("b", "x = 2"), ("c", "x = 1")):
        info = tmp_path / name / "fact-1.dist-info"
        info.mkdir(parents=True)
        (info / "RECORD").write_text("fact.py,,\n")
        (tmp_path / name / "fact.py").write_text(text)
    pythons = [
        python(f"/{name}").model_copy(update={"packages": {"fact": ("1", str(tmp_path / name / "fact-1.dist-info"))}})
        for name in "abc"
    ]
    pairs = [SidePair(Side(backend="b"), Side(backend="b"), HERE, (pythons[0], other)) for other in pythons[1:]]
    assert [labels(pair) for pair in pairs] == [["fact 1, other content"], []]


def test_settings_and_files_of_two_models_are_merged(tmp_path: Path) -> None:
    ours = folder(
        tmp_path / "ours", {"theta": 1, "rope": {"factor": 2, "same": 0}, "gone": 1},
        tokenizer_json="a", model_safetensors="w", README_md="x", generation_config_json="same",
    )  # fmt: skip
    theirs = folder(
        tmp_path / "theirs", {"theta": 9, "rope": {"factor": 4, "same": 0}, "new": [1]},
        tokenizer_json="b", model_safetensors="v", README_md="y", generation_config_json="same", extra_json="e",
    )  # fmt: skip
    pair = SidePair(Side(backend="b", model=str(ours)), Side(backend="b", model=str(theirs)), (ours, theirs))
    every = [
        "config.json: gone 1 -> absent", "config.json: new absent -> [1]", "config.json: rope.factor 2 -> 4",
        "config.json: theta 1 -> 9", "extra.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert labels(pair) == every
    assert applied(pair, tmp_path).model == str(ours)
    assert applied(pair, tmp_path, *every).model == str(theirs)
    some = Path(applied(pair, tmp_path, "config.json: gone 1 -> absent", "config.json: rope.factor 2 -> 4", "tokenizer.json").model)
    assert json.loads((some / "config.json").read_text()) == {"theta": 1, "rope": {"factor": 4, "same": 0}}
    assert {file.name: file.read_text() for file in some.iterdir() if file.name != "config.json"} == {
        "tokenizer.json": "b", "model.safetensors": "w", "generation_config.json": "same",
    }  # fmt: skip
    assert (some / "model.safetensors").is_symlink()
    assert json.loads((ours / "config.json").read_text())["rope"]["factor"] == 2


def test_weights_in_other_files_are_one_difference(tmp_path: Path) -> None:
    ours = folder(tmp_path / "ours", {}, a_safetensors="w")
    theirs = folder(tmp_path / "theirs", {}, b_safetensors="v", c_safetensors="u")
    pair = SidePair(Side(backend="b", model=str(ours)), Side(backend="b", model=str(theirs)), (ours, theirs))
    assert labels(pair) == ["weights"]


@pytest.mark.parametrize(
    ("kind", "name", "before", "after", "label"),
    [
        ("flag", "--a", "", "true", "--a"),
        ("config", "config.json: api_key", "1", "2", "config.json: api_key *** -> ***"),
        ("file", "tokenizer.json", "", "", "tokenizer.json"),
    ],
)
def test_labels(kind: Any, name: str, before: str, after: str, label: str) -> None:
    shown = Difference(kind=kind, name=name, before=before, after=after).label
    assert shown == label or shown == "config.json: api_key ***, other content"
