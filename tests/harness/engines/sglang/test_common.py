"""Arguments as SGLang 0.5.17 and 0.5.23 resolve them, shortened; `test_sglang_resolves…` asks the installed version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assay.harness.engines.launch import Launch
from assay.harness.engines.model import TINY_MODEL
from assay.harness.engines.sglang.common import _common_settings, agree, resolved_arguments
from assay.harness.engines.sglang.launch import command
from assay.harness.errors import EngineError
from assay.harness.sides import Role

NAMES: dict[Role, str] = {"reference": "triton", "candidate": "torch_native"}
# 0.5.17 on an H100: assay's own flag has disabled prefill graphs in both.
TRITON = {
    "attention_backend": "triton",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "page_size": 1,
    "chunked_prefill_size": 8192,
    "disable_radix_cache": False,
    "disable_overlap_schedule": False,
    "kv_cache_dtype": "auto",
    "cuda_graph_max_bs_decode": None,
    "cuda_graph_config": {"decode": {"backend": "full", "bs": [1, 2]}, "prefill": {"backend": "disabled"}},
}
NATIVE = TRITON | {
    "attention_backend": "torch_native",
    "cuda_graph_config": {"decode": {"backend": "disabled", "bs": [1, 2]}, "prefill": {"backend": "disabled"}},
}


def flags(candidate: Mapping[str, Any]) -> tuple[str, ...]:
    return _common_settings(TRITON, candidate, NAMES).flags


def launch(role: Role, backend: str, **changes: Any) -> Launch:
    fields: dict[str, Any] = {
        "role": role, "backend": backend, "model": TINY_MODEL, "device": "cuda", "evidence": Path("e"), "log": Path("l"),
        "decode_backend": "triton", "startup_timeout": 9.0, "request_timeout": 9.0, "eager": False,
    }  # fmt: skip
    return Launch(**fields | changes)


PAIR: dict[Role, Launch] = {role: launch(role, backend) for role, backend in NAMES.items()}


def test_a_backend_without_cuda_graphs_takes_them_from_both() -> None:
    found = _common_settings(TRITON, NATIVE, NAMES)
    assert found.flags == ("--disable-cuda-graph",)
    assert found.impossible == ()
    assert found.because == (
        "both were given --disable-cuda-graph, because SGLang resolves cuda_graph_config.decode.backend by the backend "
        "(triton: full; torch_native: disabled)",
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"page_size": 64}, ("--page-size=64",)),
        ({"chunked_prefill_size": 4096}, ("--chunked-prefill-size=4096",)),
        ({"chunked_prefill_size": -1}, ("--chunked-prefill-size=8192",)),
        ({"disable_radix_cache": True}, ("--disable-radix-cache",)),
        ({"kv_cache_dtype": "fp8_e4m3", "new_argument": 3}, ()),
        ({"cuda_graph_max_bs_decode": 8, "page_size": 128}, ("--cuda-graph-max-bs-decode=8", "--page-size=128")),
    ],
)  # fmt: skip
def test_settings_that_a_flag_makes_equal(changes: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert flags(TRITON | changes) == expected


def sglang(launch: Launch) -> dict[str, Any]:
    """Stand-in for SGLang's resolution."""
    graphs = "disabled" if launch.backend == "torch_native" or "--disable-cuda-graph" in launch.common else "full"
    sizes = [int(flag.partition("=")[2]) for flag in launch.common if flag.startswith("--page-size=")]
    return TRITON | {
        "attention_backend": launch.backend,
        "page_size": 64 if launch.backend == "flashmla" else max(sizes, default=1),
        "cuda_graph_config": {"decode": {"backend": graphs}, "prefill": {"backend": "disabled"}},
    }


def test_a_flag_that_has_no_effect_is_said() -> None:
    found = agree(PAIR, lambda one: sglang(replace(one, common=())))
    assert found.flags == ("--disable-cuda-graph",)
    assert "although both were given it" in found.impossible[0]


def test_what_cannot_be_resolved_is_left_to_the_servers() -> None:
    def refuse(one: Launch) -> dict[str, Any]:
        raise EngineError("SGLang does not resolve the command line of the candidate (fa3): no GPU.", "e", "d")

    found = agree(PAIR, refuse)
    assert found.flags == ()
    assert "no GPU" in found.impossible[0]


@pytest.mark.slow
def test_sglang_resolves_cuda_graphs_by_the_backend_and_a_common_flag_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real resolution of the installed version, on the CPU, without the flag that assay gives there."""
    monkeypatch.setattr(
        "assay.harness.engines.sglang.launch.command",
        lambda one, port, name: [flag for flag in command(one, port, name) if flag != "--disable-cuda-graph"] + list(one.common),
    )
    pair = {role: replace(one, device="cpu", eager=True) for role, one in PAIR.items()}
    found = agree(pair)
    assert found.flags == ("--disable-cuda-graph",)
    assert found.impossible == ()
    assert "torch_native: disabled" in found.because[0]


@pytest.mark.slow
def test_a_command_line_that_sglang_refuses_is_an_error() -> None:
    with pytest.raises(EngineError, match="does not resolve the command line"):
        resolved_arguments(launch("reference", "no_such_backend", device="cpu"))
