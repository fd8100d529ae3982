"""The rules of an engine trace, as regular expressions over a string with one letter for each relevant line of a request.

The rules follow from MLC-LLM at 79d603f (July 2026): ``EngineImpl::Step`` polls its actions in order and returns after the first
one that processed requests; ``cpp/serve/model.cc`` begins a forward pass in the KV cache, calls the model once, and ends it; logits
are sampled after a softmax. A request's sequence is added to the KV cache, or forked from one whose prefix it shares.

The letters: ``N`` adds a request, ``A`` adds or forks its sequence; ``[ ]`` is a segment, ``( )`` a forward pass; ``p j d`` poll
the three actions; ``m c v`` call the model (prefill, decode, verify); ``e s g`` are embed, softmax and sample; ``o`` is the answer.
At the end, ``X`` stands for the beginning of the next part and ``Z`` for the end of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

PREFILL, JUMP_FORWARD, DECODE = "NewRequestPrefill", "Batch jump forward", "Batch decode"
RULES = {
    "trace-begin-not-closed": "A begin without its end",
    "trace-end-not-begun": "An end without its begin",
    "trace-decode-before-prefill": "A decode before the prefill of its request",
    "trace-sequence-count": "Not exactly one sequence added or forked for a request",
    "trace-action-order": "Actions polled out of order",
    "trace-call-order": "Calls of a forward pass out of order",
    "trace-cut-off": "The trace ends early",
}
"""Rules of a trace, by id: the title of a violation."""
# A forward pass. The beginning or end of anything else ends it too.
_PASS = re.compile(r"\([^()pjd\[\]oXZ]*\)?")
# A step of the engine that computes nothing.
_STEP = r"[^pjdmvc\[\]o]*"
# By rule and view of the letters: patterns whose groups mark the lines of a violation, and a sentence that states it.
_PATTERNS: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("trace-begin-not-closed", "all"): (
        (r"(\[)(?=[^\[\]X]*([\[X]))", "the segment does not end before the next part begins"),
        (r"(\()(?=[^()pjd\[\]oXZ]*([\[\]oX]))", "the forward pass does not end before the next part begins"),
        (r"(\()(?=[^()pjd\[\]oXZ]*([pjd]))", "the forward pass does not end before {name} is polled"),
        (r"(\()(?=[^()pjd\[\]oXZ]*(\())", "the forward pass does not end before the next one begins"),
    ),
    ("trace-end-not-begun", "all"): ((r"(?:^|(?<=\]))[^\[\]]*(\])", "a segment ends that had not begun"),),
    ("trace-end-not-begun", "outside"): ((r"(\))", "a forward pass ends that had not begun"),),
    ("trace-call-order", "outside"): ((r"([mvc])", "{name} is called outside of a forward pass"),),
    ("trace-call-order", "inside"): (
        (r"(\()[^mvc)·]*(\))", "the forward pass ends without a call of the model"),
        (r"([mvc])(?=[^mvc()·]*([mvc]))", "{name} is the second call of the model in one forward pass"),
        (r"(\()[^esg)·]*([esg])", "{name} is called inside of a forward pass"),
    ),
    ("trace-call-order", "all"): (
        (r"(?:^|(?<=[pjd\[\]o]))[^pjdmvcs\[\]o]*(s)", "{name} is called, but the step did not compute logits"),
        (r"(?:^|(?<=[gpjd]))[^gpjds]*(g)", "{name} is called before softmax_func_"),
    ),
    ("trace-action-order", "all"): (
        (rf"(?:^|(?<=[dmvc\[\]o])){_STEP}([jd])", f"the engine polls {{name}} where {PREFILL} is next"),
        (rf"(p)(?={_STEP}([pd]))", f"the engine polls {{name}} where {JUMP_FORWARD} is next"),
        (rf"(j)(?={_STEP}([pj]))", f"the engine polls {{name}} where {DECODE} is next"),
        (rf"([pj])(?={_STEP}([\[\]oX]))", "the engine polls no action after {first}, which computed nothing"),
        (r"(?:([pj])|^|(?<=[\[\]o]))[^pjdc\[\]o]*(c)", f"{{name}} is called, but the engine is not in {DECODE}"),
    ),
    ("trace-decode-before-prefill", "all"): ((r"^(N?)[^mcv]*([cv])", "{name} is called before any prefill"),),
}
_CUT_OFF = tuple(
    (pattern, f"{what} that begins here does not end in the file")
    for pattern, what in (
        (r"(\()[^()pjd\[\]oX]*(Z)", "a forward pass"),
        (r"(\[)[^\[\]X]*(Z)", "a segment"),
        (r"([pj])[^pjdmvc\[\]oX]*(Z)", "a step of the engine"),
        (r"(N)[^o]*(Z)", "the request"),
    )
)


class Violation(NamedTuple):
    """A rule that a trace breaks: where, as text; the fault, as a sentence without a full stop; and the lines."""

    rule: str
    where: str
    says: str
    places: tuple[int, ...]


def violations(letters: str, lines: Sequence[tuple[str, int]], part: str) -> Iterator[Violation]:
    """Yield the rules that a part of a trace breaks, in line order. A part is a request, or the lines between two requests.

    Args:
        letters: the part's letters.
        lines: the name and the number of each letter's line.
        part: the part's name, such as "request 2".
    """
    inside = _PASS.sub(lambda match: "·" * len(match[0]), letters)
    views = {
        "all": letters,
        "outside": inside,
        "inside": "".join("·" if a == b else b for a, b in zip(inside, letters, strict=True)),
    }
    broken: list[tuple[int, Violation]] = []

    def note(rule: str, match: re.Match[str], says: str) -> None:
        at = [match.start(group) for group in range(1, len(match.groups()) + 1) if match[group]]
        before = letters[: at[-1]]
        where = f"{part}, segment {before.count('[')}" if before.rfind("[") > before.rfind("]") else part
        says = says.format(name=lines[at[-1]][0], first=lines[at[0]][0])
        broken.append((at[-1], Violation(rule, where, says, tuple(lines[place][1] for place in at))))

    for (rule, view), patterns in _PATTERNS.items():
        for pattern, says in patterns:
            for match in re.finditer(pattern, views[view]):
                note(rule, match, says)
    cut = [(ends, says) for pattern, says in _CUT_OFF if (ends := re.search(pattern, letters))][:1]
    sequences = [place for place, letter in enumerate(letters) if letter == "A"]
    if cut:
        note("trace-cut-off", *cut[0])
    elif letters.startswith("N") and len(sequences) != 1:
        says = f"{len(sequences)} sequences were added or forked for the request, where one is expected"
        places = tuple(lines[place][1] for place in (0, *sequences[:3]))
        broken.append((len(letters), Violation("trace-sequence-count", part, says, places)))
    yield from (violation for _, violation in sorted(broken, key=lambda item: item[0]))
