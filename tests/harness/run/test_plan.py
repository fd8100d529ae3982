from __future__ import annotations

import re
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import pytest

from assay.harness import extras
from assay.harness.config import RunSpec
from assay.harness.engines import registry
from assay.harness.errors import UsageError
from assay.harness.run.doctor import examine
from assay.harness.run.plan import prepare
from assay.harness.run.preflight import asked_of, check_environment
from assay.harness.run.run_folder import open_folder, shadowed_role
from assay.harness.run.side_probes import compares_probes
from assay.harness.sides import ROLES


def test_packages_that_only_the_report_needs_are_missed_before_a_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_installed", lambda name: name != "scipy")
    with pytest.raises(UsageError, match="not installed: scipy"):
        prepare(RunSpec.of(reference="torch_native", candidate="torch_native"))


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("torch", "2.5.1+cu124", r"torch>=2\.6 \(2\.5\.1\+cu124 is installed\)"),
        ("scipy", "1.9", r"scipy>=1\.14 \(1\.9 is installed\)"),
        ("httpx-aiohttp", "0.1.0", r"httpx-aiohttp>=.* \(0\.1\.0 is installed\)"),
    ],
)
def test_a_package_that_is_too_old_is_found_before_a_server_starts_and_by_the_doctor(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str, said: str
) -> None:
    monkeypatch.setattr(
        extras, "distribution", lambda asked: SimpleNamespace(version=version) if asked == name else distribution(asked)
    )
    with pytest.raises(UsageError, match=said):
        prepare(RunSpec.of(reference="torch_native", candidate="torch_native"))
    found = {one.id: one for one in examine(RunSpec.of(reference="torch_native", candidate="torch_native"))}
    row = found["packages" if name == "httpx-aiohttp" else "check"]
    assert row.status == "missing"
    assert re.search(said, row.found)


def test_an_sglang_that_is_too_old_is_found_before_a_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = prepare(RunSpec.of(reference="torch_native", candidate="torch_native"))
    check_environment(plan)
    monkeypatch.setattr(registry, "version", lambda name: "0.5.9.post1")
    with pytest.raises(UsageError, match=r"SGLang 0\.5\.9\.post1 is too old"):
        check_environment(plan)
    found = {one.id: one for one in examine(RunSpec.of(reference="torch_native", candidate="torch_native"))}
    assert (found["sglang"].status, found["sglang"].found) == ("missing", "SGLang 0.5.9.post1 is too old")


@pytest.mark.parametrize("suites", ["layers", "layers,logits"])
def test_settings_of_a_candidate_whose_server_nothing_asks_are_refused(suites: str) -> None:
    """A pass would prove nothing about them: only the reference's server would run."""
    spec = RunSpec.of(candidate_arg=("--page-size=16",), suites=suites)
    with pytest.raises(UsageError, match="differ in --page-size, and nothing asks the candidate's own server"):
        prepare(spec)
    prepare(RunSpec.of(candidate_arg=("--page-size=16",), suites=f"{suites},greedy"))
    prepare(RunSpec.of(suites=suites))


def test_a_witness_has_no_shadow_and_the_candidate_runs_beside_a_backend_of_its_own_engine(tmp_path: Path) -> None:
    known = {"triton": ("torch_native", "candidate"), "vllm": ("CPU_ATTN", "candidate")}
    for candidate, expected in known.items():
        plan = prepare(RunSpec.of(reference="hf", candidate=candidate))
        folder = open_folder(plan, tmp_path / candidate)
        assert (plan.beside, shadowed_role(plan, folder)) == expected
        assert [plan.instrumented(role) for role in ROLES] == [False, True]
        assert not compares_probes(plan)
        assert asked_of(plan.spec, plan.models)["reference"] == {}
    plan = prepare(RunSpec.of(reference="triton", candidate="torch_native"))
    assert (plan.beside, shadowed_role(plan, open_folder(plan, tmp_path / "two"))) == ("triton", "reference")
