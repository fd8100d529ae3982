"""Windows, a soft cap, sinks, an FP8 cache and latents in real CPU servers: interpreted Triton as the reference, tiny models.

The candidate is right, but for one layer in decode. There its window has one key fewer, which is what the reference computes in
every layer with a window; or it scales a stored V as K; or it scales scores for the dims of a latent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest

from assay.evals.questions import parse_answer
from assay.evals.synthetic import questions
from assay.evals.tiny_model.families import tiny_model
from assay.harness.attention.call import Mask
from assay.harness.checks.replay import replay
from assay.harness.conditions import PHASES
from assay.harness.engines.base import ChatRequest
from assay.harness.engines.inside.control import RECORD, SHADOW, Control, set_control, substituted_calls, write_now
from assay.harness.engines.launch import Launch
from assay.harness.engines.sglang.server import SGLangServer
from assay.harness.evidence.pack import RecordedCall, read_pack
from assay.harness.evidence.shadow_errors import ShadowErrors, read_shadow_errors
from assay.harness.judge.truth_bounds import LAYER, PHASE, MeasuredCells, compare_with_noise
from assay.harness.verdict import serious

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.interpreter]
WINDOW, WINDOWS, LAYERS, WRONG = 64, (0, 2), 4, 2
ASKED = {"gemma2": {"window", "softcap"}, "gpt-oss": {"window", "sinks"}, "fp8-kv": {"stored_kv"}, "deepseek-v2": {"mla"}}
FLAGS = {"fp8-kv": ("--kv-cache-dtype=fp8_e4m3", "--dtype=float16")}
TOKENS = {"deepseek-v2": 3}
"""Tokens of an answer, where it is not to be read: of latents, a token takes seconds."""
KERNELS = f"""
from dataclasses import replace
from assay import declares
from assay.harness.attention.call import Mask
from assay.harness.attention.bugs.faults import rounded_oracle

@declares(features=("window", "softcap", "sinks", "stored_kv", "mla"))
def right(call):
    return rounded_oracle(call)

@declares(features=("window", "softcap", "sinks", "stored_kv", "mla"))
def wrong(call):
    if call.layer != {WRONG} or call.phase != "decode":
        return rounded_oracle(call)
    if call.stored is not None:
        return rounded_oracle(replace(call, v=(call.stored.v.float() * call.stored.k_scale).to(call.q.dtype)))
    if "mla" in call.features:
        return rounded_oracle(call.with_spec(scale=576**-0.5))
    return rounded_oracle(call.with_spec(mask=Mask(window={WINDOW - 1})))
"""


@dataclass(frozen=True)
class Served:
    """What a server left: its shadow's errors, the pack, and calls that were substituted in one answer."""

    family: str
    folder: Path
    cells: ShadowErrors
    pack: list[RecordedCall]
    answers: list[str]
    substituted: dict[int, int]


@pytest.fixture(scope="module", params=ASKED)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, answers = tmp_path_factory.mktemp("served"), {}
    (folder / "featured.py").write_text(KERNELS)
    [question] = islice(questions(), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
        patch.syspath_prepend(str(folder))
        unused = os.environ.get("SGLANG_DISABLED_MODEL_ARCHS", "").split(",")
        served = request.param.replace("-", "_")
        patch.setenv("SGLANG_DISABLED_MODEL_ARCHS", ",".join(name for name in unused if name != served))
        launch = Launch(
            role="reference", backend="triton", model=tiny_model(request.param), device="cpu", evidence=folder / "evidence",
            log=folder / "server.log", decode_backend="triton", startup_timeout=900.0, request_timeout=900.0, cpu_core=0,
            engine_args=FLAGS.get(request.param, ()),
            extra={SHADOW: "featured:wrong", RECORD: str(2**26)},
        )  # fmt: skip
        with SGLangServer(launch) as server:
            assert server.evidence is not None
            for place, control in enumerate((Control(shadow=True), Control(substitute=(WRONG,)))):
                set_control(server.evidence, control)
                server.flush_cache()
                server.ask(
                    [ChatRequest(question.prompt, TOKENS.get(request.param, 12))],
                    1,
                    lambda _, reply, at=place: answers.update({at: reply.text}),
                )
                if control.shadow:
                    write_now(server.evidence, lambda: server.ask([ChatRequest("x", 1)], 1, lambda *_: None))
            if request.param not in TOKENS:
                assert parse_answer(answers[0]) == question.answer
            cells, pack = read_shadow_errors(server.evidence), read_pack(server.evidence / "pack")
            yield Served(request.param, folder, cells, pack, [*answers.values()], substituted_calls(server.evidence))


def test_only_the_wrong_layer_is_out_of_bounds_although_the_reference_is_wrong_in_the_same_way(served: Served) -> None:
    against = compare_with_noise(served.cells)
    assert served.cells.failed_calls == ()
    assert served.cells.headers[0].untested == {}
    assert set(served.cells.headers[0].features) == ASKED[served.family]
    assert places(against.cells, flagged=True) == {(WRONG, "decode")}
    assert places(against.cells, flagged=False) == {(layer, phase) for layer in range(LAYERS) for phase in PHASES} - {
        (WRONG, "decode")
    }
    assert not against.reference.flagged.any()
    assert not against.reference_queries.flagged.any()
    windows = {(layer, "decode") for layer in WINDOWS if "window" in ASKED[served.family]}
    given = {(layer, "extend") for layer in range(LAYERS) if "stored_kv" in ASKED[served.family]}
    assert {(layer, phase) for layer, phase, how in served.cells.known if how == "window"} == windows
    assert {(layer, phase) for layer, phase, how in served.cells.known if how == "given"} == given
    wrong = set() if (WRONG, "decode") in windows else {(WRONG, "decode")}
    assert places(against.apart, flagged=False) == {
        (layer, phase) for layer in range(LAYERS) for phase in PHASES
    } - windows - given - wrong  # fmt: skip


def test_recorded_calls_have_the_features_and_a_replay_finds_the_layer(served: Served) -> None:
    for record in served.pack:
        spec = record.call.spec
        has_window = spec.layer in WINDOWS and "window" in ASKED[served.family]
        assert spec.mask == (Mask(window=WINDOW) if has_window else Mask())
        assert ("stored_kv" in record.call.features) == ("stored_kv" in ASKED[served.family])
        absorbed = any(record.entry.prefix) or spec.phase == "decode"  # a prefill without a prefix makes K and V of latents
        assert (spec.layout == "v in k") == ("mla" in ASKED[served.family] and absorbed)
        assert bool(spec.softcap) == ("softcap" in ASKED[served.family])
        assert len(spec.sinks) == (record.call.q.shape[1] if "sinks" in ASKED[served.family] else 0)
    dropped = [
        record.call
        for record in served.pack
        if record.call.lens_k != [sum(lens) for lens in zip(record.entry.new, record.entry.prefix, strict=True)]
    ]
    assert bool(dropped) == (served.family == "gpt-oss"), "SGLang drops keys where layers with a window have a pool of their own"
    pack = served.folder / "evidence" / "pack"
    assert not serious(replay(pack, "featured:right", read_out=0).findings)
    wrong = replay(pack, "featured:wrong", read_out=0)
    assert serious(wrong.findings)
    assert set(wrong.outside) == {(WRONG, "decode")}


def test_a_layer_is_substituted_in_both_phases(served: Served) -> None:
    assert set(served.substituted) == {WRONG}
    assert served.substituted[WRONG] > 1
    if "window" in ASKED[served.family]:  # what is wrong elsewhere changes the answer
        assert served.answers[0] == served.answers[1]


def places(measured: MeasuredCells, *, flagged: bool) -> set[tuple[int, str]]:
    """Layers and phases of which a test is flagged, or of which none is."""
    found: dict[tuple[int, str], bool] = {}
    for row, is_flagged in zip(measured.index, measured.flagged, strict=True):
        at = (int(row[LAYER]), PHASES[row[PHASE]])
        found[at] = found.get(at, False) or bool(is_flagged)
    return {at for at, is_flagged in found.items() if is_flagged == flagged}
