from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from assay.harness.config import make_spec
from assay.harness.judge.evidence import RunEvidence
from assay.harness.judge.policy_checks import claim


@pytest.mark.parametrize(
    ("flags", "noise", "status", "found"),
    [
        ({}, {"reference": "int8_qk", "candidate": ""}, "ok", "margins, error rates and envelope are the defaults"),
        ({}, {"candidate": "int8_qk"}, "not checked", "noise = int8_qk (declared by the kernel alone)"),
        ({"margin": 0.1, "alpha": 0.2}, {}, "not checked", "margin = 0.1 (--margin); alpha = 0.2 (--alpha)"),
    ],
)
def test_a_weaker_policy_is_named(tmp_path: Path, flags: dict[str, Any], noise: dict[str, str], status: str, found: str) -> None:
    manifest = SimpleNamespace(noise=noise, model="tiny", created="")
    folder = SimpleNamespace(path=tmp_path / "run")
    run = SimpleNamespace(spec=make_spec(flags), manifest=manifest, baselines=None, folder=folder)
    check = claim(cast(RunEvidence, run), ()).checks[-1]
    assert (check.id, check.status) == ("policy", status)
    assert check.found.startswith(found)
