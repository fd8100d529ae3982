"""``server_args=ServerArgs(model_path='…')`` and ``server_args={'model_path': '…'}`` → names and values. Nothing is evaluated."""

from __future__ import annotations

import re
from itertools import pairwise

_TOKENS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[()\[\]{},]|[^'"()\[\]{},]+|['"]""")
_NAME = re.compile(r"""\s*(?:(\w+)=|'(\w+)':\s)""")
PER_SERVER = frozenset({"random_seed", "port", "nccl_port", "dist_init_addr", "mem_fraction_static", "host"})
"""Arguments that differ between any two servers: chosen at random, by the machine's free memory, or to be out of the way."""


def parse(text: str) -> tuple[dict[str, str], bool]:
    """Split a list of arguments at its top-level commas.

    Args:
        text: from behind the opening bracket on.

    Returns:
        Values as they are written, by name, and whether the list ends. A value that is cut off is left out.
    """
    arguments: dict[str, str] = {}
    start = 0
    while (end := _end(text, start)) >= 0:
        if named := _NAME.match(text[start:end]):
            arguments[named[1] or named[2]] = text[start + named.end() : end].strip()
        start = end + 1
        if text[end] != ",":
            return arguments, not text[start:].strip()
    return arguments, False


def _end(text: str, start: int) -> int:
    """Find where an argument ends: at a comma, or at the bracket that closes the list; -1 if it is cut off."""
    depth = 0
    for match in _TOKENS.finditer(text, start):
        token = match.group()
        if token in "([{":
            depth += 1
        elif token == "," and not depth:
            return match.start()
        elif token in ")]}":
            depth -= 1
            if depth < 0:
                return match.start()
    return -1


def differences(servers: list[dict[str, str]]) -> list[tuple[str, tuple[str, ...]]]:
    """List the arguments that differ between servers, without `PER_SERVER`: the name, and each server's value, or "not stated"."""
    names = dict.fromkeys(name for server in servers for name in server if name not in PER_SERVER)
    rows = [(name, tuple(server.get(name, "not stated") for server in servers)) for name in names]
    return [(name, values) for name, values in rows if any(a != b for a, b in pairwise(values))]
