"""Make text from a model or a server safe to show: no hidden characters, no cursor movement, no change of direction."""

from __future__ import annotations

import difflib
import math
import re
import signal
from collections.abc import Collection, Sequence

# C0 and C1 controls, direction marks, invisible characters, line separators that only some readers honour, lone surrogates,
# code points that XML forbids, and tag characters that carry invisible ASCII. U+200C and U+200D stay: emoji and Indic scripts
# need them.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)
_DELETE = 0x7F


def visible(text: str) -> str:
    """Make hidden and control characters in `text` visible. Idempotent.

    U+0000 to U+001F and U+007F become control pictures (U+001B is ␛), others ``[U+202E]``. Newlines and tabs stay, and CR LF
    becomes LF.
    """
    return _HIDDEN.sub(_picture, text.replace("\r\n", "\n"))


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code == _DELETE:
        return "␡"
    return chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"


def one_line(text: str, limit: int = 200) -> str:
    """Put `visible` text on one line, cut at `limit` characters with an ellipsis."""
    line = " ".join(visible(text[: 4 * limit]).split())
    return line if len(line) <= limit and len(text) <= 4 * limit else line[: limit - 1] + "…"


def clip(text: str, limit: int) -> str:
    """Cut `text` to its start and end with a note between them, if it has more than `limit` characters.

    The end gets a quarter of `limit`, since the last line of an answer is the graded one.
    """
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 4, limit // 4
    left_out = len(text) - head - tail
    return f"{text[:head]}\n[… {left_out:,} characters left out …]\n{text[-tail:]}"


def some(what: str, chosen: Collection[int], of: Collection[int]) -> str:
    """Name some of several: "all 4 layers", "layer 2 of 4", "heads 0-2, 7 of 8"; "layer 21 among 5" where numbers are left out."""
    if len(chosen) == len(of):
        return f"all {len(of)} {what}s" if len(of) > 1 else f"{what} {next(iter(of))}"
    word = "of" if max(of) < len(of) else "among"
    return f"{what}{'s' if len(chosen) > 1 else ''} {ranges(chosen)} {word} {len(of)}"


def ranges(numbers: Collection[int]) -> str:
    """Format numbers in short form, such as "0-7, 12"; "none" if there are none."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs) or "none"


def listed(words: Sequence[str]) -> str:
    """Join words in a sentence: "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def few(words: Sequence[str], most: int) -> str:
    """Join the first of several words, and count the others: "a, b and 3 more"."""
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def met(spans: Sequence[tuple[int, int]], near: int) -> str:
    """List the numbers that were met: "48 of 1 to 256 and 4,097"; numbers more than `near` apart are listed individually.

    Args:
        spans: first and last of the numbers that were met, ascending.
        near: most by which neighbours of one range may differ.
    """
    grouped: list[tuple[int, int, int]] = []
    for first, last in spans:
        start, number = first, 0
        if grouped and first - grouped[-1][1] <= near:
            start, _, number = grouped.pop()
        grouped.append((start, last, number + last - first + 1))
    said = [
        (f"{number:,} of " * (number <= last - first)) + (f"{first:,} to {last:,}" if first < last else f"{first:,}")
        for first, last, number in grouped
    ]
    return (few(said, 9) if len(said) > 9 else listed(said)) or "none"


def counted(count: int, what: str) -> str:
    """Format a number of things: "1 line", "1,200 lines"."""
    return in_units(f"{count:,}", what)


def in_units(shown: str, unit: str) -> str:
    """Put a unit after a number that is already text: "1 point", "1.9 points", "-1 point"."""
    return f"{shown} {unit}{'' if shown.lstrip('+-') == '1' else 's'}"


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Suggest a known name: "did you mean 'sage_attn'?" for "sage_atn", or an empty string if no known name is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def percent(share: float) -> str:
    """Format a share in percent, to two significant digits, or three from ten percent up; "not finite" for infinity and NaN."""
    if not math.isfinite(share):
        return "not finite"
    return f"{float(f'{100 * share:.3g}'):,.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def times(ratio: float) -> str:
    """Format a ratio to two significant digits, without an exponent below a million million: "0.37 ×", "14,000,000 ×"."""
    if not math.isfinite(ratio):
        return "not finite"
    rounded = float(f"{ratio:.2g}")
    return f"{rounded:,.0f} ×" if 10 <= rounded < 1e12 else f"{rounded:g} ×"


def three_digits(number: float) -> str:
    """Format a number of points or percent, to a tenth and to at most three digits: "0", "1.9", "85.5", "100"."""
    return f"{float(f'{round(number, 1):.3g}') + 0.0:,g}"  # adding 0 turns -0.0 into 0.0


def points(number: float) -> str:
    """Format a number of points, as `three_digits` does: "1 point", "85.5 points"."""
    return in_units(three_digits(number), "point")


def how_ended(status: int) -> str:
    """Describe how a process ended, by its exit status or the negative number of a signal: "was killed by SIGKILL"."""
    if status >= 0:
        return f"exited with status {status}"
    return (
        f"was killed by {signal.Signals(-status).name}"
        if -status in set(signal.Signals)
        else f"was killed by signal {-status}"
    )
