"""The kinds of line in an MLC-LLM engine trace: an instrumented engine prints one line for each function that it calls.

The names of the functions are the members of ``FunctionTable`` in ``cpp/serve/function_table.h`` of MLC-LLM at 79d603f (July
2026); the actions are those of its engine of spring 2024. The marks of segments, requests and outputs are those of the program that
drove it, in the two spellings that occur.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from assay.harness.ingest.result import CitedFinding, Excerpt, FileRead, Timeline

PREFILL, JUMP_FORWARD, DECODE = "NewRequestPrefill", "Batch jump forward", "Batch decode"
POLLING_ORDER = (PREFILL, JUMP_FORWARD, DECODE)
"""The order in which an engine's step polls its actions; the first one that computes something ends the step."""

ADD, FORK = "kv_cache_add_sequence_func_", "kv_cache_fork_sequence_func_"
SAMPLE = ("gpu_multinomial_from_uniform_func_", "gpu_sample_with_top_p_func_")
PREFILLS = frozenset(
    "single_batch_prefill_func_ single_batch_extend_func_ prefill_func_ extend_func_ single_batch_prefill_to_last_hidden_func_ "
    "prefill_to_last_hidden_func_".split()
) | {"single_batch_prefill_func_ or single_batch_extend_func_"}
DECODES = frozenset(
    "single_batch_decode_func_ decode_func_ single_batch_decode_to_last_hidden_func_ decode_to_last_hidden_func_".split()
)
VERIFIES = frozenset({"verify_func_", "verify_to_last_hidden_func_"})
MODEL_CALLS = PREFILLS | DECODES | VERIFIES
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
RELOAD = "***Reload engine***"
"""The mark with which an engine starts anew: what it was doing is over."""
_ENGINE, _NOTE, _OUTPUT = "[engine debug] ", "[debug] ", "MLC-LLM Output: "
_REQUEST_MARK = re.compile(r"# [A-Z]+ REQUEST")


class TraceStep(NamedTuple):
    """One thing that happened, without its place, so that steps of two traces compare."""

    kind: Literal["mark", "action", "call"]
    name: str


class EngineLine(NamedTuple):
    """A line that stands alone.

    Attributes:
        letter: stands for it in `mlc_rules`: a bracket begins or ends a segment, a parenthesis a forward pass; empty where no
            rule is about it.
        step: that it is; None if it is none.
        text: of a note or an answer.
    """

    letter: str
    step: TraceStep | None = None
    text: str = ""


_LETTERS = {
    "A": (ADD, FORK), "(": ("kv_cache_begin_forward_func_",), ")": ("kv_cache_end_forward_func_",), "e": ("embed_func_",),
    "s": ("softmax_func_",), "g": SAMPLE, "m": PREFILLS, "c": DECODES, "v": VERIFIES, "": _OTHER_CALLS,
}  # fmt: skip
_BLANK = EngineLine("")
_FIXED: dict[str, EngineLine] = {
    "": _BLANK,
    f"{_ENGINE}***Add Request***": EngineLine("N", TraceStep("mark", "Add Request")),
    **{f"PRE{_}SEGMENT": EngineLine("[", TraceStep("mark", "segment begins")) for _ in "_ "},
    **{f"POST{_}SEGMENT": EngineLine("]", TraceStep("mark", "segment ends")) for _ in "_ "},
    **{
        f"{_ENGINE}{name}": EngineLine("", TraceStep("mark", name))
        for name in (RELOAD, "EngineReloadImpl", "AutoDecideEngineConfig START")
    },
    **{
        f"{_ENGINE}ACTION - {name}": EngineLine(letter, TraceStep("action", name))
        for letter, name in zip("pjd", POLLING_ORDER, strict=True)
    },
    **{
        f"{_ENGINE}{name}": EngineLine(letter, TraceStep("call", name))
        for letter, names in _LETTERS.items()
        for name in names
    },
}


def line_of(text: str) -> EngineLine | None:
    """Read a line that stands alone; None if no rule knows it.

    The text of an answer goes on over further lines, which only their place tells: they follow the line with its beginning.
    """
    known = _FIXED.get(text)
    if known is not None:
        return known
    if text.startswith(_OUTPUT):
        return EngineLine("o", text=text.removeprefix(_OUTPUT))
    return EngineLine("", text=text) if text.startswith(_NOTE) or _REQUEST_MARK.fullmatch(text) else None


def goes_on(text: str) -> bool:
    """Return True if a line may be a further one of an answer: it is blank, or neither the engine nor the driver prints it."""
    return not text or (line_of(text) is None and not text.startswith(_ENGINE))


ROWS_SHOWN = 100
"""Most rows of a table."""
VIOLATIONS_SHOWN = 5
"""Most violations of one rule that become findings; the others are counted."""
RULES = {
    "trace-begin-not-closed": "A begin without its end",
    "trace-end-not-begun": "An end without its begin",
    "trace-decode-before-prefill": "A decode before the prefill of its request",
    "trace-sequence-count": "Not one sequence added or forked for a request",
    "trace-action-order": "Actions polled out of order",
    "trace-call-order": "Calls of a forward pass out of order",
    "trace-cut-off": "The trace ends early",
}
"""Rules that a trace keeps, by id, with their titles."""
SegmentKind = Literal["setup", "extend", "decode", "mixed", "idle"]
"""What a segment computes: the phases of the glossary, both in one pass, or nothing."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A repeating part of a request: its steps, with the line of each."""

    kind: SegmentKind
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
    """A request.

    Attributes:
        name: as messages call it, such as "request 2".
        segments: in order.
        output: the text that the engine answered; None if the file has none.
        output_at: the first and the last line of that text.
    """

    name: str
    segments: tuple[Segment, ...]
    output: str | None = None
    output_at: tuple[int, int] = (0, 0)


class Violation(NamedTuple):
    """A rule that a trace breaks: where, in words; what is wrong, in a sentence without its end; and the lines."""

    rule: str
    where: str
    says: str
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A whole trace.

    Attributes:
        file: how much of it was understood.
        tracks: requests, in the order of the file.
        timeline: what the engine did.
        setup: what stands before the first request; None if nothing does.
        violations: of `RULES`, in the order of the file.
    """

    file: FileRead
    tracks: tuple[Track, ...]
    timeline: Timeline
    setup: Segment | None = None
    violations: tuple[Violation, ...] = ()

    @property
    def segments(self) -> list[Segment]:
        """All segments: the setup, then those of the requests."""
        return [
            *([self.setup] if self.setup else []),
            *(segment for track in self.tracks for segment in track.segments),
        ]

    def totals(self) -> Counter[tuple[str, str]]:
        """Count each call and action by the kind of its segment."""
        return Counter(
            (segment.kind, step.name) for segment in self.segments for step in segment.steps if step.kind != "mark"
        )


def findings_of(trace: StepTrace, texts: Mapping[int, str]) -> tuple[CitedFinding, ...]:
    """Make a finding of each violation, but of one rule at most `VIOLATIONS_SHOWN`. `texts` are of lines, by their numbers."""
    counts, seen = Counter(violation.rule for violation in trace.violations), Counter[str]()
    made = list[CitedFinding]()
    for violation in trace.violations:
        seen[violation.rule] += 1
        if seen[violation.rule] > VIOLATIONS_SHOWN:
            continue
        total = counts[violation.rule]
        evidence = [f"line {place:,}{f': {texts[place]}' if place in texts else ''}" for place in violation.places]
        made.append(CitedFinding(
            id=violation.rule, title=RULES[violation.rule], severity="warning", where=violation.where,
            diagnosis=f"{violation.says[0].upper()}{violation.says[1:]}.", reproduce="",
            cites=quote(violation.places, texts, violation.says),
            evidence=(*evidence, *((f"{total:,} such places in the trace",) if total > 1 else ())),
        ))  # fmt: skip
    return tuple(made)


def quote(places: Iterable[int], texts: Mapping[int, str], otherwise: str = "") -> tuple[Excerpt, ...]:
    """Quote the places as excerpts, with the text that stands there."""
    return tuple(Excerpt(first=place, last=place, text=texts.get(place, otherwise)) for place in places if place)
