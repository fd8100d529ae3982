from __future__ import annotations

from typing import get_args

import pytest

from assay.harness.config import RunSpec
from assay.harness.sides import ENGINES, Device, Engine, Side, flag_values, hide, hide_flags, profile_of, treatment, without_secrets

TRITON = Side(backend="triton")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_has_a_reference_on_each_device_and_its_kernels_are_known(engine: Engine) -> None:
    profile = profile_of(engine)
    assert set(profile.references) == set(get_args(Device))
    shown = not profile.instrumented or set(profile.references.values()) <= set(profile.kernels)
    assert shown, "a run could not show that the reference computed"


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ((), {}),
        (("--page-size=16",), {"--page-size": "16"}),
        (("--page-size", "16", "--disable-radix-cache"), {"--page-size": "16", "--disable-radix-cache": "true"}),
        (("--cuda-graph-bs", "1", "2", "4"), {"--cuda-graph-bs": "1 2 4"}),
        (("--page-size=16", "--page-size=32"), {"--page-size": "32"}),
    ],
)
def test_flags_have_values_however_they_are_spelled(flags: tuple[str, ...], values: dict[str, str]) -> None:
    assert flag_values(flags) == values


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, {}),
        ({"backend": "mine:forward"}, {"backend": ("triton", "mine:forward")}),
        ({"model": "other"}, {"model": ("tiny", "other")}),
        ({"flags": ("--page-size", "16")}, {"--page-size": ("", "16")}),
        ({"environment": {"A": "1"}}, {"environment.A": ("", "1")}),
        ({"interpreter": "/new/python"}, {"interpreter": ("", "/new/python")}),
    ],
)
def test_a_treatment_is_what_differs_between_the_sides(changed: dict[str, object], found: dict[str, tuple[str, str]]) -> None:
    candidate = TRITON.model_copy(update=changed)
    assert treatment(TRITON, candidate) == found
    assert treatment(candidate, TRITON) == {setting: values[::-1] for setting, values in found.items()}


def test_one_flag_is_no_treatment_in_another_spelling() -> None:
    spelled = [Side(backend="triton", flags=flags) for flags in (("--page-size=16",), ("--page-size", "16"))]
    assert treatment(*spelled) == {}


def test_flags_are_sorted_into_two_sides_that_differ_in_the_backend() -> None:
    spec = RunSpec.of(reference="triton", candidate="mine:forward", model="m", engine_arg=("--page-size=16",), questions=7)
    assert spec.reference == Side(backend="triton", model="m", flags=("--page-size=16",))
    assert spec.treatment == {"backend": ("triton", "mine:forward")}
    assert spec.workload.questions == 7


def test_sides_may_be_given_whole() -> None:
    candidate = Side(backend="triton", environment={"SGLANG_RADIX_FORCE_MISS": "1"})
    spec = RunSpec(reference=TRITON, candidate=candidate)
    assert spec.treatment == {"environment.SGLANG_RADIX_FORCE_MISS": ("", "1")}
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("--ssl-keyfile-password", "hunter2", "***"),
        ("admin_api_key", "hunter2", "***"),
        ("watermark_key_b", "12", "***"),
        ("HF_TOKEN", "hunter2", "***"),
        ("AWS_SECRET_ACCESS_KEY", "hunter2", "***"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x=hunter2", "***"),
        ("watermark_key", "null", "null"),
        ("encoder_urls", "http://me:hunter2@host:1/x", "http://***@host:1/x"),
        ("hicache_storage_backend_extra_config", '{"password": "hunter2", "n": 1}', '{"password": "***", "n": 1}'),
        ("PGPASSWORD", "hunter2", "***"),
        ("GITHUB_PAT", "hunter2", "***"),
        ("SECRETKEY", "hunter2", "***"),
        ("accessKey", "hunter2", "***"),
        ("GITHUBTOKEN", "hunter2", "***"),
        ("model", "https://host/m?token=hunter2&rev=1", "https://host/m?token=***&rev=1"),
        ("storage", "AccountName=a;AccountKey=hunter2==;Suffix=b", "AccountName=a;AccountKey=***;Suffix=b"),
        ("extra", "{'Authorization': 'Bearer hunter2', 'n': 1}", "{'Authorization': '***', 'n': 1}"),
        ("encoder_urls", "http://me:hun@ter2@host:1/x?a=b@c", "http://***@host:1/x?a=b@c"),
        ("build", "GIT_TOKEN=hunter2 make && x --password hunter2 -v", "GIT_TOKEN=*** make && x --password *** -v"),
        ("build", "pip install --extra-index-url https://me:hunter2@host .", "pip install --extra-index-url https://***@host ."),
        ("build", "make --token --page-size 16", "make --token --page-size 16"),
        ("extra", "--admin-api-key=hunter2 --page-size=16", "--admin-api-key=*** --page-size=16"),
        ("PATH", "/usr/bin", "/usr/bin"),
        ("json_model_override_args", '{"num_key_value_heads": 2, "key": "a"}', '{"num_key_value_heads": 2, "key": "***"}'),
        ("num_key_value_heads", "2", "2"),
        ("pattern", "a", "a"),
        ("design", "b", "b"),
        ("--ssl-keyfile", "/etc/key.pem", "/etc/key.pem"),
        ("tokenizer_path", "tiny", "tiny"),
        ("speculative_token_map", "map.pt", "map.pt"),
        ("SGLANG_USE_AITER_FP8_PER_TOKEN", "1", "1"),
        ("max_prefill_tokens", "8192", "8192"),
    ],
)
def test_secrets_are_hidden_and_their_names_are_kept(name: str, value: str, shown: str) -> None:
    assert hide(name, value) == shown


def test_secrets_of_two_sides_are_told_apart() -> None:
    left, right = (Side(backend="triton", flags=("--watermark-key", key, "--page-size=16")) for key in "12")
    right = right.model_copy(update={"environment": {"HF_TOKEN": "hunter2", "A": "1"}})
    assert without_secrets(left).flags == ("--watermark-key", "***", "--page-size=16")
    assert without_secrets(left, beside=left) == without_secrets(left)
    spec = RunSpec(reference=left, candidate=right)
    assert "hunter" not in spec.recorded().model_dump_json()
    assert spec.recorded().treatment == {
        "--watermark-key": ("***", "*** (another)"),
        "environment.HF_TOKEN": ("", "***"),
        "environment.A": ("", "1"),
    }
    assert spec.treatment["--watermark-key"] == ("1", "2"), "what is started has them"
    of_url, other = (Side(backend=f"http://me:{password}@host") for password in ("hunter2", "hunter3"))
    assert RunSpec(reference=of_url, candidate=other).recorded().treatment == {
        "backend": ("http://***@host", "http://*** (another)@host")
    }
    assert RunSpec.of(reference=of_url.backend, candidate="a:f").given_flags(["reference"]) == ["--reference=http://***@host"]


def test_commands_have_no_secrets() -> None:
    flags = ("--ssl-keyfile-password=hunter2", "--admin-api-key", "hunter2", "--page-size=16")
    spec = RunSpec.of(reference="triton", candidate="mine:forward", engine_arg=flags)
    assert spec.given_flags(["engine_arg"]) == [f"--engine-arg={word}" for word in hide_flags(flags)]
    assert hide_flags(flags) == ("--ssl-keyfile-password=***", "--admin-api-key", "***", "--page-size=16")
    for handed in (("--engine-arg=--api-key", "--engine-arg=hunter2"), ("--engine-arg", "--api-key", "--engine-arg", "hunter2")):
        assert hide_flags(handed) == (*handed[:-1], handed[-1].replace("hunter2", "***"))
