"""Reads an MLC-LLM engine trace: lines -> requests, segments, actions and calls.

An instrumented engine prints one line for each function that it calls. The names of the functions are the members of
``FunctionTable`` in ``cpp/serve/function_table.h`` of MLC-LLM at 79d603f (July 2026); the actions are those of its engine of spring
2024. The marks of segments, requests and outputs are those of the program that drove it, in the two spellings that occur.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from assay.harness.ingest.mlc_rules import DECODE, JUMP_FORWARD, PREFILL, Violation, violations
from assay.harness.ingest.result import Excerpt, FileRead, Timeline
from assay.harness.ingest.source_file import SourceFile
from assay.harness.text import one_line

POLLING_ORDER = (PREFILL, JUMP_FORWARD, DECODE)
"""The order in which an engine's step polls its actions; the first one that computes something ends the step."""

ADD, FORK = "kv_cache_add_sequence_func_", "kv_cache_fork_sequence_func_"
SAMPLE = ("gpu_multinomial_from_uniform_func_", "gpu_sample_with_top_p_func_")
_PREFILLS = frozenset(
    "single_batch_prefill_func_ single_batch_extend_func_ prefill_func_ extend_func_ single_batch_prefill_to_last_hidden_func_ "
    "prefill_to_last_hidden_func_".split()
) | {"single_batch_prefill_func_ or single_batch_extend_func_"}
_DECODES = frozenset(
    "single_batch_decode_func_ decode_func_ single_batch_decode_to_last_hidden_func_ decode_to_last_hidden_func_".split()
)
_VERIFIES = frozenset({"verify_func_", "verify_to_last_hidden_func_"})
MODEL_CALLS = _PREFILLS | _DECODES | _VERIFIES
_OTHER_CALLS = (
    "kv_cache_get_num_available_pages_func_ kv_cache_get_total_sequence_length_func_ kv_cache_popn_func_ "
    "kv_cache_remove_sequence_func_ kv_cache_commit_accepted_token_tree_nodes_func_ kv_cache_disagg_mark_send_func_ "
    "kv_cache_disagg_prepare_recv_func_ image_embed_func_ fuse_embed_hidden_func_ apply_bitmask_func_ apply_logit_bias_func_ "
    "apply_penalty_func_ batch_get_logits_func_ get_logits_func_ batch_select_last_hidden_func_ gather_hidden_states_func_ "
    "scatter_hidden_states_func_ gather_probs_func_ scatter_probs_func_ gpu_argsort_probs_func_ gpu_renormalize_by_top_p_func_ "
    "gpu_sampler_take_probs_func_ gpu_verify_draft_tokens_func_ nd_copy_embedding_to_offset_func_ nd_get_shape_func_ nd_view_func_ "
    "tuple_getitem_func_ create_kv_cache_func_ create_rnn_state_func_ alloc_embedding_tensor_func_ cuda_graph_alloc_init_func_ "
    "reset_kv_cache_func_"
).split()
# The mark with which an engine starts anew: what it was doing is over.
_RELOAD = "***Reload engine***"
_ENGINE, _NOTE, _OUTPUT = "[engine debug] ", "[debug] ", "MLC-LLM Output: "
_REQUEST_MARK = re.compile(r"# [A-Z]+ REQUEST")
# Lines quoted of those that no rule knows.
_SHOWN = 5


_NO_TIMELINE = Timeline(segments=0, tracks=())
# What a segment computes: the phases of the glossary, both in one pass, or nothing.
_SegmentKind = Literal["setup", "extend", "decode", "mixed", "idle"]


class TraceStep(NamedTuple):
    """One thing that happened, without its place, so that steps of two traces compare."""

    kind: Literal["mark", "action", "call"]
    name: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A repeating part of a request: the actions that the engine polled, the calls that it made and the marks, with their lines."""

    kind: _SegmentKind
    steps: tuple[TraceStep, ...]
    places: Sequence[int]

    @property
    def first(self) -> int:
        """The line of its first step; 0 if it has none."""
        return self.places[0] if self.places else 0

    @property
    def last(self) -> int:
        """The line of its last step; 0 if it has none."""
        return self.places[-1] if self.places else 0


@dataclass(frozen=True, slots=True)
class Track:
    """A request, as messages name it; the text that the engine answered, if any, and the first and last line of that text."""

    name: str
    segments: tuple[Segment, ...]
    output: str | None = None
    output_at: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A whole trace: how much was understood, requests in order, what stands before the first, and the rules that it breaks."""

    file: FileRead
    tracks: tuple[Track, ...]
    setup: Segment | None = None
    violations: tuple[Violation, ...] = ()
    timeline: Timeline = _NO_TIMELINE


class _EngineLine(NamedTuple):
    """A line that stands alone: its letter in `mlc_rules` (empty if no rule is about it), its step, the text of an answer."""

    letter: str
    step: TraceStep | None = None
    text: str = ""


_LETTERS = {
    "A": (ADD, FORK), "(": ("kv_cache_begin_forward_func_",), ")": ("kv_cache_end_forward_func_",), "e": ("embed_func_",),
    "s": ("softmax_func_",), "g": SAMPLE, "m": _PREFILLS, "c": _DECODES, "v": _VERIFIES, "": _OTHER_CALLS,
}  # fmt: skip
_FIXED: dict[str, _EngineLine] = {
    "": _EngineLine(""),
    f"{_ENGINE}***Add Request***": _EngineLine("N", TraceStep("mark", "Add Request")),
    **{f"PRE{_}SEGMENT": _EngineLine("[", TraceStep("mark", "segment begins")) for _ in "_ "},
    **{f"POST{_}SEGMENT": _EngineLine("]", TraceStep("mark", "segment ends")) for _ in "_ "},
    **{
        f"{_ENGINE}{name}": _EngineLine("", TraceStep("mark", name))
        for name in (_RELOAD, "EngineReloadImpl", "AutoDecideEngineConfig START")
    },
    **{
        f"{_ENGINE}ACTION - {name}": _EngineLine(letter, TraceStep("action", name))
        for letter, name in zip("pjd", POLLING_ORDER, strict=True)
    },
    **{
        f"{_ENGINE}{name}": _EngineLine(letter, TraceStep("call", name))
        for letter, names in _LETTERS.items()
        for name in names
    },
}


def _line_of(text: str) -> _EngineLine | None:
    """Read a line that stands alone; None if no rule knows it.

    The text of an answer goes on over further lines, which only their place tells: they follow the line with its beginning.
    """
    if (known := _FIXED.get(text)) is not None:
        return known
    if text.startswith(_OUTPUT):
        return _EngineLine("o", text=text.removeprefix(_OUTPUT))
    return _EngineLine("", text=text) if text.startswith(_NOTE) or _REQUEST_MARK.fullmatch(text) else None


def _goes_on(text: str) -> bool:
    """Return True if a line may be a further one of an answer: it is blank, or neither the engine nor the driver prints it."""
    return not text or (_line_of(text) is None and not text.startswith(_ENGINE))


def begins_trace(source: SourceFile) -> bool:
    """Return True if the file begins like an engine trace: with a line of the engine that a rule knows."""
    lines = (_line_of(text.rstrip("\r")) for text in source.head_text.splitlines()[:400])
    return any(line is not None and line.step is not None and line.letter not in ("[", "]") for line in lines)


@dataclass
class _RequestLines:
    """The lines from the addition of a request to that of the next; `request` is 0 for what stands outside of all requests."""

    request: int
    lines: list[tuple[_EngineLine, int]] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    output_at: tuple[int, int] = (0, 0)

    def track(self) -> Track:
        """Cut it into segments."""
        segments: list[Segment] = []
        begun: list[tuple[_EngineLine, int]] = []
        for line, at in self.lines:
            if line.letter == "[" and begun:
                segments.append(_segment(begun))
                begun = []
            if line.step:
                begun.append((line, at))
            if line.letter == "]":
                segments.append(_segment(begun))
                begun = []
        segments += [_segment(begun)] if begun else []
        output = "\n".join(self.output) if self.output_at[0] else None
        return Track(f"request {self.request}", tuple(segments), output, self.output_at)


def read_steps(source: SourceFile, format: str, title: str) -> StepTrace:
    """Read the steps of a whole engine trace, one line at a time. `format` and `title` name it in `FileRead`."""
    parts, excerpts, unread, number, requests, answering = [_RequestLines(0)], list[Excerpt](), 0, 0, 0, False
    for number, text in source.lines():
        part = parts[-1]
        if answering and _goes_on(text):
            part.output.append(text)
            part.output_at = (part.output_at[0], number)
            continue
        line = _line_of(text)
        if line is None:
            unread += 1
            excerpts += [Excerpt(first=number, last=number, text=one_line(text))] if unread <= _SHOWN else []
            continue
        answering = False
        if line.letter == "N":
            requests += 1
            parts.append(_RequestLines(requests))
        elif line.step and line.step.name == _RELOAD:
            parts.append(_RequestLines(0))
        elif line.letter == "o" and part.request and not part.output:
            part.output, part.output_at, answering = [line.text], (number, number), True
        parts[-1].lines.append((line, number))
    outside = [line for part in parts if not part.request for line in part.lines if line[0].step]
    tracks = tuple(part.track() for part in parts if part.request)
    return StepTrace(
        FileRead.of(source, format, title, number - unread, unread, "line", excerpts, source.encoding_notes()),
        tracks, _segment(outside, "setup") if outside else None, tuple(_violations(parts, number)),
    )  # fmt: skip


def _segment(lines: Sequence[tuple[_EngineLine, int]], kind: _SegmentKind | None = None) -> Segment:
    steps = tuple(line.step for line, _ in lines if line.step)
    return Segment(kind or _computes(steps), steps, [at for _, at in lines])


@lru_cache(4096)
def _computes(steps: tuple[TraceStep, ...]) -> _SegmentKind:
    """Tell the kind of a segment from the functions of the model that it calls."""
    names = {step.name for step in steps if step.kind == "call"}
    prefills, decodes = names & _PREFILLS, names & (_DECODES | _VERIFIES)
    if prefills and decodes:
        return "mixed"
    return "extend" if prefills else "decode" if decodes else "idle"


def _violations(parts: Sequence[_RequestLines], last: int) -> Iterator[Violation]:
    for number, part in enumerate(parts):
        ruled = [(line, at) for line, at in part.lines if line.letter]
        following = parts[number + 1].lines[0][1] if number + 1 < len(parts) else 0
        letters = "".join(line.letter for line, _ in ruled) + ("X" if following else "Z")
        lines = [(line.step.name if line.step else "", at) for line, at in ruled] + [("", following or last)]
        outside = "no request" if number else "before the first request"
        yield from violations(letters, lines, f"request {part.request}" if part.request else outside)
