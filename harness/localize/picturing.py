"""The picture of an operator: from the weights that were read, or from the outputs of a call whose weights cannot be read."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import sequences
from assay.harness.localize.reading import Numbers, WeightReading, right_weights, scores_of
from assay.harness.picture import (
    ELSEWHERE,
    MAX_KEYS,
    MAX_QUERIES,
    NONE,
    SAME,
    UNSEEN,
    WITH_WEIGHTS,
    WRONG,
    WRONG_WEIGHT,
    WRONGLY_SEEN,
    Picture,
    RowKind,
)
from assay.harness.text import ranges

_Flags = NDArray[np.bool_]
_Ints = NDArray[np.int64]
_Words = NDArray[np.str_]

# Smaller relative errors of weights are not shown for any dtype: each kernel sums in float32 in its own order.
_LEAST_RELATIVE = 1e-3
# Roundings to the call's dtype that a correct weight may have: of q, k, the weight, and the output.
_ROUNDINGS = 4
BEFORE = 8
"""Number of correct queries, or keys, to show next to the first difference."""
# Most sequences of a call to list in its description.
_SEQUENCES = 8


def picture_of(reading: WeightReading, head: int | None = None, *, relative: float | None = None) -> Picture:
    """Make the picture of one q head of a call whose weights were read.

    Args:
        reading: the weights.
        head: the q head, or None for the one with the most misplaced weight.
        relative: smaller relative errors of weights are not shown. None means the error that roundings to the call's dtype
            explain; a kernel that quantises needs a larger value.
    """
    call, order = reading.call, np.argsort(reading.rows)
    heads, own = np.arange(call.q.shape[1]), _own_kv_heads(call)
    eps = float(torch.finfo(call.q.dtype).eps)
    least = max(1e-6, eps / 100)
    kinds = _kinds(reading, 50 * least)
    cells = _cells(reading, max(_LEAST_RELATIVE, _ROUNDINGS * eps) if relative is None else relative, least)
    whole = kinds != "nonlinear"  # weights that are not the whole output say nothing about heads or keys
    wrong = whole & ((kinds != "read") | np.isin(cells, WRONG).any(-1))
    if head is None:
        misplaced = np.abs(reading.weights - reading.expected).sum((-1, -2)) + (kinds != "read")
        head = int((misplaced * (wrong | ~whole)).sum(0).argmax())
    shown = order[_window((wrong | ~whole)[order, head], MAX_QUERIES)]
    by_kv = (np.abs(reading.weights[:, head]).max(-1) > least)[whole[:, head]].any(0)
    picture = _picture(
        call, reading.rows[shown], head, heads[wrong.any(0)], kinds[shown, head], cells[shown, head],
        reading.expected[shown, head, own[head]], reading.weights[shown, head].sum(1),
    )  # fmt: skip
    foreign = tuple(kv for kv in np.flatnonzero(by_kv).tolist() if kv != own[head])
    return picture.model_copy(update={"foreign_kv_heads": foreign})


def unread_picture(call: AttentionCall, out: Tensor, wrong: _Flags) -> Picture:
    """Make the picture of the q head with the most wrong outputs, for a call whose weights cannot be read, such as one with NaN.

    Args:
        call: the call.
        out: the kernel's output, [total_q, num_q_heads, head_dim_v].
        wrong: flags of the wrong outputs, bool [total_q, num_q_heads].
    """
    head = int(wrong.sum(0).argmax())
    rows = _window(wrong[:, head], MAX_QUERIES)
    answers = out[torch.from_numpy(rows).to(out.device), head].detach().cpu().double()
    kinds = np.array(
        [_unread_kind(answer) if wrong[row, head] else "right" for row, answer in zip(rows, answers, strict=True)]
    )
    expected = right_weights(call, rows, scores_of(call, rows))[:, head, _own_kv_heads(call)[head]]
    cells = np.full(expected.shape, NONE)
    return _picture(call, rows, head, np.flatnonzero(wrong.any(0)), kinds, cells, expected, np.zeros_like(expected))


def _own_kv_heads(call: AttentionCall) -> _Ints:
    """Return the kv head of each q head."""
    return call.heads.kv_head(np.arange(call.heads.q_heads))


def _own_sequence(call: AttentionCall, rows: _Ints) -> _Flags:
    """Return flags of the keys in a query's own sequence, bool [rows, total_k]."""
    own = np.zeros((len(rows), call.k.shape[0]), bool)
    for q, k in sequences(call):
        own[(rows >= q.start) & (rows < q.stop), k] = True
    return own


def _kinds(reading: WeightReading, small: float) -> _Words:
    """Return the kind of each query and head, [rows, num_q_heads]; values up to `small` count as zero."""
    weights = np.abs(reading.weights).sum((-1, -2))
    constant = np.abs(reading.constant).max(-1)
    conditions = [weights + constant <= small, weights <= small, reading.off > 20 * small, constant > small]
    return np.select(conditions, ["zero", "constant", "nonlinear", "shifted"], "read")


def _unread_kind(answer: Tensor) -> RowKind:
    """Return the kind of a wrong output, [head_dim_v], without its weights."""
    if bool(answer.isnan().any()):
        return "nan"
    if bool(answer.isinf().any()):
        return "infinite"
    if not bool(answer.any()):
        return "zero"
    return "constant" if len(answer) > 1 and bool((answer == answer[0]).all()) else "wrong"


def _cells(reading: WeightReading, relative: float, least: float) -> _Words:
    """Return the cells of a picture, [rows, num_q_heads, total_k], as in `Picture.cells`; weights below `least` do not count."""
    call = reading.call
    heads, own = np.arange(call.q.shape[1]), _own_kv_heads(call)
    read, expected = reading.weights[:, heads, own], reading.expected[:, heads, own]
    of_other_heads = np.abs(reading.weights).sum(2) - np.abs(read)
    seen, at_home = reading.visible[:, None], _own_sequence(call, reading.rows)[:, None]
    tiny = least / 100
    right = _common_factor(read, expected, reading.weights.sum((-1, -2)), relative, least) * expected
    off = np.abs(read - right) > relative * np.maximum(np.abs(read), right) + tiny
    counts = np.abs(read) > least
    return np.select(
        [
            (of_other_heads > least) | (~at_home & counts),
            seen & off & (expected > least) & (np.abs(read) <= tiny),
            seen & off & ((expected > least) | counts),
            ~seen & counts,
            np.broadcast_to(seen, read.shape),
        ],
        [ELSEWHERE, UNSEEN, WRONG_WEIGHT, WRONGLY_SEEN, SAME],
        NONE,
    )


def _common_factor(read: Numbers, expected: Numbers, total: Numbers, relative: float, least: float) -> Numbers:
    """Return the factor common to most weights of a query because other weights change the denominator, [rows, heads, 1].

    `read` and `expected` are the own kv head's weights, [rows, heads, total_k]; `total` is over all kv heads, [rows, heads].
    """
    # If the other keys of a softmax over exp(scores) have the weight U instead of M (in their own sequence or not), it divides by
    # (1 - U) / (1 - M) of the correct denominator. Any other factor is a separate error, and 1 is returned.
    both = (expected > least) & (np.abs(read) > least / 100)
    ratio = np.sort(np.where(both, read / np.where(both, expected, 1.0), np.inf), -1)
    middle = np.maximum(both.sum(-1, keepdims=True) - 1, 0) // 2
    factor = np.where(both.any(-1, keepdims=True), np.take_along_axis(ratio, middle, -1), 1.0)
    agree = both & (np.abs(read - factor * expected) <= relative * np.abs(factor) * expected)
    should = (expected * ~agree).sum(-1)
    does = total - (read * agree).sum(-1)
    follows = np.abs(factor[..., 0] * (1 - should) - (1 - does)) <= relative
    most = agree.sum(-1) > both.sum(-1) / 2
    return np.where((follows & most)[..., None], factor, 1.0)


def hides(queries: int, keys: int) -> tuple[bool, bool, int]:
    """Rate how little a picture of this size shows: few keys hide a rule, and few queries hide the edge of a mask."""
    return keys < 8, queries < 4, keys


def _window(flags: _Flags, most: int) -> _Ints:
    """Return at most this many consecutive indices, from a few before the first flagged one."""
    first = int(flags.argmax()) if flags.any() else 0
    start = max(0, min(first - BEFORE, len(flags) - most))
    return np.arange(start, min(start + most, len(flags)))


def _keys_shown(cells: _Words, expected: Numbers) -> _Ints:
    """Return the packed keys to show: where most changes; if some weight comes from elsewhere too, half of them there."""
    keys = cells.shape[1]
    if keys <= MAX_KEYS:
        return np.arange(keys)
    home, away = np.isin(cells, (UNSEEN, WRONGLY_SEEN, WRONG_WEIGHT)), np.isin(cells, ELSEWHERE)
    if not (home | away).any():  # the last keys that these queries should see
        last = int(np.flatnonzero((expected > 0).any(0)).max(initial=0))
        start = min(max(0, last + 1 + BEFORE - MAX_KEYS), keys - MAX_KEYS)
        return np.arange(start, start + MAX_KEYS)
    if home.any() and away.any():
        both = np.union1d(
            _where_most_changes(home, cells, MAX_KEYS // 2), _where_most_changes(away, cells, MAX_KEYS // 2)
        )
        if len(both) == MAX_KEYS:
            return both
    return _where_most_changes(np.isin(cells, WRONG), cells, MAX_KEYS)


def _where_most_changes(flags: _Flags, cells: _Words, count: int) -> _Ints:
    """Return `count` consecutive keys with the most borders between flagged and other keys, or else the first flagged ones."""
    # A border with a correctly weighed key counts twice: it says more than one with a key that should have no weight.
    border = flags[:, 1:] != flags[:, :-1]
    same = (cells[:, 1:] == SAME) | (cells[:, :-1] == SAME)
    borders = np.concatenate([[0], np.cumsum((border * (1 + same)).sum(0))])
    inside = borders[count - 1 :] - borders[: len(borders) - count + 1]
    if not inside.any():
        return _window(np.asarray(flags.any(0)), count)
    best = np.flatnonzero(inside == inside.max())
    start = int(best[len(best) // 2])
    return np.arange(start, start + count)


def _picture(
    call: AttentionCall, rows: _Ints, head: int, wrong_heads: _Ints, kinds: _Words, cells: _Words, expected: Numbers, read: Numbers
) -> Picture:  # fmt: skip
    """Make the picture of some queries of a head, from packed rows of q [rows], and their arrays [rows] and [rows, total_k]."""
    with_weights = np.isin(kinds, WITH_WEIGHTS)
    keys = _keys_shown(np.where(with_weights[:, None], cells, NONE), expected)
    starts_q, starts_k = np.array(call.cu_seqlens_q.tolist()), np.array(call.cu_seqlens_k.tolist())
    of_query = np.searchsorted(starts_q, rows, "right") - 1
    of_key = np.searchsorted(starts_k, keys, "right") - 1
    return Picture(
        call=_words(call),
        shown=_shown(call, rows, keys),
        head=head,
        heads=call.q.shape[1],
        wrong_heads=tuple(wrong_heads.tolist()),
        query_sequences=tuple(of_query.tolist()),
        query_positions=tuple((rows - starts_q[of_query] + np.array(call.prefixes)[of_query]).tolist()),
        key_sequences=tuple(of_key.tolist()),
        key_indices=tuple((keys - starts_k[of_key]).tolist()),
        expected=tuple(map(_rounded, expected[:, keys])),
        read=tuple(_rounded(row[keys]) if has else () for row, has in zip(read, with_weights, strict=True)),
        cells=tuple("".join(row[keys]) if has else "" for row, has in zip(cells, with_weights, strict=True)),
        rows=cast("tuple[RowKind, ...]", tuple(kinds.tolist())),
    )


def _rounded(weights: Numbers) -> tuple[float, ...]:
    return tuple(float(f"{weight:.4g}") + 0.0 for weight in weights)  # + 0.0 makes 0.0 of -0.0


def _words(call: AttentionCall) -> str:
    lens = [f"{new}+{prefix}" for new, prefix in zip(call.lens_q, call.prefixes, strict=True)]
    more = f" and {len(lens) - _SEQUENCES} more" if len(lens) > _SEQUENCES else ""
    return f"layer {call.layer} {call.phase}, new+prefix {' '.join(lens[:_SEQUENCES])}{more}"


def _shown(call: AttentionCall, rows: _Ints, keys: _Ints) -> str:
    total_q, total_k = call.q.shape[0], call.k.shape[0]
    if (len(rows), len(keys)) == (total_q, total_k):
        return ""
    packed = "packed " if len(call.lens_q) > 1 else ""
    return f"{packed}queries {ranges(rows.tolist())} of {total_q}, {packed}keys {ranges(keys.tolist())} of {total_k}"
