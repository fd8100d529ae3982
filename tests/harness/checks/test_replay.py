from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import fault
from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.backend import Backend
from assay.harness.checks.observed import Reader
from assay.harness.checks.replay import choose, replay, replay_recorded
from assay.harness.engines.inside.pack_writer import PackWriter, stratum
from assay.harness.errors import EvidenceError, ExitCode
from assay.harness.evidence.kernel_result import KernelResult
from assay.harness.evidence.pack import Source, read_manifest, read_pack
from assay.harness.localize.kernel_runs import CallResult, measure

pytestmark = pytest.mark.usefixtures("jobs_here")  # test_observed.py replays in a process


def sdpa(call: AttentionCall) -> torch.Tensor:
    """A correct kernel."""
    return oracle(call).to(call.q.dtype)


Lens = list[tuple[int, int]]
LENS: list[Lens] = [[(3, 0)], [(9, 0)], [(30, 0)], [(4, 20)], [(8, 40), (3, 0)]]
KERNEL = fault("mask-top-left", sdpa, layers=[1], heads=[0])
"""Wrong in layer 1 and head 0, where a prefix is cached."""


def pack(folder: Path, kernel: Kernel, layers: int = 2, lens_of: Sequence[Lens] = LENS) -> Path:
    """A pack that was recorded in the shadow of `kernel`."""
    source = Source(engine="e", model="m", model_hash="h", reference="r", candidate="c")
    writer = PackWriter(folder, source, 10**8)
    for number, lens in enumerate(lens_of):
        for layer in range(layers):
            call = call_of(lens, (2, 1), 64, torch.float32, "cpu", seed=number).with_spec(layer=layer)
            out, truth = kernel(call), sdpa(call)
            worst = float((out - truth).abs().sum() / truth.abs().sum())
            assert writer.wants(stratum(layer, call.phase, call.lens_q, call.prefixes))
            writer.add(call, truth, candidate=out)
            if writer.wants_worst(layer, call.phase, worst):
                writer.add(call, truth, worst, candidate=out)
    writer.flush()
    return folder


def test_every_layer_is_there_with_and_without_a_prefix_and_the_worst_call(tmp_path: Path) -> None:
    chosen = choose(read_pack(pack(tmp_path / "pack", KERNEL)))
    kinds = {(one.call.layer, any(one.call.prefixes)) for one in chosen}
    assert kinds == {(0, False), (0, True), (1, False), (1, True)}
    smallest = {one.call.lens_k[0] for one in chosen if not any(one.call.prefixes)}
    assert smallest == {3, 9, 30}, "the smallest, the middle one and the largest"
    assert [one.call.layer for one in chosen if one.entry.chosen == "worst"] == [1]
    assert len(chosen) == len({id(one) for one in chosen})


@pytest.mark.parametrize(("kernel", "verdict", "code"), [(KERNEL, "regression", 1), (sdpa, "pass", 0)])
def test_the_document_of_a_replay_says_its_verdict(tmp_path: Path, kernel: Kernel, verdict: str, code: int) -> None:
    result = replay_recorded(pack(tmp_path / "pack", kernel), Backend.parse("triton"), "again")
    document = json.loads(result.model_dump_json())
    assert (document["verdict"], document["exit_code"]) == (verdict, code), "a cell of a sweep has its verdict from there"
    assert KernelResult.model_validate(document) == result
    assert len(document["measured"]) == result.calls
    assert any(call["wrong"] and call["error"] > call["bound"] for call in document["measured"]) == bool(code)
    assert KernelResult.model_validate(document | {"verdict": "pass", "exit_code": 0}).verdict == verdict


def test_what_is_wrong_in_the_server_alone_keeps_its_name(tmp_path: Path) -> None:
    """The kernel is right here, on calls of the first layer, and its recorded outputs of another one are still named."""
    right = "assay.harness.attention.sdpa:torch_sdpa"
    result = replay_recorded(pack(tmp_path / "pack", KERNEL, lens_of=[[(3, 0)], [(4, 20)]]), Backend.parse(right), "again")
    assert [finding.id for finding in result.findings if finding.severity == "serious"] == ["mask-top-left"]


def test_what_the_shadow_recorded_is_named_without_running_anything(tmp_path: Path) -> None:
    result = replay_recorded(pack(tmp_path / "pack", KERNEL), Backend.parse("triton"), "again")
    (finding,) = [f for f in result.findings if f.severity == "serious"]
    assert finding.id == "mask-top-left"
    assert "layer 1 of 2, head 0 of 2" in finding.where
    assert finding.reproduce == "again"
    assert result.worst > 1
    assert result.outside == ((1, "extend"),)
    assert "runs only in a server" in result.not_tested[0]


SOURCE = """
from assay.harness.attention.oracle import oracle

def forward(call):
    out = oracle(call).to(call.q.dtype)
    for start, end, prefix in zip(call.cu_seqlens_q, call.cu_seqlens_q[1:], call.prefixes):
        if prefix >= 17:
            out[start:end] = 0
    return out
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("served", [False, True])
def test_a_condition_is_tried_from_recorded_shapes_where_the_kernel_can_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    """The pack has prefixes of 0, 20 and 40 alone; replayed, and as the cause of a run."""
    name = f"recorded_{served}".lower()
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    kernel = f"{name}:forward"
    recorded = pack(tmp_path / "pack", __import__(name).forward)
    if served:
        result = replay_recorded(recorded, Backend.parse(kernel), "again", reader=Reader(5))
    else:
        result = replay(recorded, kernel, read_out=5)
    assert result.tried is not None
    assert [(prop.feature, prop.kind, prop.values) for prop in result.tried.rule] == [("prefix", ">=", (17,))]
    first = next(finding for finding in result.findings if finding.severity == "serious")
    assert first.id == "output-not-written"
    assert "cached prefix >= 17" in first.does


def test_recorded_shapes_that_cannot_be_drawn_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "undrawn.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = Source(engine="e", model="m", model_hash="h", reference="r", candidate="c")
    writer = PackWriter(tmp_path / "pack", source, 10**8)
    call = call_of([(4, 20)], (2, 1), 64, torch.float32, "cpu").with_spec(scale=0.3)
    writer.add(call, sdpa(call), candidate=sdpa(call))
    writer.flush()
    result = replay(tmp_path / "pack", "undrawn:forward", read_out=5)
    assert result.tried is None
    [why] = [line for line in result.not_tested if "no experiments on the condition" in line]
    assert why.endswith("with another scale, cannot be drawn again")


def test_a_call_that_cannot_be_read_hides_no_other_and_is_missing(tmp_path: Path) -> None:
    recorded = pack(tmp_path / "pack", sdpa)
    names = [entry.file for entry in read_manifest(recorded).calls]
    right = "assay.harness.attention.sdpa:torch_sdpa"
    missing = replay(recorded, right).missing
    (recorded / names[0]).write_bytes(b"")
    result = replay(recorded, right)
    assert (result.exit_code, result.recorded) == (ExitCode.NO_VERDICT, len(names) - 1)
    [why] = {*result.missing} - {*missing}
    assert why.startswith(f"1 recorded call could not be read: {recorded / names[0]} is damaged")
    for name in names:
        (recorded / name).write_bytes(b"")
    with pytest.raises(EvidenceError, match="is damaged"):
        replay(recorded, right)


@pytest.mark.parametrize(("prefix", "calls", "code"), [(15, 0, ExitCode.NO_VERDICT), (16, 2, ExitCode.PASS)])
def test_a_verdict_needs_a_cached_prefix_of_16_tokens(tmp_path: Path, prefix: int, calls: int, code: ExitCode) -> None:
    recorded = pack(tmp_path / "pack", sdpa, lens_of=[[(3, 0)], [(9, prefix)]])
    result = replay_recorded(recorded, Backend.parse("triton"), "again")
    assert (result.calls, result.with_prefix, result.exit_code) == (4, calls, code)


def test_recorded_calls_of_the_engines_own_backends_have_the_noise_of_their_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the shadow: SGLang's flashinfer merges what it computed on cached and on new keys in prefill."""
    asked = set()

    def noting(call: AttentionCall, out: Tensor, noise: str) -> CallResult:
        asked.add((call.phase, noise))
        return measure(call, out, noise)

    monkeypatch.setattr("assay.harness.checks.replay.measure", noting)
    recorded = pack(tmp_path / "pack", sdpa)
    phases = {record.call.phase for record in read_pack(recorded)}
    replay_recorded(recorded, Backend.parse("flashinfer"), "again")
    assert asked == {(phase, "merged_prefix" if phase == "extend" else "") for phase in phases}


def test_a_name_from_the_recorded_outputs_alone_runs_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the kernel was run")

    exact = Backend.parse("assay.harness.attention.sdpa:torch_sdpa")
    monkeypatch.setattr(sys.modules["assay.harness.checks.replay"], "run_calls", never)
    (finding,) = replay_recorded(pack(tmp_path / "pack", KERNEL), exact, "again", not_run="it hung", reader=Reader(0.0)).findings
    assert (finding.id, finding.reproduce) == ("mask-top-left", "again")
    assert not replay_recorded(pack(tmp_path / "right", sdpa), exact, "again", not_run="it hung").findings


def test_a_correct_backend_has_no_finding(tmp_path: Path) -> None:
    result = replay_recorded(pack(tmp_path / "pack", sdpa), Backend.parse("triton"), "again")
    assert (result.findings, result.worst < 1) == ((), True)


def test_a_kernel_is_run_again_on_a_call_with_and_one_without_a_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = pack(tmp_path / "pack", sdpa)
    (tmp_path / "moody.py").write_text(
        "import torch\nfrom tests_kernel import sdpa\n\n"
        "def forward(call):\n    call.k.add_(0)\n    return sdpa(call) * (1 + torch.rand(()))\n"
    )
    (tmp_path / "tests_kernel.py").write_text(
        "from assay.harness.attention.oracle import oracle\n\ndef sdpa(call):\n    return oracle(call).to(call.q.dtype)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = replay_recorded(recorded, Backend.parse("moody:forward"), "again")
    assert "nondeterminism" in {f.id for f in result.findings}
    assert result.not_tested == ("only 2 calls were tested for nondeterminism, state and overwritten inputs",)


def test_a_kernel_that_runs_only_in_a_server_is_judged_by_its_recorded_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = pack(tmp_path / "pack", KERNEL)
    (tmp_path / "ranked.py").write_text("def forward(call):\n    raise ValueError('no process group')\n")
    monkeypatch.syspath_prepend(tmp_path)
    result = replay_recorded(recorded, Backend.parse("ranked:forward"), "again")
    assert [f.id for f in result.findings if f.severity == "serious"] == ["mask-top-left"]
    assert result.not_run == "outside a server, the kernel raised ValueError: no process group (ranked.py, line 2, in forward)"
    (not_tested,) = result.not_tested
    assert not_tested.endswith(result.not_run)


@pytest.mark.parametrize("when", ["True", "any(call.prefixes)"])
def test_a_kernel_that_raises_is_a_finding_and_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    recorded = pack(tmp_path / "pack", KERNEL)
    name = f"raising_{len(when)}"
    body = f"    if {when}:\n        raise ValueError('no such tile')\n    return oracle(call).to(call.q.dtype)\n"
    (tmp_path / f"{name}.py").write_text(f"from assay import oracle\n\ndef forward(call):\n{body}")
    monkeypatch.syspath_prepend(tmp_path)
    result = replay(recorded, f"{name}:forward")
    assert result.exit_code == ExitCode.REGRESSION
    [finding] = result.findings
    assert (finding.id, finding.severity) == ("contract-broken", "serious")
    assert finding.diagnosis == f"the kernel raised ValueError: no such tile ({name}.py, line 5, in forward)"
    assert finding.where.endswith("recorded calls")


@pytest.mark.slow
def test_a_replay_ends_with_the_smallest_failing_call_and_a_test_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "top_left.py").write_text(
        "from assay.harness.attention.bugs.faults import fault\n\nforward = fault('mask-top-left', layers=[1], heads=[0])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = replay(pack(tmp_path / "pack", KERNEL), "top_left:forward")
    assert result.findings[0].id == "mask-top-left"
    assert result.findings[0].reproduce == f"assay replay {tmp_path / 'pack'} --candidate top_left:forward"
    assert result.smallest.startswith("layer 1 extend, new+prefix ")
    assert "def test_" in result.test
    compile(result.test, "test_it.py", "exec")
    assert not replay(tmp_path / "pack", "assay.harness.attention.sdpa:torch_sdpa").test


def test_what_cannot_be_asked_has_a_name_and_a_picture_of_a_recorded_call(tmp_path: Path) -> None:
    recorded = pack(tmp_path / "pack", KERNEL)
    (finding, *_) = replay_recorded(recorded, Backend.parse("triton"), "again").findings
    assert (finding.id, finding.operator) == ("mask-top-left", "")
    assert finding.picture is not None
    assert "wrong" in finding.picture.rows
    right_here = Backend.parse("assay.harness.attention.sdpa:torch_sdpa")
    (finding, *_) = replay_recorded(recorded, right_here, "again", reader=Reader()).findings
    assert any("it is wrong in its server" in line for line in finding.evidence)
    assert finding.picture is not None


def test_a_pack_without_a_claimed_phase_gives_no_pass_and_its_envelope_is_stated(tmp_path: Path) -> None:
    recorded = pack(tmp_path / "pack", sdpa, layers=2, lens_of=[[(3, 0)], [(9, 16)]])
    result = replay(recorded, "assay.harness.attention.sdpa:torch_sdpa", read_out=0)
    assert result.exit_code == ExitCode.NO_VERDICT
    assert result.envelope == {"extend": "layers 0-1; 3, 9 new tokens, 0, 16 cached; 4 calls", "decode": ""}
    assert result.missing == ("the pack has no decode call, which the kernel claims",)
