"""The record of a known bug: its computation, its name, and its code.

A candidate that disagrees with the oracle and agrees with the output of a bug, up to its numerical noise, has that bug. A bug gives
None for a call on which it cannot show, such as a dropped prefix where nothing is cached. In its output, NaN means that the bug
leaves the value undefined (a query that sees no key); infinity means that the value is expected not to be finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import Request, attend, requests

_Severity = Literal["warning", "serious"]
Batch = list[Request]
Change = Callable[[Request], "Request | Tensor | None"]
"""The effect of a bug on a sequence: a changed request (attention is then computed as usual), or its output for the wanted
queries, or None if the bug cannot show."""
_BatchChange = Callable[[Batch, int], "Request | Tensor | None"]
"""The effect on sequence b of a batch, if the other sequences matter."""
Form = Literal["sequence", "heads", "batch"]
"""The arguments of a function: "sequence", (q, k, v, scale); "heads", the same with fewer kv heads than q heads; "batch", (q, k, v,
starts, b, scale) with k and v of the whole batch; sequence b has the rows starts[b] to starts[b + 1]."""
LEAK = "leak"
"""The kind of every bug by which one request reads another's data. It is reported first, even if others fit better."""
# The place in a template where wrong and correct code differ.
_HOLE = "@"


@dataclass(frozen=True)
class Code:
    """A minimal, runnable function that computes one sequence, wrong and right.

    q is [heads, new tokens, dim], k and v are [heads, cached prefix + new tokens, dim]. K and V have a head for each q head, except
    where heads are the subject.

    Attributes:
        wrong: source of a function ``attend`` with the bug; torch is imported.
        right: the same without it.
        form: the arguments of the function.
    """

    wrong: str
    right: str
    form: Form = "sequence"


class Compute(Protocol):
    """(call, packed query rows or None for all) -> the output of a kernel with a bug; see `Bug`."""

    def __call__(self, call: AttentionCall, rows: Tensor | None = None, /) -> Tensor | None: ...


@dataclass(frozen=True)
class Bug:
    """One known bug.

    Attributes:
        id: stable, unique name, kebab-case.
        title: name in prose.
        about: what goes wrong, as a sentence without its full stop.
        does: the predicate of a sentence whose subject is a kernel with the bug.
        kind: id of a group of variants, such as all sizes of a sliding window.
        compute: (call, rows) -> output of a kernel with the bug, float64 [rows, num_q_heads, head_dim_v], or None where the bug
            cannot show on the call. The rows are packed query rows, int64, in increasing order; without them all are computed.
        code: wrong and right code, or None for a bug estimated from outputs, such as a scale.
        severity: "serious", or "warning" for a bug that only costs precision.
        reports: public reports of such a bug, "owner/repository#number" or with "!" for a pull request.
        measured: the measured cost of the bug, or an empty string.
    """

    id: str
    title: str
    about: str
    does: str
    kind: str
    compute: Compute
    code: Code | None = None
    severity: _Severity = "serious"
    reports: tuple[str, ...] = ()
    measured: str = ""


def changing(change: Change) -> Compute:
    """Compute the output of a bug that changes each sequence by itself."""
    return changing_in_batch(lambda batch, b: change(batch[b]))


def changing_in_batch(change: _BatchChange) -> Compute:
    """Compute the output of a bug that changes sequences one by one."""
    return partial(_changed_output, change)


def _changed_output(change: _BatchChange, call: AttentionCall, rows: Tensor | None = None) -> Tensor | None:
    """Compute the output of a call on which a bug shows, or None where no sequence shows it. See `Bug.compute`."""
    batch = requests(call, rows)
    # Without a query there is no output to compare; without a key the output is undefined.
    changed = [change(batch, b) if r.len_q and r.len_k else None for b, r in enumerate(batch)]
    if all(c is None for c in changed):
        return None
    outs = [c if isinstance(c, Tensor) else attend(r if c is None else c) for r, c in zip(batch, changed, strict=True)]
    return torch.cat(outs, dim=1).transpose(0, 1)


def links(*reports: str) -> tuple[str, ...]:
    """Expand the reports of a `Bug` to addresses."""
    addresses = []
    for report in reports:
        kind, mark = ("pull", "!") if "!" in report else ("issues", "#")
        repository, _, number = report.partition(mark)
        addresses.append(f"https://github.com/{repository}/{kind}/{number}")
    return tuple(addresses)


def keys_of(request: Request) -> Tensor:
    """Number the keys of a sequence from 0, int64 [len_k]."""
    return torch.arange(request.len_k, device=request.q.device)


def seeing(keys: Callable[[Request, Tensor], Tensor]) -> Change:
    """Hide keys from every query. `keys` says which are not hidden: (request, `keys_of` it) -> bool [len_k]."""

    def change(request: Request) -> Request | None:
        seen = keys(request, keys_of(request))
        return None if bool(seen.all()) else replace(request, visible=request.visible & seen)

    return change


def code(template: str, wrong: str, right: str, form: Form = "sequence") -> Code:
    """Fill the hole of a template, "@", with wrong and with right code; "@@" stands for "@" itself."""

    def filled(put: str) -> str:
        return template.replace(_HOLE * 2, "\0").replace(_HOLE, put).replace("\0", _HOLE)

    return Code(filled(wrong), filled(right), form)


def lines(*given: str) -> str:
    """Indent lines of a function's body."""
    return "".join(f"    {line}\n" for line in given)
