"""Shadow, recorder, layer substitution and trace in real CPU servers with the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from assay.evals.synthetic import questions
from assay.harness.attention.oracle import oracle
from assay.harness.engines.base import ChatRequest
from assay.harness.engines.inside.control import RECORD, SHADOW, TRACE, Control, set_control, substituted_calls, write_now
from assay.harness.engines.launch import Launch
from assay.harness.engines.model import TINY_MODEL
from assay.harness.engines.sglang.server import SGLangServer
from assay.harness.evidence.counters import read_counters
from assay.harness.evidence.error_table import elements, relative_l1
from assay.harness.evidence.pack import RecordedCall, read_manifest, read_pack
from assay.harness.evidence.records import Answer
from assay.harness.evidence.shadow_errors import ShadowErrors, read_shadow_errors
from assay.harness.evidence.trace import Trace, read_trace
from assay.harness.judge.traces import _trace_sums, free_running_errors

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.interpreter]
LAYERS, HEADS = 4, 4
BUDGET = 8 * 2**20
INT8_NOISE = 0.05
HEADER = "Facts, writes to: Jungal bawexn . Koven solfinn . Daltas birmesh .\n"


def asks() -> list[ChatRequest]:
    """Twelve questions. Half of them share a header, which is cached first, so that their prefixes are long."""
    drawn = [question.own.rpartition("\n\n")[0] for question in islice(questions(), 12)]
    return [ChatRequest(HEADER * 2 + text if i % 2 else text, 8, top_logprobs=2) for i, text in enumerate(drawn)]


def serve(folder: Path, extra: dict[str, str], **changes: Any) -> SGLangServer:
    return SGLangServer(Launch(**{
        "role": "reference", "backend": "torch_native", "model": TINY_MODEL, "device": "cpu", "evidence": folder / "evidence",
        "log": folder / "server.log", "decode_backend": "torch_native", "startup_timeout": 300.0, "request_timeout": 120.0,
        "cpu_core": 0, "extra": extra, **changes,
    }))  # fmt: skip


def ask_all(server: SGLangServer) -> list[Answer]:
    """Flush the cache, cache the header, and send one question at a time, so that every server forms the same batches."""
    replies: dict[int, Answer] = {}
    server.flush_cache()
    server.ask([ChatRequest(HEADER * 2, 1)], 1, lambda index, answer: None)
    server.ask(asks(), 1, replies.__setitem__)
    return [replies[index] for index in range(len(replies))]


def up_to_date(server: SGLangServer) -> None:
    assert server.evidence is not None
    write_now(server.evidence, lambda: server.ask([ChatRequest("x", 1)], 1, lambda index, answer: None))


@dataclass(frozen=True)
class Served:
    """A server with the as-shipped kernel attached, and its answers under successive controls."""

    server: SGLangServer
    off: list[Answer]
    files_while_off: set[str]
    shadowed: list[Answer]
    cells: ShadowErrors
    pack: list[RecordedCall]
    after: list[Answer]

    @property
    def folder(self) -> Path:
        return evidence(self.server)


def question() -> ChatRequest:
    """A question whose answer needs the header, which is cached."""
    return ChatRequest(HEADER * 2 + "Whom does Koven write to?", 6, top_logprobs=2)


def answer(server: SGLangServer, control: Control) -> Answer:
    """Ask the question under a control, with the header cached without one, and switch everything off again."""
    replies: list[Answer] = []
    set_control(evidence(server), Control())
    server.flush_cache()
    server.ask([ChatRequest(HEADER * 2, 1)], 1, lambda index, answer: None)
    set_control(evidence(server), control)
    server.ask([question()], 1, lambda index, reply: replies.append(reply))
    return replies[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    extra = {SHADOW: "sage_attn_as_shipped", RECORD: str(BUDGET), TRACE: str(BUDGET)}
    with serve(tmp_path_factory.mktemp("served"), extra) as server:
        off = ask_all(server)
        files = {file.name for file in evidence(server).iterdir()}
        set_control(evidence(server), Control(shadow=True))
        shadowed = ask_all(server)
        up_to_date(server)
        set_control(evidence(server), Control())
        # Read now: another session replaces the files.
        cells, pack = read_shadow_errors(evidence(server)), read_pack(evidence(server) / "pack")
        yield Served(server, off, files, shadowed, cells, pack, ask_all(server))


def evidence(server: SGLangServer) -> Path:
    assert server.evidence is not None
    return server.evidence


def test_a_candidate_that_is_off_writes_nothing(served: Served) -> None:
    assert not {"shadow", "substituted", "trace"} & served.files_while_off
    assert "counters" in served.files_while_off
    assert {count.backend for count in read_counters(served.folder / "counters")} == {"torch_native"}, "nor is it served"


def test_the_answers_under_a_shadow_are_exactly_the_references(served: Served) -> None:
    for replies in (served.shadowed, served.after):
        assert [reply.text for reply in replies] == [reply.text for reply in served.off]
        assert [reply.tokens for reply in replies] == [reply.tokens for reply in served.off]
    assert max(reply.cached_tokens or 0 for reply in served.shadowed) >= 16


def test_the_error_is_where_a_prefix_is_cached_in_every_layer_and_head(served: Served) -> None:
    cells = served.cells
    assert cells.failed_calls == ()
    assert cells.headers[0].phases == cells.cells.observed("phase") == ("extend",)
    cold = relative_l1(cells.cells.distance(where={"phase": "extend", "prefix": "0"}))
    warm = relative_l1(cells.cells.distance(where={"phase": "extend", "prefix": ">= 16"}))
    assert cold.shape == warm.shape == (LAYERS, HEADS)
    assert cold.max() < INT8_NOISE
    assert warm.min() > 0.2


def test_the_pack_has_every_layer_with_and_without_a_prefix_within_its_budget(served: Served) -> None:
    pack = served.pack
    sampled = {(one.call.layer, one.call.phase, max(one.entry.prefix) > 0) for one in pack if one.entry.chosen == "sample"}
    assert sampled >= {(layer, "extend", cached) for layer in range(LAYERS) for cached in (False, True)}
    assert {one.call.layer for one in pack if one.entry.chosen == "worst"} == set(range(LAYERS))
    assert {one.call.phase for one in pack} == {"extend", "decode"}
    for one in pack:
        assert torch.allclose(one.reference.double(), oracle(one.call), atol=1e-5, rtol=0), one.entry
    folder = served.folder / "pack"
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= BUDGET
    source = read_manifest(folder).source
    assert (source.reference, source.candidate) == ("torch_native", "sage_attn_as_shipped")
    assert source.engine.startswith("SGLang ")


def test_only_a_substitution_changes_the_answer(served: Served) -> None:
    everywhere = tuple(range(LAYERS))
    right = answer(served.server, Control(shadow=True))
    assert substituted_calls(served.folder) == {}
    wrong = answer(served.server, Control(substitute=everywhere))
    assert (wrong.cached_tokens or 0) >= 16
    assert substituted_calls(served.folder) == dict.fromkeys(everywhere, 1)  # it computes extend; decode stays with the reference
    one = answer(served.server, Control(substitute=(2,)))
    assert substituted_calls(served.folder) == {2: 1}
    again = answer(served.server, Control())
    assert substituted_calls(served.folder) == {}
    assert again.tokens == right.tokens
    assert wrong.text != right.text
    assert one.tokens != right.tokens


def test_traces_separate_own_and_inherited_errors(served: Served) -> None:
    everywhere, traces = tuple(range(LAYERS)), {}
    for label, layers in {"reference": (), "candidate": everywhere, "layer-1": (1,)}.items():
        reply = answer(served.server, Control(trace=label, substitute=layers))
        traces[label] = trace = read_trace(served.folder, label)
        assert tuple(trace.outputs) == everywhere
        assert {out.shape[1] for out in trace.outputs.values()} == {HEADS}
        assert prefill_of(trace).positions.tolist() == list(range(reply.cached_tokens or 0, reply.prompt_tokens))
        assert trace.phases.count("decode") >= reply.completion_tokens - 1

    own = own_errors(served)
    reference, candidate, one = map(prefill_of, traces.values())
    whole = elements(_trace_sums(reference, candidate)[0])[0]
    assert whole == reference.outputs[0][:, 0].size, "every row has a partner"
    free = free_running_errors([(reference, candidate)], own)
    assert min(total for total, _ in free.values()) > 0.2
    # The first layer attends to the same inputs in both, so its error is its own.
    assert free[0] == (pytest.approx(own[0], rel=1e-3), pytest.approx(0, abs=1e-3))

    first, second, *others = (total for total, _ in free_running_errors([(reference, one)], own).values())
    assert first == 0
    assert second == pytest.approx(own[1], rel=1e-3)
    assert min(others) > 0.01  # inherited only: these layers use the reference


def prefill_of(trace: Trace) -> Trace:
    """Its extend rows."""
    rows = np.array([phase == "extend" for phase in trace.phases])
    return Trace(
        trace.label,
        trace.tokens[rows],
        trace.positions[rows],
        ("extend",) * int(rows.sum()),
        {layer: out[rows] for layer, out in trace.outputs.items()},
    )


def own_errors(served: Served) -> NDArray[np.float64]:
    """Own relative L1 of each layer in the prefill of the question alone, from a separate session."""
    answer(served.server, Control(shadow=True))
    set_control(served.folder, Control())
    served.server.ask([ChatRequest("x", 1)], 1, lambda index, answer: None)  # a pass that reads the control
    return relative_l1(read_shadow_errors(served.folder).cells.distance(("layer",)))


def test_sglang_backends_agree_in_shadow_and_substitution_with_chunks_mixed_batches_and_decode(tmp_path: Path) -> None:
    chunked = ("--chunked-prefill-size", "16", "--enable-mixed-chunk")
    everywhere, evidence = tuple(range(LAYERS)), tmp_path / "evidence"
    replies: dict[bool, list[Answer]] = {True: [], False: []}
    with serve(tmp_path, {SHADOW: "triton"}, engine_args=chunked) as server:
        questions = [ChatRequest(f"{HEADER}Whom does {name} write to?", 2) for name in ("Koven", "Jungal", "Daltas")]
        for control in (Control(shadow=True), Control(substitute=everywhere)):
            set_control(evidence, control)
            server.flush_cache()
            for _ in range(2):
                server.ask(questions, 3, lambda index, reply, to=replies[control.shadow]: to.append(reply))
            if control.shadow:
                up_to_date(server)
    assert max(reply.cached_tokens or 0 for reply in replies[False]) >= 16
    assert sorted(reply.text for reply in replies[False]) == sorted(reply.text for reply in replies[True])
    calls = substituted_calls(evidence)
    assert set(calls) == set(everywhere)
    assert min(calls.values()) >= 8  # chunks of 16 tokens, in the first round alone
    cells = read_shadow_errors(evidence)
    assert cells.failed_calls == ()
    table = relative_l1(cells.cells.distance(("phase", "layer", "head")))
    assert table.max() < 1e-4
    assert table.shape == (2, LAYERS, HEADS)
    assert np.isfinite(relative_l1(cells.cells.distance(where={"phase": "extend", "prefix": ">= 16"}))).all()
    assert "last" in cells.cells.observed("batch")
