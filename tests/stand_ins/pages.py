"""A document of each kind of page. Loaded by path: test folders are not packages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

from assay.harness.attention.bugs.faults import fault, rounded_oracle
from assay.harness.attention.matrix import cases
from assay.harness.checks.check import check
from assay.harness.drivers.bisect.commits.state import BisectResult, BisectSpec, BisectState, CommitInfo, CommitProbe
from assay.harness.drivers.sweep.spec import SweepResult, SweptCell
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.evidence.invariance import InvarianceFolder
from assay.harness.evidence.kernel_result import KernelResult
from assay.harness.fingerprint.differences import compare_fingerprints
from assay.harness.ingest.recognise import compare, ingest
from assay.harness.ingest.tensor_diff import TensorRule
from assay.harness.judge.history import RunLine, RunList
from assay.harness.judge.invariance import judge_invariance
from assay.reports.bisection import bisection_document
from assay.reports.check import check_document
from assay.reports.compare import compare_document
from assay.reports.document import Document
from assay.reports.fingerprint import diff_document, fingerprint_document
from assay.reports.ingest import ingest_document
from assay.reports.invariance import invariance_document
from assay.reports.run_report import run_document
from assay.reports.runs import runs_document
from assay.reports.sweep import sweep_document

DATA = Path(__file__).parents[1] / "data"
LONG = "mykernels.attention.paged_flash_forward_with_prefix_cache:forward"


def documents(folder: Path, reports: ModuleType, arms: ModuleType) -> dict[str, Callable[[], Document]]:
    """A function for each kind of page that makes its document; files are written to `folder`."""
    run = {
        "run-regression": lambda: run_document(reports.regression()),
        "run-pass": lambda: run_document(reports.passing().model_copy(update={"latency": reports.latency()})),
        "run-inconclusive": lambda: run_document(reports.inconclusive()),
        "run-error": lambda: run_document(reports.failed_server()),
    }
    results = DATA / "results"
    pairs: dict[str, Callable[[], tuple[Path, Path]]] = {
        "compare-answers": lambda: (results / "inspect_a.eval", results / "inspect_b.eval"),
        "compare-lm-eval": lambda: (results / "lm_eval_a", results / "lm_eval_b"),
        "compare-choices": lambda: choices(folder),
        "compare-traces": lambda: _traces(folder),
        "compare-tensors": lambda: _tensors(folder),
    }

    def compared(name: str) -> Document:
        return compare_document(compare(*pairs[name](), 0.02, TensorRule(), reproduce="assay compare A B"))

    logs = [DATA / "sglang_log" / "server_0.5.23.log", DATA / "sglang_log" / "seed.log", DATA / "traces" / "mlc_engine.txt"]
    return run | {name: lambda name=name: compared(name) for name in pairs} | {
        "check-wrong": lambda: check_document(_wrong(reports)),
        "check-right": lambda: check_document(check(rounded_oracle, cases=cases(("decode",))[:12])),
        "compare-fingerprints": lambda: diff_document(compare_fingerprints(*_fingerprints())),
        "fingerprint": lambda: fingerprint_document(_fingerprints()[0]),
        "ingest": lambda: ingest_document(ingest(logs)),
        "invariance": lambda: invariance_document(judge_invariance(_invariance(folder, arms))),
        "sweep": lambda: sweep_document(_sweep(), folder / "index.html"),
        "bisect": lambda: bisection_document(_bisection()),
        "runs": lambda: runs_document(_runs()),
    }  # fmt: skip


def _wrong(reports: ModuleType) -> KernelResult:
    """A kernel whose mask is wrong, with what was observed of it."""
    wrong = check(fault("mask-top-left"), cases=cases(("extend",), dtypes=[torch.float32], head_dims=[64])[::12], read_out=0)
    first, *others = wrong.findings
    drawn = {"operator": "query i does not see keys j > i", "picture": reports.picture(reports.TOP_LEFT)}
    again = {"again": "assay check mine:forward", "test": "def test_mine():\n    assert_correct(forward, call)"}
    return wrong.model_copy(update={"findings": (first.model_copy(update=drawn), *others), **again})


def choices(folder: Path) -> tuple[Path, Path]:
    """Samples of a multiple-choice task, as lm-eval 0.4.9 writes them, of which B gets six wrong and two right."""
    texts, right = ["the mitochondrion", "incomprehensibilities", "a ribosome", "none of these"], [-2.0, -0.5, -3.0, -4.0]
    wrong, made = [-0.25, -2.0, -3.0, -4.0], []
    for name, lost in (("a", {38, 39}), ("b", set(range(6)))):
        rows = []
        for number in range(40):
            scores = wrong if number in lost else right
            rows.append({
                "doc_id": number, "doc": {"question": f"Which organelle is number {number}?", "choices": texts, "answer": 1},
                "target": "1",
                "arguments": {f"gen_args_{n}": {"arg_0": "Q", "arg_1": f" {text}"} for n, text in enumerate(texts)},
                "resps": [[[str(score), "False"]] for score in scores],
                "filtered_resps": [[str(score), "False"] for score in scores],
                "filter": "none", "metrics": ["acc"], "doc_hash": f"d{number}", "prompt_hash": f"p{number}", "target_hash": "t",
                "acc": float(max(scores) == scores[1]),
            })  # fmt: skip
        path = folder / name / "samples_organelles_2026-11-20.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        made.append(path)
    return made[0], made[1]


def _traces(folder: Path) -> tuple[Path, Path]:
    trace, other = DATA / "traces" / "mlc_engine.txt", folder / "b.txt"
    other.write_text(trace.read_text().replace("fork_sequence", "add_sequence"))
    return trace, other


def _tensors(folder: Path) -> tuple[Path, Path]:
    """Tensors of twelve layers, of which attention in layer 3 is wrong by a head, and so is all that follows."""
    rng = torch.Generator().manual_seed(0)
    a = {
        f"model.layers.{layer}.self_attn.{name}": torch.randn(24, 8, 64, generator=rng)
        for layer in range(12) for name in ("q", "attn")
    }  # fmt: skip
    b = {name: value.clone() for name, value in a.items()}
    for layer in range(3, 12):
        b[f"model.layers.{layer}.self_attn.attn"][5:, 2] *= 1 + 0.3 / layer
    paths = folder / "a.safetensors", folder / "b.safetensors"
    for path, tensors in zip(paths, (a, b), strict=True):
        save_file(tensors, path)
    return paths


def _fingerprints() -> tuple[Fingerprint, Fingerprint]:
    made = [
        Fingerprint(
            source="server", engine="SGLang 0.5.23 on cuda", model="meta-llama/Llama-3.1-8B-Instruct",
            packages={"torch": version, "flashinfer-python": "0.6.1", "sglang": "0.5.23", "triton": "3.5.0"},
            arguments={"attention_backend": backend, "page_size": "16", "chunked_prefill_size": "8192"},
            config={"rms_norm_eps": "1e-05", "rope_theta": "500000.0", "sliding_window": "None"},
            environment={"SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "1"},
        )
        for version, backend in (("2.9.1+cu128", "fa3"), ("2.9.0+cu128", "flashinfer"))
    ]  # fmt: skip
    return made[0], made[1]


def _invariance(folder: Path, arms: ModuleType) -> InvarianceFolder:
    one, both = ("page-size",), ("page-size", "prefix-cache")
    made = InvarianceFolder.new(folder / "invariance")
    records = [arms.arm(*one), arms.arm(*both, number=3, decode=0.8), arms.arm(*both, "order", number=4, decode=0.8)]
    arms.write(made, [*records, arms.arm("batch", number=5, decode=0.8)])
    return made


def _sweep() -> SweepResult:
    def cell(key: str, axes: dict[str, str], verdict: Any, headline: str = "", problem: str = "") -> SweptCell:
        return SweptCell(
            key=key, command=("run", axes["candidate"]), axes=axes, verdict=verdict, problem=problem, seconds=212.0,
            headline=headline,
        )  # fmt: skip

    model, other = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-30B-A3B-Instruct-2507"
    axes = {"candidate": ("flashinfer", LONG), "model": (model, other)}
    cells = (
        cell("7f3a90c2", {"candidate": "flashinfer", "model": model}, "pass", "No worse than the reference, within 2 points."),
        cell(
            "11d09e4b", {"candidate": LONG, "model": model}, "regression", "Computes a top-left causal mask behind a cached prefix."
        ),
        cell("e0b7c1aa", {"candidate": LONG, "model": other}, "error", problem="The candidate's server died while it was loading."),
        cell("93ac00d1", {"candidate": "flashinfer", "model": other}, None),
    )
    return SweepResult(
        verdict="regression", command="assay sweep sweep.toml", folder="runs/sweep-1", created="2026-01-01T00:00:00Z",
        seconds=840.0, axes=axes, interrupted=True, cells=cells,
    )  # fmt: skip


def _bisection() -> BisectState:
    hashes = [f"{i:02x}" * 20 for i in range(10, 31)]
    purposes = [
        ("good-end", 0, "good", 0.4),
        ("bad-end", 20, "bad", math.inf),
        ("search", 10, "good", 0.5),
        ("search", 11, "bad", 1.5e6),
    ]
    probes = tuple(
        CommitProbe(
            number=number, commit=hashes[at], purpose=purpose, came_out=came_out, worst=worst, own=worst / 100,
            where="extend, new+prefix 7+16, head 1", seconds=0.4,
        )
        for number, (purpose, at, came_out, worst) in enumerate(purposes, 1)
    )  # fmt: skip
    commit = CommitInfo(
        commit=hashes[11], subject="Tile keys by 64", body="Saves shared memory.", author="A. Author <a@b.c>", date="2026-01-02",
        diffstat="attention.py | 14 +++++++-------", parents=(hashes[10],),
    )  # fmt: skip
    result = BisectResult(outcome="found", suspects=(hashes[11],), commit=commit)
    spec = BisectSpec(repo="/home/me/kernels", good=hashes[0], bad=hashes[20], kernel=LONG)
    history = dict.fromkeys(hashes[1:], "Another change to the kernel and to its tests")
    return BisectState(spec=spec, command="assay bisect commits v1..main", history=history, probes=probes, result=result)


def _runs() -> RunList:
    lines = [
        RunLine(
            folder=f"runs/2026-11-2{n}-sage_attn_as_shipped", verdict=verdict, created=f"2026-11-2{n}T20:43:19Z",
            candidate=LONG if n == 3 else "sage_attn", reference="torch_native", model="meta-llama/Llama-3.1-8B-Instruct",
            device="cuda", worst=worst, cause=cause,
        )
        for n, verdict, worst, cause in (
            (3, "regression", 138.0, "causal mask aligned top-left once a prefix is cached"), (2, "pass", 0.4, ""),
            (1, "inconclusive", None, "no request had a cached prefix"), (0, "error", None, "the candidate's server died"),
        )
    ]  # fmt: skip
    return RunList(folder="runs", runs=tuple(lines))
