"""The page of an id: of a hypothesis, computed from the hypothesis itself, or of another finding, written by hand."""

from __future__ import annotations

import difflib
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import oracle
from assay.harness.bugs.bug import Bug
from assay.harness.bugs.catalogue import public_reports
from assay.harness.bugs.family import BY_ID, FAMILY
from assay.harness.errors import UsageError
from assay.harness.explain import broken
from assay.harness.explain.examples import example
from assay.harness.explain.other_findings import OTHER_KIND, OTHERS, Page
from assay.harness.localize.picturing import picture_of, unread_picture
from assay.harness.localize.reading import read
from assay.harness.picture import Picture

_SYMBOLS = ("q", "int8")
"""First words that keep their case."""
_EXACT = 1e-5
"""Relative error of a weight that is not shown: hypotheses are computed in float64."""
BEYOND_MATRIX = frozenset({"sliding-window-4096", "values-saturate-fp16", "values-overflow-fp16"})
"""Hypotheses that show on no call of the small op-level matrix: it has no sequence of 4,096 tokens, and no values beyond fp16. A
test holds it against the matrix."""
_COMPARE = "Compare the kernel with the right code."
_AFTER_A_FIX = "After a fix, assay check shows if it is right under all conditions."
_NOT_IN_MATRIX = (
    "The matrix of assay check has no call on which this shows: record calls of a model that has them with assay record, "
    "and replay them."
)
_REPLAY = "assay replay PACK --candidate mine:forward"


def titles() -> dict[str, str]:
    """Return every id that has a page, with its title: hypotheses first."""
    return {bug.id: bug.title for bug in FAMILY} | {id_: other.title for id_, other in OTHERS.items()}


def ids_of(kind: str) -> tuple[str, ...]:
    """List the ids of a kind, in their order."""
    return tuple(OTHERS) if kind == OTHER_KIND else tuple(bug.id for bug in FAMILY if bug.kind == kind)


def page(id_: str) -> Page:
    """Make the page of an id.

    Raises:
        UsageError: there is no such id; the message names the nearest one.
    """
    if id_ in BY_ID:
        return _of_hypothesis(BY_ID[id_])
    if id_ in OTHERS:
        return replace(OTHERS[id_], variants=tuple(variant for variant in OTHERS if variant != id_))
    known = titles()
    near = difflib.get_close_matches(id_, [*known, *known.values()], n=1)
    by_title = {title: known_id for known_id, title in known.items()}
    hint = f"did you mean {by_title.get(near[0], near[0])!r}?" if near else "assay explain lists them"
    raise UsageError(f"There is no hypothesis or finding {id_!r}.", "the id of one", hint)


def _of_hypothesis(of: Bug) -> Page:
    call = example(of)
    wrong, right = _output(of, call), oracle(call)
    error = (wrong - right).abs().sum() / right.abs().sum()
    return Page(
        id=of.id,
        title=of.title,
        about=_sentence(of.about),
        kind=of.kind,
        severity=of.severity,
        variants=tuple(variant for variant in ids_of(of.kind) if variant != of.id),
        code=of.code,
        picture=_picture(of, call),
        error=float(error.nan_to_num(nan=torch.inf, posinf=torch.inf)),
        measured=of.measured,
        reports=public_reports(of.id),
        do=f"{_COMPARE} {_NOT_IN_MATRIX if of.id in BEYOND_MATRIX else _AFTER_A_FIX}",
        command=_REPLAY if of.id in BEYOND_MATRIX else f"assay check {broken.__name__}:{of.id.replace('-', '_')}",
    )


def _sentence(about: str) -> str:
    first = about.split()[0]
    return f"{about if first in _SYMBOLS else about[0].upper() + about[1:]}."


def _output(of: Bug, call: AttentionCall) -> Tensor:
    """Compute a kernel's output with the bug, float64 [total_q, num_q_heads, head_dim_v]; the right one where it does not show."""
    computed = of.compute(call)
    return oracle(call) if computed is None else computed


def _picture(of: Bug, call: AttentionCall) -> Picture:
    """Draw what a bug does to the weights of a call, read off the hypothesis as it would be read off a kernel."""
    reading = read(partial(_output, of), call, range(call.rows))
    if reading is not None:
        return picture_of(reading, relative=_EXACT)
    wrong = _output(of, call)
    return unread_picture(call, wrong, (~wrong.isfinite()).any(-1).numpy())
