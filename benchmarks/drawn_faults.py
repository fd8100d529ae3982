"""Random faults of attention, each with one sentence that says exactly what is wrong: what a diagnosis is measured against.

    python benchmarks/drawn_faults.py --number 60

A seed draws a bug from the templates of `drawn_bugs`, and up to two restrictions to heads, layers, calls, sequences or
positions. The kernel of a fault computes attention in float32, with the bug in the outputs that every restriction chooses.
`drawn_bugs` says what the numbers in the sentences count. Bugs and restrictions were written without sight of any diagnosis.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from drawn_bugs import TEMPLATES, Bug, Memory, Template, attention
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, Mask
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sample_calls import call_of

GROUPS = tuple(TEMPLATES)
VISIBLE = 0.01
"""Smallest relative error of an output that counts as visible; see `Difference`."""
VISIBLE_CALLS = 4
"""Calls of the pool on which a drawn fault must be visible; else the seed draws again."""
RESTRICTIONS = (0, 1, 1, 1, 2, 2)
"""Numbers of restrictions, drawn from evenly."""


# Restrictions


@dataclass(frozen=True)
class Places:
    """Where the outputs of a call are. The tensors are int64 and broadcast to [total_q, num_q_heads].

    Attributes:
        layer: of the call.
        phase: of the call.
        batch: sequences of the call.
        head: q head.
        kv_head: kv head that the q head reads.
        index: of the sequence in the call.
        new: new tokens of the sequence.
        prefix: cached tokens of the sequence.
        length: tokens of the sequence.
        position: of the query in its sequence, cached tokens included.
    """

    layer: int
    phase: str
    batch: int
    head: Tensor
    kv_head: Tensor
    index: Tensor
    new: Tensor
    prefix: Tensor
    length: Tensor
    position: Tensor


def places(call: AttentionCall) -> Places:
    """The places of a call."""
    heads, group, device = call.q.shape[1], call.q.shape[1] // call.k.shape[1], call.q.device
    lens = torch.tensor(call.lens_q, device=device), torch.tensor(call.lens_k, device=device)
    index = torch.arange(len(lens[0]), device=device).repeat_interleave(lens[0])[:, None]
    new, length = lens[0][index], lens[1][index]
    row = torch.arange(len(call.q), device=device)[:, None] - call.cu_seqlens_q.to(device)[index]
    head = torch.arange(heads, device=device)[None, :]
    return Places(
        call.layer, call.phase, len(lens[0]), head, head // group, index, new, length - new, length, length - new + row
    )


@dataclass(frozen=True)
class Restriction:
    """One condition of a fault.

    Attributes:
        words: end of a sentence, after "only".
        holds: places -> whether it holds, a bool or bools that broadcast to [total_q, num_q_heads].
    """

    words: str
    holds: Callable[[Places], Tensor | bool]


def _head(rng: random.Random) -> Restriction:
    head, odd, start, kv = rng.randrange(4), rng.randrange(2), rng.randrange(1, 4), rng.randrange(2)
    return rng.choice(
        (
            Restriction(f"in q head {head}", lambda p: p.head == head),
            Restriction(f"in {('even', 'odd')[odd]} q heads", lambda p: p.head % 2 == odd),
            Restriction(f"in q heads from {start} on", lambda p: p.head >= start),
            Restriction(f"in the q heads of kv head {kv}", lambda p: p.kv_head == kv),
        )
    )


def _layer(rng: random.Random) -> Restriction:
    layer, odd, start = rng.randrange(4), rng.randrange(2), rng.randrange(1, 4)
    return rng.choice(
        (
            Restriction(f"in layer {layer}", lambda p: p.layer == layer),
            Restriction(f"in {('even', 'odd')[odd]} layers", lambda p: p.layer % 2 == odd),
            Restriction(f"in layers from {start} on", lambda p: p.layer >= start),
        )
    )


def _phase(rng: random.Random) -> Restriction:
    phase = rng.choice(("extend", "decode"))
    return Restriction(f"in {phase} calls", lambda p: p.phase == phase)


def _batch(rng: random.Random) -> Restriction:
    least = rng.choice((2, 3))
    return rng.choice(
        (
            Restriction(f"in calls with at least {least} sequences", lambda p: p.batch >= least),
            Restriction("in calls with one sequence", lambda p: p.batch == 1),
            Restriction("in calls with exactly 2 sequences", lambda p: p.batch == 2),
        )
    )


def _place(rng: random.Random) -> Restriction:
    return rng.choice(
        (
            Restriction("for the first sequence of a call", lambda p: p.index == 0),
            Restriction("for the last sequence of a call", lambda p: p.index == p.batch - 1),
            Restriction("for sequence 1 of a call", lambda p: p.index == 1),
            Restriction("for sequences that are not the first of a call", lambda p: p.index > 0),
        )
    )


def _prefix(rng: random.Random) -> Restriction:
    least, below = rng.choice((8, 16, 32, 64, 100, 128, 200)), rng.choice((8, 16, 32, 64))
    return rng.choice(
        (
            Restriction("for sequences with a cached prefix", lambda p: p.prefix > 0),
            Restriction("for sequences without a cached prefix", lambda p: p.prefix == 0),
            Restriction(f"for sequences with at least {least} cached tokens", lambda p: p.prefix >= least),
            Restriction(f"for sequences with fewer than {below} cached tokens", lambda p: p.prefix < below),
        )
    )


def _new(rng: random.Random) -> Restriction:
    least, below = rng.choice((2, 4, 16, 32, 64)), rng.choice((2, 8, 16, 32))
    few = f"for sequences with fewer than {below} new tokens" if below > 2 else "for sequences with one new token"
    return rng.choice(
        (
            Restriction(f"for sequences with at least {least} new tokens", lambda p: p.new >= least),
            Restriction(few, lambda p: p.new < below),
        )
    )


def _length(rng: random.Random) -> Restriction:
    least, below = rng.choice((16, 32, 48, 64, 100, 128, 160, 256, 400)), rng.choice((32, 64, 100, 128))
    return rng.choice(
        (
            Restriction(f"for sequences of at least {least} tokens", lambda p: p.length >= least),
            Restriction(f"for sequences of fewer than {below} tokens", lambda p: p.length < below),
        )
    )


def _residue(rng: random.Random) -> Restriction:
    modulus, block = rng.choice((2, 3, 4, 8)), rng.choice((4, 8, 16, 64))
    rest = rng.randrange(modulus)
    return rng.choice(
        (
            Restriction(f"for sequences with length mod {modulus} = {rest}", lambda p: p.length % modulus == rest),
            Restriction(f"for sequences whose length is no multiple of {block}", lambda p: p.length % block != 0),
        )
    )


def _position(rng: random.Random) -> Restriction:
    least, below = rng.choice((8, 16, 32, 64, 100, 128, 200)), rng.choice((4, 8, 16, 32, 64))
    page = rng.choice((4, 8, 16))
    return rng.choice(
        (
            Restriction(f"for queries at positions from {least} on", lambda p: p.position >= least),
            Restriction(f"for queries at positions below {below}", lambda p: p.position < below),
            Restriction(f"for queries at positions that are multiples of {page}", lambda p: p.position % page == 0),
        )
    )


OF_CALLS = (_layer, _phase, _batch)
OF_SEQUENCES = (_place, _prefix, _new, _length, _residue, _position)
"""Restrictions of one kind each: no fault has two of a kind."""


# Faults


@dataclass(frozen=True)
class DrawnFault:
    """A random fault.

    Attributes:
        seed: draws the same fault again.
        group: one of `GROUPS`.
        template: name of the function in `drawn_bugs` that the bug comes from.
        bug: what goes wrong.
        where: restrictions, all of which must hold.
    """

    seed: int
    group: str
    template: str
    bug: Bug
    where: tuple[Restriction, ...]

    @property
    def truth(self) -> str:
        """One sentence that says exactly what is wrong, and where."""
        where = " and ".join(f"only {one.words}" for one in self.where)
        text = f"{self.bug.text}, {where}." if where else f"{self.bug.text}."
        return text[0].upper() + text[1:]

    def mask(self, call: AttentionCall) -> Tensor:
        """The outputs of a call that the restrictions choose, bool [total_q, num_q_heads]."""
        found, chosen = places(call), torch.ones(call.q.shape[:2], dtype=torch.bool, device=call.q.device)
        for restriction in self.where:
            chosen = chosen & restriction.holds(found)
        return chosen

    def kernel(self) -> Kernel:
        """A kernel with the fault that has seen no call yet."""
        memory = Memory()

        def faulty(call: AttentionCall) -> Tensor:
            memory.begin(call)
            chosen, seen = self.mask(call), call
            wrong = self.bug.effect(call, memory)
            out = torch.where(chosen[..., None], wrong, attention(call)).to(call.q.dtype)
            if self.bug.after is not None and bool(chosen.any()):
                seen = call.clone()
                out = self.bug.after(call, out, memory)
            memory.end(seen, out)
            return out

        return faulty


def draw(seed: int) -> DrawnFault:
    """The fault of a seed: templates take turns, parameters and restrictions are random.

    It is visible on `VISIBLE_CALLS` calls of `pool`, and without one of its restrictions it would be visible in more places.
    """
    for attempt in range(1000):
        found = _attempt(seed, random.Random(f"{seed} {attempt}"))
        if _visible_calls(found) >= VISIBLE_CALLS and all(_narrows(found, one) for one in found.where):
            return found
    raise RuntimeError(
        f"seed {seed}: none of 1000 attempts is visible on {VISIBLE_CALLS} calls of the pool; add calls to the pool"
    )


def examples(number: int) -> list[DrawnFault]:
    """The faults of the seeds 0 to number - 1; groups take turns."""
    return [draw(seed) for seed in range(number)]


def _template(seed: int) -> tuple[str, Template]:
    """Group and template of a seed: groups take turns, and so do the templates of a group, each time in another order."""
    group, turn = GROUPS[seed % len(GROUPS)], seed // len(GROUPS)
    of_group = TEMPLATES[group]
    order = random.Random(f"{group} {turn // len(of_group)}").sample(of_group, len(of_group))
    return group, order[turn % len(of_group)]


def _attempt(seed: int, rng: random.Random) -> DrawnFault:
    group, template = _template(seed)
    bug = template(rng)
    kinds = [*OF_CALLS]
    if bug.after is None:  # what happens after the output is computed happens to whole calls
        kinds += [*OF_SEQUENCES, *[_head] * (not bug.names_heads)]
    where = tuple(kind(rng) for kind in rng.sample(kinds, rng.choice(RESTRICTIONS)))
    return DrawnFault(seed, group, template.__name__, bug, where)


# What shows


def correct(call: AttentionCall) -> Tensor:
    """A kernel without a fault, which computes as the faulty ones do."""
    return attention(call).to(call.q.dtype)


@dataclass(frozen=True)
class Difference:
    """How far a kernel was from the truth in one call.

    Attributes:
        output: largest relative error of an output over the queries and heads of a call: the sum of |output - truth| over its
            dimensions, divided by that of |truth|. Infinite where an output is not finite.
        later: the same of the returned tensor after the last call: larger if a later call overwrote it.
        inputs: whether the kernel wrote to its inputs.
    """

    output: float
    later: float
    inputs: bool

    def shows(self, least: float = VISIBLE) -> bool:
        """Whether an error is at least this large, or inputs were written to."""
        return max(self.output, self.later) >= least or self.inputs


def relative_errors(out: Tensor, truth: Tensor) -> Tensor:
    """Errors of an output as `Difference` measures them, float64 [total_q, num_q_heads]."""
    errors = (out.double() - truth).abs().sum(-1) / truth.double().abs().sum(-1).clamp(min=1e-30)
    return errors.nan_to_num(nan=math.inf, posinf=math.inf)


def differences(
    kernel: Kernel, calls: Sequence[AttentionCall], truths: Sequence[Tensor] | None = None
) -> list[Difference]:
    """How far a kernel is from the truth in calls that it gets one after another.

    Args:
        kernel: the kernel; it gets copies of the calls.
        calls: the calls.
        truths: right outputs; None for the oracle's.
    """
    expected = [oracle(call) for call in calls] if truths is None else truths
    return [
        Difference(_worst(first, truth), _worst(later, truth), written)
        for (first, later, written), truth in zip(_run(kernel, calls), expected, strict=True)
    ]


def _run(kernel: Kernel, calls: Sequence[AttentionCall]) -> list[tuple[Tensor, Tensor, bool]]:
    """For each call: the output, the same tensor after the last call, and whether inputs were written to."""
    given = [call.clone() for call in calls]
    later = []
    first = []
    for call in given:
        later.append(kernel(call))
        first.append(later[-1].clone())
    written = [
        not all(torch.equal(getattr(now, name), getattr(call, name)) for name in "qkv")
        for now, call in zip(given, calls, strict=True)
    ]
    return list(zip(first, later, written, strict=True))


def _worst(out: Tensor, truth: Tensor) -> float:
    return float(relative_errors(out, truth).amax())


def shows(
    fault: DrawnFault, call: AttentionCall, before: Sequence[AttentionCall] = (), later: Sequence[AttentionCall] = ()
) -> bool:
    """Whether a fault shows on a call: its output visibly differs from the right one, or its inputs were written to.

    Args:
        fault: the fault.
        call: the call.
        before: calls that a fresh kernel gets first.
        later: calls that it gets afterwards, which may overwrite the output.
    """
    return differences(fault.kernel(), [*before, call, *later])[len(before)].shows()


def random_calls(seed: int, forwards: int) -> Iterator[AttentionCall]:
    """Calls as a server makes them: forward passes, each through two of four layers; on normal data, float32, head_dim 16.

    A batch has 1 to 3 sequences of at most 600 tokens, most of them at most 200. About half of the sequences of extend calls
    have a cached prefix. A tenth of the passes is not causal.
    """
    rng = random.Random(f"calls {seed}")
    for _ in range(forwards):
        phase = rng.choice(("extend", "extend", "decode"))
        lens = [_lens(rng, phase) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
        heads, causal = rng.choice(((4, 2), (8, 2), (4, 4))), rng.random() < 0.9
        for layer in sorted(rng.sample(range(4), 2)):
            call = call_of(lens, heads, 16, torch.float32, "cpu", rng.randrange(2**31))
            yield call.with_spec(layer=layer, phase=phase, mask=Mask(causal=causal))


def _lens(rng: random.Random, phase: str) -> tuple[int, int]:
    """New and cached tokens of a sequence; short ones are as frequent as long ones, on a logarithmic scale."""
    most = rng.choice((200, 200, 200, 600))
    new, prefix = (int(math.exp(rng.uniform(0, math.log(most)))) for _ in range(2))
    if phase == "decode":
        return 1, min(prefix, most - 1)
    return new, min(prefix, most - new) if rng.random() < 0.6 else 0


@cache
def pool() -> tuple[AttentionCall, ...]:
    """The calls on which a drawn fault must be visible."""
    return tuple(random_calls(0, 64))


@cache
def _truth(number: int) -> Tensor:
    return oracle(pool()[number])


def _series(fault: DrawnFault) -> list[range]:
    """The pool in series, each for a fresh kernel: a fault of the group "state" depends on the calls before."""
    length = 16 if fault.group == "state" else 1
    return [range(i, i + length) for i in range(0, len(pool()), length)]


def _visible_calls(fault: DrawnFault) -> int:
    """Calls of the pool on which a fault is visible. Counting ends at `VISIBLE_CALLS`."""
    found = 0
    for numbers in _series(fault):
        calls = [pool()[i] for i in numbers]
        if any(bool(fault.mask(call).any()) for call in calls):
            found += sum(one.shows() for one in differences(fault.kernel(), calls, [_truth(i) for i in numbers]))
        if found >= VISIBLE_CALLS:
            break
    return found


def _narrows(fault: DrawnFault, restriction: Restriction) -> bool:
    """Whether a fault would be visible in more places of the pool without a restriction."""
    wider = replace(fault, where=tuple(one for one in fault.where if one is not restriction))
    for numbers in _series(fault):
        calls = [pool()[i] for i in numbers]
        if all(torch.equal(fault.mask(call), wider.mask(call)) for call in calls):
            continue
        for narrow, wide in zip(_run(fault.kernel(), calls), _run(wider.kernel(), calls), strict=True):
            if max(_worst(wide[0], narrow[0]), _worst(wide[1], narrow[1])) >= VISIBLE or wide[2] != narrow[2]:
                return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=60, help="faults, from seed 0 on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for one in examples(args.number):
        print(f"{one.seed:3} {one.group:6} {one.truth}")


if __name__ == "__main__":
    main()
