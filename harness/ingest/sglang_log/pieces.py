"""One line of a file → the pieces that several writers put on it.

Standard output and standard error of a server, its progress bars and pytest's names of tests end up on one line. tqdm rewrites
its line with a carriage return, which terminals and ``tee`` often lose, and cuts it off at the terminal's width.
"""

from __future__ import annotations

import re

LONGEST = 20_000
"""Characters of a line in which progress bars are looked for."""
_RATE = r"[\d.?]+(?:[kMG]?\w{0,12}/\w{1,12}(?:, [\w=.+-]+)*\]|s/it|it/s|s/i|it/|it|s/|s|i)?"
_BAR = re.compile(
    r"(?P<percent>\d{1,3})%(?:\|[^|\r]{0,200}\|| Completed \|) *"
    r"(?P<done>[\d.]+[kMG]?)/(?P<total>[\d.]+[kMG]?) "
    rf"\[(?P<elapsed>[\d:]+)<(?:[\d:]+|\?)(?:, *(?:{_RATE})?)?\]?"
)
"""A progress bar of tqdm 4 (``std.tqdm.format_meter``), whole or cut off behind its rate; SGLang writes "25% Completed |"."""
_LABEL = re.compile(r"(?P<label>[^][|%\r: ][^][|%\r]{0,80}): +")
_STARTS = ("Output: ", "Error: ", "stdout: ", "stderr: ")
_MARKS = ("%|", "% Completed |")
_TEST = re.compile(r"(?P<id>[\w./-]+\.py::[^\s\[]+(?:\[[^\]]*\])?) (?=\S|$)")
_PREFIX = re.compile(r"(?P<name>Output|Error|stdout|stderr): (?=\[|$)")


LinePiece = tuple[str, str, tuple[str, str, str]]
"""A piece of a line: its kind ("progress", "test-start", "label" or "text"), its text, and of a progress bar the text before its
colon and its two numbers as they are written.
"""
_NO_BAR = ("", "", "")


def plain(text: str) -> bool:
    """Return True if nothing on the line points to more than one piece; `split` is then not needed."""
    return (
        "\r" not in text
        and not any(mark in text for mark in _MARKS)
        and ".py::" not in text
        and not text.startswith(_STARTS)
    )


def split(text: str) -> list[LinePiece]:
    """Split a line; a line of one writer is one piece of kind "text"."""
    pieces: list[LinePiece] = []
    for part in text.split("\r") if "\r" in text else (text,):
        if part or not pieces:
            _split(part, pieces)
    return pieces


def _split(text: str, pieces: list[LinePiece]) -> None:
    start = 0
    if "%" in text and len(text) <= LONGEST and any(mark in text for mark in _MARKS):
        for bar in _BAR.finditer(text):
            before = text[start : bar.start()]
            label = _LABEL.fullmatch(before)
            if before.strip() and not label:
                _labels(before.rstrip(" "), pieces)
            numbers = (label["label"] if label else "", bar["done"], bar["total"])
            pieces.append(("progress", bar.group(), numbers))
            start = bar.end()
    if start < len(text) or not pieces:
        _labels(text[start:], pieces)


def _labels(text: str, pieces: list[LinePiece]) -> None:
    for kind, pattern in (("test-start", _TEST), ("label", _PREFIX)):
        match = pattern.match(text)
        if match:
            pieces.append((kind, match[1], _NO_BAR))
            text = text[match.end() :]
            if not text:
                return
    pieces.append(("text", text, _NO_BAR))
