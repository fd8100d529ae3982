"""A sweep's cells: command lines and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from assay.harness.drivers.sweep import cells
from assay.harness.drivers.sweep.cells import Option, cells_of
from assay.harness.drivers.sweep.spec import SweepSpec, SweptCell
from assay.harness.errors import UsageError

CHECK = {
    "candidate": Option(""),
    "size": Option("--size"),
    "dtype": Option("--dtype"),
    "read_out": Option("--read-out", True),
    "graphs": Option("--graphs", True, "--no-graphs"),
}


def planned(device: str = "CPU", **given: Any) -> list[SweptCell]:
    for cached in (cells._code_of, cells._files_of):
        cached.cache_clear()
    return cells_of(SweepSpec(**{"command": "check", **given}), CHECK, device)


def commands(made: list[SweptCell]) -> list[str]:
    return [" ".join(cell.command) for cell in made]


def test_a_cell_is_a_command_line() -> None:
    made = planned(axes={"candidate": ["a:f", "b:f"], "dtype": [["float16", "float32"]], "size": "full"})
    assert commands(made) == [
        "check --size=full --dtype=float16 --dtype=float32 a:f", "check --size=full --dtype=float16 --dtype=float32 b:f",
    ]  # fmt: skip
    assert made[0].axes == {"candidate": "a:f", "dtype": "float16,float32", "size": "full"}


def test_switches_are_on_or_off() -> None:
    made = planned(axes={"read_out": [True, False], "graphs": [True, False], "candidate": "a:f"})
    assert commands(made) == [
        "check --read-out --graphs a:f", "check --read-out --no-graphs a:f", "check --graphs a:f", "check --no-graphs a:f",
    ]  # fmt: skip


def test_a_key_holds_what_decides_a_cell_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep_helper.py").write_text("SCALE = 1\n")
    (tmp_path / "sweep_kernel.py").write_text("import sweep_helper\ndef forward(call): return call.q\n")

    def key(device: str = "CPU", **given: Any) -> str:
        (cell,) = planned(device, **{"axes": {"candidate": "sweep_kernel:forward", "size": "full"}, **given})
        return cell.key

    first = key()
    (tmp_path / "other.py").write_text("x = 1\n")
    assert key(axes={"size": ["full"], "candidate": ["sweep_kernel:forward"]}) == first
    assert key(limits={"minutes": 1}) == first
    others = [key(axes={"candidate": "sweep_kernel:forward"}), key(device="L4"), key(runtime_env={"pip": ["torch==2.9"]})]
    (tmp_path / "assay.toml").write_text("[run]\n")
    others.append(key())
    (tmp_path / "sweep_helper.py").write_text("SCALE = 2\n")
    others.append(key())
    assert len({first, *others}) == 6


@pytest.mark.parametrize(
    ("code", "changed", "unchanged"),
    [
        ('Path(__file__).with_name("tuned.json").read_text()', "tuned.json", "report.json"),
        ('open(f"configs/E={e}.json")', "configs/E=8.json", "notes.md"),
        ('read(f"E={e}.json")', "E=8.json", "notes.md"),
        ('[*(Path(__file__).parent / "configs").iterdir()]', "configs/a.bin", "notes.md"),
    ],
)
def test_a_key_holds_the_data_beside_a_kernel_that_its_code_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, changed: str, unchanged: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "data_kernel.py").write_text(f"def forward(call):\n    return {code}\n")
    keys = []
    for name, content in ((changed, "1"), (changed, "2"), (unchanged, "3")):
        (tmp_path / name).write_text(content)
        keys.append(planned(axes={"candidate": ["data_kernel:forward"]})[0].key)
    assert keys[0] != keys[1]
    assert keys[1] == keys[2], "what the kernel does not name decides nothing"


def test_what_is_shown_and_kept_of_a_cell_has_no_secrets() -> None:
    values = ["--api-key=hunter2", "--api-key=hunter3", "--page-size=16"]
    made = planned(axes={"size": values, "candidate": "a:f", "dtype": "http://me:hunter2@host"})
    assert "hunter" not in "".join(cell.model_dump_json() for cell in made)
    assert [cell.axes["size"] for cell in made] == ["--api-key=***", "--api-key=***", "--page-size=16"]
    assert made[0].given == ("check", "--size=--api-key=hunter2", "--dtype=http://me:hunter2@host", "a:f")
    assert len({cell.key for cell in made}) == 3


@pytest.mark.parametrize(
    ("given", "found", "do"),
    [
        ({"axes": {"candidate": ["a:f"], "model": ["m"]}}, "The axis model is not an option of assay check.", "see"),
        ({"axes": {"candidate": ["a:f"], "sise": 1}}, "The axis sise is not an option of assay check.", "size"),
    ],
)
def test_what_the_command_does_not_take_is_refused(given: dict[str, Any], found: str, do: str) -> None:
    with pytest.raises(UsageError) as error:
        planned(**given)
    assert error.value.found.startswith(found)
    assert do in error.value.do
