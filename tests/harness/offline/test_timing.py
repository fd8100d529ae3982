from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.attention.kernels import declares
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.attention.sdpa import torch_sdpa
from assay.harness.bugs.faults import fault, rounded_oracle
from assay.harness.errors import UsageError
from assay.harness.evidence.pack import CallMetadata, Source
from assay.harness.offline.timing import time_kernels
from assay.harness.offline.timing_result import KernelTiming
from assay.harness.server.pack_writer import PackWriter

LENS = [[(24, 0)], [(12, 40), (3, 9)], [(1, 30), (1, 12)]]


NAMES = ("mine", "theirs")


COMMAND = ("bench", "kernel")
"""What `call` begins with."""


def calls() -> list[AttentionCall]:
    made = [call_of(lens, (4, 2), 16, torch.float32, "cpu") for lens in LENS]
    made[2] = made[2].with_spec(phase="decode")
    return [call.with_spec(layer=layer) for call in made for layer in range(2)]


def timed(candidate: object, given: list[AttentionCall] | None = None, bound: float = 1.1) -> KernelTiming:
    assert callable(candidate)
    return time_kernels(candidate, torch_sdpa, given or calls(), bound, 0.05, 0.2, "again", NAMES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_kernel_is_correct(dtype: torch.dtype) -> None:
    for lens in [*LENS, [(5, 0), (1, 0), (7, 3)]]:
        call = call_of(lens, (4, 2), 16, dtype, "cpu")
        close = 1e-5 if dtype == torch.float32 else 2e-2
        assert torch.allclose(torch_sdpa(call).double(), oracle(call), atol=close, rtol=0)
        assert torch_sdpa(call).dtype == dtype


def test_shapes_are_timed_once_and_checked_in_every_layer() -> None:
    result = timed(rounded_oracle)
    assert [(shape.phase, shape.layers) for shape in result.shapes] == [
        ("extend", (0, 1)), ("extend", (0, 1)), ("decode", (0, 1))
    ]  # fmt: skip
    assert all(
        shape.right and shape.repeats >= 6 and shape.reference_share is shape.candidate_share is None for shape in result.shapes
    )
    assert result.findings == ()


def test_a_kernel_that_waits_is_a_regression_though_it_is_correct() -> None:
    def slow(call: AttentionCall) -> Tensor:
        time.sleep(0.005)
        return torch_sdpa(call)

    result = timed(slow)
    assert result.verdict == "regression"
    assert all(shape.right for shape in result.shapes)
    assert "pass" not in {shape.verdict for shape in result.shapes}, "on a busy machine one may be undecided"
    assert result.findings == ()


def test_the_speed_of_a_wrong_kernel_is_a_finding_with_the_name_of_its_bug() -> None:
    wrong = fault("mask-top-left")
    slow = time_kernels(wrong, rounded_oracle_slowly, calls(), 1.1, 0.05, 0.2, "again", NAMES)
    assert slow.verdict == "regression", "though it is faster than the reference"
    assert [shape.right for shape in slow.shapes] == [True, False, False]
    (finding,) = slow.findings
    assert finding.id == "wrong-kernel-timed"
    assert "not a speed-up" in finding.diagnosis
    assert any("top-left" in line for line in finding.evidence)


def rounded_oracle_slowly(call: AttentionCall) -> Tensor:
    time.sleep(0.02)
    return rounded_oracle(call)


def test_an_error_in_one_layer_only_is_seen() -> None:
    assert [shape.right for shape in timed(fault("mask-top-left", layers=[1])).shapes] == [True, False, False]


def test_phases_that_the_kernel_does_not_declare_are_not_timed() -> None:
    @declares(phases=("extend",))
    def half(call: AttentionCall) -> Tensor:
        return torch_sdpa(call)

    assert {shape.phase for shape in timed(half).shapes} == {"extend"}
    with pytest.raises(UsageError, match="no extend call"):
        timed(half, [call for call in calls() if call.phase == "decode"])


def test_what_is_refused_is_reported_and_is_no_pass() -> None:
    def picky(call: AttentionCall) -> Tensor:
        if any(call.prefixes):
            raise KernelRefused("no prefix, please")
        return torch_sdpa(call)

    result = timed(picky, bound=5.0)
    assert len(result.shapes) == 1
    assert len(result.refused) == 2
    assert result.verdict == "inconclusive"


def test_inputs_that_a_kernel_writes_to_do_not_spoil_the_others() -> None:
    def writer(call: AttentionCall) -> Tensor:
        out = torch_sdpa(call)
        call.k.zero_()
        return out

    assert all(shape.right for shape in timed(writer).shapes)


def test_what_a_kernel_prepares_once_for_all_layers_is_not_timed() -> None:
    class Pooled:
        laid_out = 0
        open = False

        def __call__(self, call: AttentionCall) -> Tensor:
            with self.prepared(call) as run:
                return run()

        @contextmanager
        def prepared(self, call: AttentionCall) -> Iterator[Callable[[], Tensor]]:
            self.laid_out += 1
            time.sleep(0.05)
            out = rounded_oracle(call)
            self.open = True
            yield lambda: out if self.open else out[:0]
            self.open = False

    pooled = Pooled()
    result = timed(pooled)
    assert max(shape.candidate_s for shape in result.shapes) < 0.01
    assert pooled.laid_out == len(result.shapes) + len(calls())  # once to be timed, and once for each own error
    assert not pooled.open


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    writer = PackWriter(tmp_path / "pack", Source(engine="e", model="m", model_hash="", reference="r"), 2**22)
    for number, call in enumerate(calls()):
        phase = "decode" if call.phase == "decode" else "extend"
        names = tuple(f"r{number}-{i}" for i in range(len(call.lens_q)))
        seen = CallMetadata(call.layer, phase, tuple(call.lens_q), tuple(call.prefixes), names)
        writer.add(seen, call, rounded_oracle(call))
    writer.flush()
    return tmp_path / "pack"


def test_the_command_times_a_pack(call: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, pack: Path) -> None:
    out = tmp_path / "timing.json"
    flags = ["--candidate", "assay.harness.attention.sdpa:torch_sdpa", "--bound", "20", "--seconds", "1", "--out", str(out)]
    assert call(str(pack), *flags) == 0
    assert "PASS" in capsys.readouterr().out
    assert '"schema":"assay.kernel-timing/2"' in out.read_text().replace(" ", "").replace("\n", "")


def test_a_kernel_that_does_not_exist_is_a_usage_error(
    call: Callable[..., int], capsys: pytest.CaptureFixture[str], pack: Path
) -> None:
    assert call(str(pack), "--candidate", "no.such:kernel") == 2
    assert "no.such:kernel" in capsys.readouterr().err
