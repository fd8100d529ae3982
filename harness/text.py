"""Text that a model or a server wrote, made fit to be shown: nothing in it hides, moves the cursor or turns the line."""

from __future__ import annotations

import re

# C0 and C1 controls, marks that steer direction or show nothing, line separators that only some readers honour, lone
# surrogates, the code points that XML forbids, and the tag characters that carry invisible ASCII. U+200C and U+200D stay:
# emoji and Indic scripts are spelled with them.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ud800-\udfff\ufeff\uffa0\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)
_DELETE = 0x7F


def visible(text: str) -> str:
    """`text` with each hidden or steering character written out: U+0000 to U+001F and U+007F as their control
    pictures (U+001B as ␛), the others as ``[U+202E]``. Newlines and tabs stay; CR LF becomes LF. Applying it twice
    changes nothing more.
    """
    return _HIDDEN.sub(_picture, text.replace("\r\n", "\n"))


def _picture(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code == _DELETE:
        return "␡"
    return chr(0x2400 + code) if code < 0x20 else f"[U+{code:04X}]"


def one_line(text: str, limit: int = 200) -> str:
    """`visible` text on one line, cut at `limit` characters with an ellipsis."""
    line = " ".join(visible(text[: 4 * limit]).split())
    return line if len(line) <= limit and len(text) <= 4 * limit else line[: limit - 1] + "…"


def clip(text: str, limit: int) -> str:
    """`text` if it has at most `limit` characters, else its first three quarters and last quarter of `limit`, with
    what was left out said between them: an answer's last line is the one that is graded.
    """
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 4, limit // 4
    left_out = len(text) - head - tail
    return f"{text[:head]}\n[… {left_out:,} characters left out …]\n{text[-tail:]}"
