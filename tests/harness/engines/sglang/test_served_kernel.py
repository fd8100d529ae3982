"""A kernel as an SGLang backend, on stand-ins for SGLang's objects."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import KernelRefused
from assay.harness.engines.sglang.served_kernel import serve_kernel


@pytest.fixture
def server(stand_in: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server whose backend is the rounded oracle, as a kernel."""
    registry = ModuleType("registry")
    registry.__dict__["ATTENTION_BACKENDS"] = {"torch_native": stand_in.Backend}
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.attention.attention_registry", registry)
    monkeypatch.setattr("assay.harness.engines.sglang.kv_pool.Pages.write", lambda *_: None)
    server = stand_in.Server()
    server.backend = serve_kernel("mine", rounded_oracle, server.runner, "")
    return server


@pytest.mark.parametrize("phase", ["extend", "decode"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logit_cap": 30.0, "logit_capping_method": "clip"}, "a logit cap by 'clip'"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"use_irope": True}, "chunked local attention"),
        ({"arguments": {"k_rope": torch.zeros(4), "sinks": None}}, "the argument 'k_rope'"),
    ],
)
def test_what_the_contract_cannot_express_is_refused_by_name(server: Any, phase: str, change: dict[str, Any], words: str) -> None:
    lens = [(1, 3)] if phase == "decode" else [(4, 0)]
    with pytest.raises(KernelRefused, match=f"layer 0 needs {words}, which the kernel contract"):
        server.step(phase, lens, **change)


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        ({"sliding_window_size": 127}, "window"),
        ({"logit_cap": 30.0}, "softcap"),
        ({"xai_temperature_len": 1024}, "temperature"),
        ({"arguments": {"sinks": torch.zeros(4)}}, "sinks"),
    ],
)
def test_what_the_kernel_does_not_declare_is_refused_by_name(server: Any, change: dict[str, Any], feature: str) -> None:
    with pytest.raises(KernelRefused, match=f"mine does not declare {feature}, which this call asks for"):
        server.step("extend", [(4, 0)], **change)


def test_a_plain_layer_is_served(server: Any) -> None:
    assert len(server.step("extend", [(4, 0)], arguments={"sinks": None})) == 3
