"""Whole runs: two real SGLang servers, real Triton kernels, the tiny model. Few questions each, so margins are wide."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from assay.harness.engines.model import TINY_MODEL

pytestmark = pytest.mark.server

ROOT = Path(__file__).parent.parent
FEW = ["--questions", "48", "--margin", "0.1"]
SEED_CASE = [*FEW, "--suites", "accuracy,layers", "--config", "shallow.toml"]
"""What shows it; a correct kernel goes through all suites in `test_collect_server.py`."""
ANSWERS = ["--questions", "48", "--margin", "0.1", "--suites", "accuracy"]
"""For what is not about the other suites: each start and each call of an interpreted kernel costs seconds."""

KERNEL = """
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import oracle

def wrong_after_a_while(call: AttentionCall):
    wrong_after_a_while.calls = getattr(wrong_after_a_while, "calls", 0) + 1
    if wrong_after_a_while.calls > 100:
        raise RuntimeError("out of shared memory, says the kernel")
    return oracle(call).to(call.q.dtype)
"""

AS_SHIPPED = """
from assay.harness.attention.bugs.faults import fault
from assay.harness.attention.declaration import declares

as_shipped = declares(phases=("extend",))(fault("mask-top-left"))
"""
"""The mistake of the shipped kernel without its interpreter, which takes two thirds of the CPU time of a run."""


def assay(folder: Path, *arguments: str, warm: tuple[ModuleType, Path] | None = None) -> subprocess.Popen[str]:
    """Start a run, whose servers a template forks if there is one; without, as users do."""
    (folder / "shallow.toml").write_text("[policy]\nenvelope_tokens = 128\n")
    path, script = [ROOT, folder], list[str]()
    if warm is not None:
        path, script = [*path, Path(warm[0].__file__ or "").parent], [str(warm[0].__file__), str(warm[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.Popen(
        [sys.executable, *script, "-m", "assay", "run", "--out", str(folder / "run"), *arguments],
        # A shell starts what runs in its background with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=600)
    return process.returncode, out


def report(folder: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    return made


def servers_of(folder: Path) -> list[psutil.Process]:
    """Processes that were started for a run in `folder`, wherever they are by now."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.cwd().startswith(str(folder / "run" / "servers"))
        except psutil.Error:
            continue
        if mine and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def gone(folder: Path, seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while servers_of(folder) and time.monotonic() < end:
        time.sleep(0.5)
    return not servers_of(folder)


def status(made: dict[str, Any], check: str) -> str:
    (found,) = (c["status"] for c in made["checks"] if c["id"] == check)
    return str(found)


def accuracy(made: dict[str, Any], role: str) -> float:
    (tally,) = (t for t in made["suites"][0]["tallies"] if t["role"] == role)
    return float(tally["right"] / tally["total"])


@dataclass(frozen=True)
class Resumed:
    """A run with every suite that was killed while it asked, and then resumed."""

    folder: Path
    servers_gone: bool
    answered_before: list[str]
    code: int
    out: str

    @property
    def answered(self) -> list[str]:
        return (self.folder / "run" / "records.jsonl").read_text().splitlines()


@pytest.fixture(scope="module")
def repaired(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    folder = tmp_path_factory.mktemp("repaired")
    process = assay(folder, *FEW, "--candidate", "sage_attn")
    records = folder / "run" / "records.jsonl"
    while not (records.exists() and len(records.read_text().splitlines()) > 20):
        assert process.poll() is None, finish(process)
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    servers_gone = gone(folder)
    before = records.read_text().splitlines()
    return Resumed(folder, servers_gone, before, *finish(assay(folder, *FEW, "--candidate", "sage_attn")))


@pytest.mark.slow
def test_the_repaired_backend_passes(repaired: Resumed) -> None:
    made = report(repaired.folder)
    assert (repaired.code, made["verdict"], made["exit_code"]) == (0, "pass", 0), repaired.out
    assert accuracy(made, "reference") >= 0.9
    calls = {c["phase"]: c for c in made["candidate"]["calls"]}
    assert calls["extend"]["kernel"] == "sageattention 1.0.6 (Triton interpreter)"
    assert calls["extend"]["calls_with_cached_prefix"] > 0
    assert (calls["decode"]["kernel"], calls["decode"]["delegated_by"]) == ("torch_native", "sage_attn")
    assert all(c["layers"] == 4 for c in calls.values())
    assert {c["status"] for c in made["checks"]} == {"ok", "not checked"}
    assert status(made, "layers-compared") == "ok"
    assert [(s["id"], s["verdict"]) for s in made["suites"]] == [
        (n, "pass") for n in ("accuracy", "greedy", "logits", "layers", "matrix")
    ]
    assert made["findings"] == []
    records = [json.loads(line) for line in repaired.answered]
    questions = [(r["role"], r["item"], r["repeat"]) for r in records if r["suite"] == "accuracy"]
    asked = max(one["total"] for one in made["suites"][0]["tallies"])  # up to the verdict
    assert len(questions) == len(set(questions)), "nothing is asked twice after the run was resumed"
    assert 2 * asked + 32 <= len(questions) <= 2 * 48 + 32, "and 32 by the reference again, for its floor"
    assert all(r["request_id"] for r in records)
    names = {row["bucket"] for s in made["suites"] for row in s["conditions"] if row["by"] == "batch-size"}
    assert "not observed" not in names
    for name in ("report.html", "report.md", "report.junit.xml", "manifest.json", "reference.log"):
        assert (repaired.folder / "run" / name).stat().st_size > 0
    assert gone(repaired.folder)


@pytest.mark.slow
def test_a_killed_run_leaves_no_server_and_is_resumed(repaired: Resumed) -> None:
    assert repaired.servers_gone
    before, after = repaired.answered_before, repaired.answered
    assert 20 < len(before) < len(after)
    assert after[: len(before) - 1] == before[:-1], "what was answered is not asked again"
    asked = [tuple(json.loads(line)[key] for key in ("suite", "role", "item", "repeat")) for line in after]
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("candidate", ["mine:as_shipped", pytest.param("sage_attn_as_shipped", marks=pytest.mark.slow)])
def test_the_seed_case_is_a_regression_and_says_where_and_why(candidate: str, tmp_path: Path, warm_servers: Any) -> None:
    (tmp_path / "mine.py").write_text(AS_SHIPPED)
    process = assay(tmp_path, *SEED_CASE, "--candidate", candidate, warm=warm_servers)
    while not servers_of(tmp_path):
        assert process.poll() is None, finish(process)
        time.sleep(0.2)
    code, out = finish(process)
    made = report(tmp_path)
    assert (code, made["verdict"]) == (1, "regression"), out
    assert accuracy(made, "candidate") <= 0.35
    assert status(made, "layers-compared") == "ok"
    cause, *others = made["findings"]
    assert cause["id"] == "mask-top-left", cause
    # Wrong answers are longer, too, in some of the orders in which servers batch them.
    assert {one["id"] for one in others} - {"answer-lengths"} == {"mask-top-left", "accuracy"}, "the op-level matrix names it, too"
    [finding] = [one for one in others if one["id"] == "accuracy"]
    # Asking stops as soon as the answers decide; fewer than six with an empty cache separate no condition.
    conditions = {one["id"]: one for suite in made["suites"] for one in suite["conditions"]}
    if conditions["cached-prefix-0"]["items"] >= 6:
        assert finding["where"] == "cached prefix >= 16", finding
        assert "causal mask" in finding["diagnosis"]
    assert conditions["cached-prefix-0"]["lost"] == 0
    assert conditions["cached-prefix-at-least-16"]["lost"] > 10
    assert candidate in finding["reproduce"]
    assert gone(tmp_path)


@pytest.mark.slow
def test_without_the_prefix_cache_the_seed_case_is_inconclusive(tmp_path: Path) -> None:
    flags = [*ANSWERS, "--candidate", "sage_attn_as_shipped", "--engine-arg=--disable-radix-cache", "--servers", "in-turn"]
    code, out = finish(assay(tmp_path, *flags))
    made = report(tmp_path)
    assert (code, made["verdict"]) == (3, "inconclusive"), out
    assert accuracy(made, "candidate") >= 0.9
    assert [c["id"] for c in made["checks"] if c["status"] == "missing"] == ["cached-prefix"]


@pytest.mark.slow
def test_ctrl_c_stops_the_servers_and_is_no_verdict(tmp_path: Path) -> None:
    process = assay(tmp_path, *ANSWERS)
    while not servers_of(tmp_path):
        assert process.poll() is None, finish(process)
        time.sleep(0.2)
    time.sleep(3)
    os.kill(process.pid, signal.SIGINT)
    code, out = finish(process)
    assert (code, report(tmp_path)["verdict"]) == (3, "error"), out
    assert "esume it: assay run " in out
    assert "interrupted" in report(tmp_path)["headline"]
    assert gone(tmp_path)


@pytest.mark.slow
def test_a_kernel_that_raises_is_an_error_and_no_fallback(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(KERNEL)
    code, out = finish(assay(tmp_path, *ANSWERS, "--candidate", "mine:wrong_after_a_while"))
    made = report(tmp_path)
    assert (code, made["verdict"]) == (3, "error"), out
    assert "out of shared memory, says the kernel" in made["headline"]
    assert "repair the kernel" in made["reasons"][0]
    assert (tmp_path / "run" / "records.jsonl").exists()
    assert gone(tmp_path)


@pytest.mark.slow
def test_pytest_suites_is_the_same_run(tmp_path: Path) -> None:
    flags = ["--questions=48", "--margin=0.1", "--suites=accuracy", "--candidate=sage_attn_as_shipped", f"--out={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "pytest", str(ROOT / "suites"), "-p", "no:cacheprovider", "-q", "-rA", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stdout
    assert "FAILED suites/test_run.py::test_the_suite_is_a_pass[accuracy]" in done.stdout
    assert "PASSED suites/test_run.py::test_the_candidates_own_kernel_ran" in done.stdout
    assert report(tmp_path)["verdict"] == "regression"
    assert gone(tmp_path)


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output of an ``assay`` command that is given there, and that may import what lies there."""
    done = subprocess.run(
        [sys.executable, "-m", "assay", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


VERSIONS = """
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.declaration import declares
from assay.harness.attention.oracle import oracle

@declares(phases=("extend",))
def old(call: AttentionCall):
    return oracle(call).to(call.q.dtype)

@declares(phases=("extend",))
def new(call: AttentionCall):
    return oracle(call.with_spec(scale=call.scale * 1.02)).to(call.q.dtype)
"""


@pytest.mark.slow
def test_two_versions_of_a_kernel_are_compared_and_neither_computes_the_others_phase(tmp_path: Path) -> None:
    (tmp_path / "versions.py").write_text(VERSIONS)
    command = ("run", "--suites", "layers,logits", "--reference", "versions:old", "--out", str(tmp_path / "run"))
    code, out = run(tmp_path, *command, "--candidate", "versions:new")
    made = report(tmp_path)
    assert (code, made["verdict"]) == (1, "regression"), out
    assert any(finding["where"].startswith("extend") for finding in made["findings"])
    assert {(call["phase"], call["kernel"]) for call in made["reference"]["calls"]} >= {("decode", "torch_native")}
    assert gone(tmp_path)


@pytest.mark.slow
def test_diff_names_the_bug_and_its_pack_can_be_replayed(tmp_path: Path) -> None:
    code, out = run(
        tmp_path, "run", "--suites", "layers,logits", "--candidate", "sage_attn_as_shipped", "--out", str(tmp_path / "run")
    )
    made = report(tmp_path)
    assert (code, made["verdict"]) == (1, "regression"), out
    assert status(made, "layers-compared") == "ok"
    cause, of_matrix = made["findings"]
    assert cause["where"] == "extend, with a cached prefix, all 4 layers, all 4 heads"
    assert (of_matrix["id"], of_matrix["where"]) == ("mask-top-left", "extend, with a cached prefix, all 4 heads")
    assert (cause["id"], "Correct without a cached prefix." in cause["diagnosis"]) == ("mask-top-left", True), cause
    [missed] = made["layers"]["not_observed"]
    assert missed["text"] == "decode: sage_attn_as_shipped does not compute it"
    assert cause["does"] in out
    assert (tmp_path / "run" / "report.html").stat().st_size > 0
    assert gone(tmp_path)
    pack = str(tmp_path / "run" / "servers" / "reference" / "pack")
    assert made["layers"]["pack"] == pack
    code, out = run(tmp_path, "replay", pack, "--candidate", "sage_attn")
    assert (code, "PASS   sage_attn" in out) == (0, True), out
    code, out = run(tmp_path, "replay", pack, "--candidate", "sage_attn_as_shipped")
    assert (code, cause["does"] in out) == (1, True), out


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "verdict"), [("--chunked-prefill-size=64", "pass"), ("--rope-scaling-is-no-flag", "error")])
def test_a_flag_of_the_candidate_alone_is_compared(flag: str, verdict: str, tmp_path: Path) -> None:
    """What SGLang derives from the flag is listed and forbids no pass; both servers get what takes either to its limits."""
    code, out = finish(assay(tmp_path, f"--candidate-arg={flag}"))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["verdict"], code) == (verdict, 0 if verdict == "pass" else 3), out
    if verdict == "pass":
        assert report["treatment"] == {"--chunked-prefill-size": ["", "64"]}
        assert report["environment"]["derived_arguments"]
        assert not report["environment"]["argument_differences"]
        assert report["envelope"]["served_reached"]["extend"]["new-tokens"] == 64
        assert (report["parting"]["place"], report["parting"]["layers"]) == ("behind layers", 4), "nothing parts inside"
    else:
        assert "does not resolve the command line of the candidate" in out


@pytest.mark.slow
def test_another_checkpoint_is_compared_and_the_layer_named_at_which_it_parts(tmp_path: Path) -> None:
    """A copy of the model with another RoPE base: the loss is shown, and that q and K differ in layer 0, but not V."""
    model = Path(shutil.copytree(TINY_MODEL, tmp_path / "turned"))
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 4
    (model / "config.json").write_text(json.dumps(config))
    code, out = finish(assay(tmp_path, f"--candidate-model={model}"))
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["verdict"], code) == ("regression", 1), out
    parting = report["parting"]
    assert (parting["layer"], parting["place"], parting["names"]) == (0, "input", ["q", "k"])
    assert status(report, "same-servers") == "missing", "nobody asked for another RoPE base"
