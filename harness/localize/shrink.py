"""Shrinks a failing call to the smallest one that still shows the bug, and writes a test of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from assay.harness.attention.bugs.family import BY_ID
from assay.harness.attention.call import STORED, AttentionCall, KernelRefused, Mask, cumulative
from assay.harness.attention.declaration import declaration
from assay.harness.attention.oracle import sequences
from assay.harness.attention.sample_calls import call_of
from assay.harness.localize.call_conditions import describe
from assay.harness.localize.causes import OUTPUT_NOT_WRITTEN, OUTPUT_SCALED
from assay.harness.localize.cells import deviation
from assay.harness.localize.faults import Fault, WrongLses, came_of, shows
from assay.harness.localize.guard import Guard
from assay.harness.localize.kernel_runs import CallResult, KernelRun, measure
from assay.harness.localize.threads import budget_clock
from assay.harness.stats.error_sums import relative_l1
from assay.harness.verdict import CONTRACT_BROKEN, UNEXPLAINED, Finding, serious

# Most runs of the kernel, and seconds, for shrinking a call; the report shows the smallest call by then.
_MAX_RUNS, _SECONDS = 400, 10.0
# Most numbers to write as literals in a test: about 90 kB of text.
_MAX_LITERALS = 4096
_IN_EVIDENCE = "smallest failing call: "


Fails = Callable[[AttentionCall], bool]


@dataclass(frozen=True)
class Smallest:
    """The smallest calls that show a bug, and a function that writes a test of them; all empty if no call fails.

    Attributes:
        words: a description of the calls.
        source: writes a test for a finding, or None if a test cannot hold the calls.
        wrong: the wrong outputs on the way to them.
        alone: False if they are right in a fresh process, so that the kernel is wrong by earlier calls or by chance.
    """

    words: str = ""
    source: Callable[[Finding], str] | None = None
    wrong: Sequence[CallResult] = ()
    alone: bool = True

    def test(self, findings: Sequence[Finding]) -> str:
        """Write a pytest file that describes the first finding about outputs, or else the first; return "" without a source."""
        about = _about_outputs(findings)
        return self.source(about[0]) if self.source and about else ""

    def named_in(self, findings: Sequence[Finding]) -> list[Finding]:
        """Replace the smallest call in the first finding about outputs by this one; return all findings."""
        about, named = _about_outputs(findings)[:1], list(findings)
        for first in about if self.words else ():
            evidence = [_IN_EVIDENCE + self.words if line.startswith(_IN_EVIDENCE) else line for line in first.evidence]
            named[named.index(first)] = first.model_copy(update={"evidence": tuple(evidence)})
        return named


def _about_outputs(findings: Sequence[Finding]) -> list[Finding]:
    wrong = serious(findings)
    return [finding for finding in wrong if finding.id != CONTRACT_BROKEN] or wrong


def smallest_call(
    guard: Guard,
    run: KernelRun,
    findings: Sequence[Finding],
    path: str,
    other: tuple[AttentionCall, Fault] | None = None,
) -> Smallest:
    """Find the smallest call that shows the first bug.

    Args:
        guard: the kernel.
        run: its results on several calls.
        findings: its findings, named bugs first.
        path: the path to import the kernel, as ``module:function`` or a published name, or an empty string if there is none.
        other: if no output is wrong, a call with another fault, and the fault.
    """
    failing = [result.call for result in run.results if result.fails]
    if not failing and other is not None:
        call, fault = other

        def fails(smaller: AttentionCall) -> bool:
            came = came_of(guard, smaller)
            return came is not None and shows(fault, came)

        call = shrunk(call, head_dims_of(guard, run), _limited(fails, call))
        text = written(call, fails) if path else None
        asked = ", log-sum-exps asked for" * isinstance(fault, WrongLses)
        return Smallest(f"{describe(call)}{asked}", source_of([text], guard, path) if text else None)
    if not failing:
        return Smallest()
    call = min(failing, key=lambda call: (call.k.numel(), call.q.numel()))
    named = (f.id for f in findings if f.id in BY_ID or f.id in (UNEXPLAINED, OUTPUT_SCALED, OUTPUT_NOT_WRITTEN))
    wrong: list[CallResult] = []
    with suppress(ValueError):  # a call with another bug, or one that fails only sometimes, stays as it is
        # If a kernel errs by chance, any error counts.
        call = shrink(guard, call, head_dims_of(guard, run), next(named, ""), wrong)
    text = written(call, lambda drawn: _fails(guard, drawn)) if path else None
    return Smallest(describe(call), source_of([text], guard, path) if text else None, wrong)


def head_dims_of(guard: Guard, run: KernelRun) -> set[int]:
    """Return the head dims that a call may shrink to. With others, a kernel may write beyond its output and crash the process."""
    return {result.call.q.shape[2] for result in run.results} | set(guard.assay.head_dims or ())


def shrink(
    guard: Guard,
    call: AttentionCall,
    head_dims: Collection[int],
    bug: str = "",
    wrong: list[CallResult] | None = None,
) -> AttentionCall:
    """Find the smallest call that still fails: fewer sequences, heads and tokens, and a smaller head_dim.

    The search is deterministic and greedy: each step takes the first smaller call that fails, until none does or the runs are
    used up. A call that the kernel refuses does not fail. Prefixes lose their oldest tokens, and new tokens the newest; complete
    groups of q heads are dropped first. A scale of head_dim ** -0.5 follows head_dim.

    Args:
        guard: the kernel.
        call: a call on which it fails.
        head_dims: smaller head dims to try.
        bug: id of the hypothesis that must explain a failing output, or an empty string for any.
        wrong: receives each result that is out of bounds.

    Raises:
        ValueError: the call itself does not fail.
    """

    def fails(smaller: AttentionCall) -> bool:
        try:
            out = guard(smaller.clone()).out
        except KernelRefused:
            return False
        result = measure(smaller, out, guard.assay.noise)
        if wrong is not None and result.fails:
            wrong.append(result)
        if bug not in BY_ID or not result.fails:
            return result.fails
        expected = BY_ID[bug].compute(smaller)
        return expected is not None and bool(
            (relative_l1(deviation(out, expected, result.cells)) <= result.fit_bounds).all()
        )

    still_fails = _limited(fails, call)
    if not still_fails(call):
        raise ValueError(f"nothing to shrink: the kernel does not fail on {describe(call)}")
    return shrunk(call, head_dims, still_fails)


def _limited(fails: Fails, first: AttentionCall) -> Fails:
    """Return the predicate with a limit on runs and time, after which nothing fails."""
    clock, runs = budget_clock(first.q.device.type), 0

    def limited(call: AttentionCall) -> bool:
        nonlocal runs
        runs += 1
        return runs <= _MAX_RUNS + 1 and clock() <= _SECONDS and fails(call)

    return limited


def shrunk(call: AttentionCall, head_dims: Collection[int], still_fails: Fails) -> AttentionCall:
    """Make a call smaller, step by step, as long as it still fails."""
    steps = (smaller for smaller in _smaller(call, sorted(head_dims)) if smaller.rows and still_fails(smaller))
    while (smaller := next(steps, None)) is not None:
        call = smaller
        steps = (smaller for smaller in _smaller(call, sorted(head_dims)) if smaller.rows and still_fails(smaller))
    return call


def _smaller(call: AttentionCall, head_dims: Sequence[int]) -> Iterator[AttentionCall]:
    """Yield the calls that are one step smaller, largest steps first."""
    batch, groups = len(call.lens_q), call.k.shape[1]
    for padded in _fewer(call.spec.padded_rows, 0):
        yield replace(call, q=call.q[: call.rows + padded]).with_spec(padded_rows=padded)
    for plain in ({"softcap": 0.0}, {"temperature": 0}, {"sinks": ()}, {"mask": Mask(call.causal)}):
        if (plainer := call.with_spec(**plain)).spec != call.spec:
            yield plainer
    for lost in call.spec.ways:
        yield call.with_spec(ways=tuple(way for way in call.spec.ways if way != lost))
    if batch > 1:
        yield from (_pick(call, [(b, 0, 0)]) for b in range(batch))
        yield from (_pick(call, [(b, 0, 0) for b in range(batch) if b != lost]) for lost in range(batch))
    if groups > 1:
        yield from (_groups(call, [g]) for g in range(groups))
        yield from (_groups(call, [g for g in range(groups) if g != lost]) for lost in range(groups))
    if (each := call.heads.group) > 1:
        kept = {h: [g * each + h for g in range(groups)] for h in range(each)}
        yield from (call.of_heads(rows, range(groups)) for rows in kept.values())
    for b, (new, prefix) in enumerate(zip(call.lens_q, call.prefixes, strict=True)):
        for fewer in _fewer(prefix, 0):
            yield _pick(call, [(i, (prefix - fewer) * (i == b), 0) for i in range(batch)])
        for fewer in _fewer(new, 1):
            yield _pick(call, [(i, 0, (new - fewer) * (i == b)) for i in range(batch)])
    same = call.q.shape[2] == call.v.shape[2] and call.stored is None
    for dim in (d for d in head_dims if same and d < call.q.shape[2]):
        scale = dim**-0.5 if call.scale == call.q.shape[2] ** -0.5 else call.scale
        yield replace(call, q=call.q[..., :dim], k=call.k[..., :dim], v=call.v[..., :dim]).with_spec(scale=scale)


def _fewer(count: int, least: int) -> list[int]:
    """Return the smaller counts to try, largest steps first."""
    steps = {least, least + 1, count // 4, count // 2, count * 3 // 4, count - 16, count - 4, count - 1}
    return sorted(n for n in steps if least <= n < count)


def _pick(call: AttentionCall, kept: list[tuple[int, int, int]]) -> AttentionCall:
    """Take some sequences of a call, as (sequence, oldest prefix tokens to drop, newest tokens to drop)."""
    rows = sequences(call)
    q_rows = [torch.arange(rows[b][0].start, rows[b][0].stop - newest) for b, _, newest in kept]
    k_rows = [
        torch.arange(start := rows[b][1].start + oldest, max(min(start + 1, rows[b][1].stop), rows[b][1].stop - newest))
        for b, oldest, newest in kept
    ]
    device = call.q.device
    padded = torch.arange(call.rows, call.q.shape[0])
    q, k = (torch.cat(r).to(device) for r in ([*q_rows, padded], k_rows))
    lens = {"cu_seqlens_q": q_rows, "cu_seqlens_k": k_rows}
    cumulated = {name: cumulative((len(r) for r in rows), device) for name, rows in lens.items()}
    if call.cu_seqlens_k is call.cu_seqlens_q and torch.equal(*cumulated.values()):
        cumulated["cu_seqlens_k"] = cumulated["cu_seqlens_q"]
    return call.with_tensors(call.of_rows(q, k) | cumulated)


def _groups(call: AttentionCall, kept: list[int]) -> AttentionCall:
    """Take some kv heads of a call, with the q heads that read them."""
    readers = (call.heads.readers(g) for g in kept)
    heads = [h for some in readers for h in range(some.start, some.stop)]
    return call.of_heads(heads, kept)


# Names of the calls of a test before its last.
_EARLIER = ("FIRST", "SECOND", "THIRD")
MAX_CALLS = len(_EARLIER) + 1
"""Most calls of a test."""


def source_of(calls: Sequence[str], guard: Guard, path: str, times: int = 1) -> Callable[[Finding], str]:
    """Return a function that writes a pytest file, which fails if any of the calls is wrong.

    Args:
        calls: the calls as `written`, in order.
        guard: the kernel.
        path: the path to import it.
        times: number of times to make the last call.
    """
    noise = guard.assay.noise
    excused = "" if noise == declaration(guard.kernel).noise else f", noise={noise!r}"
    names = [*_EARLIER[: len(calls) - 1], "CALL"]
    made = "\n".join(text.replace("CALL", name) for name, text in zip(names, calls, strict=True))
    lines = [f"    assert_correct(KERNEL, {name}{excused})" for name in names]
    if times > 1:
        lines[-1:] = [f"    for _ in range({times}):", f"    {lines[-1]}"]
    of_assay, of_calls = ["Mask", "assert_correct"], ["CallSpec"]
    of_assay[:0] = ["AttentionCall"] * ("AttentionCall(" in made)
    of_calls += ["StoredKV"] * ("StoredKV(" in made)
    imports = "from dataclasses import replace\n\n" * ("replace(" in made)
    imports += f"import torch\n\nfrom assay import {', '.join(of_assay)}"
    imports += f"\nfrom assay.harness.attention.call import {', '.join(of_calls)}"
    imports += "\nfrom assay.harness.attention.sample_calls import call_of" * ("call_of(" in made)
    body = "\n".join(lines)
    what = "the smallest call that shows it" if len(calls) == times == 1 else "the shortest calls that show it"

    def source(finding: Finding) -> str:
        observed = f" Observed: {finding.observed}." if finding.observed else ""
        return f'''"""{_prose(finding.title)}: {what}."""

{imports}

KERNEL = {path!r}
{made}


def test_the_kernel_is_correct() -> None:
    """{_prose(finding.sentence)}{_prose(observed)}"""
{body}
'''

    return source


def written(call: AttentionCall, fails: Fails) -> str | None:
    """Write a call as source that names it CALL: inputs from a seed if such data fail too, or else its numbers.

    Returns:
        The source, or None if the kernel fails only on the call's own data, and these are too large for a test.
    """
    own = f"spec={call.spec!r}"
    if drawn := _drawn(call, fails):
        seed, (changed, _) = drawn
        lens, heads = list(zip(call.lens_q, call.prefixes, strict=True)), (call.q.shape[1], call.k.shape[1])
        shape = f"{lens}, {heads}, {call.q.shape[2]}, {call.q.dtype}, {str(call.q.device)!r}"
        text = f"CALL = replace(call_of({shape}{f', seed={seed}' * bool(seed)}), {own})"
        rows = call.spec.padded_rows
        padded = f'q=torch.cat([CALL.q, CALL.q.new_full(({rows}, *CALL.q.shape[1:]), float("nan"))])' if rows else ""
        return text + "".join(f"\nCALL = replace(CALL, {more})" for more in (padded, changed) if more)
    if sum(tensor.numel() for tensor in (call.q, call.k, call.v)) > _MAX_LITERALS:
        return None
    literals = {name: _literal(tensor) for name, tensor in call.tensors.items()}
    tensors = "".join(f"    {name}={literal},\n" for name, literal in literals.items() if name not in STORED)
    if call.stored is not None:
        own += f",\n    stored=StoredKV({', '.join(literals[name] for name in STORED)})"
    return f"CALL = AttentionCall(\n{tensors}    {own},\n)"


_Change = tuple[str, Callable[[AttentionCall], AttentionCall]]
# Changes that can make a kernel fail on normal data, as source and as a function: values beyond the range of fp8, peaked weights,
# an offset of K, scores far below zero.
_CHANGES: tuple[_Change, ...] = (
    ("", lambda call: call),
    ("v=300 * CALL.v", lambda call: replace(call, v=300 * call.v)),
    ("q=2 * CALL.q, k=2 * CALL.k", lambda call: replace(call, q=2 * call.q, k=2 * call.k)),
    ("q=4 * CALL.q, k=4 * CALL.k", lambda call: replace(call, q=4 * call.q, k=4 * call.k)),
    ("k=CALL.k + 6", lambda call: replace(call, k=call.k + 6)),
    ("q=CALL.q.abs(), k=-8 * CALL.k.abs()", lambda call: replace(call, q=call.q.abs(), k=-8 * call.k.abs())),
)
# Seeds to try with each change.
_SEEDS = 6


def _drawn(call: AttentionCall, fails: Fails) -> tuple[int, _Change] | None:
    """Return a seed and a change of its data with which the kernel fails on a call of this shape, or None."""
    carried = any(call.tensors.keys() - {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"})
    if carried or call.v.shape[2] != call.q.shape[2] or call.spec.layout != "packed" or call.spec.grad_mode:
        return None
    lens, heads = list(zip(call.lens_q, call.prefixes, strict=True)), (call.q.shape[1], call.k.shape[1])
    for change in _CHANGES:
        for seed in range(_SEEDS):
            made = call_of(lens, heads, call.q.shape[2], call.q.dtype, str(call.q.device), seed)
            drawn = replace(made, q=torch.cat([made.q, call.q[call.rows :]]), spec=call.spec)
            if fails(change[1](drawn)):
                return seed, change
    return None


def _fails(guard: Guard, call: AttentionCall) -> bool:
    try:
        return measure(call, guard(call.clone()).out, guard.assay.noise).fails
    except (KernelRefused, ValueError):  # ValueError: such data overflow the dtype
        return False


def _literal(tensor: Tensor) -> str:
    """Format a tensor as source; the repr of a float64 is exact for every narrower dtype."""
    device = "" if tensor.device.type == "cpu" else f", device={str(tensor.device)!r}"
    values = tensor.tolist() if not tensor.is_floating_point() else tensor.double().tolist()
    if tensor.dtype.itemsize == 1 and tensor.is_floating_point():  # torch.tensor cannot make FP8
        return f"torch.tensor({values!r}){device and f'.to({str(tensor.device)!r})'}.to({tensor.dtype})"
    text = repr(values).replace("nan", 'float("nan")').replace("inf", 'float("inf")')
    return f"torch.tensor({text}, dtype={tensor.dtype}{device})"


def _prose(text: str) -> str:
    """Make text safe in a docstring."""
    return text.replace("\\", "/").replace('"', "'")
