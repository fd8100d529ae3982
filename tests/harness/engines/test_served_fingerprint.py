"""What a running server's processes write of themselves, and what they do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.evals.probe_texts import CHATS
from assay.harness.engines import served_fingerprint
from assay.harness.engines.inside.control import read_setting
from assay.harness.engines.served_fingerprint import fingerprint_of
from assay.harness.errors import EngineError
from assay.harness.evidence.fingerprint import OF_PROCESS, Fingerprint, Tokens


class Server:
    """A server of which `ranks` processes write their fingerprint, and which has ended if `dead`."""

    kind = "sglang"

    def __init__(self, folder: Path, ranks: int, dead: bool = False) -> None:
        self.folder, self.ranks, self.dead = folder, ranks, dead

    def flush_cache(self) -> None:
        pass

    def ask(self, asks: Any, concurrency: int, on_answer: Callable[[int, Any], None]) -> None:
        on_answer(0, None)
        label = read_setting(self.folder).control.fingerprint
        for rank in range(self.ranks):
            made = Fingerprint(source="server", engine="e", model="m", packages={"torch": "2"})
            OF_PROCESS.write(self.folder, made, process=f"{label}-{rank:04}")

    def check(self) -> None:
        if self.dead:
            raise EngineError("the server was killed by SIGKILL")

    def send(self, path: str, body: dict[str, Any]) -> Any:
        raise EngineError("no tokens")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_fingerprint, "_WAIT_S", 0.0)


def test_a_server_that_writes_none_has_none(tmp_path: Path) -> None:
    assert fingerprint_of(Server(tmp_path, 0), tmp_path, tmp_path, 1) is None  # type: ignore[arg-type]
    assert not read_setting(tmp_path).control.fingerprint, "the control is left off"


def test_some_of_its_processes_are_not_all(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="1 of 2 processes of the server wrote their fingerprint"):
        fingerprint_of(Server(tmp_path, 1), tmp_path, tmp_path, 2)  # type: ignore[arg-type]


def test_a_dead_server_says_how_it_ended(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="killed by SIGKILL"):
        fingerprint_of(Server(tmp_path, 0, dead=True), tmp_path, tmp_path, 1)  # type: ignore[arg-type]


def test_what_every_process_wrote_is_joined(tmp_path: Path) -> None:
    made = fingerprint_of(Server(tmp_path, 2), tmp_path, tmp_path, 2)  # type: ignore[arg-type]
    assert made is not None
    assert made.packages == {"torch": "2"}
    assert made.not_observed["tokens"] == "no tokens"


class Telling(Server):
    """A server whose process tells its tokenizer, and whose endpoint makes ids; its template refuses what `refuses` names."""

    refuses: tuple[str, ...] = ()

    def ask(self, asks: Any, concurrency: int, on_answer: Callable[[int, Any], None]) -> None:
        on_answer(0, None)
        label = read_setting(self.folder).control.fingerprint
        tokens = Tokens(tokenizer="T", bos=0, eos=(1,), texts={"english": (9,)}, retold={"user": (0, 0, 5)})
        made = Fingerprint(source="own server", engine="e", model="m", tokens=tokens)
        OF_PROCESS.write(self.folder, made, process=f"{label}-0000")

    def send(self, path: str, body: dict[str, Any]) -> Any:
        if "messages" not in body:
            return {"tokens": [[7]] * len(body["prompt"])}
        if body["messages"][0]["role"] in self.refuses or ("tools" in body and "tools" in self.refuses):
            raise EngineError("the server answered /tokenize with HTTP 400: no such role.")
        return {"tokens": [7]}


def test_a_process_tells_of_the_tokenizer_what_the_endpoint_does_not(tmp_path: Path) -> None:
    made = fingerprint_of(Telling(tmp_path, 1), tmp_path, tmp_path, 1)  # type: ignore[arg-type]
    assert made is not None
    assert made.tokens is not None
    assert (made.tokens.tokenizer, made.tokens.bos, made.tokens.eos, made.tokens.retold) == ("T", 0, (1,), {"user": (0, 0, 5)})
    assert made.tokens.texts["english"] == made.tokens.chats["user"] == (7,), "of the endpoint, which requests go through"


@pytest.mark.parametrize(
    ("refuses", "refused"), [((), set()), (("system", "tools"), {"system", "tools", "tool answer"}), (("system", "user"), set())]
)
def test_each_chat_that_a_template_refuses_is_recorded(tmp_path: Path, refuses: tuple[str, ...], refused: set[str]) -> None:
    server = Telling(tmp_path, 1)
    server.refuses = refuses
    made = fingerprint_of(server, tmp_path, tmp_path, 1)  # type: ignore[arg-type]
    assert made is not None
    assert made.tokens is not None
    assert made.tokens.refused.keys() == refused
    assert made.tokens.chats.keys() == (CHATS.keys() - refused if "user" not in refuses else set())
    assert all("HTTP 400: no such role" in why for why in made.tokens.refused.values())
