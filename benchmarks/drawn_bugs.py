"""What the faults of `drawn_faults` do to attention, wherever they are seeded: templates that a random generator fills in.

In every sentence, heads, layers, tokens, positions, keys, queries, blocks, pages, dimensions and sequences count from 0. Key j
and token j are at index j of their sequence, cached prefix included; so is a query at position j. New token i is at index i of
the new tokens of its sequence. A distance is the position of a query minus the index of a key.
A query that sees no key has an output of zero.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import Request, requests, scores

# Attention in float32, one sequence at a time, heads first


def attention(call: AttentionCall) -> Tensor:
    """Attention without a bug, float32 [total_q, num_q_heads, head_dim_v]."""
    return _packed([_attend(r) for r in _batch(call)])


def _batch(call: AttentionCall) -> list[Request]:
    """The sequences of a call in float32."""
    return [replace(r, q=r.q.float(), k=r.k.float(), v=r.v.float()) for r in requests(call)]


def _packed(outs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(outs), dim=1).transpose(0, 1).contiguous()


def _weights(logits: Tensor) -> Tensor:
    """Softmax over the keys; zero for a query that sees none."""
    return logits.softmax(-1).nan_to_num(0.0)


def _weighted(r: Request, logits: Tensor) -> Tensor:
    return _weights(logits) @ r.v[r.kv_head]


def _attend(r: Request) -> Tensor:
    """Attention of one sequence, float32 [num_q_heads, len_q, head_dim_v]."""
    return _weighted(r, scores(r))


def _keys(r: Request) -> Tensor:
    return torch.arange(r.len_k, device=r.q.device)


def _rows(r: Request) -> Tensor:
    return torch.arange(r.len_q, device=r.q.device)


def _distance(r: Request) -> Tensor:
    """Position of each query minus index of each key, [len_q, len_k]."""
    return (_rows(r) + r.prefix)[:, None] - _keys(r)[None, :]


# Bugs


@dataclass
class Memory:
    """What a kernel keeps between calls.

    Attributes:
        number: of the current call, counted from 1.
        previous: the call before, as it was made; None in the first one.
        output: what the kernel returned for it, as it was then.
        first: number of sequences -> (new tokens, all tokens) of each sequence of the first call with that many.
        buffers: memory for outputs, by what it is for.
    """

    number: int = 0
    previous: AttentionCall | None = None
    output: Tensor | None = None
    first: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    buffers: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def begin(self, call: AttentionCall) -> None:
        """Count a call."""
        self.number += 1
        self.first.setdefault(len(call.lens_q), (call.lens_q, call.lens_k))

    def end(self, call: AttentionCall, out: Tensor) -> None:
        """Keep copies of a call and of what was returned for it."""
        self.previous, self.output = call.clone(), out.clone()


Effect = Callable[[AttentionCall, Memory], Tensor]
"""The wrong output of a call, float32 [total_q, num_q_heads, head_dim_v]; right where the bug cannot show."""
After = Callable[[AttentionCall, Tensor, Memory], Tensor]
"""(call, output, memory) -> what is returned. It may write to the call."""
Changed = Request | Tensor
"""A sequence in which something is changed, or its output [num_q_heads, len_q, head_dim_v]."""


@dataclass(frozen=True)
class Bug:
    """What goes wrong.

    Attributes:
        text: a clause in the present tense, without a capital and a full stop.
        effect: the wrong output.
        after: what happens once the output is computed; None for nothing.
        names_heads: whether the text names q heads, so that a restriction to heads would confuse.
    """

    text: str
    effect: Effect
    after: After | None = None
    names_heads: bool = False


Template = Callable[[random.Random], Bug]


def _among(change: Callable[[list[Request], int], Changed]) -> Effect:
    """A change of a sequence that may depend on the others, (sequences, b) -> sequence b, as an effect."""

    def effect(call: AttentionCall, memory: Memory) -> Tensor:
        batch = _batch(call)
        changed = [change(batch, b) for b in range(len(batch))]
        return _packed([one if isinstance(one, Tensor) else _attend(one) for one in changed])

    return effect


def _alone(change: Callable[[Request], Changed]) -> Effect:
    """A change of each sequence as an effect."""
    return _among(lambda batch, b: change(batch[b]))


def _ordinal(n: int) -> str:
    return f"{n}{ {2: 'nd', 3: 'rd'}.get(n, 'th') }"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _end(which: str, n: int, what: str) -> str:
    return f"the {which} {_count(n, what)}" if n > 1 else f"the {which} {what}"


def _away(n: int) -> str:
    return f"{n} " if n > 1 else ""


def _firsts(n: int) -> str:
    return f"each of the first {n} has" if n > 1 else "the first has"


# Sets of keys


KeySet = tuple[str, Callable[[Request], Tensor]]
"""Some keys of a sequence: words that follow "keys", and sequence -> bool [len_k]."""


def _one_block(rng: random.Random) -> KeySet:
    drawn = ((4, 0), (4, 3), (8, 1), (8, 5), (16, 0), (16, 1), (16, 2), (16, 3), (32, 0), (32, 1), (64, 1))
    size, b = rng.choice(drawn)
    return f"{b * size} to {(b + 1) * size - 1} of a sequence", lambda r: _keys(r) // size == b


def _every_block(rng: random.Random) -> KeySet:
    size, n = rng.choice((4, 8, 16, 32)), rng.choice((2, 3, 4))
    first = rng.randrange(n)
    words = f"of every {_ordinal(n)} block of {size} keys (blocks {first}, {first + n}, {first + 2 * n}, …)"
    return words, lambda r: _keys(r) // size % n == first


def _every_key(rng: random.Random) -> KeySet:
    n = rng.choice((2, 3, 4, 5, 7, 8, 16))
    first = rng.randrange(n)
    return f"{first}, {first + n}, {first + 2 * n}, … of a sequence", lambda r: _keys(r) % n == first


def _first_keys(rng: random.Random) -> KeySet:
    n = rng.choice((1, 2, 4, 8, 16, 32, 50))
    words = f"0 to {n - 1} of a sequence" if n > 1 else "that are the first of their sequence"
    return words, lambda r: _keys(r) < n


def _last_keys(rng: random.Random) -> KeySet:
    n = rng.choice((1, 2, 4, 8, 16, 32, 50))
    words = f"among the last {n} of a sequence" if n > 1 else "that are the last of their sequence"
    return words, lambda r: _keys(r) >= r.len_k - n


def _cached_keys(rng: random.Random) -> KeySet:
    return "that are cached", lambda r: _keys(r) < r.prefix


def _new_keys(rng: random.Random) -> KeySet:
    return "that are new", lambda r: _keys(r) >= r.prefix


def _some_keys(rng: random.Random) -> KeySet:
    return rng.choice((_one_block, _every_block, _every_key, _first_keys, _last_keys, _cached_keys, _new_keys))(rng)


# Other sequences


Neighbour = tuple[str, int | None]
"""Another sequence of a call: words, and how much further it is; None for the first of the call."""


def _neighbour(rng: random.Random) -> Neighbour:
    return rng.choice(
        (("the sequence before it", -1), ("the sequence after it", 1), ("the first sequence of the call", None))
    )


def _other(which: Neighbour, batch: list[Request], b: int) -> Request | None:
    """Another sequence of the call; None where there is none."""
    found = 0 if which[1] is None else b + which[1]
    return batch[found] if 0 <= found < len(batch) and found != b else None


# Masks


def extra_key(rng: random.Random) -> Bug:
    by = rng.choice((1, 2, 3, 4, 5, 8, 16))
    seen = _alone(lambda r: replace(r, visible=r.visible | (_distance(r) == -by)))
    return Bug(f"each query also sees the key {_away(by)}after its own", seen)


def key_at_distance_unseen(rng: random.Random) -> Bug:
    by = rng.choice((0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 32, 63, 64))
    seen = _alone(lambda r: replace(r, visible=r.visible & (_distance(r) != by)))
    return Bug(f"no query sees the key {_away(by)}before its own" if by else "no query sees its own key", seen)


def window(rng: random.Random) -> Bug:
    size = rng.choice((2, 4, 8, 12, 16, 24, 32, 48, 64, 100, 128, 200))
    seen = _alone(lambda r: replace(r, visible=r.visible & (_distance(r) < size)))
    return Bug(f"no query sees keys at a distance of {size} or more", seen)


def strided_past(rng: random.Random) -> Bug:
    size, n = rng.choice((8, 16, 32, 64)), rng.choice((2, 3, 4, 8))
    seen = _alone(lambda r: replace(r, visible=r.visible & ((_distance(r) < size) | (_keys(r) % n == 0))))
    return Bug(
        f"of the keys at a distance of {size} or more, queries see only those with an index that is a multiple of {n}",
        seen,
    )


def keys_unseen(rng: random.Random) -> Bug:
    words, chosen = _some_keys(rng)
    return Bug(f"no query sees keys {words}", _alone(lambda r: replace(r, visible=r.visible & ~chosen(r))))


def diagonal(rng: random.Random) -> Bug:
    by = rng.choice((-8, -4, -3, -2, -1, 1, 2, 3, 4, 8))
    if by > 0:
        how = f"right (a query also sees the {_count(by, 'key')} after its own)"
    else:
        how = (
            "left (a query does not see its own key" + f" and the {_count(-by - 1, 'key')} before it" * (by < -1) + ")"
        )
    shifted = _alone(lambda r: replace(r, visible=_distance(r) >= -by) if r.mask.causal else r)
    return Bug(f"the causal mask is shifted {_count(abs(by), 'key')} to the {how}", shifted)


def shared_mask(rng: random.Random) -> Bug:
    size, last = rng.choice((2, 4, 8, 16, 32, 64)), rng.random() < 0.5

    def change(r: Request) -> Request:
        shared = _rows(r) // size * size + (size - 1) * last
        return replace(r, visible=r.visible[shared.clamp(max=r.len_q - 1)])

    of = "last" if last else "first"
    return Bug(
        f"all new tokens of a block of {size} new tokens see the keys that the {of} of them should see", _alone(change)
    )


def top_left(rng: random.Random) -> Bug:
    aligned = _alone(lambda r: replace(r, visible=torch.ones_like(r.visible).tril()) if r.mask.causal else r)
    return Bug("the causal mask is aligned to the top left (new token i sees keys 0 to i of its sequence)", aligned)


def prefix_of_another(rng: random.Random) -> Bug:
    which = _neighbour(rng)

    def change(batch: list[Request], b: int) -> Request:
        r, other = batch[b], _other(which, batch, b)
        if other is None or not r.mask.causal:
            return r
        return replace(r, visible=torch.ones_like(r.visible).tril(other.prefix))

    text = f"the causal mask of a sequence is aligned by the cached prefix p of {which[0]} (new token i sees keys 0 to i + p)"
    return Bug(text, _among(change))


def strangers_seen(rng: random.Random) -> Bug:
    which, n = _neighbour(rng), rng.choice((1, 2, 4, 8, 16))
    words, part = rng.choice(
        (
            ("all keys", slice(None)),
            (_end("first", n, "key"), slice(0, n)),
            (_end("last", n, "key"), slice(-n, None)),
        )
    )

    def change(batch: list[Request], b: int) -> Request:
        r, other = batch[b], _other(which, batch, b)
        if other is None:
            return r
        k, v = torch.cat([other.k[:, part], r.k], 1), torch.cat([other.v[:, part], r.v], 1)
        seen = r.visible.new_ones(r.len_q, k.shape[1] - r.len_k)
        return replace(r, k=k, v=v, visible=torch.cat([seen, r.visible], 1))

    return Bug(f"each query also sees {words} of {which[0]}", _among(change))


# Rows


_PARTS = (("key", "k"), ("value", "v"), ("key and value", "kv"))


def _with(r: Request, what: str, changed: Callable[[Tensor], Tensor]) -> Request:
    """A sequence whose K, V or both ("k", "v", "kv"), [num_kv_heads, len_k, dim], are changed."""
    return replace(r, k=changed(r.k) if "k" in what else r.k, v=changed(r.v) if "v" in what else r.v)


def _read(r: Request, what: str, index: Tensor) -> Request:
    """A sequence whose K, V or both are read from other tokens, int64 [len_k]."""
    return _with(r, what, lambda rows: rows[:, index])


def rows_shifted(rng: random.Random) -> Bug:
    part, what = rng.choice(_PARTS)
    by = rng.choice((-16, -8, -4, -3, -2, -1, 1, 2, 3, 4, 8, 16))
    region = rng.choice(("", "cached ", "new "))

    def change(r: Request) -> Request:
        keys = _keys(r)
        chosen = {"": keys >= 0, "cached ": keys < r.prefix, "new ": keys >= r.prefix}[region]
        return _read(r, what, torch.where(chosen, (keys + by).clamp(0, r.len_k - 1), keys))

    end, sign = ("the last token", "+") if by > 0 else ("token 0", "-")
    text = f"{region}token j of a sequence has the {part} of token j {sign} {abs(by)} (of {end} where there is none)"
    return Bug(text, _alone(change))


def block_before(rng: random.Random) -> Bug:
    part, what = rng.choice(_PARTS)
    size, only = rng.choice((4, 8, 16, 32, 64)), rng.choice((None, 1, 2, 3))

    def change(r: Request) -> Request:
        block = _keys(r) // size
        chosen = block > 0 if only is None else block == only
        return _read(r, what, torch.where(chosen, _keys(r) - size, _keys(r)))

    tokens = (
        f"each token from {size} on"
        if only is None
        else f"each of the tokens {only * size} to {(only + 1) * size - 1} of a sequence"
    )
    return Bug(
        f"{tokens} has the {part} of the token {size} before it: of its place in the block before", _alone(change)
    )


def rows_modulo(rng: random.Random) -> Bug:
    part, what = rng.choice(_PARTS)
    n = rng.choice((4, 8, 16, 32, 64, 100, 128))
    return Bug(
        f"token j of a sequence has the {part} of token j mod {n}", _alone(lambda r: _read(r, what, _keys(r) % n))
    )


def pages_swapped(rng: random.Random) -> Bug:
    part, what, rest = rng.choice((("key", "k", "values"), ("value", "v", "keys")))
    size, first, by = rng.choice((4, 8, 16, 32)), rng.randrange(3), rng.choice((1, 2))

    def change(r: Request) -> Request:
        keys, page = _keys(r), _keys(r) // size
        if r.len_k < (first + by + 1) * size:
            return r
        moved = keys + by * size * ((page == first).long() - (page == first + by).long())
        return _read(r, what, moved)

    pages = f"pages {first} and {first + by} of {size} tokens"
    return Bug(f"the {part}s of {pages} are swapped, their {rest} are not, where a sequence fills both", _alone(change))


def rows_of_another_sequence(rng: random.Random) -> Bug:
    part, what = rng.choice(_PARTS)
    which = _neighbour(rng)

    def change(batch: list[Request], b: int) -> Request:
        r, other = batch[b], _other(which, batch, b)
        if other is None:
            return r
        n = min(r.len_k, other.len_k)
        k, v = torch.cat([other.k[:, :n], r.k[:, n:]], 1), torch.cat([other.v[:, :n], r.v[:, n:]], 1)
        return replace(r, k=k if "k" in what else r.k, v=v if "v" in what else r.v)

    return Bug(f"token j of a sequence has the {part} of token j of {which[0]}, where that has one", _among(change))


def rows_of_another_kv_head(rng: random.Random) -> Bug:
    part, what = rng.choice(_PARTS)
    interleaved = rng.random() < 0.5

    def change(r: Request) -> Tensor:
        wrong = torch.arange(len(r.kv_head), device=r.q.device) if interleaved else r.kv_head + 1
        wrong = wrong % r.k.shape[0]
        logits = scores(replace(r, kv_head=wrong) if "k" in what else r)
        return _weights(logits) @ r.v[wrong if "v" in what else r.kv_head]

    whose = "kv head h mod the number of kv heads" if interleaved else "the kv head after its own, in a circle"
    part = part.replace("key", "keys").replace("value", "values")
    return Bug(f"q head h reads the {part} of {whose}", _alone(change))


def query_of_another_row(rng: random.Random) -> Bug:
    by = rng.choice((1, 1, 2, 4))
    moved = _alone(lambda r: replace(r, q=torch.cat([r.q[:, :by], r.q[:, : max(0, r.len_q - by)]], 1)[:, : r.len_q]))
    return Bug(f"new token i has the query of new token i - {by} ({_firsts(by)} its own)", moved)


def query_of_another_head(rng: random.Random) -> Bug:
    by = rng.choice((1, -1, 2))
    whose = f"the q head {_away(abs(by))}{'after' if by > 0 else 'before'} it, in a circle"
    return Bug(f"each q head has the query of {whose}", _alone(lambda r: replace(r, q=r.q.roll(-by, 0))))


def heads_swapped(rng: random.Random) -> Bug:
    first, second = sorted(rng.sample(range(4), 2))

    def change(r: Request) -> Tensor:
        out = _attend(r)
        order = list(range(len(out)))
        if second < len(out):
            order[first], order[second] = second, first
        return out[order]

    return Bug(f"the outputs of q heads {first} and {second} are swapped", _alone(change), names_heads=True)


def output_moved(rng: random.Random) -> Bug:
    by, zero = rng.choice((1, 1, 2, 3)), rng.random() < 0.5

    def change(r: Request) -> Tensor:
        out = _attend(r)
        return torch.cat([out[:, :by] * float(not zero), out[:, : max(0, r.len_q - by)]], 1)[:, : r.len_q]

    first = "an output of zero" if zero else "its own"
    return Bug(f"new token i has the output of new token i - {by} ({_firsts(by)} {first})", _alone(change))


def output_of_another_sequence(rng: random.Random) -> Bug:
    which = _neighbour(rng)

    def change(batch: list[Request], b: int) -> Tensor:
        out, other = _attend(batch[b]), _other(which, batch, b)
        if other is None:
            return out
        n = min(batch[b].len_q, other.len_q)
        return torch.cat([_attend(other)[:, :n], out[:, n:]], 1)

    return Bug(
        f"new token i of a sequence has the output of new token i of {which[0]}, where that has one", _among(change)
    )


_Rows = Callable[[Tensor], Tensor]


def dims_of_output(rng: random.Random) -> Bug:
    n = rng.choice((1, 2, 4, 8))
    variants: tuple[tuple[str, _Rows], ...] = (
        ("the dimensions of the output are in reverse order", lambda out: out.flip(-1)),
        (f"dimension c of the output holds dimension c + {n}, in a circle", lambda out: out.roll(-n, -1)),
        ("the first and the second half of the output's dimensions are swapped", lambda out: out.roll(out.shape[-1] // 2, -1)),
        (f"{_end('last', n, 'dimension')} of the output {'is' if n == 1 else 'are'} zero",
         lambda out: torch.cat([out[..., :-n], torch.zeros_like(out[..., -n:])], -1)),
        (f"the output is zero from dimension {n} on",
         lambda out: torch.cat([out[..., :n], torch.zeros_like(out[..., n:])], -1)),
    )  # fmt: skip
    text, moved = rng.choice(variants)
    return Bug(text, _alone(lambda r: moved(_attend(r))))


def dims_of_scores(rng: random.Random) -> Bug:
    n = rng.choice((1, 2, 4))
    variants: tuple[tuple[str, _Rows], ...] = (
        (f"{_end('last', n, 'dimension')} of q and k {'is' if n == 1 else 'are'} left out of the scores",
         lambda k: torch.cat([k[..., :-n], torch.zeros_like(k[..., -n:])], -1)),
        (f"dimension c of each key is read from its dimension c + {n}, in a circle", lambda k: k.roll(-n, -1)),
        ("the first and the second half of the keys' dimensions are swapped", lambda k: k.roll(k.shape[-1] // 2, -1)),
    )  # fmt: skip
    text, moved = rng.choice(variants)
    return Bug(text, _alone(lambda r: _with(r, "k", moved)))


# Scales


def weights_times(rng: random.Random) -> Bug:
    factor = rng.choice((0.0, 0.5, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0))
    words, chosen = _some_keys(rng)
    changed = _alone(lambda r: (_weights(scores(r)) * torch.where(chosen(r), factor, 1.0)) @ r.v[r.kv_head])
    return Bug(f"after the softmax, the weights of keys {words} are multiplied by {factor:g}", changed)


def scores_times(rng: random.Random) -> Bug:
    factor, size = rng.choice((0.5, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0)), rng.choice((4, 8, 16, 32, 64))
    words, chosen = _some_keys(rng)
    variants: tuple[KeySet, ...] = (
        ("all keys", lambda r: _keys(r) >= 0),
        (f"keys {words}", chosen),
        (f"keys {words}", chosen),
        (f"keys at a distance of {size} or more", lambda r: _distance(r) >= size),
    )
    of, where = rng.choice(variants)
    changed = _alone(lambda r: _weighted(r, scores(r) * torch.where(where(r), factor, 1.0)))
    return Bug(f"the scores of {of} are multiplied by {factor:g}", changed)


def scores_plus(rng: random.Random) -> Bug:
    term = rng.choice((-2.0, -1.0, -0.5, -0.2, 0.2, 0.5, 1.0, 2.0))
    words, chosen = _some_keys(rng)
    how = f"{abs(term):g} is {'added to' if term > 0 else 'subtracted from'}"
    changed = _alone(lambda r: _weighted(r, scores(r) + torch.where(chosen(r), term, 0.0)))
    return Bug(f"{how} the scaled scores of keys {words}", changed)


def slope(rng: random.Random) -> Bug:
    by = rng.choice((0.002, 0.005, 0.01, 0.02, 0.05, 0.1))
    changed = _alone(lambda r: _weighted(r, scores(r) - by * _distance(r).abs()))
    return Bug(f"the scaled score of a key loses {by:g} per token of its absolute distance to the query", changed)


def output_times(rng: random.Random) -> Bug:
    factor = rng.choice((-1.0, 0.0, 0.5, 0.9, 0.97, 1.03, 1.1, 1.5, 2.0))
    return Bug(f"the output is multiplied by {factor:g}", _alone(lambda r: _attend(r) * factor))


def scale_of_neighbour(rng: random.Random) -> Bug:
    part, what = rng.choice((("keys", "k"), ("values", "v")))
    size, by = rng.choice((4, 8, 16, 32, 64)), rng.choice((-1, 1))
    only = rng.choice((None, 1, 2))

    def change(r: Request) -> Request:
        block = _keys(r) // size
        chosen = block >= 0 if only is None else block == only

        def rescaled(rows: Tensor) -> Tensor:
            blocks = [torch.arange(i, min(i + size, r.len_k)) for i in range(0, r.len_k, size)]
            scale = torch.stack([rows[:, tokens].abs().amax((1, 2)) for tokens in blocks], 1).clamp(min=1e-30)
            wrong = torch.where(chosen, (block + by).clamp(0, len(blocks) - 1), block)
            return rows * (scale[:, wrong] / scale[:, block])[..., None]

        return _with(r, what, rescaled)

    of = (
        f"each block of {size} tokens"
        if only is None
        else f"tokens {only * size} to {(only + 1) * size - 1} (block {only} of {size})"
    )
    side = "after" if by > 0 else "before"
    text = f"the {part} of {of} are dequantised with the scale of the block {side}, where there is one"
    return Bug(f"{text} (a scale is the largest absolute value in a block of a kv head)", _alone(change))


def phantoms(rng: random.Random) -> Bug:
    n, score = rng.choice((1, 2, 3, 4, 8, 16)), rng.choice((0, 0, 0, 1, 2))

    def change(r: Request) -> Tensor:
        logits = scores(r)
        more = torch.cat([logits, logits.new_full((*logits.shape[:2], n), score)], -1)
        return _weights(more)[..., : r.len_k] @ r.v[r.kv_head]

    return Bug(
        f"the denominator of the softmax counts {_count(n, 'key')} too many, with score {score} and value 0",
        _alone(change),
    )


def soft_cap(rng: random.Random) -> Bug:
    cap, hard = rng.choice((0.5, 1.0, 1.5, 2.0, 3.0)), rng.random() < 0.3

    def change(r: Request) -> Tensor:
        logits = scores(r)
        capped = logits.clamp(-cap, cap) if hard else cap * (logits / cap).tanh()
        return _weighted(r, capped.masked_fill(~r.visible, -math.inf))

    how = (
        f"clamped to between -{cap:g} and {cap:g}"
        if hard
        else f"soft-capped at {cap:g} (s becomes {cap:g} tanh(s / {cap:g}))"
    )
    return Bug(f"scaled scores are {how}", _alone(change))


Importance = Callable[[Tensor, Tensor], Tensor]
"""(log-sum-exps, largest scores) of parts of the keys -> what their outputs are merged by. All are [parts, heads, len_q, 1],
and -inf where a query sees no key of a part."""


def _merged(r: Request, edges: Sequence[int], importance: Importance) -> Tensor:
    """Parts of the keys, from edge to edge, attended to alone and merged by the softmax of their importance."""
    logits, values = scores(r), r.v[r.kv_head]
    parts = [(logits[..., i:j], values[:, i:j]) for i, j in pairwise(edges)]
    outs = torch.stack([_weights(part) @ v for part, v in parts])
    lse = torch.stack([part.logsumexp(-1, keepdim=True) for part, _ in parts])
    largest = torch.stack([part.amax(-1, keepdim=True) for part, _ in parts])
    return (importance(lse, largest).softmax(0).nan_to_num(0.0) * outs).sum(0)


def bases_mixed(rng: random.Random) -> Bug:
    log2e = math.log2(math.e)
    words, cached, new = rng.choice(
        (
            ("the log-sum-exp of the cached keys is in base 2 and taken for base e", log2e, 1.0),
            ("the log-sum-exp of the new keys is in base 2 and taken for base e", 1.0, log2e),
            ("the log-sum-exps of both are in base 2 and taken for base e", log2e, log2e),
            ("the log-sum-exp of the cached keys is in base e and taken for base 2", 1 / log2e, 1.0),
            ("the log-sum-exps of both are in base e and taken for base 2", 1 / log2e, 1 / log2e),
        )
    )

    def change(r: Request) -> Changed:
        factors = r.q.new_tensor([cached, new])[:, None, None, None]
        return _merged(r, [0, r.prefix, r.len_k], lambda lse, largest: lse * factors) if r.prefix else r

    return Bug(
        f"cached and new keys are attended to alone and merged by their log-sum-exps, but {words}", _alone(change)
    )


def exponent_of_another_base(rng: random.Random) -> Bug:
    cached, twice = rng.random() < 0.5, rng.random() < 0.5
    factor = math.log2(math.e) if twice else math.log(2)
    of, rest = ("cached", "new") if cached else ("new", "cached")
    how = (
        "exp is taken of scores that were multiplied by log2(e) for exp2"
        if twice
        else "2 instead of e is raised to the scores"
    )
    changed = _alone(lambda r: _weighted(r, scores(r) * torch.where((_keys(r) < r.prefix) == cached, factor, 1.0)))
    return Bug(f"for {of} keys, {how}; for {rest} keys, the exponential is right", changed)


def parts_merged(rng: random.Random) -> Bug:
    size = rng.choice((8, 16, 32, 64))
    variants: tuple[tuple[str, Importance], ...] = (
        ("by their largest scores instead of their log-sum-exps", lambda lse, largest: largest),
        ("with equal weights", lambda lse, largest: torch.where(lse.isfinite(), 0.0, lse)),
        ("by the log-sum-exps of the next q head, in a circle", lambda lse, largest: lse.roll(-1, 1)),
    )
    words, importance = rng.choice(variants)
    changed = _alone(lambda r: _merged(r, [*range(0, r.len_k, size), r.len_k], importance))
    return Bug(f"parts of {size} keys are attended to alone and merged {words}", changed)


# Mixtures


_SHARES = ((1.0, 0.1), (1.0, 0.25), (0.5, 0.5), (0.9, 0.1), (0.75, 0.25))
"""(share of the right output, share of something else)."""


def _sum(share: float, part: float, of: str) -> str:
    """A clause for a sum of the right output and something else."""
    return (
        f"{part:g} times {of} is added to each output"
        if share == 1
        else f"each output is {share:g} times the right one plus {part:g} times {of}"
    )


def output_of_row_added(rng: random.Random) -> Bug:
    (share, part), by = rng.choice(_SHARES), rng.choice((1, 1, 2, 4))

    def change(r: Request) -> Tensor:
        out = _attend(r)
        return share * out + part * torch.cat([out[:, :by], out[:, : max(0, r.len_q - by)]], 1)[:, : r.len_q]

    return Bug(
        _sum(share, part, f"the right output of the new token {_away(by)}before it ({_firsts(by)} its own)"),
        _alone(change),
    )


def output_of_head_added(rng: random.Random) -> Bug:
    (share, part), by = rng.choice(_SHARES), rng.choice((1, 1, 2, 3))
    changed = _alone(lambda r: share * _attend(r) + part * _attend(r).roll(-by, 0))
    return Bug(_sum(share, part, f"the right output of the q head {_away(by)}after it (in a circle)"), changed)


def output_of_sequence_added(rng: random.Random) -> Bug:
    (share, part), which = rng.choice(_SHARES), _neighbour(rng)

    def change(batch: list[Request], b: int) -> Tensor:
        out, other = _attend(batch[b]), _other(which, batch, b)
        if other is None:
            return out
        n = min(batch[b].len_q, other.len_q)
        return torch.cat([share * out[:, :n] + part * _attend(other)[:, :n], out[:, n:]], 1)

    text = _sum(share, part, f"the right output of the new token with the same index in {which[0]}")
    return Bug(f"{text}, where there is one", _among(change))


def rows_averaged(rng: random.Random) -> Bug:
    part, what = rng.choice((("keys", "k"), ("values", "v"), ("keys and the values", "kv")))
    by = rng.choice((1, 1, 2, 4, 8))

    def change(r: Request) -> Request:
        before = (_keys(r) - by).clamp(min=0)
        return _with(r, what, lambda rows: (rows + rows[:, before]) / 2)

    before = f"the token {_away(by)}before (token 0 where there is none)"
    return Bug(f"the {part} of tokens are averages of their own and those of {before}", _alone(change))


def queries_averaged(rng: random.Random) -> Bug:
    part = rng.choice((0.25, 0.5))

    def change(r: Request) -> Request:
        return replace(r, q=(1 - part) * r.q + part * r.q[:, (_rows(r) - 1).clamp(min=0)])

    text = f"the query of a new token is {1 - part:g} times its own plus {part:g} times that of the new token before"
    return Bug(f"{text} (the first is right)", _alone(change))


def rows_smeared(rng: random.Random) -> Bug:
    part = rng.choice((0.1, 0.25, 0.5))

    def change(r: Request) -> Tensor:
        out = _attend(r)
        for i in range(1, r.len_q):
            out[:, i] = (1 - part) * out[:, i] + part * out[:, i - 1]
        return out

    own, rest = f"{1 - part:g} times the right output", f"{part:g} times the average up to the new token before"
    return Bug(
        f"the outputs of a sequence are a running average over its new tokens: {own} plus {rest}", _alone(change)
    )


def uniform_part(rng: random.Random) -> Bug:
    share, part = rng.choice(_SHARES)
    changed = _alone(lambda r: share * _attend(r) + part * _attend(replace(r, scale=0.0)))
    return Bug(_sum(share, part, "the mean of the values that the query sees"), changed)


def own_value_added(rng: random.Random) -> Bug:
    part = rng.choice((0.05, 0.1, 0.25, 0.5, 1.0))
    changed = _alone(lambda r: _attend(r) + part * r.v[r.kv_head][:, r.prefix :])
    return Bug(_sum(1, part, "the value of the query's own token"), changed)


def weights_of_two_heads(rng: random.Random) -> Bug:
    part = rng.choice((0.1, 0.25, 0.5))

    def change(r: Request) -> Tensor:
        own = _weights(scores(r))
        return ((1 - part) * own + part * own.roll(-1, 0)) @ r.v[r.kv_head]

    mixed = f"{1 - part:g} times its own plus {part:g} times those of the next q head, in a circle"
    return Bug(f"the weights of a q head, on its own values, are {mixed}", _alone(change))


# State


def _inner(rng: random.Random) -> Bug:
    """A bug of another group, for one that depends on the calls before."""
    return rng.choice(TEMPLATES[rng.choice([group for group in TEMPLATES if group != "state"])])(rng)


def _sometimes(words: str, when: Callable[[AttentionCall, Memory], bool], inner: Bug) -> Bug:
    def effect(call: AttentionCall, memory: Memory) -> Tensor:
        return inner.effect(call, memory) if when(call, memory) else attention(call)

    return Bug(f"{words}, {inner.text}", effect, names_heads=inner.names_heads)


def from_call_on(rng: random.Random) -> Bug:
    n = rng.choice((2, 3, 4, 6, 8))
    return _sometimes(
        f"from the {_ordinal(n)} call of the kernel on", lambda call, memory: memory.number >= n, _inner(rng)
    )


def every_nth_call(rng: random.Random) -> Bug:
    n = rng.choice((2, 3, 4, 5))
    words = f"in every {_ordinal(n)} call of the kernel (the {_ordinal(n)}, the {_ordinal(2 * n)}, …)"
    return _sometimes(words, lambda call, memory: memory.number % n == 0, _inner(rng))


def after_another_layer(rng: random.Random) -> Bug:
    words = "in a call with another layer than the call before"
    return _sometimes(
        words, lambda call, memory: memory.previous is not None and memory.previous.layer != call.layer, _inner(rng)
    )


def after_another_phase(rng: random.Random) -> Bug:
    words = "in a call with another phase than the call before"
    return _sometimes(
        words, lambda call, memory: memory.previous is not None and memory.previous.phase != call.phase, _inner(rng)
    )


def first_lengths(rng: random.Random) -> Bug:
    prefix = rng.random() < 0.5

    def effect(call: AttentionCall, memory: Memory) -> Tensor:
        outs = []
        for r, new, length in zip(_batch(call), *memory.first[len(call.lens_q)], strict=True):
            aligned = torch.ones_like(r.visible).tril(length - new) if r.mask.causal else r.visible
            outs.append(_attend(replace(r, visible=aligned if prefix else r.visible & (_keys(r) < length))))
        return _packed(outs)

    first = "of the sequence at its place in the first call with as many sequences"
    aligned = (
        f"the causal mask of a sequence is aligned by the cached prefix p {first} (new token i sees keys 0 to i + p)"
    )
    return Bug(aligned if prefix else f"no query of a sequence sees keys beyond the length {first}", effect)


def _last_output(call: AttentionCall, memory: Memory) -> Tensor | None:
    """What the call before returned, in float32, if it has the shape of this call's output; else None."""
    shape = (*call.q.shape[:2], call.v.shape[2])
    return memory.output.float() if memory.output is not None and memory.output.shape == shape else None


def last_output_added(rng: random.Random) -> Bug:
    part = rng.choice((0.1, 0.25, 0.5, 0.9))

    def effect(call: AttentionCall, memory: Memory) -> Tensor:
        out, last = attention(call), _last_output(call, memory)
        return out if last is None else out + part * last

    return Bug(f"{_sum(1, part, 'what the call before returned')}, where both have the same shape", effect)


def last_output_again(rng: random.Random) -> Bug:
    def effect(call: AttentionCall, memory: Memory) -> Tensor:
        last = _last_output(call, memory)
        return attention(call) if last is None else last

    return Bug("a call returns what the call before returned, where both outputs have the same shape", effect)


def stale_rows(rng: random.Random) -> Bug:
    part, what = rng.choice((("keys", "k"), ("values", "v"), ("keys and values", "kv")))
    n = rng.choice((1, 4, 16, 64))

    def stale(now: Tensor, old: Tensor) -> Tensor:
        if old.shape[1:] != now.shape[1:]:
            return now
        kept = min(n, len(now), len(old))
        return torch.cat([old[:kept].to(now), now[kept:]])

    def effect(call: AttentionCall, memory: Memory) -> Tensor:
        old = memory.previous
        if old is not None and "k" in what:
            call = replace(call, k=stale(call.k, old.k))
        if old is not None and "v" in what:
            call = replace(call, v=stale(call.v, old.v))
        return attention(call)

    rows = f"the {part} of {_end('first', n, 'token')} of a call (packed, over all sequences)"
    return Bug(f"{rows} are those of the call before, where both calls have as many kv heads", effect)


def _right(call: AttentionCall, memory: Memory) -> Tensor:
    return attention(call)


def output_memory_reused(rng: random.Random) -> Bug:
    by_shape = rng.random() < 0.5

    def after(call: AttentionCall, out: Tensor, memory: Memory) -> Tensor:
        key = (out.dtype, out.device, out.shape if by_shape else None)
        buffer = memory.buffers.get(key)
        if buffer is None or buffer.numel() < out.numel():
            buffer = memory.buffers[key] = out.new_empty(out.numel())
        return buffer[: out.numel()].view(out.shape).copy_(out)

    how = (
        "outputs of one shape share a buffer"
        if by_shape
        else "outputs share a buffer, with a new one where an output does not fit"
    )
    return Bug(f"an output is right when it is returned, and a later call overwrites it ({how})", _right, after)


def inputs_written(rng: random.Random) -> Bug:
    def scaled(call: AttentionCall) -> None:
        call.q.mul_(call.scale)

    def zeroed(call: AttentionCall) -> None:
        call.k[call.cu_seqlens_k[1:].long() - 1] = 0

    def rounded(call: AttentionCall) -> None:
        largest = call.v.abs().amax().clamp(min=1e-30) / 127
        call.v.div_(largest).round_().mul_(largest)

    words, write = rng.choice(
        (
            ("the caller's q is multiplied by the scale in place", scaled),
            ("the caller's key of the last token of each sequence is set to zero in place", zeroed),
            ("the caller's values are rounded to int8 and back in place, with one scale per call", rounded),
        )
    )

    def after(call: AttentionCall, out: Tensor, memory: Memory) -> Tensor:
        write(call)
        return out

    return Bug(f"{words}, after the right output was computed", _right, after)


TEMPLATES: dict[str, tuple[Template, ...]] = {
    "mask": (
        extra_key, key_at_distance_unseen, window, strided_past, keys_unseen, keys_unseen, diagonal, shared_mask, top_left,
        prefix_of_another, strangers_seen,
    ),
    "rows": (
        rows_shifted, rows_shifted, block_before, rows_modulo, pages_swapped, rows_of_another_sequence, rows_of_another_kv_head,
        query_of_another_row, query_of_another_head, heads_swapped, output_moved, output_of_another_sequence, dims_of_output,
        dims_of_scores,
    ),
    "scales": (
        weights_times, scores_times, scores_plus, slope, output_times, scale_of_neighbour, phantoms, soft_cap, bases_mixed,
        exponent_of_another_base, parts_merged,
    ),
    "mix": (
        output_of_row_added, output_of_head_added, output_of_sequence_added, rows_averaged, queries_averaged, rows_smeared,
        uniform_part, own_value_added, weights_of_two_heads,
    ),
    "state": (
        from_call_on, every_nth_call, after_another_layer, after_another_phase, first_lengths, last_output_added,
        last_output_again, stale_rows, output_memory_reused, inputs_written,
    ),
}  # fmt: skip
"""Group -> its templates; one with many variants is listed twice. The groups change the keys that queries see; the rows that
are read or written; scores, weights and scales; sums of outputs; what a call leaves to later ones."""
