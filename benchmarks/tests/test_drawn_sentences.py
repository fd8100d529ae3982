"""The sentences of random faults: bugs and restrictions do what they say.

They are read here by regular expressions and carried out by other code, which is slow and plain.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sample_calls import call_of

# Restrictions: what their words choose


@dataclass(frozen=True)
class Place:
    """One output of a call."""

    layer: int
    phase: str
    batch: int
    head: int
    kv_head: int
    index: int
    new: int
    prefix: int
    position: int

    @property
    def length(self) -> int:
        return self.prefix + self.new


PARITY = {"even": 0, "odd": 1}
RESTRICTIONS: tuple[tuple[str, Callable[..., bool]], ...] = (
    (r"in q head (\d+)", lambda p, n: p.head == n),
    (r"in (even|odd) q heads", lambda p, n: p.head % 2 == n),
    (r"in q heads from (\d+) on", lambda p, n: p.head >= n),
    (r"in the q heads of kv head (\d+)", lambda p, n: p.kv_head == n),
    (r"in layer (\d+)", lambda p, n: p.layer == n),
    (r"in (even|odd) layers", lambda p, n: p.layer % 2 == n),
    (r"in layers from (\d+) on", lambda p, n: p.layer >= n),
    (r"in extend calls", lambda p: p.phase == "extend"),
    (r"in decode calls", lambda p: p.phase == "decode"),
    (r"in calls with at least (\d+) sequences", lambda p, n: p.batch >= n),
    (r"in calls with one sequence", lambda p: p.batch == 1),
    (r"in calls with exactly 2 sequences", lambda p: p.batch == 2),
    (r"for the first sequence of a call", lambda p: p.index == 0),
    (r"for the last sequence of a call", lambda p: p.index == p.batch - 1),
    (r"for sequence 1 of a call", lambda p: p.index == 1),
    (r"for sequences that are not the first of a call", lambda p: p.index != 0),
    (r"for sequences with a cached prefix", lambda p: p.prefix != 0),
    (r"for sequences without a cached prefix", lambda p: p.prefix == 0),
    (r"for sequences with at least (\d+) cached tokens", lambda p, n: p.prefix >= n),
    (r"for sequences with fewer than (\d+) cached tokens", lambda p, n: p.prefix < n),
    (r"for sequences with at least (\d+) new tokens", lambda p, n: p.new >= n),
    (r"for sequences with fewer than (\d+) new tokens", lambda p, n: p.new < n),
    (r"for sequences with one new token", lambda p: p.new == 1),
    (r"for sequences of at least (\d+) tokens", lambda p, n: p.length >= n),
    (r"for sequences of fewer than (\d+) tokens", lambda p, n: p.length < n),
    (r"for sequences with length mod (\d+) = (\d+)", lambda p, m, n: p.length % m == n),
    (r"for sequences whose length is no multiple of (\d+)", lambda p, n: p.length % n != 0),
    (r"for queries at positions from (\d+) on", lambda p, n: p.position >= n),
    (r"for queries at positions below (\d+)", lambda p, n: p.position < n),
    (r"for queries at positions that are multiples of (\d+)", lambda p, n: p.position % n == 0),
)  # fmt: skip


def number(word: str) -> float | str:
    """A number or a word of a clause; whole numbers are ints."""
    if re.fullmatch(r"-?[\d.]+", word):
        return float(word) if "." in word else int(word)
    return PARITY.get(word, word)


def read(table: tuple[tuple[str, Any], ...], words: str) -> tuple[Any, list[Any]]:
    """What a clause means by the only entry of a table that fits, and its numbers."""
    found = [(meaning, match) for pattern, meaning in table if (match := re.fullmatch(pattern, words))]
    assert len(found) == 1, words
    return found[0][0], [number(one) for one in found[0][1].groups()]


AT_THRESHOLDS = [
    (16, 0), (16, 16), (16, 32), (32, 32), (36, 64), (28, 100), (32, 128), (56, 200), (4, 396), (2, 30), (8, 8),
    (64, 1), (1, 31),
]  # fmt: skip
"""Sequences with as many new tokens, cached tokens and tokens as the restrictions compare with."""


@pytest.mark.parametrize("lens", [AT_THRESHOLDS, [(6, 3), (70, 0), (2, 66)], [(1, 129), (1, 7)], [(20, 13)]])
def test_restrictions_choose_what_their_words_say(drawn_faults: ModuleType, lens: list[tuple[int, int]]) -> None:
    kinds = [*drawn_faults.OF_CALLS, *drawn_faults.OF_SEQUENCES, drawn_faults._head]
    drawn = {one.words: one for kind in kinds for seed in range(40) for one in [kind(random.Random(seed))]}
    call = call_of(lens, (8, 2), 2, torch.float32, "cpu")

    assert len({pattern for pattern, _ in RESTRICTIONS for words in drawn if re.fullmatch(pattern, words)}) == len(
        RESTRICTIONS
    )
    for layer, phase in ((1, "extend"), (2, "decode")):
        made = drawn_faults.places(call.with_spec(layer=layer, phase=phase))
        listed = [
            [Place(layer, phase, len(lens), head, head // 4, b, new, prefix, prefix + i) for head in range(8)]
            for b, (new, prefix) in enumerate(lens)
            for i in range(new)
        ]
        for words, restriction in drawn.items():
            meaning, numbers = read(RESTRICTIONS, words)
            expected = torch.tensor([[meaning(place, *numbers) for place in row] for row in listed])
            chosen = torch.ones(expected.shape, dtype=torch.bool) & restriction.holds(made)
            assert torch.equal(chosen, expected), words


# Bugs: what their words compute


KEY_SETS: tuple[tuple[str, Callable[..., bool]], ...] = (
    (r"(\d+) to (\d+) of a sequence", lambda j, prefix, length, a, b: a <= j <= b),
    (r"of every (\d+)(?:nd|rd|th) block of (\d+) keys \(blocks (\d+), .*\)",
     lambda j, prefix, length, n, size, first: (j // size) % n == first),
    (r"(\d+), (\d+), \d+, … of a sequence", lambda j, prefix, length, a, b: j % (b - a) == a),
    (r"that are the first of their sequence", lambda j, prefix, length: j == 0),
    (r"that are the last of their sequence", lambda j, prefix, length: j == length - 1),
    (r"among the last (\d+) of a sequence", lambda j, prefix, length, n: j >= length - n),
    (r"that are cached", lambda j, prefix, length: j < prefix),
    (r"that are new", lambda j, prefix, length: j >= prefix),
)  # fmt: skip

MASKS: tuple[tuple[str, Callable[..., bool]], ...] = (
    (r"each query also sees the key (\d+) after its own", lambda i, j, p, new, right, n: right or j == p + i + n),
    (r"no query sees its own key", lambda i, j, p, new, right: right and j != p + i),
    (r"no query sees the key (\d+) before its own", lambda i, j, p, new, right, n: right and j != p + i - n),
    (r"no query sees keys at a distance of (\d+) or more", lambda i, j, p, new, right, n: right and p + i - j < n),
    (r"of the keys at a distance of (\d+) or more, queries see only those with an index that is a multiple of (\d+)",
     lambda i, j, p, new, right, n, m: right and (p + i - j < n or j % m == 0)),
    (r"the causal mask is shifted (\d+) keys? to the right \(a query also sees the .* after its own\)",
     lambda i, j, p, new, right, n: j <= p + i + n),
    (r"the causal mask is shifted (\d+) keys? to the left \(a query does not see its own key.*\)",
     lambda i, j, p, new, right, n: j <= p + i - n),
    (r"all new tokens of a block of (\d+) new tokens see the keys that the first of them should see",
     lambda i, j, p, new, right, n: j <= p + i // n * n),
    (r"all new tokens of a block of (\d+) new tokens see the keys that the last of them should see",
     lambda i, j, p, new, right, n: j <= p + min(i // n * n + n, new) - 1),
    (r"the causal mask is aligned to the top left \(new token i sees keys 0 to i of its sequence\)",
     lambda i, j, p, new, right: j <= i),
)  # fmt: skip

ROWS: tuple[tuple[str, Callable[..., int]], ...] = (
    (r"token j of a sequence has the (?:key|value|key and value) of token j \+ (\d+) \(of the last token where there is none\)",
     lambda j, p, length, n: min(j + n, length - 1)),
    (r"token j of a sequence has the (?:key|value|key and value) of token j - (\d+) \(of token 0 where there is none\)",
     lambda j, p, length, n: max(j - n, 0)),
    (r"cached token j of a sequence has the (?:key|value|key and value) of token j \+ (\d+) \(of the last token .*\)",
     lambda j, p, length, n: min(j + n, length - 1) if j < p else j),
    (r"cached token j of a sequence has the (?:key|value|key and value) of token j - (\d+) \(of token 0 .*\)",
     lambda j, p, length, n: max(j - n, 0) if j < p else j),
    (r"new token j of a sequence has the (?:key|value|key and value) of token j \+ (\d+) \(of the last token .*\)",
     lambda j, p, length, n: min(j + n, length - 1) if j >= p else j),
    (r"new token j of a sequence has the (?:key|value|key and value) of token j - (\d+) \(of token 0 .*\)",
     lambda j, p, length, n: max(j - n, 0) if j >= p else j),
    (r"token j of a sequence has the (?:key|value|key and value) of token j mod (\d+)", lambda j, p, length, n: j % n),
    (r"each token from (\d+) on has the (?:key|value|key and value) of the token \d+ before it: .*",
     lambda j, p, length, n: j - n if j >= n else j),
    (r"each of the tokens (\d+) to (\d+) of a sequence has the (?:key|value|key and value) of the token (\d+) before it: .*",
     lambda j, p, length, a, b, n: j - n if a <= j <= b else j),
    (r"the (?:key|value)s of pages (\d+) and (\d+) of (\d+) tokens are swapped, their (?:key|value)s are not, .*",
     lambda j, p, length, a, b, n: {a: b, b: a}.get(j // n, j // n) * n + j % n if length >= (b + 1) * n else j),
)  # fmt: skip

MASK_TEMPLATES = "extra_key key_at_distance_unseen window strided_past diagonal shared_mask top_left"
ROW_TEMPLATES = "rows_shifted block_before rows_modulo pages_swapped"
KEY_SET_TEMPLATES = "keys_unseen weights_times scores_times scores_plus"
"""Templates that are read by the keys that queries see, the rows that they read, and sets of keys."""
F = r"(-?[\d.]+)"
LENS = [(20, 70), (9, 0), (1, 33)]


def attend(
    call: AttentionCall,
    sees: Callable[..., bool] = lambda i, j, p, new, right: right,
    row: Callable[..., int] = lambda j, p, length: j,
    parts: str = "",
    score: Callable[..., tuple[float, float, float]] = lambda j, p, length: (1.0, 1.0, 0.0),
) -> Tensor:
    """Attention by loops over queries and keys.

    Args:
        call: the call.
        sees: (i, j, prefix, new tokens, whether the right mask lets it) -> whether new token i sees key j.
        row: (j, prefix, length) -> the token from which key or value j is read.
        parts: which of them is, "k", "v" or "kv".
        score: (j, prefix, length) -> factor of the weights after the softmax; factor and term of the scores before it.
    """
    out = torch.zeros_like(oracle(call))
    groups, q0, k0 = call.q.shape[1] // call.k.shape[1], 0, 0
    for new, length in zip(call.lens_q, call.lens_k, strict=True):
        p, q = length - new, call.q.double()
        k, v = (t.double().repeat_interleave(groups, 1) for t in (call.k, call.v))
        moved = [k0 + row(j, p, length) for j in range(length)]
        own = list(range(k0, k0 + length))
        keys, values = k[moved if "k" in parts else own], v[moved if "v" in parts else own]
        after, factors, terms = torch.tensor([score(j, p, length) for j in range(length)], dtype=torch.float64).unbind(
            1
        )
        for i in range(new):
            seen = [j for j in range(length) if sees(i, j, p, new, j <= p + i)]
            if seen:
                logits = call.scale * torch.einsum("hd,khd->hk", q[q0 + i], keys[seen]) * factors[seen] + terms[seen]
                out[q0 + i] = torch.einsum("hk,khd->hd", logits.softmax(-1) * after[seen], values[seen])
        q0, k0 = q0 + new, k0 + length
    return out


def drawn(drawn_bugs: ModuleType, names: str, seeds: range = range(60)) -> dict[str, Any]:
    """The bugs of some templates, by their text."""
    made = [getattr(drawn_bugs, name)(random.Random(seed)) for name in names.split() for seed in seeds]
    return {bug.text: bug for bug in made}


def with_ones(text: str) -> str:
    """A clause in which "the key after" is "the key 1 after"."""
    return re.sub(r"the (key|token|new token|q head) (after|before)", r"the \1 1 \2", text)


def with_numbers(meaning: Callable[..., Any], numbers: list[Any]) -> Callable[..., Any]:
    return lambda *place: meaning(*place, *numbers)


def either(chosen: Callable[..., bool], change: Any, none: Any) -> Callable[..., Any]:
    return lambda *place: change if chosen(*place) else none


def agree(bug: Any, memory: Any, **said: Any) -> bool:
    """Whether a bug computes what `attend` does with what was said."""
    call = call_of(LENS, (4, 2), 4, torch.float32, "cpu")
    return bool(torch.allclose(bug.effect(call, memory).double(), attend(call, **said), rtol=0, atol=1e-4))


def test_masks_show_the_keys_that_their_words_say(drawn_bugs: ModuleType) -> None:
    bugs = drawn(drawn_bugs, MASK_TEMPLATES)
    read_here = set()

    for text, bug in bugs.items():
        meaning, numbers = read(MASKS, with_ones(text))
        read_here.add(meaning)
        assert agree(bug, drawn_bugs.Memory(), sees=with_numbers(meaning, numbers)), text
    assert len(read_here) == len(MASKS)


def test_keys_and_values_are_read_from_the_tokens_that_the_words_say(drawn_bugs: ModuleType) -> None:
    bugs = drawn(drawn_bugs, ROW_TEMPLATES)
    read_here = set()

    for text, bug in bugs.items():
        meaning, numbers = read(ROWS, text)
        read_here.add(meaning)
        parts = text if text.startswith("the ") else text.split(" has the ")[1]
        parts = "kv" if "key and value" in parts else "k" if re.match(r"(the )?key", parts) else "v"

        assert agree(bug, drawn_bugs.Memory(), row=with_numbers(meaning, numbers), parts=parts), text
    assert len(read_here) == len(ROWS)


def test_sets_of_keys_are_those_that_the_words_say(drawn_bugs: ModuleType) -> None:
    bugs = drawn(drawn_bugs, KEY_SET_TEMPLATES)
    read_here = set()
    changes: tuple[tuple[str, Callable[..., tuple[float, float, float]]], ...] = (
        (r"no query sees keys (.*)", lambda found: (0.0, 1.0, -1e9)),
        (rf"after the softmax, the weights of keys (.*) are multiplied by {F}", lambda found: (float(found[2]), 1.0, 0.0)),
        (rf"the scores of keys (.*) are multiplied by {F}", lambda found: (1.0, float(found[2]), 0.0)),
        (rf"(){F} is added to the scaled scores of keys (.*)", lambda found: (1.0, 1.0, float(found[2]))),
        (rf"(){F} is subtracted from the scaled scores of keys (.*)", lambda found: (1.0, 1.0, -float(found[2]))),
    )  # fmt: skip

    for text, bug in bugs.items():
        if re.match("the scores of (all keys|keys at a distance)", text):  # read below
            continue
        ((found, change_of),) = [
            (match, change) for pattern, change in changes if (match := re.fullmatch(pattern, text))
        ]
        meaning, numbers = read(KEY_SETS, found[1] or found[3])
        read_here.add(meaning)

        score = either(with_numbers(meaning, numbers), change_of(found), (1.0, 1.0, 0.0))
        assert agree(bug, drawn_bugs.Memory(), score=score), text
    assert len(read_here) == len(KEY_SETS)


# Other bugs: each clause as a function of the sequences of a call


@dataclass(frozen=True)
class Sequence:
    """One sequence in float64, [tokens, q heads, dim] each; k and v are repeated for the q heads of each of the kv heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    kv_heads: int

    @property
    def prefix(self) -> int:
        return len(self.k) - len(self.q)

    def logits(self) -> Tensor:
        """[q heads, new tokens, tokens]."""
        found = self.scale * torch.einsum("ihd,jhd->hij", self.q, self.k)
        for i in range(len(self.q)):
            found[:, i, self.prefix + i + 1 :] = -math.inf
        return found

    def out(self, weights: Tensor | None = None) -> Tensor:
        weights = self.logits().softmax(-1) if weights is None else weights
        return torch.einsum("hij,jhd->ihd", weights, self.v)

    def part(self, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sum-exp and largest score of some keys; [new tokens, q heads, dim or 1]."""
        logits = self.logits()[..., first:end]
        lse, largest = logits.logsumexp(-1).T[..., None], logits.amax(-1).T[..., None]
        return torch.einsum("hij,jhd->ihd", logits.softmax(-1).nan_to_num(0.0), self.v[first:end]), lse, largest


def split(call: AttentionCall) -> list[Sequence]:
    groups, found, q0, k0 = call.q.shape[1] // call.k.shape[1], [], 0, 0
    for new, length in zip(call.lens_q, call.lens_k, strict=True):
        k, v = (t[k0 : k0 + length].double().repeat_interleave(groups, 1) for t in (call.k, call.v))
        found.append(Sequence(call.q[q0 : q0 + new].double(), k, v, call.scale, call.k.shape[1]))
        q0, k0 = q0 + new, k0 + length
    return found


def merged(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """(output, weight of it) of several parts."""
    return sum(out * weight for out, weight in parts) / sum(weight for _, weight in parts)  # type: ignore[return-value]


def heads_of(s: Sequence, change: Callable[[int], int]) -> list[int]:
    return [change(h) % s.q.shape[1] for h in range(s.q.shape[1])]


def neighbour(all_: list[Sequence], b: int, which: str) -> Sequence | None:
    other = {"before it": b - 1, "after it": b + 1, "of the call": 0}[which]
    return all_[other] if 0 <= other < len(all_) and other != b else None


def of_other(all_: list[Sequence], b: int, which: str, own: float = 0.0, part: float = 1.0) -> Tensor:
    out, other = all_[b].out(), neighbour(all_, b, which)
    if other is not None:
        for i in range(min(len(out), len(other.q))):
            out[i] = own * out[i] + part * other.out()[i]
    return out


def rows_of_other(all_: list[Sequence], b: int, parts: str, which: str) -> Tensor:
    s, other = all_[b], neighbour(all_, b, which)
    k, v = s.k.clone(), s.v.clone()
    for j in range(min(len(k), len(other.k)) if other is not None else 0):
        k[j], v[j] = other.k[j], other.v[j]  # type: ignore[union-attr]
    return replace(s, k=k if "key" in parts else s.k, v=v if "value" in parts else s.v).out()


def strangers(all_: list[Sequence], b: int, words: str, which: str) -> Tensor:
    s, other = all_[b], neighbour(all_, b, which)
    if other is None:
        return s.out()
    n = int((re.search(r"\d+", words) or ["1"])[0])
    chosen = {"all": list(range(len(other.k))), "the first": list(range(n)), "the last": list(range(-n, 0))}
    rows = chosen[words.removesuffix("keys").removesuffix("key").strip(" 0123456789")]
    rows = [j for j in rows if -len(other.k) <= j < len(other.k)]
    more = s.scale * torch.einsum("ihd,jhd->hij", s.q, other.k[rows])
    weights = torch.cat([s.logits(), more], -1).softmax(-1)
    return replace(s, v=torch.cat([s.v, other.v[rows]])).out(weights)


def aligned_by_other(all_: list[Sequence], b: int, which: str) -> Tensor:
    s, other = all_[b], neighbour(all_, b, which)
    if other is None:
        return s.out()
    p, logits = other.prefix, s.scale * torch.einsum("ihd,jhd->hij", s.q, s.k)
    for i in range(len(s.q)):
        logits[:, i, i + p + 1 :] = -math.inf
    return s.out(logits.softmax(-1))


def shifted_rows(x: Tensor, n: int, first: float = 1.0) -> Tensor:
    return torch.stack([x[i - n] if i >= n else first * x[i] for i in range(len(x))])


def distances(s: Sequence) -> Tensor:
    return torch.tensor([[float(abs(s.prefix + i - j)) for j in range(len(s.k))] for i in range(len(s.q))]).double()


def running(out: Tensor, own: float, part: float) -> Tensor:
    rows = [out[0]]
    for i in range(1, len(out)):
        rows.append(own * out[i] + part * rows[-1])
    return torch.stack(rows)


def exponents(s: Sequence, of: str, how: str) -> Tensor:
    logits = s.logits()
    keys = slice(0, s.prefix) if of == "cached" else slice(s.prefix, None)
    logits[..., keys] *= math.log(2) if how.startswith("2 instead") else 1 / math.log(2)
    return s.out(logits.softmax(-1))


def bases(s: Sequence, cached: float, new: float) -> Tensor:
    if not s.prefix:
        return s.out()
    (a, a_lse, _), (b, b_lse, _) = s.part(0, s.prefix), s.part(s.prefix, len(s.k))
    return merged([(a, (cached * a_lse).exp()), (b, (new * b_lse).exp())])


def parts(s: Sequence, size: int, weight: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    cut = [s.part(j, min(j + size, len(s.k))) for j in range(0, len(s.k), size)]
    return merged([(out, weight(lse, largest)) for out, lse, largest in cut])


def averaged(s: Sequence, which: str, n: int) -> Tensor:
    before = [max(j - n, 0) for j in range(len(s.k))]
    k, v = (s.k + s.k[before]) / 2, (s.v + s.v[before]) / 2
    return replace(s, k=k if "keys" in which else s.k, v=v if "values" in which else s.v).out()


def kv_heads_of(s: Sequence, which: str, of: Callable[[int, int], int]) -> Tensor:
    group = s.q.shape[1] // s.kv_heads
    heads = [of(h, h // group) % s.kv_heads * group for h in range(s.q.shape[1])]
    return replace(s, k=s.k[:, heads] if "keys" in which else s.k, v=s.v[:, heads] if "values" in which else s.v).out()


def dims(x: Tensor, change: Callable[[int, int], int]) -> Tensor:
    return x[..., [change(c, x.shape[-1]) for c in range(x.shape[-1])]]


def without(x: Tensor, zero: Callable[[int, int], bool]) -> Tensor:
    x = x.clone()
    for c in range(x.shape[-1]):
        if zero(c, x.shape[-1]):
            x[..., c] = 0
    return x


def block_scales(s: Sequence, which: str, only: int | None, size: int, side: str) -> Tensor:
    changed = (s.k if which == "keys" else s.v).clone()
    group, right = changed.shape[1] // s.kv_heads, changed.clone()
    for start in range(0, len(changed), size):
        other = start + size if side == "after" else start - size
        if 0 <= other < len(changed) and (only is None or start == only):
            for h in range(0, changed.shape[1], group):
                ratio = right[other : other + size, h].abs().max() / right[start : start + size, h].abs().max()
                changed[start : start + size, h : h + group] *= ratio
    return (replace(s, k=changed) if which == "keys" else replace(s, v=changed)).out()


OTHER = r"the (?:first )?sequence (before it|after it|of the call)"
LOG2E = math.log2(math.e)
BASES = "cached and new keys are attended to alone and merged by their log-sum-exps, but the log-sum-exp"

ALONE: tuple[tuple[str, Callable[..., Tensor]], ...] = (
    (rf"the output is multiplied by {F}", lambda s, f: f * s.out()),
    (rf"the outputs of q heads {F} and {F} are swapped",
     lambda s, a, b: s.out()[:, heads_of(s, lambda h: {a: b, b: a}.get(h, h))]),
    (rf"each q head has the query of the q head {F} after it, in a circle",
     lambda s, n: replace(s, q=s.q[:, heads_of(s, lambda h: h + n)]).out()),
    (rf"each q head has the query of the q head {F} before it, in a circle",
     lambda s, n: replace(s, q=s.q[:, heads_of(s, lambda h: h - n)]).out()),
    (r"q head h reads the (keys|values|keys and values) of the kv head after its own, in a circle",
     lambda s, which: kv_heads_of(s, which, lambda h, kv: kv + 1)),
    (r"q head h reads the (keys|values|keys and values) of kv head h mod the number of kv heads",
     lambda s, which: kv_heads_of(s, which, lambda h, kv: h)),
    (rf"new token i has the query of new token i - {F} \(.* its own\)", lambda s, n: replace(s, q=shifted_rows(s.q, n)).out()),
    (rf"new token i has the output of new token i - {F} \(.* its own\)", lambda s, n: shifted_rows(s.out(), n)),
    (rf"new token i has the output of new token i - {F} \(.* an output of zero\)", lambda s, n: shifted_rows(s.out(), n, 0.0)),
    (r"the dimensions of the output are in reverse order", lambda s: dims(s.out(), lambda c, d: d - 1 - c)),
    (rf"dimension c of the output holds dimension c \+ {F}, in a circle", lambda s, n: dims(s.out(), lambda c, d: (c + n) % d)),
    (r"the first and the second half of the output's dimensions are swapped",
     lambda s: dims(s.out(), lambda c, d: (c + d // 2) % d)),
    (r"the last dimension of the output is zero", lambda s: without(s.out(), lambda c, d: c == d - 1)),
    (rf"the last {F} dimensions of the output are zero", lambda s, n: without(s.out(), lambda c, d: c >= d - n)),
    (rf"the output is zero from dimension {F} on", lambda s, n: without(s.out(), lambda c, d: c >= n)),
    (r"the last dimension of q and k is left out of the scores",
     lambda s: replace(s, q=without(s.q, lambda c, d: c == d - 1)).out()),
    (rf"the last {F} dimensions of q and k are left out of the scores",
     lambda s, n: replace(s, q=without(s.q, lambda c, d: c >= d - n)).out()),
    (rf"dimension c of each key is read from its dimension c \+ {F}, in a circle",
     lambda s, n: replace(s, k=dims(s.k, lambda c, d: (c + n) % d)).out()),
    (r"the first and the second half of the keys' dimensions are swapped",
     lambda s: replace(s, k=dims(s.k, lambda c, d: (c + d // 2) % d)).out()),
    (rf"the scores of all keys are multiplied by {F}", lambda s, f: s.out((f * s.logits()).softmax(-1))),
    (rf"the scores of keys at a distance of {F} or more are multiplied by {F}",
     lambda s, n, f: s.out((s.logits() * torch.where(distances(s) >= n, float(f), 1.0)).softmax(-1))),
    (rf"the scaled score of a key loses {F} per token of its absolute distance to the query",
     lambda s, f: s.out((s.logits() - f * distances(s)).softmax(-1))),
    (rf"the denominator of the softmax counts {F} keys? too many, with score {F} and value 0",
     lambda s, n, score: s.out(s.logits().exp() / (s.logits().exp().sum(-1, keepdim=True) + n * math.exp(score)))),
    (rf"scaled scores are soft-capped at {F} \(.*\)",
     lambda s, c: s.out(torch.where(s.logits().isfinite(), c * (s.logits() / c).tanh(), -math.inf).softmax(-1))),
    (rf"scaled scores are clamped to between {F} and {F}",
     lambda s, a, b: s.out(torch.where(s.logits().isfinite(), s.logits().clamp(a, b), -math.inf).softmax(-1))),
    (rf"{BASES} of the cached keys is in base 2 and taken for base e", lambda s: bases(s, LOG2E, 1)),
    (rf"{BASES} of the new keys is in base 2 and taken for base e", lambda s: bases(s, 1, LOG2E)),
    (rf"{BASES}s of both are in base 2 and taken for base e", lambda s: bases(s, LOG2E, LOG2E)),
    (rf"{BASES} of the cached keys is in base e and taken for base 2", lambda s: bases(s, 1 / LOG2E, 1)),
    (rf"{BASES}s of both are in base e and taken for base 2", lambda s: bases(s, 1 / LOG2E, 1 / LOG2E)),
    (r"for (cached|new) keys, (.*); for (?:cached|new) keys, the exponential is right", exponents),
    (rf"parts of {F} keys are attended to alone and merged by their largest scores instead of their log-sum-exps",
     lambda s, n: parts(s, n, lambda lse, largest: largest.exp())),
    (rf"parts of {F} keys are attended to alone and merged with equal weights",
     lambda s, n: parts(s, n, lambda lse, largest: lse.isfinite().double())),
    (rf"parts of {F} keys are attended to alone and merged by the log-sum-exps of the next q head, in a circle",
     lambda s, n: parts(s, n, lambda lse, largest: lse[:, heads_of(s, lambda h: h + 1)].exp())),
    (rf"the (keys|values) of each block of {F} tokens are dequantised with the scale of the block (after|before).*",
     lambda s, which, size, side: block_scales(s, which, None, size, side)),
    (rf"the (keys|values) of tokens {F} to \d+ \(block . of {F}\) are dequantised with the scale of the block (after|before).*",
     lambda s, which, only, size, side: block_scales(s, which, only, size, side)),
    (rf"{F} times the right output of the new token {F} before it \(.* its own\) is added to each output",
     lambda s, f, n: s.out() + f * shifted_rows(s.out(), n)),
    (rf"each output is {F} times the right one plus {F} times the right output of the new token {F} before it \(.* its own\)",
     lambda s, a, f, n: a * s.out() + f * shifted_rows(s.out(), n)),
    (rf"{F} times the right output of the q head {F} after it \(in a circle\) is added to each output",
     lambda s, f, n: s.out() + f * s.out()[:, heads_of(s, lambda h: h + n)]),
    (rf"each output is {F} times the right one plus {F} times the right output of the q head {F} after it \(in a circle\)",
     lambda s, a, f, n: a * s.out() + f * s.out()[:, heads_of(s, lambda h: h + n)]),
    (r"the (keys|values|keys and the values) of tokens are averages of their own and those of the token "
     rf"{F} before \(token 0 where there is none\)", averaged),
    (rf"the query of a new token is {F} times its own plus {F} times that of the new token 1 before \(the first is right\)",
     lambda s, a, f: replace(s, q=a * s.q + f * shifted_rows(s.q, 1)).out()),
    (rf"the outputs of a sequence are a running average over its new tokens: {F} times the right .* plus {F} times the .*",
     lambda s, a, f: running(s.out(), a, f)),
    (rf"{F} times the mean of the values that the query sees is added to each output",
     lambda s, f: s.out() + f * replace(s, q=0 * s.q).out()),
    (rf"each output is {F} times the right one plus {F} times the mean of the values that the query sees",
     lambda s, a, f: a * s.out() + f * replace(s, q=0 * s.q).out()),
    (rf"{F} times the value of the query's own token is added to each output", lambda s, f: s.out() + f * s.v[s.prefix :]),
    (rf"the weights of a q head, on its own values, are {F} times its own plus {F} times those of the next q head, in a circle",
     lambda s, a, f: s.out(a * s.logits().softmax(-1) + f * s.logits().softmax(-1)[heads_of(s, lambda h: h + 1)])),
)  # fmt: skip

AMONG: tuple[tuple[str, Callable[..., Tensor]], ...] = (
    (rf"token j of a sequence has the (key|value|key and value) of token j of {OTHER}, where that has one", rows_of_other),
    (rf"new token i of a sequence has the output of new token i of {OTHER}, where that has one", of_other),
    (rf"{F} times the right output of the new token with the same index in {OTHER} is added to each output, where there is one",
     lambda all_, b, f, which: of_other(all_, b, which, 1, f)),
    (rf"each output is {F} times the right one plus {F} times the right output of the new token with the .* index in {OTHER}.+",
     lambda all_, b, a, f, which: of_other(all_, b, which, a, f)),
    (rf"each query also sees (.*) of {OTHER}", strangers),
    (rf"the causal mask of a sequence is aligned by the cached prefix p of {OTHER} \(new token i sees keys 0 to i \+ p\)",
     aligned_by_other),
)  # fmt: skip


def test_other_bugs_compute_what_their_words_say(drawn_bugs: ModuleType) -> None:
    templates = {one.__name__ for group, of in drawn_bugs.TEMPLATES.items() if group != "state" for one in of}
    read_above = f"{MASK_TEMPLATES} {ROW_TEMPLATES} {KEY_SET_TEMPLATES}".split()
    others = templates - set(read_above) | {"scores_times"}
    bugs = drawn(drawn_bugs, " ".join(sorted(others)))
    call = call_of([(7, 20), (9, 0), (1, 33)], (6, 3), 6, torch.float32, "cpu")
    sequences, read_here = split(call), set()

    for text, bug in bugs.items():
        if re.match(r"the scores of keys (?!at a distance)", text):  # read above
            continue
        words = with_ones(text)
        among = any(re.fullmatch(pattern, words) for pattern, _ in AMONG)
        meaning, numbers = read(AMONG if among else ALONE, words)
        read_here.add(meaning)
        expected = [meaning(sequences, b, *numbers) if among else meaning(s, *numbers) for b, s in enumerate(sequences)]
        assert torch.allclose(bug.effect(call, drawn_bugs.Memory()).double(), torch.cat(expected), rtol=0, atol=1e-4), (
            text
        )
    assert len(read_here) == len(ALONE) + len(AMONG)


# Bugs that depend on the calls before


def series() -> list[AttentionCall]:
    """Calls with changes of layer, phase, number of sequences and shape."""
    made = []
    for number, (lens, layer) in enumerate(
        [
            ([(4, 3)], 0),
            ([(4, 3)], 1),
            ([(1, 9), (1, 5)], 1),
            ([(1, 9), (1, 5)], 2),
            ([(2, 30)], 2),
            ([(2, 0)], 2),
            ([(4, 8)], 3),
        ]
        * 2
    ):
        phase = "decode" if len(lens) == 2 else "extend"
        made.append(call_of(lens, (4, 2), 4, torch.float32, "cpu", number).with_spec(layer=layer, phase=phase))
    return made


def outputs(drawn_faults: ModuleType, bug: Any) -> list[Tensor]:
    kernel = drawn_faults.DrawnFault(0, "state", "", bug, ()).kernel()
    return [kernel(call.clone()).double() for call in series()]


WHEN: tuple[tuple[str, Callable[..., bool]], ...] = (
    (r"from the (\d+)(?:nd|rd|th) call of the kernel on, .*", lambda i, calls, n: i + 1 >= n),
    (r"in every (\d+)(?:nd|rd|th) call of the kernel \(.*\), .*", lambda i, calls, n: (i + 1) % n == 0),
    (r"in a call with another layer than the call before, .*", lambda i, calls: i > 0 and calls[i].layer != calls[i - 1].layer),
    (r"in a call with another phase than the call before, .*", lambda i, calls: i > 0 and calls[i].phase != calls[i - 1].phase),
)  # fmt: skip


def test_bugs_in_some_calls_show_in_those_that_the_words_say(drawn_faults: ModuleType, drawn_bugs: ModuleType) -> None:
    bugs = drawn(drawn_bugs, "from_call_on every_nth_call after_another_layer after_another_phase", range(15))
    calls, exact = series(), set()
    right = [oracle(call) for call in calls]

    for text, bug in bugs.items():
        meaning, numbers = read(WHEN, text)
        outs = outputs(drawn_faults, bug)
        wrong = {i for i, out in enumerate(outs) if not torch.allclose(out, right[i], rtol=0, atol=1e-4)}
        said = {i for i in range(len(calls)) if meaning(i, calls, *numbers)}
        assert wrong <= said, text
        if wrong == said:
            exact.add(meaning)
    assert len(exact) == len(WHEN)


def test_what_calls_leave_to_later_ones_is_what_the_words_say(drawn_faults: ModuleType, drawn_bugs: ModuleType) -> None:
    bugs = drawn(drawn_bugs, "first_lengths last_output_added last_output_again stale_rows")
    calls, said = series(), []

    for text, bug in bugs.items():
        outs = outputs(drawn_faults, bug)
        first: dict[int, AttentionCall] = {}
        for i, (call, out) in enumerate(zip(calls, outs, strict=True)):
            of_first = first.setdefault(len(call.lens_q), call)
            right, last = oracle(call), outs[i - 1] if i and outs[i - 1].shape == outs[i].shape else None
            if found := re.fullmatch(
                r"([\d.]+) times what the call before returned is added to .*, where both have the same shape", text
            ):
                expected = right if last is None else right + float(found[1]) * last
            elif text == "a call returns what the call before returned, where both outputs have the same shape":
                expected = right if last is None else last
            elif found := re.fullmatch(
                r"the (keys|values|keys and values) of the first (?:(\d+) )?tokens? of a call .* of the call before, .*",
                text,
            ):
                expected, n = right, int(found[2] or 1)
                if i:
                    k, v = call.k.clone(), call.v.clone()
                    for j in range(min(n, len(k), len(calls[i - 1].k))):
                        k[j], v[j] = calls[i - 1].k[j], calls[i - 1].v[j]
                    expected = oracle(
                        replace(call, k=k if "keys" in found[1] else call.k, v=v if "values" in found[1] else call.v)
                    )
            elif text.startswith(
                "no query of a sequence sees keys beyond the length of the sequence at its place in the first call"
            ):
                expected = torch.cat(
                    [
                        attend(one, sees=lambda i, j, p, new, right, least=length: right and j < least)
                        for one, length in zip(alone(call), of_first.lens_k, strict=True)
                    ]
                )
            else:
                assert text.startswith(
                    "the causal mask of a sequence is aligned by the cached prefix p of the sequence at its place in"
                )
                expected = torch.cat(
                    [
                        attend(one, sees=lambda i, j, p, new, right, by=prefix: j <= i + by)
                        for one, prefix in zip(alone(call), of_first.prefixes, strict=True)
                    ]
                )
            said.append(bool((expected - right).abs().max() > 1e-3))
            assert torch.allclose(out, expected, rtol=0, atol=1e-4), text
    assert sum(said) > len(said) / 4


def test_side_effects_are_those_that_the_words_say(drawn_bugs: ModuleType) -> None:
    bugs = drawn(drawn_bugs, "output_memory_reused inputs_written")
    small, large, other = (
        call_of(lens, (4, 2), 4, torch.float32, "cpu", 1) for lens in ([(2, 3)], [(5, 9), (1, 2)], [(2, 9)])
    )

    assert len(bugs) == 5
    for text, bug in bugs.items():
        memory, right = drawn_bugs.Memory(), oracle(small).float()
        given = small.clone()
        out = bug.after(given, right.clone(), memory)
        assert torch.equal(out, right)
        if text.startswith("an output is right when it is returned, and a later call overwrites it"):
            one_for_all = "outputs share a buffer, with a new one where an output does not fit" in text
            wide = bug.after(large, oracle(large).float(), memory)
            assert torch.equal(out, right)
            bug.after(other, oracle(other).float(), memory)
            assert torch.equal(out, right) == one_for_all
            assert torch.equal(wide, oracle(large).float()) != one_for_all
            again = bug.after(small, right.clone(), memory)
            bug.after(other, oracle(other).float(), memory)
            assert not torch.equal(again, right)
            continue
        expected = small.clone()
        if text.startswith("the caller's q is multiplied by the scale in place"):
            expected.q.mul_(0.5)
        elif text.startswith("the caller's key of the last token of each sequence is set to zero in place"):
            expected.k[4] = 0
        else:
            assert text.startswith("the caller's values are rounded to int8 and back in place, with one scale per call")
            largest = float(small.v.abs().max())
            expected = replace(small, v=torch.round(small.v / largest * 127) * largest / 127)
            assert not torch.equal(given.v, small.v)
        assert all(torch.allclose(getattr(given, name), getattr(expected, name)) for name in "qkv"), text


def alone(call: AttentionCall) -> list[AttentionCall]:
    """The sequences of a call, as calls."""
    q, k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    return [
        replace(call, q=call.q[q[b] : q[b + 1]], k=call.k[k[b] : k[b + 1]], v=call.v[k[b] : k[b + 1]],
                cu_seqlens_q=torch.tensor([0, q[b + 1] - q[b]], dtype=torch.int32),
                cu_seqlens_k=torch.tensor([0, k[b + 1] - k[b]], dtype=torch.int32))
        for b in range(len(q) - 1)
    ]  # fmt: skip
