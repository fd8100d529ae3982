"""What decides a cell besides its command."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.harness.sweep.identity import identify


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep_helper.py").write_text("SCALE = 1\n")
    path = tmp_path / "sweep_kernel.py"
    path.write_text("import sweep_helper\ndef forward(call): return call.q\n")
    return path


def test_a_candidates_code_decides_and_other_files_do_not(kernel: Path) -> None:
    def now() -> dict[str, str]:
        return identify({}, "CPU")({"candidate": "sweep_kernel:forward"}, "")

    first = now()
    (kernel.parent / "other.py").write_text("x = 1\n")
    assert now() == first
    (kernel.parent / "sweep_helper.py").write_text("SCALE = 2\n")
    assert {name for name, value in now().items() if first.get(name) != value} == {"code of candidate"}


def test_files_that_a_cell_reads_decide(kernel: Path) -> None:
    def now() -> dict[str, str]:
        return identify({}, "CPU")({"candidate": "triton", "model": "model"}, "")

    (kernel.parent / "model").mkdir()
    (kernel.parent / "model" / "config.json").write_text("{}")
    first = now()
    assert (first["code of candidate"], first["files of assay.toml"]) == ("", "")
    (kernel.parent / "model" / "config.json").write_text('{"layers": 1}')
    (kernel.parent / "assay.toml").write_text("[run]\n")
    assert {name for name, value in now().items() if first.get(name) != value} == {"files of model", "files of assay.toml"}


def test_environment_and_device_decide() -> None:
    made = [
        identify({}, "CPU")({}, ""), identify({}, "CPU")({}, "L4"), identify({}, "any GPU")({}, ""),
        identify({"pip": ["torch==2.9"]}, "CPU")({}, ""),
    ]  # fmt: skip
    assert len({repr(sorted(found.items())) for found in made}) == 4
    assert "torch" in made[0]["environment"]
    assert "assay" in made[0]["environment"]
