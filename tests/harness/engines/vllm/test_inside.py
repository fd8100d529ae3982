"""assay inside a real vLLM: the offline engine on a CPU, with the tiny models, in vLLM's own Python."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from assay.evals.tiny_model.families import SOURCE, tiny_model
from assay.harness.attention.oracle import oracle
from assay.harness.engines.environments import room
from assay.harness.engines.hf.model import Model
from assay.harness.engines.inside.control import EVIDENCE, FAULTS, KERNEL, RECORD, SHADOW, TRACE, Control, TracedRequest
from assay.harness.evidence.counters import CallCount, read_counters
from assay.harness.evidence.error_table import relative_l1
from assay.harness.evidence.pack import read_manifest, read_pack
from assay.harness.evidence.shadow_errors import read_shadow_errors
from assay.harness.evidence.trace import read_trace
from assay.harness.judge.traces import parting

pytestmark = [pytest.mark.slow]
ROOT = Path(__file__).parents[4]
LAYERS, HEADS = 4, 4
KERNELS = "served_kernels"
# In the fifth step, the fifth of seven requests: its prefix is cached, and others are computed in the same calls.
TRACED, UNTIL = str(4 * 7 + 4), 100
# Of the serving float32 backend on packed inputs.
ROUNDING = 2e-6


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The Python of an environment that has vLLM."""
    named = os.environ.get("ASSAY_TEST_VLLM_PYTHON", str(ROOT / ".nox" / "vllm" / "bin" / "python"))
    if not Path(named).exists():
        pytest.skip(f"needs vLLM's own environment: {named} does not exist; ASSAY_TEST_VLLM_PYTHON names another Python")
    return named


def prompts() -> list[list[list[int]]]:
    """Two waves of prompts as token ids: one is longer than a chunk, two of the second wave have a cached prefix."""
    draw = random.Random(0)

    def drawn(count: int) -> list[int]:
        return [draw.randrange(20, 1000) for _ in range(count)]

    header = drawn(70)
    first = [header + drawn(20), drawn(200)]
    return [first, [*first, header + drawn(50), drawn(13), drawn(5)]]


@dataclass
class Offline:
    """An engine that has taken its steps."""

    folder: Path
    answers: list[list[tuple[int, list[int]]]] = field(default_factory=list)

    @property
    def counters(self) -> list[CallCount]:
        return read_counters(self.folder / "counters")

    def calls(self, **of: Any) -> int:
        """Sum the calls of the rows with these fields in layer 0."""
        return sum(row.calls_by_layer[0] for row in self.counters if all(getattr(row, name) == value for name, value in of.items()))


Serve = Callable[..., Offline]


@pytest.fixture(scope="module")
def serve(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Makes an engine take steps, each under a control."""

    def made(
        variables: dict[str, str], *controls: Control,
        model: Path = SOURCE, waves: list[list[list[int]]] | None = None, **engine: Any,
    ) -> Offline:  # fmt: skip
        folder = tmp_path_factory.mktemp("vllm")
        steps = [{"control": control.model_dump(mode="json"), "waves": waves or prompts()} for control in controls]
        asked = {"engine": {"model": str(model), **engine}, "steps": steps}
        (folder / "steps.json").write_text(json.dumps(asked))
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ} | {
            "PYTHONPATH": f"{room()}:{Path(__file__).parent}", EVIDENCE: str(folder), "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1", "VLLM_PLUGINS": "assay",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1", **variables,
        }  # fmt: skip
        if plugin := variables.get("PYTHONPATH"):
            environment["PYTHONPATH"] = f"{room()}:{Path(__file__).parent}:{plugin}"
        done = subprocess.run(
            [vllm_python, str(Path(__file__).with_name("offline.py")), str(folder / "steps.json")],
            env=environment, capture_output=True, text=True, timeout=500, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        answers = [[tuple(answer) for answer in step] for step in json.loads(done.stdout.splitlines()[-1])]
        return Offline(folder, answers)

    return made


@pytest.fixture(scope="module")
def attached(serve: Serve) -> Offline:
    """The tiny Llama with a wrong candidate: off; in the shadow; serving each layer; with a seeded fault; off and traced."""
    variables = {SHADOW: f"{KERNELS}:top_left", RECORD: str(8 * 2**20), TRACE: str(2**20), FAULTS: "1"}
    every = tuple(range(LAYERS))
    return serve(
        variables, Control(), Control(shadow=True), Control(substitute=every), Control(fault="mask-top-left"),
        Control(trace="one", traced=TracedRequest(request=TRACED, until=UNTIL)),
    )  # fmt: skip


def test_every_call_is_counted_by_layer_and_phase(attached: Offline) -> None:
    of_layers = [row.calls_by_layer for row in attached.counters]
    assert all(set(calls) == set(range(LAYERS)) and len(set(calls.values())) == 1 for calls in of_layers)
    assert {row.backend for row in attached.counters} == {"CPU_ATTN"}
    # Of each step: a wave of two prompts, in two chunks of 128 tokens and a rest; a wave of five, two with a prefix.
    assert attached.calls(phase="decode") > 0
    assert attached.calls(phase="extend", cached_prefix=True) >= 2 * len(attached.answers)
    admitted = [json.loads(line) for line in (attached.folder / "admissions.jsonl").read_text().splitlines()]
    assert len(admitted) == attached.calls(phase="extend")
    tokens: dict[str, int] = {}
    for batch in admitted:
        for request, new in zip(batch["rids"], batch["new"], strict=True):
            tokens[request] = tokens.get(request, 0) + new
    lengths = [len(prompt) for wave in prompts() for prompt in wave]
    cached = [hit for hit, _ in attached.answers[0]]
    assert [tokens[str(request)] for request in range(7)] == [n - hit for n, hit in zip(lengths, cached, strict=True)]
    assert cached == [0, 0, 64, 192, 64, 0, 0]


def test_the_model_uses_the_reference_under_a_shadow_and_the_candidate_under_substitution(attached: Offline) -> None:
    off, shadowed, substituted, seeded, after = attached.answers
    assert shadowed == off == after
    assert [ids for _, ids in substituted] != [ids for _, ids in off]
    assert substituted == seeded, "a fault of the reference is the same as a candidate that has it"


def test_the_reference_is_right_and_the_candidate_wrong_where_a_prefix_is_cached(attached: Offline) -> None:
    errors = read_shadow_errors(attached.folder)
    assert errors.failed_calls == ()
    assert errors.headers[0].untested == errors.headers[0].unrecorded == {}
    assert errors.cells.observed("phase") == ("extend", "decode")
    for phase in ("extend", "decode"):
        assert relative_l1(errors.cells.distance(where={"phase": phase, "prefix": ">= 16"})).min() > 0.2
    cold = relative_l1(errors.cells.distance(where={"phase": "extend", "prefix": "0"}))
    assert cold.shape == (LAYERS, HEADS)
    assert cold.max() < ROUNDING


def test_recorded_calls_hold_what_the_reference_computed(attached: Offline) -> None:
    manifest = read_manifest(attached.folder / "pack")
    assert manifest.source.engine.startswith("vLLM 0.")
    recorded = read_pack(attached.folder / "pack")
    assert {call.call.phase for call in recorded} == {"extend", "decode"}
    assert any(max(call.call.prefixes) >= 64 for call in recorded if call.call.phase == "extend")
    for call in recorded:
        truth = oracle(call.call)
        assert (call.reference.double() - truth).abs().max() < 2e-5, call.call.spec


def test_a_traced_request_of_mixed_calls_has_its_own_rows_and_keys(attached: Offline) -> None:
    trace = read_trace(attached.folder, "one")
    assert trace.positions.tolist() == list(range(64, UNTIL + 1))
    assert trace.tokens.tolist() == prompts()[1][2][64 : UNTIL + 1]
    assert set(trace.phases) == {"extend"}
    witness = Model(SOURCE).trace(prompts()[1][2][: UNTIL + 1])
    for layer in range(LAYERS):
        whole = witness[f"after.{layer}"][64:].numpy()
        assert np.abs(trace.layer_outputs[layer] - whole).max() < 1e-4 * np.abs(whole).max(), "with its residual"
        assert trace.outputs[layer].shape == (UNTIL - 63, HEADS, 64)
        assert np.array_equal(trace.keys[layer][64:], trace.new_keys[layer])
        assert np.array_equal(trace.values[layer][64:], trace.new_values[layer])


@pytest.mark.parametrize("kernel", ["right", "top_left"])
def test_a_kernel_serves_in_the_place_of_the_backend(serve: Serve, attached: Offline, kernel: str) -> None:
    served = serve({KERNEL: f"{KERNELS}:{kernel}"}, Control())
    assert {row.backend for row in served.counters} == {f"{KERNELS}:{kernel}"}
    assert served.answers[0] == attached.answers[0 if kernel == "right" else 2]


def test_a_phase_that_a_kernel_does_not_declare_is_delegated(serve: Serve, attached: Offline) -> None:
    served = serve({KERNEL: f"{KERNELS}:decode_only"}, Control())
    assert served.answers[0] == attached.answers[0]
    assert served.calls(phase="extend", backend="CPU_ATTN", delegated_by=f"{KERNELS}:decode_only") > 0
    assert served.calls(phase="decode", backend=f"{KERNELS}:decode_only", delegated_by="") > 0
    assert served.calls(phase="decode", backend="CPU_ATTN") == 0


@pytest.mark.parametrize(
    ("family", "engine", "bound"),
    [("gemma2", {}, ROUNDING), ("gemma3", {}, ROUNDING), ("", {"dtype": "bfloat16"}, 4e-3)],
    ids=["windows and a cap", "windows", "bfloat16"],
)
def test_k_and_v_of_other_models_and_pages_give_what_the_backend_computes(
    serve: Serve, family: str, engine: dict[str, Any], bound: float
) -> None:
    variables = {SHADOW: f"{KERNELS}:right", RECORD: str(2**20)}
    model = tiny_model(family) if family else SOURCE
    served = serve(variables, Control(shadow=True), Control(), model=model, **engine)
    errors = read_shadow_errors(served.folder)
    assert errors.failed_calls == ()
    assert errors.headers[0].untested == errors.headers[0].unrecorded == {}
    assert errors.cells.observed("phase") == ("extend", "decode")
    assert relative_l1(errors.cells.distance()).max() < bound
    assert served.answers[0] == served.answers[1]


def test_latents_are_read_in_decode_and_in_extend_where_vllm_attends_to_keys(serve: Serve) -> None:
    # With Intel's AMX, vLLM serves this model only in bfloat16.
    served = serve(
        {SHADOW: f"{KERNELS}:right"}, Control(shadow=True), Control(), model=tiny_model("deepseek-v2"), dtype="bfloat16",
        block_size=32 if "amx_tile" in Path("/proc/cpuinfo").read_text() else 16, max_num_batched_tokens=2048,
    )  # fmt: skip
    errors = read_shadow_errors(served.folder)
    refused = {(failed.phase, failed.layer) for failed in errors.failed_calls}
    absorbed = "AMX_MLA" in {row.backend for row in served.counters}
    assert refused == ({("extend", layer) for layer in range(LAYERS)} if absorbed else set())
    assert all("attends to latents and projects them" in failed.text for failed in errors.failed_calls)
    assert errors.cells.observed("phase") == (("decode",) if absorbed else ("extend", "decode"))
    assert relative_l1(errors.cells.distance()).max() < 1e-2
    assert served.answers[0] == served.answers[1]
    assert served.calls(phase="decode") > 0
    assert served.calls(phase="extend") > 0


def test_pages_of_fp8_are_read_as_the_backend_reads_them_and_are_not_rounded(serve: Serve) -> None:
    served = serve({SHADOW: f"{KERNELS}:right", RECORD: str(2**20)}, Control(shadow=True), Control(), kv_cache_dtype="fp8_e4m3")
    errors = read_shadow_errors(served.folder)
    assert errors.failed_calls == ()
    assert relative_l1(errors.cells.distance()).max() < 3e-6
    # vLLM 0.32.0 cuts the last bits off on a CPU, which doubles the error and makes every number smaller.
    assert set(errors.headers[0].untested) == set(range(LAYERS))
    assert all("not K divided by its scale" in why for why in errors.headers[0].untested.values())
    for recorded in read_pack(served.folder / "pack"):
        assert recorded.call.stored is not None
        assert (recorded.reference.double() - oracle(recorded.call)).abs().max() < 2e-5


# Faults of an engine: attention is the right function, of wrong inputs or beside its own place


# Place, layer, tensors, and the first of how many positions that differ.
PLACES = {
    "wrong-scale": ("attention", 2, ("output",), 64, 37),
    "head-lost": ("attention", 2, ("output",), 64, 37),
    "rope-base": ("input", 0, ("q", "k"), 64, 37),
    "stale-block-table": ("cache", 0, ("k", "v"), 96, 5),
    "kv-of-another-request": ("cache", 0, ("k", "v"), 0, 32),
    "prefix-of-another-prompt": ("cache", 0, ("k", "v"), 16, 32),
}


def alike() -> list[list[list[int]]]:
    """Three waves. In the last, the traced prompt has a prefix of the second; the first one's is half the same in each block."""
    draw = random.Random(0)

    def drawn(count: int) -> list[int]:
        return [draw.randrange(20, 1000) for _ in range(count)]

    header = drawn(70)
    other = [token if at % 32 < 16 else draw.randrange(20, 1000) for at, token in enumerate(header)]
    return [[other + drawn(20)], [header + drawn(20), drawn(200)], [header + drawn(50), drawn(13), drawn(90)]]


def traced(label: str, step: int) -> Control:
    """Trace the first prompt of the last wave, to the fifth token of its fourth block."""
    return Control(trace=label, traced=TracedRequest(request=str(6 * step + 3), until=100))


@pytest.fixture(scope="module")
def sound(serve: Serve) -> Offline:
    """The engine without a fault, twice."""
    return serve({TRACE: str(2**23)}, traced("first", 0), traced("again", 1), waves=alike())


@pytest.mark.parametrize("fault", PLACES)
def test_a_fault_of_the_engine_is_placed(
    serve: Serve, sound: Offline, seeded_engines: ModuleType, tmp_path: Path, fault: str
) -> None:
    of_gemma = {"softcap-dropped", "window-everywhere"}  # the tiny Llama has neither: see benchmarks/two_sides.py
    assert set(PLACES) == set(seeded_engines.FAULTS["vllm"]) - of_gemma
    (tmp_path / "seeded_engines.py").symlink_to(str(seeded_engines.__file__))
    (tmp_path / "sitecustomize.py").write_text(f"import seeded_engines\nseeded_engines.seed('vllm', {fault!r})\n")
    wrong = serve({TRACE: str(2**23), "PYTHONPATH": str(tmp_path)}, traced("first", 0), waves=alike())
    base, again = (read_trace(sound.folder, label) for label in ("first", "again"))
    at = parting(base, again, read_trace(wrong.folder, "first"), 1e-5)
    assert tuple(getattr(at, name) for name in ("place", "layer", "names", "position", "positions")) == PLACES[fault]
    if fault == "head-lost":
        assert at.head == seeded_engines.HEAD
