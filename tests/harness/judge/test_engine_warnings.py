"""The engines' own warnings about accuracy become findings of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

from assay.harness.judge.engine_warnings import claim
from assay.harness.judge.evidence import RunEvidence
from assay.harness.sides import ROLES, Role

SCALE = "WARNING 08-31 10:12:58 [kv_cache.py:104] Using KV cache scaling factor 1.0 for fp8_e4m3.\n"
RISK = "WARNING 08-31 10:12:58 [kv_cache.py:143] Using uncalibrated q_scale 1.0 with fp8 attention.\n"


def run(folder: Path, urls: tuple[Role, ...] = (), **logs: str) -> RunEvidence:
    for role, text in logs.items():
        (folder / f"{role}.log").write_text(text)
    evidence = SimpleNamespace(
        folder=SimpleNamespace(log=lambda role: folder / f"{role}.log"),
        measured=ROLES,
        urls=urls,
        manifest=SimpleNamespace(command="assay run"),
    )
    return cast(RunEvidence, evidence)


def test_a_warning_of_both_sides_is_one_finding_with_the_worst_first(tmp_path: Path) -> None:
    (found,) = claim(run(tmp_path, reference=RISK + SCALE, candidate="INFO 1 [a.py:1] well\n" + RISK + SCALE)).findings
    assert (found.id, found.severity, found.where) == ("accuracy-warned", "warning", "the log of the reference and the candidate")
    assert found.claim is not None
    assert found.claim.values == {"line": "Using KV cache scaling factor 1.0 for fp8_e4m3.", "more": 1}
    assert found.evidence == ("Using uncalibrated q_scale 1.0 with fp8 attention.",)


def test_each_side_has_its_own_and_a_server_that_assay_did_not_start_has_none(tmp_path: Path) -> None:
    findings = claim(run(tmp_path, reference="INFO 1 [a.py:1] well\n", candidate=SCALE)).findings
    assert [found.where for found in findings] == ["the log of the candidate"]
    assert claim(run(tmp_path, urls=("candidate",), reference="", candidate=SCALE)).findings == []
