from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from junitparser import JUnitXml

from assay.reports.json_report import to_json

DATA = Path(__file__).parents[2] / "data" / "results"
ENGINE = DATA.parent / "traces" / "mlc_engine.txt"


COMMAND = ("compare",)
"""What `call` begins with."""


def test_a_regression_exits_with_1_and_is_shown_and_written(
    call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("c.html", "c.xml")]
    flags = ["--html", files[0], "--junit", files[1]]
    assert call(DATA / "lm_eval_a", DATA / "lm_eval_b", "--all", *flags) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("REGRESSION   B is worse than A")
    assert "lost 7" in shown
    assert "not checked: whether the kernel under test computed the answers" in shown
    assert call(DATA / "lm_eval_a", DATA / "lm_eval_b", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["verdict"], document["exit_code"]) == ("assay.compare/5", "regression", 1)
    assert "assay_synthetic" in files[0].read_text()
    (suite,) = JUnitXml.fromfile(str(files[1]))
    results = {case.name: [type(one).__name__ for one in case.result] for case in suite}
    assert results["verdict"] == ["Failure"]
    assert results["execution"] == ["Skipped"]
    assert results["all-paired"] == ["Error"], "the data are 24 of the 128 answers that were asked for"


def test_tensors_are_compared_by_head_and_token_where_the_layout_is_told(
    call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = np.ones((6, 4, 8), np.float32)
    np.savez(tmp_path / "a.npz", **{"layers.0.attn": values})
    np.savez(tmp_path / "same.npz", **{"layers.0.attn": values})
    values[2, 3] = 2
    np.savez(tmp_path / "b.npz", **{"layers.0.attn": values})
    told = ("--layout", "thd", "--all")
    assert call(tmp_path / "a.npz", tmp_path / "b.npz", "--json", "--html", tmp_path / "c.html", *told) == 1
    said = capsys.readouterr()
    assert "First and worst: layer 0, attention, head 3, token 2, of layers.0.attn" in said.err
    document = json.loads(said.out)
    assert (document["kind"], document["tensors"]["first"]["index"]) == ("tensors", [2, 3])
    assert call(tmp_path / "a.npz", tmp_path / "same.npz") == 0
    assert call(tmp_path / "a.npz", tmp_path / "b.npz", "--tolerance", "2") == 0
    assert call(tmp_path / "a.npz", tmp_path / "a.npz") == 2
    assert call(tmp_path / "a.npz", tmp_path / "b.npz", "--layout", "xyz") == 2


def test_traces_are_compared_step_by_step(call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = shutil.copy(ENGINE, tmp_path)
    assert call(ENGINE, again) == 0
    assert capsys.readouterr().out.startswith("EQUAL   Both traces take the same steps: ")
    other = tmp_path / "other.txt"
    other.write_text(ENGINE.read_text().replace("fork_sequence", "add_sequence"))
    assert call(ENGINE, other, "--html", tmp_path / "c.html") == 1
    assert capsys.readouterr().out.startswith("DIFFERENT   Request 2 calls kv_cache_fork_sequence_func_ (line ")
    assert (tmp_path / "c.html").read_text().count('class="chart"') == 2
    assert call(ENGINE, DATA / "lm_eval_a") == 2


def test_two_reports_are_compared_and_get_the_verdict_of_the_new_run(
    call: Callable[..., int], tmp_path: Path, examples: ModuleType
) -> None:
    paths = []
    for name in ("passing", "regression"):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(to_json(getattr(examples, name)()))
    assert call(*paths) == 1
    assert call(*paths[::-1]) == 3, "reports have no answers"
