"""A right Triton kernel is right on a CPU as well: what the interpreter computes wrongly is not taken for the kernel's."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def _row(Q, K, V, O, scale, group, prefix, keys, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    i, h = tl.program_id(0), tl.program_id(1)
    d, n, m = tl.arange(0, D), tl.arange(0, N), tl.arange(0, 16)
    q = tl.load(Q + (i * H + h) * D + d[None, :] + m[:, None] * 0)
    at = (n[:, None] * G + h // group) * D + d[None, :]
    seen = n <= i + prefix
    k = tl.load(K + at, mask=n[:, None] < keys, other=0.0)
    v = tl.load(V + at, mask=n[:, None] < keys, other=0.0)
    s = tl.where(seen[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
    p = tl.exp(s - tl.max(s, 1)[:, None])
    o = tl.dot(p.to(v.dtype), v) / tl.sum(p, 1)[:, None]
    tl.store(O + (i * H + h) * D + d[None, :] + m[:, None] * 0, o.to(O.dtype.element_ty))


def forward(call):
    out = torch.empty_like(call.q)
    for b, (new, keys) in enumerate(zip(call.lens_q, call.lens_k)):
        q0, k0 = int(call.cu_seqlens_q[b]), int(call.cu_seqlens_k[b])
        q, k, v = call.q[q0 : q0 + new].contiguous(), call.k[k0 : k0 + keys].contiguous(), call.v[k0 : k0 + keys].contiguous()
        o, (_, heads, dim) = torch.empty_like(q), q.shape
        size = max(16, triton.next_power_of_2(keys))
        _row[(new, heads)](q, k, v, o, call.scale, heads // k.shape[1], keys - new, keys, heads, k.shape[1], dim, size)
        out[q0 : q0 + new] = o
    return out
"""


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def assay_check(python: Run, tmp_path: Path) -> Run:
    """A function that checks this kernel, in a process of its own."""
    (tmp_path / "mine.py").write_text(KERNEL)
    command = ("-m", "assay", "check", "mine:forward", "--read-out", "0", "--phase", "decode", "--all", "--case")
    return lambda *flags: python(*command, *flags, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.interpreter
def test_bfloat16_is_skipped_by_name_where_the_interpreter_is_wrong(assay_check: Run) -> None:
    done = assay_check("decode-1+63-", "--head-dim", "64")
    assert done.returncode == 0, done.stdout + done.stderr
    words = " ".join(done.stdout.split())
    assert "Not covered: bfloat16" in words
    assert "Triton's interpreter computes bfloat16 wrongly in this version; a GPU covers it" in words
    covered = words.partition("Covered: ")[2].partition("Not covered")[0]
    assert "float16" in covered
    assert "bfloat16" not in covered


@pytest.mark.interpreter
@pytest.mark.slow
def test_bfloat16_that_was_asked_for_is_missing(assay_check: Run) -> None:
    done = assay_check("decode-1+63-", "--dtype", "bfloat16", "--dtype", "float16")
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Missing for a pass: " in done.stdout
    assert "Not covered: bfloat16" in done.stdout
