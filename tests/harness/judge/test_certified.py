from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from assay.harness.config import RunSpec
from assay.harness.evidence.certificate import Certificate, CertifiedEnvelope, Examined
from assay.harness.judge.certified import check_certificate
from assay.harness.verdict import Check

ENGINE = "SGLang 0.5.23"


def envelope(**changed: Any) -> CertifiedEnvelope:
    made = CertifiedEnvelope(
        level="server", device="cpu", engine=f"{ENGINE}, torch_native as reference", model="tiny", dtypes=("float32",),
        torch="2", layers=4, heads=4, most_new=512, longest=512, largest_batch=9, suites=("layers",), source="abc",
    )  # fmt: skip
    return made.model_copy(update=changed)


def checked(
    folder: Path, made: CertifiedEnvelope, *, verdict: str = "pass", spec: dict[str, Any] | None = None
) -> Check:
    path = folder / "certificate.json"
    examined = (Examined(id="a", kind="fault", title="a", outcome="caught", seconds=1.0),)
    certificate = Certificate(
        verdict=verdict, made="2026-01-02T03:04:05Z", envelope=made, examined=examined  # type: ignore[arg-type]
    )  # fmt: skip
    path.write_text(certificate.model_dump_json())
    return check_certificate(RunSpec(**{**RUN, "certificate": str(path), **(spec or {})}), {ENGINE})


RUN: dict[str, Any] = {"reference": "torch_native", "candidate": "triton"}


def test_a_certificate_of_the_runs_envelope_is_cited(tmp_path: Path) -> None:
    found = checked(tmp_path, envelope())
    assert (found.status, found.found) == ("ok", "1 of 1 faults caught, 0 false alarms, on 2026-01-02")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"device": "cuda"}, "device cuda instead of cpu"),
        ({"model": "other"}, "model other instead of tiny"),
        ({"engine": "SGLang 0.5.17"}, "engine SGLang 0.5.17 instead of SGLang 0.5.23"),
        ({"longest": 100}, "to 100 tokens instead of 512"),
    ],
)
def test_a_certificate_of_another_envelope_is_not(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    found = checked(tmp_path, envelope(**changed))
    assert found.status == "not checked"
    assert words in found.found


def test_a_failed_certificate_is_no_proof(tmp_path: Path) -> None:
    assert checked(tmp_path, envelope(), verdict="regression").status == "not checked"


def test_without_a_certificate_nothing_is_checked_unless_the_policy_names_one(tmp_path: Path) -> None:
    none = str(tmp_path / "none")
    assert check_certificate(RunSpec(**RUN, baselines=none), ()).status == "not checked"
    assert check_certificate(RunSpec(**RUN, certificate=none), ()).status == "missing"


def test_a_damaged_certificate_forbids_a_pass(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    path.write_text("{}")
    assert check_certificate(RunSpec(**RUN, certificate=str(path)), ()).status == "missing"
