"""A real vLLM server on a CPU: what a run asks of it inside."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from assay.harness.engines.base import ChatRequest, ProbeRequest
from assay.harness.engines.inside.control import RECORD, SHADOW, TRACE, Control, TracedRequest, set_control, write_now
from assay.harness.engines.launch import Launch
from assay.harness.engines.model import TINY_MODEL
from assay.harness.engines.vllm.server import VLLMServer
from assay.harness.evidence.counters import read_counters
from assay.harness.evidence.error_table import relative_l1
from assay.harness.evidence.pack import read_manifest
from assay.harness.evidence.shadow_errors import read_shadow_errors
from assay.harness.evidence.trace import read_trace

pytestmark = [pytest.mark.slow, pytest.mark.server]
ROOT, LAYERS = Path(__file__).parents[4], 4
IDS = tuple(int(number) for number in np.random.default_rng(0).integers(20, 1000, 120))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """A server with a wrong candidate attached."""
    python = os.environ.get("ASSAY_TEST_VLLM_PYTHON", str(ROOT / ".nox" / "vllm" / "bin" / "python"))
    if not Path(python).exists():
        pytest.skip(f"needs vLLM's own environment: {python} does not exist; ASSAY_TEST_VLLM_PYTHON names another Python")
    folder = tmp_path_factory.mktemp("served")
    extra = {
        SHADOW: "served_kernels:top_left", RECORD: str(2**20), TRACE: str(2**23), "PYTHONPATH": str(Path(__file__).parent),
    }  # fmt: skip
    launch = Launch(
        engine="vllm", role="reference", backend="CPU_ATTN", model=TINY_MODEL, device="cpu", evidence=folder / "evidence",
        log=folder / "server.log", decode_backend="", startup_timeout=500.0, request_timeout=120.0, cpu_core=0, extra=extra,
        interpreter=python,
    )  # fmt: skip
    with VLLMServer(launch) as started:
        yield started


def test_a_prompt_is_traced_after_its_cached_prefix_and_from_the_start(server: VLLMServer) -> None:
    assert server.evidence is not None
    traces, replies = [], []
    for label, cached in (("cold", False), ("cached", True)):
        set_control(
            server.evidence, Control(trace=label, traced=TracedRequest(request=server.request_id(f"of-{label}"), until=119))
        )
        server.flush_cache()
        if cached:
            server.probe([ProbeRequest("prefix", f"before-{label}", IDS[:80], 79, 1)])
        replies.append(
            server.probe(
                [ProbeRequest("a", f"of-{label}", IDS, 80, 3, (7, 8, 9)), ProbeRequest("b", f"by-{label}", IDS[:30], 10, 5)]
            )
        )
        set_control(server.evidence, Control())
        server.ask([ChatRequest("x", 1)], 1, lambda index, answer: None)
        traces.append(read_trace(server.evidence, label))
    cold, warm = traces
    for first, second in zip(*replies, strict=True):
        assert first.decode.tokens == second.decode.tokens
        assert np.abs(np.subtract(first.prefill.own + first.decode.own, second.prefill.own + second.decode.own)).max() < 1e-4
    (forced, other), (hit, _) = replies
    assert forced.decode.tokens == (7, 8, 9), "whatever the model prefers"
    assert any(row[0] != token for row, token in zip(forced.decode.ids, forced.decode.tokens, strict=True))
    assert (forced.prefill.first, forced.prefill.tokens, len(other.prefill.tokens)) == (81, IDS[81:], 19)
    assert (forced.cached_tokens, hit.cached_tokens) == (0, 64)
    assert cold.positions.tolist() == list(range(120))
    assert warm.positions.tolist() == list(range(64, 120)), "whole blocks of 32 of the 80 tokens"
    assert warm.tokens.tolist() == list(IDS[64:])
    for layer in range(LAYERS):
        assert np.abs(cold.outputs[layer][64:] - warm.outputs[layer]).max() < 1e-4
        assert np.array_equal(cold.keys[layer], warm.keys[layer])


def test_a_shadow_in_a_server_sees_the_seed_case(server: VLLMServer) -> None:
    assert server.evidence is not None
    server.flush_cache()
    set_control(server.evidence, Control(shadow=True))
    header = "Facts, writes to: Jungal bawexn . Koven solfinn . Daltas birmesh . " * 4
    asks = [ChatRequest(f"{header}{question}", 4) for question in ("Whom?", "Koven?", "Daltas writes to whom?")]
    server.ask(asks[:1], 1, lambda index, answer: None)
    server.ask(asks, 3, lambda index, answer: None)
    write_now(server.evidence, lambda: server.ask([ChatRequest("x", 1)], 1, lambda index, answer: None))
    set_control(server.evidence, Control())
    errors = read_shadow_errors(server.evidence)
    assert errors.failed_calls == ()
    assert errors.headers[0].untested == errors.headers[0].unrecorded == {}
    assert errors.cells.observed("phase") == ("extend", "decode")
    assert relative_l1(errors.cells.distance(where={"phase": "extend", "prefix": ">= 16"})).min() > 0.2
    assert relative_l1(errors.cells.distance(where={"phase": "extend", "prefix": "0"})).max() < 2e-6
    assert read_manifest(server.evidence / "pack").calls
    assert {count.backend for count in read_counters(server.evidence / "counters")} == {"CPU_ATTN"}
