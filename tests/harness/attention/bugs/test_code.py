"""Every piece of code that is shown is run: the wrong one is the known bug, the right one is attention."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import LEAK, Bug, Form
from assay.harness.attention.bugs.family import BY_ID, FAMILY
from assay.harness.attention.bugs.features import CAP, SINK, WINDOW
from assay.harness.attention.call import AttentionCall, Mask, StoredKV
from assay.harness.attention.oracle import oracle, sequences
from assay.harness.attention.sample_calls import call_of

MOST_LINES = 10
Lens = list[tuple[int, int]]
_NEW, _PREFIX = 7, 9
"""New and cached tokens of a call that fits into a terminal."""
_OF_KIND: dict[str, Lens] = {
    LEAK: [(4, 5), (4, 5), (4, 5)],  # equal lengths, so that a neighbour has a row for each of one's own
    "quantisation-scale": [(8, 120)],
    "k-smoothing": [(8, 88)],
    "accumulator": [(8, 248)],
    "rows-and-strides": [(3, 70), (3, 66)],
}
_OF_ID: dict[str, Lens] = {
    "q-scale-previous-block": [(250, 4)], "q-scale-next-block": [(140, 4)], "stored-scales-of-next-block": [(7, 20)],
}  # fmt: skip


def example(hypothesis: Bug) -> AttentionCall:
    """Make a call in float64 on which the bug of a hypothesis shows, as few tokens as that takes; the same each time."""
    call = call_of(_lens(hypothesis), _heads(hypothesis), 32, torch.float64, "cpu")
    if hypothesis.id == "scale-of-head-dim-v":
        return replace(call, q=call.q[..., :16].contiguous(), k=call.k[..., :16].contiguous()).with_spec(scale=16**-0.5)
    if hypothesis.kind in ("quantisation-scale", "k-smoothing"):
        return replace(call, q=_stepped(call.q), k=_stepped(call.k) + torch.linspace(-20, 20, 32, dtype=torch.float64))
    if hypothesis.kind in ("saturation", "overflow"):
        return _beyond(hypothesis.id, call)
    return _ASKING.get(hypothesis.kind, _plain)(hypothesis.id, call)


def _plain(_id: str, call: AttentionCall) -> AttentionCall:
    return call


def _sunk(_id: str, call: AttentionCall) -> AttentionCall:
    return call.with_spec(sinks=(SINK, -2.0)[: call.heads.q_heads])


def _in_parts(id_: str, call: AttentionCall) -> AttentionCall:
    return replace(call, v=call.v[..., :16].contiguous()) if id_ == "values-at-key-stride" else call


def _padded(_id: str, call: AttentionCall) -> AttentionCall:
    return replace(call.with_spec(padded_rows=2), q=torch.cat([call.q, call.q[:2]]))


def _stored(id_: str, call: AttentionCall) -> AttentionCall:
    """Store k and v in FP8, with scales of their own for what a bug mixes, else for each head."""
    tokens, heads, _ = call.k.shape
    shape = (tokens, heads, 1) if id_.endswith(("token", "block")) else (1, heads, 1)
    size = 16 if id_.endswith("block") else 1
    scale = 2.0 ** -(torch.arange(1, math.prod(shape) + 1) // size % 3).view(shape)
    k, v = (tensor.to(torch.float8_e4m3fn) for tensor in (call.k, call.v))
    return replace(call, k=k.double() * scale, v=v.double() * 4 * scale, stored=StoredKV(k, v, scale, 4 * scale))


def _latent(_id: str, call: AttentionCall) -> AttentionCall:
    wide = call_of([(_NEW, _PREFIX)], (1, 1), 576, torch.float64, "cpu")
    return replace(wide, v=wide.k[..., :512]).with_spec(layout="v in k", scale=192**-0.5)


_ASKING: dict[str, Callable[[str, AttentionCall], AttentionCall]] = {
    "window": lambda _, call: call.with_spec(mask=Mask(window=WINDOW)),
    "softcap": lambda _, call: call.with_spec(softcap=CAP),
    "sinks": _sunk,
    "temperature": lambda _, call: call.with_spec(temperature=4),
    "rows-and-strides": _in_parts,
    "padding": _padded,
    "stored-kv": _stored,
    "latent": _latent,
}
"""What a call asks for, by kind of bug."""


def _lens(hypothesis: Bug) -> Lens:
    if hypothesis.kind in ("sliding-window", "last-block-lost"):
        size = _number(hypothesis.id)
        return [(8, size + 4)]
    return _OF_ID.get(hypothesis.id) or _OF_KIND.get(hypothesis.kind, [(_NEW, _PREFIX)])


def _number(id_: str) -> int:
    digits = re.search(r"\d+$", id_)
    assert digits is not None
    return int(digits[0])


def _heads(hypothesis: Bug) -> tuple[int, int]:
    if hypothesis.id.endswith(("next-head", "strides")):
        return 2, 2
    if hypothesis.kind == "kv-heads":
        return 6, 3  # of two kv heads, the previous is the next
    return (2, 2) if hypothesis.id == "scale-of-all-heads" else (1, 1)


def _stepped(x: Tensor) -> Tensor:
    """Make rows of blocks of 64 tokens that differ in size, so that a neighbour's scale is wrong."""
    return x * (1.0 + torch.arange(len(x)) // 64)[:, None, None]


def _beyond(id_: str, call: AttentionCall) -> AttentionCall:
    """Make the call with values, or q k products, beyond the limit of a format; a value that every query sees."""
    limit = 448 if "e4m3" in id_ else 65504
    if id_.startswith("values"):
        v = call.v.clone()
        v[2] *= 4 * limit
        return replace(call, v=v)
    k = call.k.clone()
    k[2] = 2 * limit * call.q[0] / call.q[0].square().sum()  # the first query's product with it is twice the limit
    return replace(call, k=k).with_spec(scale=8 / limit)


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
