"""Bugs by which a sequence reads the data of another one in its batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import LEAK, Batch, Bug, Code, changing_in_batch, code, lines
from assay.harness.attention.oracle import Request

_BATCH = """\
def attend(q, k, v, starts, b, scale):  # k and v of the whole batch, q of sequence b
    own, last = slice(starts[b], starts[b + 1]), len(starts) - 2
@    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    scores = scale * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
_OWN = lines("k, v = k[:, own], v[:, own]")
_SIDES = (("previous", -1, "max(b - 1, 0)"), ("next", 1, "min(b + 1, last)"))
_PARTS = (("keys", "k", "rows", "own"), ("values", "v", "own", "rows"), ("keys and values", "kv", "rows", "rows"))


def _neighbour(batch: Batch, b: int, by: int) -> Request | None:
    """Return the request `by` further in the batch, or None beyond its ends."""
    return batch[b + by] if 0 <= b + by < len(batch) else None


def _leak(by: int, what: str, only_prefix: bool, batch: Batch, b: int) -> Request | None:
    """Replace the first rows of K, V or both by those of the request `by` further in the batch."""
    r, other = batch[b], _neighbour(batch, b, by)
    tokens = 0 if other is None else min(r.prefix, other.prefix) if only_prefix else min(r.len_k, other.len_k)
    # A sequence with fewer keys than queries has no prefix.
    if other is None or tokens <= 0 or all(torch.equal(_head(r, w, tokens), _head(other, w, tokens)) for w in what):
        return None
    mixed: dict[str, Any] = {w: torch.cat([_head(other, w, tokens), getattr(r, w)[:, tokens:]], dim=1) for w in what}
    return replace(r, **mixed)


def _head(r: Request, what: str, tokens: int) -> Tensor:
    leading: Tensor = getattr(r, what)[:, :tokens]
    return leading


def _boundary(by: int, whole: bool, batch: Batch, b: int) -> Request | None:
    """Let every query also see the nearest key (or all keys) of the request `by` further in the batch."""
    r, other = batch[b], _neighbour(batch, b, by)
    if other is None:
        return None
    if not whole:
        token = slice(-1, None) if by < 0 else slice(0, 1)
        other = replace(other, k=other.k[:, token], v=other.v[:, token])
    seen = torch.ones(r.len_q, other.k.shape[1], dtype=torch.bool, device=r.q.device)
    return replace(
        r,
        k=torch.cat([other.k, r.k], dim=1),
        v=torch.cat([other.v, r.v], dim=1),
        visible=torch.cat([seen, r.visible], dim=1),
    )


def _reads(*wrong: str) -> Code:
    return code(_BATCH, lines(*wrong), _OWN, "batch")


def _rows_of(other: str) -> str:
    return f"rows = slice(starts[{other}], starts[{other}] + own.stop - own.start)"


def _next_first_key() -> Code:
    """Write a wrong loop that forgets the mask of its last block as well."""
    longer = _BATCH.replace(".tril(k.shape[1] - q.shape[1])", ".tril(k.shape[1] - (b < last) - q.shape[1])")
    longer = longer.replace("    scores =", "    seen[:, own.stop - own.start :] = True\n    scores =")
    wrong = lines("rows = slice(own.start, own.stop + (b < last))", "k, v = k[:, rows], v[:, rows]")
    return Code(code(longer, wrong, "").wrong, code(_BATCH, "", _OWN).right, "batch")


_PREFIX = (
    "prefix = own.stop - own.start - q.shape[1]",
    "k, v = (torch.cat([x[:, rows][:, :prefix], x[:, own][:, prefix:]], 1) for x in (k, v))",
)
BUGS = (
    *(Bug(f"leak-{part.replace(' and ', '-')}-{side}", f"{part} of the {side} request",
          f"a sequence attends to the {part} of the {side} one in its batch", f"reads the {part} of the {side} request", LEAK,
          changing_in_batch(partial(_leak, by, what, False)), _reads(_rows_of(other), f"k, v = k[:, {k}], v[:, {v}]"),
          reports=reports)
      for side, by, other in _SIDES for part, what, k, v in _PARTS
      for reports in [("Tencent-Hunyuan/HunyuanVideo!310",) if (what, side) == ("kv", "next") else ()]),
    *(Bug(f"leak-prefix-{side}", f"cached prefix of the {side} request",
          f"a sequence attends to the cached prefix of the {side} one in its batch",
          f"reads the cached prefix of the {side} request", LEAK,
          changing_in_batch(partial(_leak, by, "kv", True)), _reads(_rows_of(other), *_PREFIX), reports=(report,))
      for (side, by, other), report in zip(_SIDES, ("vllm-project/vllm!37152", "kvcache-ai/Mooncake#4153"), strict=True)),
    Bug("leak-last-key-previous", "last key of the previous request seen",
        "every query also sees the last key of the sequence before", "also sees the last key of the previous request", LEAK,
        changing_in_batch(partial(_boundary, -1, False)),
        _reads("rows = slice(starts[b] - (b > 0), own.stop)", "k, v = k[:, rows], v[:, rows]")),
    Bug("leak-first-key-next", "first key of the next request seen",
        "every query also sees the first key of the sequence after", "also sees the first key of the next request", LEAK,
        changing_in_batch(partial(_boundary, 1, False)), _next_first_key()),
    Bug("leak-all-keys-previous", "all keys of the previous request seen",
        "every query also sees every key of the sequence before", "also sees all keys of the previous request", LEAK,
        changing_in_batch(partial(_boundary, -1, True)),
        _reads("rows = slice(starts[max(b - 1, 0)], own.stop)", "k, v = k[:, rows], v[:, rows]"),
        reports=("Tencent-Hunyuan/HunyuanVideo!310",)),
)  # fmt: skip
