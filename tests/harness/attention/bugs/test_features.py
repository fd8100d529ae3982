"""Each bug of a feature, seeded as a fault where its feature is asked for: it is caught and named, and shows nowhere else."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from assay.harness.attention.bugs import merges
from assay.harness.attention.bugs.bug import Bug
from assay.harness.attention.bugs.family import public_reports
from assay.harness.attention.bugs.faults import fault, rounded_oracle
from assay.harness.attention.bugs.features import BUGS
from assay.harness.attention.call import FEATURES, AttentionCall, Kernel, Mask, StoredKV
from assay.harness.attention.declaration import declares
from assay.harness.attention.sample_calls import call_of
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.guard import run_and_repeat

LENS = [[(24, 0), (5, 70)], [(9, 64)], [(3, 20), (40, 0)], [(1, 90), (1, 30)]]
HEADS = (4, 2)


def declaring(kernel: Kernel) -> Kernel:
    return declares(features=tuple(feature for feature in FEATURES if feature != "lse"))(lambda call: kernel(call))


def stored(call: AttentionCall, scales: tuple[torch.Tensor, torch.Tensor]) -> AttentionCall:
    k, v = (
        (tensor / scale).clamp(-448, 448).to(torch.float8_e4m3fn) for tensor, scale in zip((call.k, call.v), scales, strict=True)
    )
    return replace(call, k=k.float() * scales[0], v=v.float() * scales[1], stored=StoredKV(k, v, *scales))


def asking(kind: str, call: AttentionCall) -> list[AttentionCall]:
    """Calls that ask for what bugs of a kind need."""
    tokens, heads = len(call.k), call.k.shape[1]
    match kind:
        case "window":
            return [call.with_spec(mask=Mask(window=n)) for n in (7, 16)]
        case "softcap":
            return [call.with_spec(softcap=n) for n in (0.5, 2.0)]
        case "sinks":
            return [call.with_spec(sinks=(0.5, 2.0, -1.0, 3.0))]
        case "temperature":
            return [call.with_spec(temperature=8)]
        case "padding":
            return [replace(call.with_spec(padded_rows=2), q=torch.cat([call.q, call.q[:2]]))]
        case "stored-kv":
            of_head = torch.tensor([0.5, 0.125]).view(1, heads, 1)
            of_token = torch.arange(1, tokens * heads + 1).view(tokens, heads, 1) / 64
            of_block = of_token[:: heads * 8].repeat_interleave(16, 0)[:tokens] if tokens > 16 else of_token
            each = [(of_head, 4 * of_head), (of_token, of_token.flip(0)), (of_block, of_block / 4)]
            return [stored(call, scales) for scales in each]
        case _:
            wide = call_of(list(zip(call.lens_q, call.prefixes, strict=True)), (4, 1), 576, torch.float32, "cpu")
            return [replace(wide, v=wide.k[..., :512]).with_spec(phase=call.phase, layout="v in k", scale=192**-0.5)]


def calls(kind: str) -> list[AttentionCall]:
    plain = [call_of(lens, HEADS, 32, torch.float32, "cpu", seed=n) for n, lens in enumerate(LENS)]
    phases = [call.with_spec(phase="decode" if max(call.lens_q) == 1 else "extend") for call in plain]
    return [asked for call in phases for asked in asking(kind, call)]


@pytest.mark.few(6)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.id)
def test_a_bug_of_a_feature_is_caught_and_named(bug: Bug) -> None:
    findings = diagnose(run_and_repeat(declaring(fault(bug.id)), calls(bug.kind)))
    assert [finding.id for finding in findings] == [bug.id]
    assert findings[0].severity == "serious"


@pytest.mark.parametrize("kind", sorted({bug.kind for bug in BUGS}))
def test_a_right_kernel_has_none_of_them(kind: str) -> None:
    assert diagnose(run_and_repeat(declaring(rounded_oracle), calls(kind))) == []


def in_parts(head_dim_v: int) -> list[AttentionCall]:
    """Calls whose keys are attended to in parts, alone and in batches of equal sequences."""
    lens = [[(3, 70), (3, 66)], [(1, 90), (1, 130), (1, 70)], [(5, 200)], [(20, 80), (20, 3)], [(1, 300)]]
    made = []
    for n, one in enumerate(lens):
        wide = call_of(one, HEADS, 192 if head_dim_v == 128 else 64, torch.float32, "cpu", seed=n)
        phase: Literal["extend", "decode"] = "decode" if max(wide.lens_q) == 1 else "extend"
        made.append(replace(wide, v=wide.v[..., :head_dim_v].contiguous()).with_spec(phase=phase))
    return made


@pytest.mark.parametrize("bug", merges.BUGS, ids=lambda bug: bug.id)
def test_a_bug_of_rows_and_strides_is_caught_and_named(bug: Bug) -> None:
    some = in_parts(128 if bug.id == "values-at-key-stride" else 64)
    findings = diagnose(run_and_repeat(declaring(fault(bug.id)), some))
    assert [finding.id for finding in findings] == [bug.id]
    assert diagnose(run_and_repeat(declaring(rounded_oracle), some)) == []


def test_values_that_were_stored_at_the_scale_1_and_clipped_are_named() -> None:
    """vLLM's pull request 54705: a cache in FP8 at unity scale."""
    clipped = [stored(replace(call, v=300 * call.v), (torch.ones(1, 1, 1), torch.full((1, 1, 1), 4.0))) for call in in_parts(64)]
    [finding] = diagnose(run_and_repeat(declaring(fault("values-saturate-fp8-e4m3")), clipped))
    assert finding.id == "values-saturate-fp8-e4m3"
    assert "https://github.com/vllm-project/vllm/pull/54705" in public_reports(finding.id)


def test_none_of_them_shows_on_plain_calls() -> None:
    for lens in LENS:
        call = call_of(lens, HEADS, 32, torch.float32, "cpu")
        assert [bug.id for bug in BUGS if bug.compute(call) is not None] == []


def test_a_window_that_is_ignored_in_one_phase_is_named_there() -> None:
    """SGLang's issue 31501: windows were missing from what decode had planned."""
    wrong = fault("window-ignored")

    def kernel(call: AttentionCall) -> torch.Tensor:
        out = wrong(call) if call.phase == "decode" else rounded_oracle(call)
        assert isinstance(out, torch.Tensor)
        return out

    [finding] = diagnose(run_and_repeat(declaring(kernel), calls("window")))
    assert (finding.id, finding.where.partition(",")[0]) == ("window-ignored", "decode")
