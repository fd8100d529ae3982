"""A kernel in the place of a backend of SGLang, on stand-ins for SGLang's modules."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from assay.harness.engines.sglang.plugin import _judge_by_delegate, _metered, _pin_nothing, _wrap_all

GUARDED = ["triton", "fa3"]


def guarded(monkeypatch: pytest.MonkeyPatch, newer: bool) -> Any:
    """Return a function that refuses backends other than `GUARDED`, as SGLang does for gpt-oss, from 0.5.18 on or before."""
    packages = {name: ModuleType(name) for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups")}
    model_hook, server_args = ModuleType("sglang.srt.arg_groups.model_hook"), ModuleType("sglang.srt.server_args")

    def refuse(backends: tuple[str, ...]) -> None:
        assert set(backends) <= set(GUARDED), backends

    class ServerArgs:
        def __init__(self, *backends: str) -> None:
            self.backends = backends

        def _resolved_attention_backends(self) -> tuple[str, ...]:
            return self.backends

        def _handle_model_specific_adjustments(self) -> None:
            refuse(self._resolved_attention_backends())

    model_hook.__dict__["attention_backends_of"] = lambda arguments: arguments.backends
    server_args.__dict__["ServerArgs"] = ServerArgs
    if newer:
        packages["sglang.srt.arg_groups"].__dict__["model_hook"] = model_hook
        packages[model_hook.__name__] = model_hook
    monkeypatch.delitem(sys.modules, model_hook.__name__, raising=False)  # where a test before has imported SGLang
    for name, module in {**packages, server_args.__name__: server_args}.items():
        monkeypatch.setitem(sys.modules, name, module)
    if newer:
        return lambda *backends: refuse(model_hook.attention_backends_of(SimpleNamespace(backends=backends)))
    return lambda *backends: ServerArgs(*backends)._handle_model_specific_adjustments()


@pytest.mark.parametrize("newer", [True, False])
def test_a_model_that_refuses_backends_by_name_judges_a_kernel_by_its_delegate(
    monkeypatch: pytest.MonkeyPatch, newer: bool
) -> None:
    check = guarded(monkeypatch, newer)
    with pytest.raises(AssertionError, match="mine"):
        check("mine", "triton")
    _judge_by_delegate({"mine"}, "triton")
    check("mine", "triton")
    with pytest.raises(AssertionError, match="torch_native"):
        check("torch_native", "triton")


@pytest.mark.parametrize("newer", [True, False])
@pytest.mark.parametrize("delegate", ["", "torch_native"])
def test_a_kernel_whose_delegate_is_refused_is_refused(monkeypatch: pytest.MonkeyPatch, newer: bool, delegate: str) -> None:
    check = guarded(monkeypatch, newer)
    _judge_by_delegate({"mine"}, delegate)
    with pytest.raises(AssertionError, match=delegate or "mine"):
        check("mine", "triton")


def test_the_backend_of_a_draft_model_is_not_metered(tmp_path: Path) -> None:
    made = SimpleNamespace()
    backends: dict[str, Any] = {"mine": lambda runner: made}
    _wrap_all(backends, partial(_metered, tmp_path))
    assert backends["mine"](SimpleNamespace(is_draft_worker=True)) is made
    assert vars(made) == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory is pinned where there is a GPU")
def test_nothing_is_pinned_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensor", "empty", "zeros", "arange"):
        monkeypatch.setattr(torch, name, getattr(torch, name))
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)
    with pytest.raises(RuntimeError):
        torch.tensor([1, 2], pin_memory=True)
    _pin_nothing()
    made = torch.tensor([1, 2], dtype=torch.int32, pin_memory=True)
    assert (made.tolist(), made.dtype) == ([1, 2], torch.int32)
    assert made.pin_memory() is made
    assert torch.arange(3, pin_memory=True).tolist() == [0, 1, 2]
