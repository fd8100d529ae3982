"""The interface of an engine under test, whether assay started it or not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from assay.evals.questions import PROMPT_HEADER, parse_answer
from assay.harness.errors import EngineError
from assay.harness.evidence.envelope import EngineLimits
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.evidence.manifest import CommonSettings
from assay.harness.evidence.probes import ProbeReply
from assay.harness.evidence.records import Answer, Item
from assay.harness.sides import Engine as EngineName
from assay.harness.sides import Role

if TYPE_CHECKING:
    from assay.harness.engines.client import Client

_STOP_INTERVAL_S = 0.2

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

_UNKEPT = Item(suite="envelope", id="", prompt="", prompt_hash="")


@dataclass(frozen=True)
class ChatRequest:
    """One user message, answered at temperature 0.

    Attributes:
        prompt: the text of the message.
        max_tokens: token limit of the answer.
        top_logprobs: alternatives to return with the log-probability of each token of the answer; 0 returns only the text.
        item: the item that is asked, whose answer is kept; by default the answer belongs to none.
        repeat: `Answer.repeat`.
    """

    prompt: str
    max_tokens: int
    top_logprobs: int = 0
    item: Item = _UNKEPT
    repeat: int = 0

    @classmethod
    def of(cls, item: Item, max_tokens: int, top_logprobs: int = 0, repeat: int = 0) -> ChatRequest:
        """Ask an item of a run."""
        return cls(item.prompt, max_tokens, top_logprobs, item, repeat)

    def answered(self, role: Role, text: str, **told: Any) -> Answer:
        """Make the answer of a role, and parse the letter, number or text that it gives to a question."""
        item = self.item
        return Answer(
            suite=item.suite,
            role=role,
            item=item.id,
            repeat=self.repeat,
            prompt_hash=item.prompt_hash,
            text=text,
            parsed=parse_answer(text, item.expected) if item.suite == "accuracy" and text else None,
            **told,
        )


@dataclass(frozen=True)
class Generation:
    """A greedy answer as token ids.

    Attributes:
        prompt_ids: the prompt's tokens, chat template included.
        ids: the answer's tokens, including the end-of-text token if it was generated.
        texts: their texts.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Score:
    """Log-probabilities, in nats, of the ``n`` tokens of a sequence after its first ``start + 1``, NaN where the server computed
    none.

    Attributes:
        cached_tokens: tokens whose keys and values came from the prefix cache, as the server reports.
        token: log-probability of the sequence's own token, float32 [n].
        top_ids: ids of the most probable tokens, best first, int32 [n, k].
        top: their log-probabilities, float32 [n, k].
        at: log-probabilities of the requested ids, in their order, float32 [n, m].
    """

    cached_tokens: int
    token: Floats
    top_ids: Ints
    top: Floats
    at: Floats


TOP = 8
"""Number of most probable tokens that a probe asks for at each position."""


@dataclass(frozen=True)
class ProbeRequest:
    """One request with which a server is probed: a prompt of token ids, scored, and an answer of a given length.

    Attributes:
        probe: id of the probe.
        name: the request's id, unique among those since the server started.
        ids: tokens of the prompt.
        start: the tokens after the first ``start + 1`` are scored; at most ``start`` tokens come from the cache.
        depth: tokens to generate, whether or not they include the end-of-text token.
        written: tokens that it is made to write, whatever the model prefers; empty to let it choose.
        scored: whether log-probabilities are asked for.
        top: number of most probable tokens to return at each position.
        at: further tokens whose log-probabilities are returned at every scored position of the prompt.
    """

    probe: str
    name: str
    ids: tuple[int, ...]
    start: int
    depth: int
    written: tuple[int, ...] = ()
    scored: bool = True
    top: int = TOP
    at: tuple[int, ...] = ()


def never() -> bool:
    """Return False: all requests are sent."""
    return False


class Engine(Protocol):
    """A serving engine in one role. A context manager: it starts on entry and stops on exit.

    Attributes:
        role: which side of the comparison it is.
        backend: name of its attention backend, or the URL of a server that assay cannot instrument.
        url: its address ("http://127.0.0.1:31000"), or an empty string before `start`.
        label: engine, version and device ("SGLang 0.5.23 on cpu").
        startup_s: seconds from launch to ready, or None if assay did not start it.
        launch_command: the command line, fit for a shell, or an empty string if assay did not start it.
        evidence: folder to which the server's process writes ``counters/`` and ``admissions.jsonl``, or None for a URL.
        who: what error messages call it, for example "the candidate server (sage_attn)".
        kind: the engine that assay starts; without meaning for a URL.
        scores: whether it computes the log-probabilities of given tokens (`score`); if not, logits are not compared.
    """

    role: Role
    kind: EngineName = "sglang"
    backend: str
    url: str
    label: str
    startup_s: float | None = None
    launch_command: str = ""
    evidence: Path | None = None
    who: str
    scores: bool = False

    def start(self) -> None:
        """Return when the server is ready. Raises EngineError if it does not become ready."""

    def stop(self) -> None:
        """Stop the server and every process that it started. Safe to call twice and from another thread."""

    def check(self) -> None:
        """Raise EngineError, with exit status and log, if the server's process has ended."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments as the server resolved them, or an empty mapping if it does not report them."""
        return {}

    def fingerprint(self) -> Fingerprint | None:
        """Observe what is really served, or return None for an engine that does not report it.

        Raises:
            EngineError: the server failed.
        """
        return None

    def resolved_arguments(self) -> dict[str, Any]:
        """Return the arguments to which the engine resolves the command line, without a server, or an empty dict if it cannot.

        Raises:
            EngineError: it refuses the command line, or does not answer in time.
        """
        return {}

    def settle_with(self, candidate: Engine, asked: Collection[str]) -> CommonSettings:
        """Find the flags that make the arguments of this reference and of a candidate agree before they start; none by default.

        Raises EngineError if the engine does not resolve its arguments. `asked` names the settings that should differ.
        """
        return CommonSettings()

    def with_flags(self, flags: tuple[str, ...]) -> Engine:
        """Return this engine with further flags of its server, which has not started; itself by default."""
        return self

    def last_step(self) -> str:
        """Return the last line that it logged since it was started, except warnings, or an empty string."""
        return ""

    def flush_cache(self) -> None:
        """Empty the prefix cache."""

    def limits(self, context: int) -> EngineLimits | None:
        """Return its limits, by the arguments that it reports, or None without them; `context` is the model's, in tokens."""
        return None

    def generate_all(
        self, items: Sequence[Item], prompts: Sequence[Sequence[int]], tokens: Sequence[int], top_logprobs: int
    ) -> list[Answer]:
        """Generate one greedy answer of a given number of tokens to each of several prompts of token ids, sent at once.

        An end-of-text token does not end an answer. `top_logprobs` is the number of alternatives with each token. Returns the
        answers, whose texts are token ids, with the seconds until all had come.

        Raises:
            EngineError: the server failed, or did not answer each of them.
        """
        raise _unscored(self)

    def score(self, ids: Sequence[int], start: int, top_k: int, at: Sequence[int] = ()) -> Score:
        """Score the tokens of a sequence after its first ``start + 1``.

        Args:
            ids: the sequence, prompt and answer.
            start: longest prefix that may come from the cache. The token after it is the first one that is computed, and the next
                one is the first with a log-probability.
            top_k: number of most probable tokens to return at each position.
            at: ids whose log-probabilities are returned at every position, regardless of their rank.

        Raises:
            ValueError: no token is left to score.
            EngineError: the server failed, or scored other tokens than the given ones.
        """
        raise _unscored(self)

    def request_id(self, name: str) -> str:
        """Return the id inside the server of a request that `probe` sends under a name."""
        return name

    def probe(self, requests: Sequence[ProbeRequest], *, streamed: bool = False) -> list[ProbeReply]:
        """Send requests at once, and return the replies to those that are scored, in their order.

        Args:
            streamed: whether the answers come in pieces, if the engine has a feature for it.

        Raises:
            EngineError: the server failed, or did not answer all of them.
        """
        raise _unscored(self)

    def toggle(self, features: Collection[str], probe: ProbeRequest) -> dict[str, str]:
        """Switch in the running server the features that need a command, and return what it says of each, or an empty string.

        `probe` is a request that may be sent to find out. Raises EngineError if the server failed.
        """
        return {}

    def ask(
        self, asks: Sequence[ChatRequest], concurrency: int, on_answer: Callable[[int, Answer], None],
        enough: Callable[[], bool] = never,
    ) -> None:  # fmt: skip
        """Send all of ``asks``, unless ``enough`` says stop, and pass on each answer as it arrives.

        Args:
            asks: the requests, started in this order.
            concurrency: largest number of requests in flight.
            on_answer: called with the index into ``asks`` and the answer, in the calling thread, one at a time.
            enough: asked before each request; once it is true, no further request is sent, and those in flight are awaited.

        Raises:
            EngineError: on the first failure; answers that arrived before it were passed on.
        """
        self.client().ask(asks, concurrency, on_answer, enough)

    def send(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST ``body`` as JSON and return the JSON response. Raises EngineError without a response."""
        return self.client().json("POST", path, body)

    def client(self) -> Client:
        """Return a client that talks to the running server."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _unscored(engine: Engine) -> EngineError:
    return EngineError(
        f"{engine.who} takes no token ids.", "an engine that assay starts", "name its backend, not a URL"
    )


def answers(engine: Engine, asks: Sequence[ChatRequest], concurrency: int) -> list[Answer]:
    """Send requests and return the answers in their order. Raises EngineError on the first failure, or if an answer is missing."""
    by_index: dict[int, Answer] = {}
    engine.ask(asks, concurrency, by_index.__setitem__)
    if len(by_index) != len(asks):
        raise EngineError(
            f"the {engine.role} server gave {len(by_index)} answers to {len(asks)} requests.",
            "an answer to each request",
            "repeat the command, which resumes",
        )
    return [by_index[index] for index in range(len(asks))]


def cache_header(engine: Engine) -> None:
    """Empty an engine's prefix cache, then cache the header that all questions share.

    Raises:
        EngineError: the server failed.
    """
    engine.flush_cache()
    answers(engine, [ChatRequest(PROMPT_HEADER, 1)], 1)


def start_together(engines: Sequence[Engine], at_once: bool = True) -> None:
    """Start engines, at once or one after the other, and return when all are ready.

    If one fails, or on Ctrl-C, all are stopped and the first error is raised.
    """
    with ThreadPoolExecutor(max_workers=len(engines) if at_once else 1, thread_name_prefix="assay-start") as pool:
        starts = [pool.submit(engine.start) for engine in engines]
        try:
            done, _ = wait(starts, return_when=FIRST_EXCEPTION)
            for start in starts:
                if start in done:
                    start.result()
        except BaseException:
            # Repeatedly: an engine cannot be stopped before its thread has launched its process.
            pending = {start for start in starts if at_once or not start.cancel()}
            while pending:
                for engine in engines:
                    engine.stop()
                _, pending = wait(pending, timeout=_STOP_INTERVAL_S)
            for engine in engines:
                engine.stop()
            raise
