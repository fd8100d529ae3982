from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from assay.harness.config import make_spec
from assay.harness.evidence.certificate import Certificate, CertifiedEnvelope, Examined
from assay.harness.judge import certified
from assay.harness.judge.evidence import RunEvidence
from assay.harness.verdict import Check

ENGINE = "SGLang 0.5.23"


@pytest.fixture(autouse=True)
def _version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certified, "installed_version", lambda: "1.0")
    monkeypatch.setattr(certified, "source_hash", lambda: "abc")


def check(
    *, noise: str = "", phases: tuple[str, ...] = ("extend",), hardware: str = "a CPU, 2 cores, 8 GiB",
    dtype: str = "float32", **flags: Any,
) -> Check:  # fmt: skip
    """The check of a run: what its servers and its manifest say, and the flags of its spec."""
    run = SimpleNamespace(
        spec=make_spec({"device": "cpu", "reference": "torch_native", "candidate": "triton", "model": "tiny", **flags}),
        manifest=SimpleNamespace(hardware=hardware, model_hash="f00", noise={"candidate": noise}),
        servers={"reference": SimpleNamespace(engine=f"{ENGINE} on cpu")},
        errors=SimpleNamespace(headers=(SimpleNamespace(dtype=dtype),)) if dtype else None,
        claimed=phases,
    )
    [made] = certified.claim(cast(RunEvidence, run)).checks
    return made


def envelope(**changed: Any) -> CertifiedEnvelope:
    made = CertifiedEnvelope(
        level="server", device="cpu", engine=ENGINE, reference="torch_native", model="tiny", model_hash="f00",
        dtypes=("float32",), torch="2", layers=4, heads=4, most_new=512, longest=512, largest_batch=9, suites=("layers",),
        version="1.0", source="abc",
    )  # fmt: skip
    return made.model_copy(update=changed)


def checked(folder: Path, made: CertifiedEnvelope, ran: dict[str, Any] | None = None, **changed: Any) -> Check:
    """The check of a run that names this certificate."""
    path = folder / "certificate.json"
    examined = (Examined(id="a", kind="fault", title="a", outcome="caught", seconds=1.0),)
    certificate = Certificate(verdict="pass", made="2026-01-02T03:04:05Z", envelope=made, examined=examined)
    path.write_text(certificate.model_copy(update=changed).model_dump_json())
    return check(**{"certificate": str(path), **(ran or {})})


def test_a_certificate_of_the_runs_envelope_is_cited_with_what_agrees(tmp_path: Path) -> None:
    found = checked(tmp_path, envelope())
    assert (found.status, found.found) == (
        "ok",
        "1 of 1 faults caught, 0 false alarms, on 2026-01-02; made in this envelope: level server, device cpu, "
        "engine SGLang 0.5.23, reference torch_native, model tiny (f00), noise family exact, assay 1.0 (abc), dtype float32, "
        "phases extend and decode, reach to 512 tokens",
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"level": "op"}, "level op instead of server"),
        ({"device": "cuda"}, "device cuda instead of cpu"),
        ({"model": "other", "model_hash": "bad"}, "model other (bad) instead of tiny (f00)"),
        ({"model_hash": "bad"}, "model tiny (bad) instead of tiny (f00)"),
        ({"engine": "SGLang 0.5.17"}, "engine SGLang 0.5.17 instead of SGLang 0.5.23"),
        ({"reference": "triton"}, "reference triton instead of torch_native"),
        ({"noise": "int8_qk"}, "noise family int8_qk instead of exact"),
        ({"dtypes": ("bfloat16",)}, "dtype bfloat16 instead of float32"),
        ({"version": "0.9"}, "assay 0.9 (abc) instead of 1.0 (abc)"),
        ({"source": "def"}, "assay 1.0 (def) instead of 1.0 (abc)"),
        ({"longest": 100}, "reach to 100 tokens instead of to 256 tokens"),
    ],
)
def test_a_certificate_of_another_envelope_is_not(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    found = checked(tmp_path, envelope(**changed))
    assert found.status == "not checked"
    assert words in found.found


def test_a_candidate_that_declares_noise_cites_no_certificate_of_exact_kernels(tmp_path: Path) -> None:
    found = checked(tmp_path, envelope(), ran={"noise": "int8_qk"})
    assert (found.status, "noise family exact instead of int8_qk" in found.found) == ("not checked", True)
    assert "the same: level, device, engine, reference, model, assay, dtype, phases and reach" in found.found


INT8 = {"candidate": "sage_attn", "noise": "int8_qk", "phases": ("extend",)}
"""What the envelope of a certificate says that was made with ``--candidate sage_attn``."""


def test_a_candidate_that_declares_noise_cites_a_certificate_of_its_family(tmp_path: Path) -> None:
    ran = {"noise": "int8_qk", "candidate": "mine:another"}
    found = checked(tmp_path, envelope(**INT8), ran=ran)
    assert (found.status, "noise family int8_qk" in found.found) == ("ok", True)
    exact = checked(tmp_path, envelope(**INT8))
    assert (exact.status, "noise family int8_qk instead of exact" in exact.found) == ("not checked", True)


def test_a_certificate_of_a_kernel_without_decode_says_nothing_of_decode(tmp_path: Path) -> None:
    both = {"noise": "int8_qk", "phases": ("extend", "decode")}
    found = checked(tmp_path, envelope(**INT8), ran=both)
    assert (found.status, "phases extend instead of extend and decode" in found.found) == ("not checked", True)
    assert checked(tmp_path, envelope(**{**INT8, "phases": ()}), ran=both).status == "ok", "as in older certificates"


def test_faults_that_the_declared_noise_hides_are_listed_where_the_certificate_is_cited(tmp_path: Path) -> None:
    caught = Examined(id="a", kind="fault", title="a", outcome="caught", seconds=1.0)
    hidden = Examined(id="faint", kind="fault", title="faint", outcome="missed", effect=1.5, seconds=1.0)
    ran = {"noise": "int8_qk"}
    found = checked(tmp_path, envelope(**INT8), ran=ran, examined=(caught, hidden))
    assert found.status == "ok"
    assert found.found.startswith("1 of 2 faults caught, 1 hidden by the noise of int8_qk (faint), 0 false alarms, on ")


@pytest.mark.parametrize(
    ("noise", "command"),
    [("", "assay certify --level server"), ("int8_qk", "assay certify --level server --candidate 'odd name:kernel'")],
)
def test_the_advice_is_a_command_that_certifies_the_candidates_noise(tmp_path: Path, noise: str, command: str) -> None:
    ran = {"noise": noise, "candidate": "odd name:kernel"}
    elsewhere = checked(tmp_path, envelope(device="cuda"), ran=ran)
    assert elsewhere.settles == f"certify this envelope: {command}"
    missing = check(certificate=str(tmp_path / "none"), **ran)
    assert missing.settles.startswith(f"make one with {command}, and name it")


@pytest.mark.parametrize(
    ("machine", "hardware", "status"),
    [
        ("NVIDIA H100", "NVIDIA H100; a CPU", "ok"),
        ("NVIDIA H100", "NVIDIA H200; a CPU", "not checked"),
        ("NVIDIA H100", "NVIDIA H100 NVL; a CPU", "not checked"),
        ("", "NVIDIA H100; a CPU", "not checked"),
    ],
)
def test_a_certificate_of_another_gpu_is_not_cited(tmp_path: Path, machine: str, hardware: str, status: str) -> None:
    made = envelope(device="cuda", machine=machine, longest=2048)
    ran = {"device": "cuda", "hardware": hardware}
    assert checked(tmp_path, made, ran | {"envelope_tokens": 2048}).status == status


def test_a_run_that_compared_no_call_cites_none(tmp_path: Path) -> None:
    assert checked(tmp_path, envelope(), ran={"dtype": ""}).status == "not checked"


def test_a_failed_certificate_is_no_proof(tmp_path: Path) -> None:
    assert checked(tmp_path, envelope(), verdict="regression").status == "not checked"


def test_a_certificate_of_a_part_of_the_catalogue_is_no_proof(tmp_path: Path) -> None:
    found = checked(tmp_path, envelope(), not_asked=("mask-missing", "scale-missing"))
    assert (found.status, "2 of the catalogue were left out, for example mask-missing" in found.found) == ("not checked", True)


def test_without_a_certificate_nothing_is_checked_unless_the_policy_names_one(tmp_path: Path) -> None:
    none = str(tmp_path / "none")
    assert check(baselines=none).status == "not checked"
    assert check(certificate=none).status == "missing"


def test_a_damaged_certificate_forbids_a_pass(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    path.write_text("{}")
    assert check(certificate=str(path)).status == "missing"
