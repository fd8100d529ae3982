"""Reads a failed server's log: the line that names the cause, and for a known cause what to do about it.

SGLang runs in several processes that write to one log. The process that fails writes a traceback; the others then fail because of
it, and the main process ends all of them with SIGKILL. So neither the end of the log nor the exit status names the cause.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from assay.harness.engines.sglang.known_causes import (
    ANYWHERE,
    CAUSES,
    ENDINGS,
    EXIT,
    KERNEL,
    OUT_OF_MEMORY,
    UNKNOWN_REMEDY,
    Situation,
    remedy,
)  # fmt: skip
from assay.harness.errors import EngineError
from assay.harness.text import how_ended, one_line
from assay.harness.tracebacks import CHAINED, HEADER, Frame, Traceback, Tracebacks

_LINE_LIMIT = 300
"""Characters of the line that names the cause; PyTorch's out-of-memory message goes on for three times as many."""


@dataclass(frozen=True)
class _LogFailure:
    """The statement of a log about a failure.

    Attributes:
        line: the line that names the cause, such as "ValueError: Loaded weights leave no GPU memory …"; empty if there is none.
        cause: id of a known cause; empty if it is not known.
        do: what to do.
        survivable: whether the server may have gone on after this line; it does not explain an end by a signal then.
    """

    line: str = ""
    cause: str = ""
    do: str = UNKNOWN_REMEDY
    survivable: bool = False


_SIGNALS = {"Segmentation fault": "SIGSEGV", "Illegal instruction": "SIGILL", "Bus error": "SIGBUS", "Aborted": "SIGABRT",
            "Floating": "SIGFPE"}  # fmt: skip
_FAULT = re.compile(r"Fatal Python error: (.+)")
_FAULT_FRAME = re.compile(r'\s+File "([^"]+)", line (\d+) in (\S+)')
_NOT_OURS = re.compile(r"/lib/python3[^/]*/|^<")
# What SGLang's main process prints about a process of its own that has ended: its watchdog, and its start.
_DEATH = re.compile(
    r"Subprocess (\w+?)(?:_\d+)? \(pid=\d+\) crashed with exit code (-?\d+)"
    r"|Rank \d+ (scheduler) died during initialization \(exit code: (-?\d+)\)"
)
_OF_A_SERVER = "hit an exception"
"""How SGLang's processes log the exception that ends them; others were survived, or ended a process with status 1."""
# How other processes, and SGLang's main process, fail because of the one that failed first.
_CONSEQUENCE = re.compile(
    r"(?:EOFError|BrokenPipeError|ConnectionResetError|ConnectionRefusedError|KeyboardInterrupt|SystemExit|asyncio\S*CancelledError)\b"
    r"|.*(?:scheduler died during initialization|Initialization failed\. Please see|child (?:process )?failed)"
)
_STARTS_AN_ENTRY = re.compile(r"\[\d{4}-\d\d-\d\d|\d{4}-\d\d-\d\d |INFO:|WARNING:|ERROR:|\[rank\d|\[W\d|\[E\d")
_FATAL = re.compile(
    r"\berror:|\bfatal\b|terminate called|what\(\):|segmentation fault|core dumped|\bkilled\b|\baborted\b|out of memory",
    re.IGNORECASE,
)
_ENDS_ITSELF = re.compile(r"sigquit (?:received|from|for)", re.IGNORECASE)  # its settings name a handler, too
_SETTINGS = re.compile(r".*server_?args", re.IGNORECASE)  # they name hundreds of flags, and with them anything
_NO_LAST_WORDS = re.compile(
    r"\s|.*(?:warning|\d+%|://)|\[|usage: |nanobind|kill_process_tree|Process \S+:$|\^|Fatal Python", re.IGNORECASE
)
_ANSWERED = re.compile(r'"(?:GET|POST) /\S* HTTP/')
_SHARE = re.compile(r"mem_fraction_static'?[=:] ?([0-9.]+(?:e-?\d+)?)")
_STAMP = re.compile(r"\s*(?:\[[^\]]*\d\d:\d\d:\d\d[^\]]*\]\s*)?(?:(?:ERROR|CRITICAL|FATAL):?\s+)?")
_MESSAGE_LINES = 12


@dataclass(frozen=True)
class _Raised:
    """An exception in a log.

    Attributes:
        text: its line, and those of its message.
        chained: whether it was raised because of the one before.
        final: whether SGLang reports that it ended a process.
        kernel: where in a kernel it was raised, as "mine.py, line 12, in forward"; empty if not in one.
    """

    text: str
    chained: bool
    final: bool
    kernel: str


def read(log: str, situation: Situation = ANYWHERE) -> _LogFailure:
    """Find in a server's log why it failed.

    Args:
        log: what the server wrote, from its launch on.
        situation: what the remedy depends on.
    """
    lines = log.splitlines()
    if share := _SHARE.search(log):
        situation = replace(situation, share=float(share[1]))
    chain = _last_chain(lines)
    died = _death(lines, situation)
    where = next((raised.kernel for raised in chain if raised.kernel), "")
    survivable = not any(raised.final for raised in chain)
    # A process that an exception ended has status 1; one that a signal ended, or exit, had survived those that it logged.
    if chain and (died is None or died.cause == "" or not survivable):
        for raised in chain:
            for cause in CAUSES:
                if match := cause.pattern.search(raised.text):
                    return _LogFailure(
                        _headline(raised.text, where), cause.id, remedy(cause, match, situation), survivable
                    )
    for line in lines:
        for cause in CAUSES:
            if cause.anywhere and not _SETTINGS.match(line) and (match := cause.pattern.search(line)):
                return _LogFailure(_without_stamp(line), cause.id, remedy(cause, match, situation))
    if died is not None and died.cause and survivable:
        return died
    if chain:
        line = _headline(chain[0].text, where)
        return _LogFailure(line, "kernel", KERNEL, survivable) if where else _LogFailure(line, survivable=survivable)
    if died is not None:  # with status 1, which sys.exit has if it is given a text
        return replace(died, cause="exit", do=EXIT)
    last = next((line for line in reversed(lines) if _FATAL.search(line) and not _SETTINGS.match(line)), "")
    return _LogFailure(_without_stamp(last), survivable=True)


def ended(
    who: str,
    how: str,
    when: str,
    log: str,
    tail: str,
    situation: Situation = ANYWHERE,
    *,
    process: str = "",
    out_of_memory: bool = False,
) -> EngineError:
    """Make the error of a server of which a process has ended.

    Args:
        who: "the candidate server (sage_attn)".
        how: how its process ended, in words: "exited with status 2".
        when: "during start-up" or "after it was ready".
        log: what it wrote.
        tail: the end of its log, as it is shown.
        situation: what the remedy depends on.
        process: which of its processes ended, as "sglang::scheduler"; empty for its main process, and so all of it.
        out_of_memory: whether the OOM killer has killed a process since the server was started.
    """
    failure = read(log, situation)
    itself = "SIGKILL" in how and bool(_ENDS_ITSELF.search(log))
    deadly = next((name for name in ENDINGS if how.endswith(name)), "")
    known = "SGLang ended its own processes" if itself else f"Its process {process} {how}" if process else f"It {how}"
    if deadly and not itself and (failure.survivable or not failure.line):
        failure = _LogFailure("", ENDINGS[deadly][0], situation.words(ENDINGS[deadly][1]))
    elif process and not failure.line:
        failure = _LogFailure("", "exit", EXIT)
    said = failure.line or (f"its process {process} {how}{_last_words(log.splitlines())}." if process else "")
    if out_of_memory and failure.cause in ("killed", ""):
        failure = _LogFailure(failure.line, "out-of-memory", situation.words(OUT_OF_MEMORY))
        said = f"the system ran out of memory and killed it ({said.rstrip('.') or how})."
    return EngineError(
        f"{who} failed {when}: {said}" if said else f"{who} {how} {when}.",
        "a running server",
        failure.do,
        details=f"{known} {when}.\n{tail}",
        cause=failure.cause,
    )


def _death(lines: list[str], situation: Situation) -> _LogFailure | None:
    """Find in a log why a process ended without an exception; an exit status of 1, which exceptions give too, is no cause."""
    for number, line in enumerate(lines):
        if (match := _FAULT.search(line)) and (name := next((n for n in _SIGNALS if match[1].startswith(n)), "")):
            cause, do = ENDINGS[_SIGNALS[name]]
            return _LogFailure(
                f"{one_line(match[0], _LINE_LIMIT)}{_fault_place(lines[number + 1 :])}", cause, situation.words(do)
            )
    for number, line in enumerate(lines):
        if not (match := _DEATH.search(line)):
            continue
        status, which = int(match[2] or match[4]), match[1] or match[3]
        how = how_ended(status)
        said = f"its {which} {how}{_last_words(lines[:number])}"
        if status > 0:
            return _LogFailure(said, "exit" if status > 1 else "", EXIT if status > 1 else UNKNOWN_REMEDY)
        cause, do = ENDINGS.get(how.rpartition(" ")[2], ("", UNKNOWN_REMEDY))
        return _LogFailure(said, cause, situation.words(do))
    return None


def _fault_place(lines: list[str]) -> str:
    """Return where Python was when it crashed: the innermost frame that is not of a library, else the innermost."""
    start = next((n for n, line in enumerate(lines) if line.startswith("Current thread")), len(lines))
    frames = [match for match in itertools.takewhile(bool, map(_FAULT_FRAME.match, lines[start + 1 :])) if match]
    if not frames:
        return ""
    frame = next((match for match in frames if not _NOT_OURS.search(match[1])), frames[0])
    return f" in {frame[3]} ({frame[1].rpartition('/')[2]}, line {frame[2]})"


def _last_words(lines: list[str]) -> str:
    """Return what a process printed before it ended outside of its log's entries."""
    before = next((n for n, line in enumerate(lines) if HEADER in line and "hit an" not in line), len(lines))
    words = next((line for line in reversed(lines[:before]) if line.strip() and not _ANSWERED.search(line)), "")
    return "" if not words or _NO_LAST_WORDS.match(words) else f', after it wrote "{one_line(words, 160)}"'


def _last_chain(lines: list[str]) -> list[_Raised]:
    """Return the last exception that is no consequence of another process's end, and those that led to it; the last first.

    A server survives exceptions of optional imports and logs them, so earlier ones do not count.
    """
    chains: list[list[_Raised]] = []
    for raised in _exceptions(lines):
        if raised.chained and chains:
            chains[-1].append(raised)
        else:
            chains.append([raised])
    failed = [chain for chain in chains if not _CONSEQUENCE.match(chain[-1].text)]
    final = [chain for chain in failed if any(raised.final for raised in chain)]
    return next(iter((final or failed)[-1:]), [])[::-1]


def _exceptions(lines: list[str]) -> Iterator[_Raised]:
    """Yield each traceback's exception. One without a message gets the source line that raised it."""
    tracebacks: list[Traceback] = []
    reader = Tracebacks(tracebacks.append, patience=math.inf)
    for number, line in enumerate(lines):
        reader.line(number, line)
    for trace in (trace for trace in tracebacks if trace.exception):
        at = trace.exception_line
        said = [trace.exception]
        for more in lines[at + 1 : at + _MESSAGE_LINES]:
            if HEADER in more or _STARTS_AN_ENTRY.match(more) or CHAINED.match(more):
                break
            said.append(more)
        if ":" not in trace.exception and not "".join(said[1:]).strip():
            source = next((line.strip() for line in reversed(lines[trace.first : at]) if line.strip(" ~^")), "")
            said = [f"{trace.exception}: {source}"]
        before = lines[max(trace.first - 3, 0) : trace.first]
        yield _Raised(
            "\n".join(said), any(map(CHAINED.match, before)), _OF_A_SERVER in trace.before, _in_kernel(trace.frames)
        )


def _in_kernel(frames: list[Frame]) -> str:
    """Return the innermost frame of a kernel that raised, outside of libraries if there is one; empty if no kernel was called."""
    called = next((n for n, known in enumerate(frames) if known.name == "run_kernel"), len(frames))
    inner = frames[called + 1 :]
    own = [known for known in inner if not _NOT_OURS.search(known.file)] or inner
    return f"{own[-1].file.rpartition('/')[2]}, line {own[-1].line}, in {own[-1].name}" if own else ""


def _without_stamp(line: str) -> str:
    """Return a line of a log without its time and level."""
    return one_line(line[_STAMP.match(line).end() :].strip(), _LINE_LIMIT)  # type: ignore[union-attr]  # it matches nothing, too


def _headline(said: str, where: str = "") -> str:
    """Return an exception's line, with its message's first line if that begins on the next one, and where it was raised."""
    first, *rest = (line.strip() for line in said.splitlines() if line.strip())
    place = f" ({where})" if where else ""
    return one_line(f"{first} {rest[0]}" if first.endswith(":") and rest else first, _LINE_LIMIT - len(place)) + place
