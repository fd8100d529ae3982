"""The meter on a stand-in for SGLang's objects; the real ones are metered in tests/test_end_to_end.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.declaration import declares
from assay.harness.attention.kernels import title
from assay.harness.engines.inside.meter import rows_of
from assay.harness.engines.sglang.meter import meter
from assay.harness.evidence.counters import read_counters


class Backend:
    """Stand-in for an SGLang attention backend: only the two methods that are metered."""

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> str:
        if q == "broken":
            raise RuntimeError("kernel failed")
        return f"extend {q} {save_kv_cache}"

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any) -> str:
        return f"decode {q}"


def layer(index: int) -> Any:
    return SimpleNamespace(layer_id=index)


def batch(rids: list[str], new: list[int], prefix: list[int]) -> Any:
    return SimpleNamespace(rids=rids, extend_seq_lens_cpu=new, extend_prefix_lens_cpu=prefix)


def test_calls_are_counted_by_phase_prefix_and_layer(tmp_path: Path) -> None:
    backend = meter(Backend(), "mine", tmp_path, "cpu")
    cold, warm = batch(["a"], [5], [15]), batch(["b", "c"], [2, 3], [0, 16])
    for index in range(3):
        assert backend.forward_extend("q", 0, 0, layer(index), cold, save_kv_cache=False) == "extend q False"
        backend.forward_extend("q", 0, 0, layer(index), warm)
    capture = SimpleNamespace(rids=None, extend_seq_lens_cpu=[64], extend_prefix_lens_cpu=[0])
    backend.forward_extend("q", 0, 0, layer(3), capture)  # SGLang's own, of no request
    with pytest.raises(RuntimeError):
        backend.forward_extend("broken", 0, 0, layer(0), cold)
    assert backend.forward_decode("q", 0, 0, layer(1), batch([], [], [])) == "decode q"
    counts = {(c.phase, c.cached_prefix): c.calls_by_layer for c in read_counters(tmp_path / "counters")}
    assert counts == {("extend", False): {0: 1, 1: 1, 2: 1}, ("extend", True): {0: 1, 1: 1, 2: 1}, ("decode", True): {1: 1}}
    lines = [json.loads(line) for line in (tmp_path / "admissions.jsonl").read_text().splitlines()]
    assert lines == [
        {"run": "", "process": os.getpid(), "rids": ["a"], "new": [5], "prefix": [15]},
        {"run": "", "process": os.getpid(), "rids": ["b", "c"], "new": [2, 3], "prefix": [0, 16]},
    ]


def test_a_pass_that_verifies_drafts_is_counted_and_is_no_prefill(tmp_path: Path) -> None:
    backend = meter(Backend(), "mine", tmp_path, "cpu")
    verified = SimpleNamespace(rids=["a"], extend_seq_lens_cpu=None, extend_prefix_lens_cpu=None)
    assert backend.forward_extend("q", 0, 0, layer(0), verified) == "extend q True"
    assert [count.calls for count in read_counters(tmp_path / "counters")] == [1]
    assert (tmp_path / "admissions.jsonl").read_text() == ""


def test_a_delegated_phase_is_counted_for_the_delegate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    @declares(("extend",), package="numpy")
    def kernel(call: AttentionCall) -> Tensor:
        return call.q

    inner = Backend()
    inner.assay_rows = rows_of("torch_native", "mine", kernel)  # type: ignore[attr-defined]
    backend = meter(inner, "mine", tmp_path, "cpu")
    backend.forward_extend("q", 0, 0, layer(0), batch(["a"], [5], [0]))
    backend.forward_decode("q", 0, 0, layer(0), batch([], [], []))
    found = {(c.phase, c.backend, c.kernel, c.delegated_by, c.interpreted) for c in read_counters(tmp_path / "counters")}
    assert found == {
        ("extend", "mine", title("mine", kernel, True), "", True),
        ("decode", "torch_native", "torch_native", "mine", False),
    }
