"""The first line names what two sides differ in."""

from __future__ import annotations

import pytest

from assay.reports.wording.sides import sides_said

_VERSIONS = ("SGLang 0.5.22 on cpu", "SGLang 0.5.23 on cpu")


@pytest.mark.parametrize(
    ("treatment", "said"),
    [
        ({}, ("triton", "triton")),
        ({"backend": ("triton", "mine:forward")}, ("mine:forward", "triton")),
        ({"backend": ("triton", "mine:forward"), "--page-size": ("", "16")}, ("mine:forward with pages of 16 tokens", "triton")),
        ({"--kv-cache-dtype": ("", "fp8_e4m3")}, ("FP8 KV cache", "the same triton server without it")),
        ({"--kv-cache-dtype": ("fp8_e4m3", "")}, ("the same triton server without FP8 KV cache", "the same triton server with it")),
        ({"--page-size": ("32", "16"), "environment.X": ("", "1")}, ("pages of 16 tokens, X=1", "pages of 32 tokens")),
        ({"--unknown-flag": ("", "true")}, ("--unknown-flag", "the same triton server without it")),
        ({"model": ("/models/a", "/models/b/")}, ("b", "a")),
        ({"packages": ("", "transformers==5.3")}, ("transformers 5.3", "the same triton server without it")),
        (
            {"packages": ("", "/wheels/transformers-5.19.0+seeded-py3-none-any.whl")},
            ("transformers 5.19.0+seeded", "the same triton server without it"),
        ),
        ({"interpreter": ("", "/env/bin/python")}, ("Python at /env/bin/python", "the same triton server without it")),
    ],
)
def test_a_treatment_is_said_as_a_person_would(treatment: dict[str, tuple[str, str]], said: tuple[str, str]) -> None:
    candidate = treatment.get("backend", ("", "triton"))[1]
    assert sides_said(treatment, "triton", candidate) == said


def test_two_versions_of_an_engine_are_named_by_their_numbers() -> None:
    treatment = {"interpreter": ("", "/env/bin/python")}
    assert sides_said(treatment, "triton", "triton", _VERSIONS) == ("SGLang 0.5.23", "SGLang 0.5.22")
    assert sides_said(treatment, "triton", "triton", (_VERSIONS[0],) * 2)[0] == "Python at /env/bin/python"
    # The package is what makes the version.
    packages = {"packages": ("sglang==0.5.22", "sglang==0.5.23, transformers==5.3")}
    assert sides_said(packages, "triton", "triton", _VERSIONS) == ("SGLang 0.5.23, transformers 5.3", "SGLang 0.5.22")


def test_flags_that_only_one_of_two_engines_has_are_counted() -> None:
    treatment = {
        "engine": ("hf", "sglang"),
        "backend": ("hf", "triton"),
        "--grammar-backend": ("", "none"),
        "--page-size": ("", "16"),
    }
    engines = ("transformers 5.19.0 on cuda", "SGLang 0.5.17 on cuda")
    said = sides_said(treatment, "hf", "triton", engines)
    assert said == ("triton with SGLang 0.5.17, pages of 16 tokens, 1 flag of its own", "hf with transformers 5.19.0")
