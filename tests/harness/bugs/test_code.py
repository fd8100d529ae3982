"""Every piece of code on a page is run: the wrong one is the hypothesis, the right one is attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import oracle, sequences
from assay.harness.bugs.bug import Form
from assay.harness.bugs.family import BY_ID, FAMILY
from assay.harness.explain.examples import example

MOST_LINES = 10


def run(source: str, form: Form, call: AttentionCall) -> Tensor:
    """The output of a piece of code on a call, [total_q, num_q_heads, head_dim_v]."""
    space: dict[str, object] = {"torch": torch}
    exec(source, space)
    attend = space["attend"]
    assert callable(attend)
    k, v = (t.transpose(0, 1) for t in (call.k, call.v))
    if form != "heads":
        k, v = (t.repeat_interleave(call.q.shape[1] // call.k.shape[1], 0) for t in (k, v))
    outs, starts = [], call.cu_seqlens_k.tolist()
    for b, (rows_q, rows_k) in enumerate(sequences(call)):
        q = call.q[rows_q].transpose(0, 1)
        batch = (k, v, starts, b) if form == "batch" else (k[:, rows_k], v[:, rows_k])
        outs.append(attend(q, *batch, call.scale))
    return torch.cat(outs, 1).transpose(0, 1)


def distance(out: Tensor, expected: Tensor) -> float:
    """Relative L1 where `expected` is finite; infinite if the other elements are."""
    finite = expected.isfinite()
    if not torch.equal(out.isfinite(), finite):
        return float("inf")
    return float((out - expected)[finite].abs().sum() / expected[finite].abs().sum())


def test_every_hypothesis_has_code_of_at_most_ten_lines() -> None:
    for bug in FAMILY:
        code = bug.code
        if code is None:
            # The functions are given no positions, and nothing that is stored.
            assert bug.kind in ("sinks", "temperature", "rows-and-strides", "padding", "stored-kv", "latent")
            continue
        for source in (code.wrong, code.right):
            assert len(list(filter(None, source.splitlines()))) <= MOST_LINES
            assert max(map(len, source.splitlines())) <= 110
            assert "@@" not in source


@pytest.mark.parametrize("id_", [id_ for id_, bug in BY_ID.items() if bug.code is not None])
def test_the_wrong_code_is_the_hypothesis_and_the_right_code_is_attention(id_: str) -> None:
    code, call = BY_ID[id_].code, example(BY_ID[id_])
    assert code is not None
    expected, right = BY_ID[id_].compute(call), oracle(call)
    assert expected is not None
    assert distance(run(code.wrong, code.form, call), expected) < 1e-12
    fixed = run(code.right, code.form, call)
    # Right code that quantises has the noise of INT8, right code that accumulates in float32 that of float32.
    quantises = BY_ID[id_].kind == "quantisation-scale" or id_ == "k-smoothing-lost"
    assert distance(fixed, right) < (0.05 if quantises else 1e-6)
    # The bug is no noise: the right code is nearer to attention than the wrong one.
    assert distance(expected, right) > 2 * distance(fixed, right)


def test_changed_code_would_be_seen() -> None:
    code, call = BY_ID["mask-top-left"].code, example(BY_ID["mask-top-left"])
    assert code is not None
    changed = code.wrong.replace(".tril()", ".tril(1)")
    expected = BY_ID["mask-top-left"].compute(call)
    assert expected is not None
    assert distance(run(changed, code.form, call), expected) > 0.01
