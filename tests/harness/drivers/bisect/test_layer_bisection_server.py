"""``assay bisect layers`` in a real CPU server: a fault seeded in one layer of the tiny model is found there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from assay.harness import cli
from assay.harness.drivers.bisect.layer_task import LayerBisection
from assay.harness.errors import ExitCode

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.interpreter]
KERNELS = """
from assay.harness.attention.bugs.faults import fault
kernel = fault("mask-top-left", layers=[1])
"""


def test_the_seeded_layer_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "seeded_in_one_layer.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    flags = ["--candidate", "seeded_in_one_layer:kernel", "--questions", "24", "--out", "out"]
    monkeypatch.setattr(sys, "argv", ["assay", "bisect", "layers", *flags])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == ExitCode.REGRESSION
    text = (tmp_path / "out" / "bisect.json").read_text()
    result = LayerBisection.model_validate_json(text)
    assert [(one.layer, one.alone) for one in result.restored] == [(1, True)]
    assert result.layers == (0, 1, 2, 3)
    # What the fault does depends on how much was cached when a prompt arrived, so the candidate's own floor may be above 0.
    assert (result.by, result.floor, result.monotone) == ("answers", 0, True)
    sets = {probe.candidate for probe in result.probes}
    assert len(sets) <= 7
    if result.candidate_floor == 0:
        assert len(sets) == len(result.probes), "identical floors need no repeated probe"
    for probe in result.probes:
        assert probe.with_prefix == result.prompts, "the fault needs a cached prefix"
        assert probe.outcome == ("wrong" if 1 in probe.candidate else "right")
    assert json.loads(text)["schema"] == "assay.bisect/7"
    assert "layer 1 of 0-3: must run torch_native" in capsys.readouterr().out
