"""Reads MLC-LLM engine traces: requests, segments, actions and calls, and the rules that they break.

An instrumented engine prints one line for each function that it calls. The functions are the members of ``FunctionTable`` in
``cpp/serve/function_table.h`` of MLC-LLM at 79d603f (July 2026); the actions are from its engine of spring 2024. The program that
drove the engine wrote the marks of segments, requests and outputs, which occur in two spellings.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from assay.harness.ingest.mlc_rules import DECODE, JUMP_FORWARD, PREFILL, RULES, Violation, violations
from assay.harness.ingest.result import (
    MAX_COLUMNS,
    MAX_TRACKS,
    NOTHING,
    POLLED,
    TENTHS,
    CitedFinding,
    Excerpt,
    Fact,
    FileDocument,
    FileRead,
    FormatReader,
    Timeline,
    TimelineTrack,
)
from assay.harness.ingest.source_file import SourceFile
from assay.harness.text import counted, one_line

_ACTIONS = {PREFILL: "p", JUMP_FORWARD: "j", DECODE: "d"}
"""Letters of the actions, in polling order. The first action that computes something ends the step."""
_ADD, _FORK = "kv_cache_add_sequence_func_", "kv_cache_fork_sequence_func_"
_PREFILLS = (
    *"single_batch_prefill_func_ single_batch_extend_func_ prefill_func_ extend_func_".split(),
    *"single_batch_prefill_to_last_hidden_func_ prefill_to_last_hidden_func_".split(),
    "single_batch_prefill_func_ or single_batch_extend_func_",
)
_DECODES = (
    "single_batch_decode_func_ decode_func_ single_batch_decode_to_last_hidden_func_ decode_to_last_hidden_func_"
).split()
# The mark of an engine that restarts: all that it was doing is over.
_RELOAD = "***Reload engine***"
_ENGINE, _NOTE, _OUTPUT = "[engine debug] ", "[debug] ", "MLC-LLM Output: "
_REQUEST_MARK, _CALL = re.compile(r"# [A-Z]+ REQUEST"), re.compile(rf"{re.escape(_ENGINE)}(\w+_func_)")
# Most unknown lines quoted, most rows in a table, and most findings for one rule.
_SHOWN, _ROWS_SHOWN, _VIOLATIONS_SHOWN = 5, 100, 5
# How a request got its sequence.
_SEQUENCE = {
    _ADD: "adds a sequence: its prefill runs without a cached prefix",
    _FORK: "forks a sequence whose prefix is in the KV cache: its prefill runs with a cached prefix",
}


class TraceLine(NamedTuple):
    """A self-contained line: its letter in `mlc_rules` (empty if no rule uses it), and its event, if any.

    For the first line of an answer, the name is the line's text.
    """

    letter: str
    kind: Literal["mark", "action", "call", ""] = ""
    name: str = ""
    number: int = 0
    text: str = ""

    @property
    def step(self) -> tuple[str, str]:
        """The event without its line number, so that two traces can be compared."""
        return self.kind, self.name


_SegmentKind = Literal["setup", "extend", "mixed", "decode", "idle"]
"""Phase that a segment computes, as in the glossary: one phase, both in one pass, or nothing."""


@dataclass(frozen=True)
class Segment:
    """A repeating part of a request: the engine's polled actions, calls and marks."""

    lines: tuple[TraceLine, ...]
    setup: bool = False

    @cached_property
    def kind(self) -> _SegmentKind:
        """The phase that it computes, according to the model functions that it calls."""
        prefills, decodes = "m" in self.letters, bool({"c", "v"} & set(self.letters))
        if self.setup:
            return "setup"
        return "mixed" if prefills and decodes else "extend" if prefills else "decode" if decodes else "idle"

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
        """The number of its first line, or 0 if it has no lines."""
        return self.lines[0].number if self.lines else 0

    @property
    def last(self) -> int:
        """The number of its last line, or 0 if it has no lines."""
        return self.lines[-1].number if self.lines else 0


@dataclass
class Track:
    """A request, or the lines before the first one: all lines until the next request is added.

    Attributes:
        request: its number; 0 for lines outside all requests.
        lines: its self-contained lines.
        answer: the lines of the engine's answer, if any.
        output_at: the first and the last line of that text.
    """

    request: int
    lines: list[TraceLine] = field(default_factory=list)
    answer: list[str] = field(default_factory=list)
    output_at: tuple[int, int] = (0, 0)

    @property
    def name(self) -> str:
        """The request's name in messages."""
        return f"request {self.request}"

    @property
    def output(self) -> str | None:
        """The engine's answer, or None if there is none."""
        return "\n".join(self.answer) if self.output_at[0] else None

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Its repeating parts. Use it only once the track is complete."""
        begun: list[list[TraceLine]] = [[]]
        for line in self.lines:
            if line.letter == "[":
                begun.append([])
            if line.kind:
                begun[-1].append(line)
            if line.letter == "]":
                begun.append([])
        return tuple(Segment(tuple(lines)) for lines in begun if lines)

    @property
    def sequence(self) -> tuple[str, int]:
        """The call that gave it its sequence, and the line; ("", 0) unless there is exactly one."""
        got = [(line.name, line.number) for line in self.lines if line.letter == "A"]
        return got[0] if len(got) == 1 else ("", 0)

    @property
    def tokens(self) -> tuple[int, int]:
        """The tokens sampled for it: in prefills, and in everything else."""
        sampled = [(segment.kind, segment.letters.count("g")) for segment in self.segments]
        return sum(n for kind, n in sampled if kind == "extend"), sum(n for kind, n in sampled if kind != "extend")


@dataclass(frozen=True)
class StepTrace:
    """A whole trace: how much was understood, the requests in order, the setup before them, and the broken rules."""

    file: FileRead
    tracks: tuple[Track, ...]
    setup: Segment
    violations: tuple[Violation, ...] = ()


_CALLS: dict[str, Iterable[str]] = {
    "A": (_ADD, _FORK), "(": ("kv_cache_begin_forward_func_",), ")": ("kv_cache_end_forward_func_",), "e": ("embed_func_",),
    "s": ("softmax_func_",), "g": ("gpu_multinomial_from_uniform_func_", "gpu_sample_with_top_p_func_"),
    "m": _PREFILLS, "c": _DECODES, "v": ("verify_func_", "verify_to_last_hidden_func_"),
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
    **{f"{_ENGINE}ACTION - {name}": TraceLine(letter, "action", name) for name, letter in _ACTIONS.items()},
    **{f"{_ENGINE}{name}": TraceLine(letter, "call", name) for letter, names in _CALLS.items() for name in names},
}


def _line_of(text: str) -> TraceLine | None:
    """Parse a self-contained line, or return None if it is unknown."""
    if (known := _FIXED.get(text)) is not None:
        return known
    if text.startswith(_OUTPUT):
        return TraceLine("o", name=text.removeprefix(_OUTPUT), text=text)
    if call := _CALL.fullmatch(text):  # that no rule is about
        return TraceLine("", "call", call[1])
    return TraceLine("") if text.startswith(_NOTE) or _REQUEST_MARK.fullmatch(text) else None


def _recognises(source: SourceFile) -> bool:
    """Return True if the file begins like an engine trace, with a known line of the engine."""
    lines = (_line_of(text.rstrip("\r")) for text in source.head_text.splitlines()[:400])
    return any(line is not None and line.kind and line.letter not in ("[", "]") for line in lines)


def _read_steps(source: SourceFile) -> StepTrace:
    """Read the steps of a whole engine trace, line by line."""
    parts, excerpts, unread, number, requests, answering = [Track(0)], list[Excerpt](), 0, 0, 0, False
    for number, text in source.lines():
        part, line = parts[-1], _line_of(text)
        # An answer may continue over further lines, which only their position identifies: each follows the beginning of the
        # answer, and is blank or printed by neither the engine nor the driver.
        if answering and (not text or (line is None and not text.startswith(_ENGINE))):
            part.answer.append(text)
            part.output_at = (part.output_at[0], number)
            continue
        if line is None:
            unread += 1
            excerpts += [Excerpt(first=number, last=number, text=one_line(text))] if unread <= _SHOWN else []
            continue
        answering = False
        if line.letter == "N":
            requests += 1
            parts.append(Track(requests))
        elif line.name == _RELOAD:
            parts.append(Track(0))
        elif line.letter == "o" and part.request and not part.answer:
            part.answer, part.output_at, answering = [line.name], (number, number), True
        parts[-1].lines.append(line._replace(number=number, text=text))
    outside = tuple(line for part in parts if not part.request for line in part.lines if line.kind)
    return StepTrace(
        FileRead.of(source, READER.id, READER.title, number - unread, unread, "line", excerpts, source.encoding_notes()),
        tuple(part for part in parts if part.request), Segment(outside, setup=True), tuple(_violations(parts, number)),
    )  # fmt: skip


def _violations(parts: Sequence[Track], last: int) -> Iterator[Violation]:
    for number, part in enumerate(parts):
        ruled = [line for line in part.lines if line.letter]
        following = parts[number + 1].lines[0].number if number + 1 < len(parts) else 0
        letters = "".join(line.letter for line in ruled) + ("X" if following else "Z")
        lines = [(line.name, line.number) for line in ruled] + [("", following or last)]
        outside = "no request" if number else "before the first request"
        yield from violations(letters, lines, part.name if part.request else outside)


def timeline(trace: StepTrace) -> Timeline:
    """Draw one lane per action of a request, with one column per segment, or per group of segments if there are many."""
    shown = trace.tracks[:MAX_TRACKS]
    longest = max((len(track.segments) for track in shown), default=0)
    lanes = tuple(_lanes(track, max(1, -(-longest // MAX_COLUMNS))) for track in shown)
    return Timeline(segments=longest, tracks=lanes, left_out=len(trace.tracks) - len(shown))


def _lanes(track: Track, per: int) -> TimelineTrack:
    groups = [track.segments[at : at + per] for at in range(0, len(track.segments), per)]
    lanes = {name: "".join(_cell(group, name) for group in groups) for name in _ACTIONS}
    got = {_ADD: "adds its sequence, ", _FORK: "forks its sequence, "}.get(track.sequence[0], "")
    note = f"{got}{counted(sum(track.tokens), 'token')}"
    return TimelineTrack(name=track.name, note=note, lanes=lanes)


def _cell(group: Sequence[Segment], action: str) -> str:
    """Return an action's cell for a group of segments: the share in which it computed something, or that it was only polled."""
    # An action computes something if the model is called before the next one is polled.
    called = re.compile(rf"{_ACTIONS[action]}[^pjdmcv]*[mcv]")
    computed = sum(len(called.findall(segment.letters)) for segment in group)
    if computed:
        return TENTHS[int(min(1.0, computed / len(group)) * len(TENTHS) - 1e-9)]
    return POLLED if any(_ACTIONS[action] in segment.letters for segment in group) else NOTHING


def _read(source: SourceFile) -> FileDocument:
    trace = _read_steps(source)
    texts = {
        line.number: one_line(line.text)
        for lines in (trace.setup.lines, *(track.lines for track in trace.tracks))
        for line in lines
    }
    return FileDocument(
        file=trace.file, facts=tuple(_facts(trace, texts)), findings=tuple(_findings(trace, texts)), timeline=timeline(trace),
    )  # fmt: skip


def _findings(trace: StepTrace, texts: Mapping[int, str]) -> Iterator[CitedFinding]:
    """Yield a finding per violation, at most `_VIOLATIONS_SHOWN` per rule. `texts` has the text of lines, by number."""
    counts, seen = Counter(violation.rule for violation in trace.violations), Counter[str]()
    for violation in trace.violations:
        seen[violation.rule] += 1
        if seen[violation.rule] > _VIOLATIONS_SHOWN:
            continue
        total = counts[violation.rule]
        evidence = [f"line {place:,}{f': {texts[place]}' if place in texts else ''}" for place in violation.places]
        cites = [(place, texts.get(place, violation.says)) for place in violation.places if place]
        yield CitedFinding(
            id=violation.rule, title=RULES[violation.rule], severity="warning", where=violation.where,
            diagnosis=f"{violation.says[0].upper()}{violation.says[1:]}.", reproduce="",
            cites=tuple(Excerpt(first=place, last=place, text=text) for place, text in cites),
            evidence=(*evidence, *((f"{total:,} places like this in the trace",) if total > 1 else ())),
        )  # fmt: skip


def _facts(trace: StepTrace, texts: Mapping[int, str]) -> Iterator[Fact]:
    yield Fact(id="requests", title="Requests", text=counted(len(trace.tracks), "request"))
    if not trace.violations:
        yield Fact(id="rules", title="Rules", text="the trace breaks none of the engine's rules")
    for track in trace.tracks[:_ROWS_SHOWN]:
        # The prefill before the first mark does not count.
        marked = [segment for segment in track.segments if segment.letters.startswith("[")]
        slug, (first, rest) = track.name.replace(" ", "-"), track.tokens
        idle = sum(segment.kind == "idle" for segment in marked)
        steps = sum(segment.kind == "decode" for segment in marked)
        ends = ", the last one" if idle == 1 and marked[-1].kind == "idle" else ""
        says = f"{counted(len(marked), 'segment')}: {steps:,} with a decode, {idle:,} idle{ends}"
        place, last = track.lines[0].number, track.lines[-1].number
        cite = Excerpt(first=place, last=last, text=texts.get(place, ""))
        yield Fact(id=f"{slug}-segments", title=f"Segments of {track.name}", text=says, cites=(cite,))
        says = f"{counted(first + rest, 'token')}: {first:,} from the prefill, {rest:,} from decodes"
        yield Fact(id=f"{slug}-tokens", title=f"Tokens of {track.name}", text=says)
        name, place = track.sequence
        if name:
            cite = Excerpt(first=place, last=place, text=texts.get(place, ""))
            says = f"{track.name} {_SEQUENCE[name]}"
            yield Fact(id=f"{slug}-sequence", title=f"Sequence of {track.name}", text=says, cites=(cite,))
        if track.output is not None:
            at, until = track.output_at
            cite = Excerpt(first=at, last=until, text=texts.get(at, ""))
            yield Fact(id=f"{slug}-output", title=f"Answer to {track.name}", text=track.output, cites=(cite,))


READER = FormatReader("mlc-llm-actions", "MLC-LLM engine trace", _recognises, _read, steps=_read_steps)
