"""Reads an MLC-LLM engine trace: lines -> requests, segments, actions and calls.

An instrumented engine prints one line for each function that it calls. The names of the functions are the members of
``FunctionTable`` in ``cpp/serve/function_table.h`` of MLC-LLM at 79d603f (July 2026); the actions are those of its engine of spring
2024. The marks of segments, requests and outputs are those of the program that drove it, in the two spellings that occur.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from assay.harness.ingest.mlc_rules import DECODE, JUMP_FORWARD, PREFILL, Violation, violations
from assay.harness.ingest.result import Excerpt, FileRead
from assay.harness.ingest.source_file import SourceFile
from assay.harness.text import one_line

ID, TITLE = "mlc-llm-actions", "MLC-LLM engine trace"
ACTIONS = {PREFILL: "p", JUMP_FORWARD: "j", DECODE: "d"}
"""Letters of the actions, in the order in which a step polls them; the first one that computes something ends the step."""
ADD, FORK = "kv_cache_add_sequence_func_", "kv_cache_fork_sequence_func_"
_PREFILLS = (
    *"single_batch_prefill_func_ single_batch_extend_func_ prefill_func_ extend_func_".split(),
    *"single_batch_prefill_to_last_hidden_func_ prefill_to_last_hidden_func_".split(),
    "single_batch_prefill_func_ or single_batch_extend_func_",
)
_DECODES = (
    "single_batch_decode_func_ decode_func_ single_batch_decode_to_last_hidden_func_ decode_to_last_hidden_func_"
).split()
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


class TraceLine(NamedTuple):
    """A line that stands alone: its letter in `mlc_rules` (empty if no rule is about it), and what happened, if anything did.

    The name of the first line of an answer is its text.
    """

    letter: str
    kind: Literal["mark", "action", "call", ""] = ""
    name: str = ""
    number: int = 0

    @property
    def step(self) -> tuple[str, str]:
        """The event without its place, so that lines of two traces compare."""
        return self.kind, self.name


SegmentKind = Literal["setup", "extend", "decode", "mixed", "idle"]
"""What a segment computes: the phases of the glossary, both in one pass, or nothing."""


@dataclass(frozen=True)
class Segment:
    """A repeating part of a request: the actions that the engine polled, the calls that it made and the marks."""

    kind: SegmentKind
    lines: tuple[TraceLine, ...]

    @cached_property
    def steps(self) -> tuple[tuple[str, str], ...]:
        """Its events."""
        return tuple(line.step for line in self.lines)

    @cached_property
    def letters(self) -> str:
        """The letters of its lines."""
        return "".join(line.letter for line in self.lines)

    @property
    def first(self) -> int:
        """The number of its first line; 0 if it has none."""
        return self.lines[0].number if self.lines else 0

    @property
    def last(self) -> int:
        """The number of its last line; 0 if it has none."""
        return self.lines[-1].number if self.lines else 0


@dataclass(frozen=True)
class Track:
    """A request, as messages name it; the text that the engine answered, if any, and the first and last line of that text."""

    name: str
    segments: tuple[Segment, ...]
    output: str | None = None
    output_at: tuple[int, int] = (0, 0)

    @property
    def sequence(self) -> tuple[str, int]:
        """The call by which it got its sequence, and its line; nothing if it got none or several."""
        got = [(line.name, line.number) for segment in self.segments for line in segment.lines if line.letter == "A"]
        return got[0] if len(got) == 1 else ("", 0)

    @property
    def tokens(self) -> tuple[int, int]:
        """The tokens that were sampled for it: in prefills, and in everything else."""
        sampled = [(segment.kind, segment.letters.count("g")) for segment in self.segments]
        return sum(n for kind, n in sampled if kind == "extend"), sum(n for kind, n in sampled if kind != "extend")


@dataclass(frozen=True)
class StepTrace:
    """A whole trace: how much was understood, requests in order, what stands before the first, and the rules that it breaks."""

    file: FileRead
    tracks: tuple[Track, ...]
    setup: Segment | None = None
    violations: tuple[Violation, ...] = ()


_CALLS: dict[str, Iterable[str]] = {
    "A": (ADD, FORK), "(": ("kv_cache_begin_forward_func_",), ")": ("kv_cache_end_forward_func_",), "e": ("embed_func_",),
    "s": ("softmax_func_",), "g": ("gpu_multinomial_from_uniform_func_", "gpu_sample_with_top_p_func_"),
    "m": _PREFILLS, "c": _DECODES, "v": ("verify_func_", "verify_to_last_hidden_func_"), "": _OTHER_CALLS,
}  # fmt: skip
_FIXED = {
    "": TraceLine(""),
    f"{_ENGINE}***Add Request***": TraceLine("N", "mark", "Add Request"),
    **{f"PRE{_}SEGMENT": TraceLine("[", "mark", "segment begins") for _ in "_ "},
    **{f"POST{_}SEGMENT": TraceLine("]", "mark", "segment ends") for _ in "_ "},
    **{
        f"{_ENGINE}{name}": TraceLine("", "mark", name)
        for name in (_RELOAD, "EngineReloadImpl", "AutoDecideEngineConfig START")
    },
    **{f"{_ENGINE}ACTION - {name}": TraceLine(letter, "action", name) for name, letter in ACTIONS.items()},
    **{f"{_ENGINE}{name}": TraceLine(letter, "call", name) for letter, names in _CALLS.items() for name in names},
}


def _line_of(text: str) -> TraceLine | None:
    """Read a line that stands alone; None if no rule knows it."""
    if (known := _FIXED.get(text)) is not None:
        return known
    if text.startswith(_OUTPUT):
        return TraceLine("o", name=text.removeprefix(_OUTPUT))
    return TraceLine("") if text.startswith(_NOTE) or _REQUEST_MARK.fullmatch(text) else None


def begins_trace(source: SourceFile) -> bool:
    """Return True if the file begins like an engine trace: with a line of the engine that a rule knows."""
    lines = (_line_of(text.rstrip("\r")) for text in source.head_text.splitlines()[:400])
    return any(line is not None and line.kind and line.letter not in ("[", "]") for line in lines)


@dataclass
class _Part:
    """The lines from the addition of a request to that of the next; `request` is 0 for what stands outside of all requests."""

    request: int
    lines: list[TraceLine] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    output_at: tuple[int, int] = (0, 0)


def read_steps(source: SourceFile) -> StepTrace:
    """Read the steps of a whole engine trace, one line at a time."""
    parts, excerpts, unread, number, requests, answering = [_Part(0)], list[Excerpt](), 0, 0, 0, False
    for number, text in source.lines():
        part, line = parts[-1], _line_of(text)
        # The text of an answer goes on over further lines, which only their place tells: a line that follows its beginning, and
        # is blank or printed by neither the engine nor the driver.
        if answering and (not text or (line is None and not text.startswith(_ENGINE))):
            part.output.append(text)
            part.output_at = (part.output_at[0], number)
            continue
        if line is None:
            unread += 1
            excerpts += [Excerpt(first=number, last=number, text=one_line(text))] if unread <= _SHOWN else []
            continue
        answering = False
        if line.letter == "N":
            requests += 1
            parts.append(_Part(requests))
        elif line.name == _RELOAD:
            parts.append(_Part(0))
        elif line.letter == "o" and part.request and not part.output:
            part.output, part.output_at, answering = [line.name], (number, number), True
        parts[-1].lines.append(line._replace(number=number))
    outside = tuple(line for part in parts if not part.request for line in part.lines if line.kind)
    tracks = tuple(
        Track(
            f"request {part.request}", tuple(_segments(part.lines)),
            "\n".join(part.output) if part.output_at[0] else None, part.output_at,
        )
        for part in parts if part.request
    )  # fmt: skip
    file = FileRead.of(source, ID, TITLE, number - unread, unread, "line", excerpts, source.encoding_notes())
    return StepTrace(file, tracks, Segment("setup", outside) if outside else None, tuple(_violations(parts, number)))


def _segments(lines: Iterable[TraceLine]) -> Iterator[Segment]:
    begun: list[TraceLine] = []
    for line in lines:
        if line.letter == "[" and begun:
            yield _segment(begun)
            begun = []
        if line.kind:
            begun.append(line)
        if line.letter == "]":
            yield _segment(begun)
            begun = []
    if begun:
        yield _segment(begun)


def _segment(lines: Sequence[TraceLine]) -> Segment:
    """Make a segment, whose kind follows from the functions of the model that it calls."""
    called = {line.letter for line in lines}
    prefills, decodes = "m" in called, bool(called & {"c", "v"})
    kind: SegmentKind = "mixed" if prefills and decodes else "extend" if prefills else "decode" if decodes else "idle"
    return Segment(kind, tuple(lines))


def _violations(parts: Sequence[_Part], last: int) -> Iterator[Violation]:
    for number, part in enumerate(parts):
        ruled = [line for line in part.lines if line.letter]
        following = parts[number + 1].lines[0].number if number + 1 < len(parts) else 0
        letters = "".join(line.letter for line in ruled) + ("X" if following else "Z")
        lines = [(line.name, line.number) for line in ruled] + [("", following or last)]
        outside = "no request" if number else "before the first request"
        yield from violations(letters, lines, f"request {part.request}" if part.request else outside)
