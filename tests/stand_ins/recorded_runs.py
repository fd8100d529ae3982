"""Runs on disk of every kind of outcome, as their servers would leave them: for tools that judge all of them.

`RUNS` names them. Each is written by a function of a folder for the run; what a run needs besides it lies in the same parent.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from assay.harness.attention.bugs.faults import fault, rounded_oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.backend import Backend
from assay.harness.checks.replay import replay_recorded
from assay.harness.config import make_spec
from assay.harness.engines.inside.pack_writer import PackWriter, stratum
from assay.harness.errors import EngineError
from assay.harness.evidence.bench_folder import bench_folder
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.kernel_result import CAUSE, MATRIX, CaseWhy, KernelResult
from assay.harness.evidence.layer_diff_record import PACK_FOLDER as PACK
from assay.harness.evidence.layer_diff_record import pack_of
from assay.harness.evidence.manifest import FailureResult
from assay.harness.evidence.pack import Source
from assay.harness.evidence.records import Answer, Token
from assay.harness.evidence.shadow_errors import FOLDER as SHADOW
from assay.harness.evidence.shadow_errors import write_shadow_errors
from assay.harness.judge.baselines import accept, adopt_reference, with_stored_reference
from assay.harness.run.plan import Plan, prepare
from assay.harness.run.run_folder import open_folder
from assay.harness.sides import ROLES, Role

_REFUSED = (CaseWhy(case="extend-1", why="too long"),)


def _beside(name: str) -> ModuleType:
    """A module of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"recorded_{name}", Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


runs, benches, layer_diffs = map(_beside, ("runs", "benches", "layer_diffs"))
QUESTIONS, GREEDY, COLD = 160, 128, 16
SAGE = ("_attn_fwd", "quant_per_block_int8_kernel")
TORCH = ("aten::scaled_dot_product_attention",)
ENGINES = {"cpu": "SGLang 0.5.23 on cpu", "cuda": "SGLang 0.5.23 on NVIDIA H100 80GB HBM3"}
EXACT = "assay.harness.attention.sdpa:torch_sdpa"


def answered(
    path: Path,
    *,
    device: str = "cpu",
    right: Callable[[int, int], bool] = lambda number, cached: True,
    greedy: Callable[[int], str] = lambda number: "yes",
    cached: int = 54,
    counted: bool = True,
    ran: tuple[str, ...] = SAGE,
    see: dict[str, int] | None = None,
    **policy: Any,
) -> RunFolder:
    """A complete run of the suites accuracy and greedy.

    Args:
        path: the run's folder.
        device: of both servers.
        right: (number of a question, its cached tokens) -> whether the candidate answers it.
        greedy: number of a prompt -> the candidate's text; the reference says "yes".
        cached: cached tokens of all but the first questions.
        counted: whether the servers counted their calls.
        ran: kernels that the candidate launched.
        see: what the candidate lost under a seeded fault, as in `runs.see_fault`; None for all of it.
        policy: more flags.
    """
    flags = {
        "device": device, "reference": "torch_native", "candidate": "sage_attn", "questions": QUESTIONS, "margin": 0.05,
        "greedy_prompts": GREEDY, "suites": "accuracy,greedy",
    }  # fmt: skip
    plan = planned(flags | policy)
    folder: RunFolder = runs.started(plan, path, engine=ENGINES[device])
    runs.trace(folder, "reference", "torch_native", TORCH)
    runs.trace(folder, "candidate", "sage_attn", ran, noise="int8_qk", kernels=SAGE)
    for role in ROLES:
        other = role == "candidate"
        for number, item in enumerate(plan.of("accuracy")):
            tokens = 0 if number < COLD else cached
            said = runs.answer_of(role, item, tokens)
            folder.append(runs.unparsed(said) if other and not right(number, tokens) else said)
        for number, item in enumerate(plan.of("greedy")):
            folder.append(_greedy(runs.answer_of(role, item, cached), greedy(number) if other else "yes"))
        if counted:
            runs.count_served(folder, role, plan.backend(role).name)
    runs.see_fault(folder, plan, **(see or {}))
    return folder


def planned(flags: dict[str, Any]) -> Plan:
    """The plan of a run, on this machine also where it is one on a GPU."""
    spec = with_stored_reference(make_spec(flags))
    return replace(prepare(spec.model_copy(update={"device": "cpu"})), spec=spec)


def _greedy(answer: Answer, text: str) -> Answer:
    top = ((text, -0.1), ("no" if text == "yes" else "maybe", -3.0))
    return answer.model_copy(update={"text": text, "tokens": (Token(text=text, logprob=-0.1, top=top),)})


def without_prefix(number: int, cached: int) -> bool:
    """The seed case: right where nothing is cached."""
    return not cached


def fails(path: Path, cause: str = "port", kind: Any = "engine") -> None:
    """A run that an error ended."""
    folder = answered(path)
    error = EngineError("The server failed: KeyError: 'x'", "", "read it.", details="log\n  line", cause=cause)
    folder.update(folder.progress().model_copy(update={"failure": FailureResult.of(kind, error), "servers": ()}))


def other_arguments(path: Path) -> None:
    """A candidate whose server got another dtype."""
    folder = answered(path, right=without_prefix)
    progress = folder.progress()
    reference, candidate = progress.servers
    changed = candidate.model_copy(update={"arguments": {**candidate.arguments, "dtype": "bfloat16"}})
    folder.update(progress.model_copy(update={"servers": (reference, changed)}))


def changed_lines(path: Path, name: str, change: Callable[[list[str]], list[str]], **made: Any) -> None:
    """A run one of whose files was edited afterwards."""
    folder = answered(path, **made)
    file = folder.path / name
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))


def another_prompt(lines: list[str]) -> list[str]:
    """The first answer is to another prompt."""
    return [json.dumps(json.loads(lines[0]) | {"prompt_hash": "another"}) + "\n", *lines[1:]]


def other_letters(lines: list[str]) -> list[str]:
    """Recorded letters that their texts do not say."""
    made = [json.loads(line) for line in lines]
    return [json.dumps(one | ({"parsed": "A"} if one["suite"] == "accuracy" else {})) + "\n" for one in made]


def few_counts(path: Path) -> None:
    """Counters that say one call in each layer."""
    folder = answered(path)
    (table,) = (folder.server_folder("candidate") / "counters").glob("*.i64")
    np.minimum(np.fromfile(table, np.int64), 1).tofile(table)


def without_seeded_fault(path: Path) -> None:
    """A run that seeded no fault."""
    shutil.rmtree(answered(path).server_folder("candidate") / "sensitivity")


def nothing_happened(path: Path) -> RunFolder:
    """A run without servers."""
    return open_folder(planned({"candidate": "sage_attn", "suites": "accuracy,greedy"}), path)


def texts(path: Path, nats: float, candidate: str = "triton", suites: tuple[str, ...] = ("greedy",)) -> None:
    """Greedy texts of which every one differs; both roles prefer their own letter by some nats."""

    def say(role: Role, number: int) -> tuple[Token, ...]:
        own, other = ("A", "B") if role == "reference" else ("B", "A")
        return (Token(text=own, logprob=-1e-7, top=((own, -1e-7), (other, -nats))),)

    folder = runs.run_of(path, runs.spec_of(candidate, suites=suites, greedy_prompts=256))
    runs.answer_all(folder, say)


def logits(path: Path, noise: float = 0.0, change: Any = None, prompts: int = 64, candidate: str = "triton") -> None:
    """Scored sequences; the candidate's logits have noise, and are changed."""
    spec = runs.spec_of(candidate, suites=("logits",))
    folder = runs.run_of(path, spec)
    runs.score_both(folder, partial(runs.scored, noise=noise, seed=1, change=change), prompts)


def reversed_behind_a_prefix(condition: str, values: Any) -> Any:
    """Certain of another token where a prefix is cached."""
    return values[:, ::-1] * 4 if condition == "cached" else values


def one_nan(condition: str, values: Any) -> Any:
    """One number that is none."""
    changed = values.copy()
    changed[17, 2] = math.nan
    return changed


def layers(
    path: Path,
    error: Callable[..., float] = lambda *cell: 1e-6,
    kernel: Any = rounded_oracle,
    matrix: dict[str, Any] | None = None,
    gain: float = 0.0,
    device: str = "cpu",
    examined: bool = True,
) -> RunFolder:
    """A layer diff of two layers, with recorded calls that were examined, and the op-level matrix.

    Args:
        path: the run's folder.
        error: layer, head, phase, prefix, position, place -> the candidate's relative L1 in the shadow.
        kernel: computes the candidate's outputs of the recorded calls.
        matrix: what is otherwise in the record of the matrix; None for a kernel within its bounds.
        gain: of the candidate in every cell.
        device: of both servers.
        examined: whether the recorded calls were examined.
    """
    flags = {"device": device, "reference": "torch_native", "candidate": EXACT, "suites": "layers"}
    folder = runs.started(planned(flags), path, engine=ENGINES[device])
    place = folder.server_folder("reference")
    source = Source(engine="e", model="m", model_hash="", reference="torch_native", candidate=EXACT, run=folder.nonce)
    writer = PackWriter(place / PACK, source, 10**7)
    for layer in (0, 1):
        for new, prefix in ((3, 0), (4, 20)):
            call = call_of([(new, prefix)], (4, 2), 8, torch.float32, "cpu", seed=layer).with_spec(layer=layer)
            if writer.wants(stratum(layer, call.phase, call.lens_q, call.prefixes)):
                writer.add(call, rounded_oracle(call), candidate=kernel(call))
    writer.flush()

    def cell(*at: Any) -> float | None:
        return error(*at) if at[2] == "extend" and at[3] in ("0", ">= 16") else None

    errors = layer_diffs.cells(2, 4, cell, noise="", gain=gain)
    exact = replace(errors.cells.candidate, honest=errors.cells.reference.honest)
    header = errors.headers[0].model_copy(update={"run": folder.nonce, "candidate": EXACT})
    write_shadow_errors(place / SHADOW / "1.safetensors", replace(errors.cells, candidate=exact), header)
    if examined and (pack := pack_of(folder)):
        folder.write(CAUSE, replay_recorded(pack, Backend.parse(EXACT), "again"))
    record = KernelResult(kernel=EXACT, shapes="float32", calls=2, worst_own=0.5, worst_bound=1.0)
    folder.write(MATRIX, record.model_copy(update=matrix or {}))
    return folder


def timed(path: Path, broken: bool = False, bench: dict[str, Any] | None = None, benched: bool = True, **flags: Any) -> RunFolder:
    """A run with questions, if its suites have them, and latency.

    Args:
        path: the run's folder.
        broken: whether the candidate answers no question behind a prefix.
        bench: what is wrong in the times, as in `benches.write_bench`.
        benched: whether the servers were timed.
        flags: more flags.
    """
    given = {"suites": "accuracy,latency", "candidate": "torch_native", "questions": 240}
    plan = planned(given | flags)
    asked = plan.of("accuracy")
    folder: RunFolder = runs.started(plan, path, roles=ROLES if asked else ())
    for role in ROLES if asked else ():
        for number, item in enumerate(asked):
            wrong = broken and role == "candidate" and number >= COLD
            said = runs.answer_of(role, item, 0 if number < COLD else 54)
            folder.append(runs.unparsed(said) if wrong else said)
        runs.count_served(folder, role, "torch_native")
        runs.trace(folder, role, "torch_native", TORCH)
    if asked:
        runs.see_fault(folder, plan)
    if benched:
        benches.write_bench(bench_folder(folder).path, nonce=folder.nonce, **(bench or {}))
    return folder


def with_stored(path: Path, right: Callable[[int, int], bool] = lambda number, cached: True, **policy: Any) -> None:
    """A run whose reference is stored: what it answered in an earlier run."""
    first = answered(path.parent / f"{path.name}-accepted", **policy)
    place = accept(first, "pass", path.parent / f"{path.name}-baselines")
    adopt_reference(answered(path, right=right, reference=str(place), **policy))


def layer_1(value: float) -> Callable[..., float]:
    """An own error in layer 1, behind a prefix."""
    return lambda layer, head, phase, prefix, *_: value if (layer, prefix) == (1, ">= 16") else 1e-6


RUNS: dict[str, Callable[[Path], object]] = {
    "answers/sound": answered,
    "answers/seed-case": partial(answered, right=without_prefix, greedy=lambda number: "no"),
    "answers/a-tenth-lost": partial(answered, right=lambda number, cached: number % 10 > 0),
    "answers/two-lost": partial(answered, right=lambda number, cached: number not in (40, 90)),
    "answers/all-lost": partial(answered, right=lambda number, cached: False),
    "answers/texts-differ": partial(answered, greedy=lambda number: "no"),
    "answers/one-text-differs": partial(answered, greedy=lambda number: "no" if number == 7 else "yes"),
    "answers/wide-margin": partial(answered, right=lambda number, cached: number % 20 > 0, margin=0.1),
    "answers/no-prefix": partial(answered, cached=1),
    "answers/not-counted": partial(answered, counted=False),
    "answers/another-kernel": partial(answered, ran=TORCH),
    "answers/fault-not-seen": partial(answered, see={"lost": 0}),
    "answers/fault-changed-nothing": partial(answered, see={"changed": 0}),
    "answers/no-fault": without_seeded_fault,
    "answers/gpu-sound": partial(answered, device="cuda"),
    "answers/gpu-seed-case": partial(answered, device="cuda", right=without_prefix, greedy=lambda number: "no"),
    "answers/gpu-not-counted": partial(answered, device="cuda", counted=False),
    "evidence/last-answer-missing": partial(changed_lines, name="records.jsonl", change=lambda lines: lines[:-1]),
    "evidence/another-prompt": partial(changed_lines, name="records.jsonl", change=another_prompt),
    "evidence/other-letters": partial(changed_lines, name="records.jsonl", change=other_letters),
    "evidence/line-cut": partial(changed_lines, name="records.jsonl", change=lambda lines: [*lines[:-1], lines[-1][:20]]),
    "evidence/items-cut": partial(changed_lines, name="items.jsonl", change=lambda lines: lines[:100]),
    "evidence/few-counts": few_counts,
    "evidence/other-arguments": other_arguments,
    "evidence/nothing": nothing_happened,
    "error/port": fails,
    "error/unknown": partial(fails, cause=""),
    "error/evidence": partial(fails, kind="evidence"),
    "error/interrupted": partial(fails, kind="interrupted"),
    "greedy/close": partial(texts, nats=0.01),
    "greedy/apart": partial(texts, nats=16.0),
    "greedy/apart-under-noise": partial(texts, nats=1.0, candidate="sage_attn"),
    "logits/equal": logits,
    "logits/noise": partial(logits, noise=0.01),
    "logits/much-noise": partial(logits, noise=1.0),
    "logits/declared-noise": partial(logits, noise=0.05, candidate="sage_attn"),
    "logits/behind-a-prefix": partial(logits, change=reversed_behind_a_prefix),
    "logits/nan": partial(logits, change=one_nan),
    "logits/few": partial(logits, prompts=8),
    "layers/exact": layers,
    "layers/one-layer": partial(layers, error=layer_1(0.5)),
    "layers/not-finite": partial(layers, error=layer_1(math.inf)),
    "layers/named": partial(layers, error=layer_1(0.5), kernel=fault("mask-top-left", layers=[1])),
    "layers/gain": partial(layers, gain=0.01),
    "layers/not-examined": partial(layers, examined=False),
    "layers/matrix-fails": partial(layers, matrix={"failing": ("extend-1",), "worst_own": 9.0}),
    "layers/matrix-refused": partial(layers, matrix={"calls": 0, "worst_own": None, "worst_bound": None, "refused": _REFUSED}),
    "layers/matrix-ended": partial(layers, matrix={"not_run": "the kernel ended its process"}),
    "layers/gpu-exact": partial(layers, device="cuda"),
    "layers/gpu-named": partial(
        layers, device="cuda", error=layer_1(0.5), kernel=fault("kv-heads-interleaved", layers=[1])
    ),
    "latency/as-fast": timed,
    "latency/slower": partial(timed, bench={"slow": {"shared": 1.5}}),
    "latency/wide-bound": partial(
        timed, bench={"slow": {"shared": 1.5}, "flags": {"latency_bound": 2.0}}, latency_bound=2.0
    ),
    "latency/faster-and-wrong": partial(timed, broken=True, bench={"slow": dict.fromkeys(benches.SHAPES, 0.5)}),
    "latency/interpreted": partial(timed, bench={"interpreted": True}),
    "latency/few-rounds": partial(timed, bench={"rounds": 2}),
    "latency/unsteady": partial(timed, bench={"floor": 1.5}),
    "latency/not-cached": partial(timed, bench={"cached": False}),
    "latency/not-counted": partial(timed, bench={"counted": False}),
    "latency/other-arguments": partial(timed, bench={"arguments": {"page_size": 16}}),
    "baseline/equal": with_stored,
    "baseline/worse": partial(with_stored, right=lambda number, cached: number % 5 > 0),
}  # fmt: skip
"""Name, "kind/case" -> a function that writes the run into a folder."""
