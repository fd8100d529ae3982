"""Sessions of a shadow on synthetic calls: how close honest kernels come to their bounds, and which gains are seen.

``python benchmarks/shadow_bounds.py --sessions 20`` prints, for each kernel, the sessions in which any test flagged it (at most one
in a thousand is expected), and the largest own error and gain as multiples of their bounds.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import torch
from honest_kernels import KERNELS
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, tensor_of
from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.attention.kernels import load
from assay.harness.attention.sample_calls import call_of
from assay.harness.attention.sdpa import torch_sdpa
from assay.harness.engines.inside.truth_sums import TruthSums, sampled_rows
from assay.harness.evidence.error_table import condition_numbers, joined
from assay.harness.evidence.shadow_errors import ShadowErrors, ShadowHeader
from assay.harness.judge.truth_bounds import AgainstNoise, compare_with_noise

LAYERS, HEADS, HEAD_DIM = 4, (4, 2), 64
PASSES = ([(60, 0)], [(90, 0)], [(27, 54), (31, 54), (40, 54)], [(29, 54)] * 4, [(200, 0), (3, 1)])


def session(kernel: Kernel, noise: str, dtype: torch.dtype, seed: int, repeats: int) -> AgainstNoise:
    """One session: every pass in every layer, some times, with the reference computed by PyTorch."""
    parts = []
    for layer in range(LAYERS):
        sums = TruthSums(HEADS[0], noise, "")
        for number, lens in enumerate(PASSES * repeats):
            at = 100_000 * seed + 10_000 * layer + number
            call = call_of(lens, HEADS, HEAD_DIM, dtype, "cpu", seed=at).with_spec(layer=layer)
            new, prefix = [n for n, _ in lens], [p for _, p in lens]
            rows = sampled_rows(new, prefix, np.random.default_rng(at))
            conditions = condition_numbers("extend", new, prefix)
            sums.add(call, (tensor_of(kernel(call)), torch_sdpa(call)), rows, conditions, at)
        parts.append(sums.cells(layer, 0))
    header = ShadowHeader(
        reference="torch_sdpa", candidate="c", phases=("extend",), candidate_noise=noise, dtype=sums.dtype,
        accumulation=sums.accumulation,
    )  # fmt: skip
    return compare_with_noise(ShadowErrors(joined(parts), (header,)))


def scaled(kernel: Kernel, factor: float) -> Kernel:
    """The kernel with its output scaled in float32, before it is rounded to the dtype of the call."""

    def wrong(call: AttentionCall) -> Tensor:
        wide = replace(call, q=call.q.float(), k=call.k.float(), v=call.v.float())
        return (tensor_of(kernel(wide)).double() * factor).to(call.q.dtype)

    return wrong


def main() -> None:
    """Run the sessions and print one line per kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument(
        "--repeats", type=int, default=1, help="times that a session repeats its passes, with other data"
    )
    parser.add_argument("--families", nargs="*", default=list(KERNELS))
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--gain", type=float, default=1.001)
    parser.add_argument("--sage", action="store_true", help="also SageAttention, in Triton's interpreter on a CPU")
    given = parser.parse_args()
    cases: list[tuple[str, Kernel, str, torch.dtype]] = []
    for dtype in (getattr(torch, name) for name in given.dtypes):
        for noise in given.families:
            for number, kernel in enumerate(KERNELS[noise]):
                cases.append((f"{noise or 'exact'} {number}", kernel, noise, dtype))
            cases.append((f"{noise or 'exact'} x {given.gain}", scaled(KERNELS[noise][0], given.gain), noise, dtype))
        cases.append(("exact as int8_qk", torch_sdpa, "int8_qk", dtype))
    if given.sage:
        interpret_without_gpu()
        sage = load("sage_attn")
        cases.append(("sage_attn", sage, "int8_qk", torch.float32))
        cases.append((f"sage_attn x {given.gain}", scaled(sage, given.gain), "int8_qk", torch.float32))
    for name, kernel, noise, dtype in cases:
        found = [session(kernel, noise, dtype, seed, given.repeats) for seed in range(given.sessions)]
        flagged = sum(bool(one.cells.flagged.any() or one.gains.flagged.any()) for one in found)
        cells, gains, reference = (
            [float(getattr(one, what).excess.max()) for one in found] for what in ("cells", "gains", "reference")
        )
        print(
            f"{name:22} {str(dtype)[6:]:8} flagged {flagged} of {given.sessions}; cell {max(cells):.2f}, gain {min(gains):.2f} to "
            f"{max(gains):.2f}, reference {max(reference):.2f} of the bound; too quiet {sum(bool(one.quiet) for one in found)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
