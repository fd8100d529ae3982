"""Asking a server to list the kernels that run in it: one pass without and one with a cached prefix, and one decode step."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from assay.harness.engines.base import ChatRequest, Engine, answers
from assay.harness.engines.inside.control import Control, set_control
from assay.harness.evidence.executed import FOLDER
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.records import Item
from assay.harness.files import write_whole
from assay.harness.sides import Role

_LABEL = "kernels"
_COMPLETE = "complete"
"""File that marks the requests as answered; it holds the nonce of the run."""
_ANSWER_TOKENS = 4
"""Token limit of the answers: the first token comes from the extend pass, the others from decode steps."""
_CONTINUATION = (
    "\nThink about every option once more before you answer, and give nothing but the letter of the right one."
)
"""What the second prompt adds to the first, which is in the cache: more new tokens than a decode step has."""


def is_traced(folder: RunFolder, role: Role) -> bool:
    """Return True if a role's server has listed its kernels."""
    path = folder.server_folder(role) / FOLDER / _COMPLETE
    return path.exists() and path.read_text() == folder.nonce


def trace_kernels(engine: Engine, folder: RunFolder, items: Sequence[Item]) -> None:
    """Have a server list its kernels, unless it has done so, or assay did not start it. Two short requests.

    Args:
        engine: the running server.
        folder: the run's.
        items: whose first prompt is asked; without any, nothing is.

    Raises:
        EngineError: the server failed.
        EvidenceError: its folder cannot be written.
    """
    if engine.evidence is None or not items or is_traced(folder, engine.role):
        return
    place = folder.server_folder(engine.role)
    shutil.rmtree(place / FOLDER, ignore_errors=True)
    prompt = items[0].prompt
    set_control(place, Control(profile=_LABEL))
    try:
        engine.flush_cache()
        for text in (prompt, prompt + _CONTINUATION):
            answers(engine, [ChatRequest(text, _ANSWER_TOKENS)], 1)
    finally:
        set_control(place, Control())
    write_whole(place / FOLDER / _COMPLETE, folder.nonce, durable=False)
