"""The fixtures of a comparison: its two servers and its report. See ``docs/library.md``.

The tests in this folder use them, and so can anybody who has assay installed. A run through pytest is the same as ``assay run``,
with the same checks, evidence and report. Nothing is imported or started until a test uses a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from openai import OpenAI

    from assay.harness.engines.base import Engine
    from assay.harness.judge.report import Report
    from assay.harness.progress import ProgressDisplay
    from assay.harness.run.run import OpenRun
    from assay.harness.sides import Role

_Made = TypeVar("_Made")
_Servers = Mapping["Role", "Server"]
EXIT_CODE = pytest.StashKey[int]()
"""The exit code of `assay run`: pytest alone cannot distinguish a regression (1) from no verdict (3)."""
_REPORT = pytest.StashKey["Report"]()


class Server:
    """A running server of a comparison.

    Attributes:
        engine: the server, as assay runs it.
        url: its address, without ``/v1``.
        model: the model's name in requests.
        headers: headers for each request, with the key that the server requires.
    """

    def __init__(self, engine: Engine) -> None:
        client = engine.client()
        self.engine, self.url, self.model, self._key = engine, client.url, client.model, client.api_key
        self.headers = {"Authorization": f"Bearer {self._key}"}

    @cached_property
    def client(self) -> OpenAI:
        """A client of the server, with its key."""
        from urllib.parse import urlsplit

        from openai import DefaultHttpxClient, OpenAI

        from assay.harness.backend import LOOPBACK

        connections = DefaultHttpxClient(trust_env=urlsplit(self.url).hostname not in LOOPBACK)
        return OpenAI(api_key=self._key, base_url=f"{self.url}/v1", http_client=connections, max_retries=0)

    def generate(self, text: str, **options: Any) -> str:
        """Return the continuation of a text, at temperature 0. For `options`, see ``client.completions.create``."""
        create = self.client.completions.create
        return str(self._answer(create, prompt=text, **options).text)

    def chat(self, messages: str | Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Return the answer to one or more messages, at temperature 0. For `options`, see ``client.chat.completions.create``."""
        given = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        return self._answer(self.client.chat.completions.create, messages=given, **options).message.content or ""

    def _answer(self, create: Callable[..., Any], **asked: Any) -> Any:
        from openai import OpenAIError

        try:
            return create(**{"model": self.model, "temperature": 0, "max_tokens": 64} | asked).choices[0]
        except OpenAIError:
            self.engine.check()  # the end of its process explains any other failure
            raise


@pytest.fixture(scope="session")
def _assay_opened(request: pytest.FixtureRequest) -> OpenRun:
    """Check the run that the flags and ``assay.toml`` describe, and open its folder."""

    def opened() -> OpenRun:
        from assay.harness.attention.interpreter import interpret_without_gpu
        from assay.harness.config import REPEATED, RUN_FLAGS, make_spec
        from assay.harness.run.run import OpenRun

        interpret_without_gpu()
        flags = {name: request.config.getoption(f"assay_{name}", None) for name in RUN_FLAGS}
        flags |= {name: tuple(flags[name]) for name in REPEATED if flags[name]}
        out = request.config.getoption("assay_out", None)
        return OpenRun.open(make_spec(flags), out, kept_running=True, display=_display())

    return _made(request.config, opened)


@pytest.fixture(scope="session")
def _assay_servers(_assay_opened: OpenRun, request: pytest.FixtureRequest) -> Iterator[_Servers]:
    """Start both servers side by side, and yield them by role. If one does not start, write a report and fail the tests."""
    from assay.harness.interruption import like_ctrl_c

    with like_ctrl_c(), _display() as display, _assay_opened.servers(display) as engines:
        if not engines:
            from assay.reports.wording.verdict import headline, reasons

            failed = _write_report(_assay_opened, request.config)
            pytest.fail(f"assay: {headline(failed)} {reasons(failed)[0]}", pytrace=False)
        yield {role: Server(engine) for role, engine in engines.items()}


@pytest.fixture(scope="session")
def reference_server(_assay_servers: _Servers) -> Server:
    """Return the running reference server: `url`, `headers`, `client`, `generate(text)`, `chat(message)`."""
    return _assay_servers["reference"]


@pytest.fixture(scope="session")
def candidate_server(_assay_servers: _Servers) -> Server:
    """Return the running candidate server: `url`, `headers`, `client`, `generate(text)`, `chat(message)`."""
    return _assay_servers["candidate"]


@pytest.fixture(scope="session")
def assay_run(_assay_opened: OpenRun, _assay_servers: _Servers, request: pytest.FixtureRequest) -> Report:
    """Compare both servers once, like ``assay run``, and return the `assay.Report`, which is also in the run's folder."""
    try:
        with _display() as display:
            _assay_opened.collect(display, ready=[server.engine for server in _assay_servers.values()])
    finally:  # answers from before an interruption still make a report
        made = _write_report(_assay_opened, request.config)
    return made


def _made(config: pytest.Config, make: Callable[[], _Made]) -> _Made:
    """Make something. A usage error fails the tests that need it, without a traceback from assay."""
    from assay.harness.errors import UsageError

    try:
        return make()
    except UsageError as error:
        config.stash[EXIT_CODE] = int(error.exit_code)
        raise pytest.fail.Exception(f"assay: {error}", pytrace=False) from None


def _display() -> ProgressDisplay:
    from rich.console import Console

    from assay.harness.progress import ProgressDisplay

    return ProgressDisplay(Console(stderr=True))


def _write_report(opened: OpenRun, config: pytest.Config) -> Report:
    from assay.reports.write import write_reports

    made = opened.report()
    write_reports(made, opened.folder.path)
    config.stash[_REPORT], config.stash[EXIT_CODE] = made, int(made.exit_code)
    return made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show the verdict below the tests."""
    if made := config.stash.get(_REPORT, None):
        from assay.reports.wording.verdict import headline, reasons

        terminalreporter.section(f"assay: {made.verdict}")
        terminalreporter.write_line(headline(made))
        for reason in reasons(made):
            terminalreporter.write_line(f"- {reason}")
