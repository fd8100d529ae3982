"""The fingerprint of a running server: written by its processes when they are asked, with the tokens that it reports."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from assay.evals.probe_texts import CHATS, TEXTS
from assay.harness.engines.base import ChatRequest, Engine, answers
from assay.harness.engines.inside.control import Control, set_control
from assay.harness.errors import EngineError
from assay.harness.evidence.fingerprint import OF_PROCESS, Fingerprint, Tokens
from assay.harness.fingerprint.folder_readings import observed, written_ids
from assay.harness.fingerprint.weights import joined
from assay.harness.text import one_line

# Seconds that the processes of a server may take after the reply: they read all weights.
_WAIT_S = 60.0


def fingerprint_of(
    server: Engine, folder: Path, model: Path, ranks: int, write: Callable[[str], None] | None = None
) -> Fingerprint | None:
    """Take the fingerprint of a running server; one short request is asked on an empty cache, and the control is left off.

    Args:
        write: makes the server's processes write theirs under a label; by default the control asks them.

    Returns:
        The fingerprint, or None if its processes write none.

    Raises:
        EngineError: the server failed, or only some of its processes wrote theirs.
    """
    begun = time.monotonic()
    label = secrets.token_hex(4)
    if write is not None:
        write(label)
    else:
        server.flush_cache()
        set_control(folder, Control(fingerprint=label))
        try:
            answers(server, [ChatRequest(TEXTS["leading space"], 1)], 1)
        finally:
            set_control(folder, Control())
    written = _written(server, folder, label, ranks)
    if not written:
        return None
    first = joined(written)
    asking = {"asking": round(time.monotonic() - begun, 4)}
    read = {"tokens": None, **observed({"tokens": lambda: _tokens(server, model, first)})}
    server.check()
    return first.with_parts({"source": "server", **read}, asking)


def _written(server: Engine, folder: Path, label: str, ranks: int) -> Sequence[Fingerprint]:
    """Read the fingerprint of each process, in the order of ranks; the result may be empty."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        files = OF_PROCESS.read_each(folder)
        written = [made for name, made in files.items() if name.startswith(f"{label}-")]
        if len(written) >= ranks:
            return written
        server.check()
        if time.monotonic() > deadline:
            if not written:
                return ()
            raise EngineError(
                f"{len(written)} of {ranks} processes of the server wrote their fingerprint.",
                "one from each process",
                "see the server's log; run again without it if that does not help",
            )
        time.sleep(0.05)


def _tokens(server: Engine, model: Path, told: Fingerprint) -> Tokens:
    """Have the server's own tokenizer make the ids of the corpus, and its own chat endpoint those of the chats.

    The rest, such as EOS and the class of the tokenizer, comes from a process of the server.
    """
    names = list(TEXTS)
    fields: dict[str, Any] = {}
    for field, special in (("texts", True), ("bare", False)):
        fields[field] = dict(zip(names, _ids_of(server, list(TEXTS.values()), special), strict=True))
    chats, refused = chats_of(lambda body: server.send("/tokenize", body))
    files = (told.arguments or {}).get("tokenizer_path") or str(model)
    fields |= {"chats": chats, "refused": refused, "written": written_ids(files, TEXTS, fields["bare"])}
    rest = told.tokens.model_dump(exclude={"digest"}) if told.tokens else {}
    return Tokens(**{**rest, **fields})


def _ids_of(server: Engine, texts: Sequence[str], special: bool) -> list[list[int]]:
    """Have a server make the ids of texts: SGLang of all at once, vLLM of each."""
    if server.kind == "sglang":
        return server.send("/tokenize", {"prompt": list(texts), "add_special_tokens": special})["tokens"]  # type: ignore[no-any-return]
    asks = [{"prompt": text, "add_special_tokens": special} for text in texts]
    return [server.send("/tokenize", body)["tokens"] for body in asks]


def chats_of(ask: Callable[[dict[str, Any]], Any]) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Have an endpoint make the ids of each chat of the corpus; `ask` sends a body to ``/tokenize``.

    Returns:
        The ids of the answered chats, and why the others were refused. Without any answer, nothing counts as refused: such an
        endpoint takes no messages, whatever the template does.
    """
    chats: dict[str, list[int]] = {}
    refused: dict[str, str] = {}
    for name, (messages, tools) in CHATS.items():
        try:
            ids = ask({"messages": messages, **({"tools": tools} if tools else {})})["tokens"]
            chats[name] = [int(id_) for id_ in ids]
        except EngineError as error:
            refused[name] = one_line(error.found, 200)
    return chats, refused if chats else {}
