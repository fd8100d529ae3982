"""A layer bisection on a stand-in server whose model is wrong in given layers."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pytest
from rich.console import Console

from assay.evals.questions import PROMPT_HEADER, prompt_hash
from assay.evals.synthetic import questions
from assay.harness.backend import Backend
from assay.harness.cli.app import load_command
from assay.harness.config import RunSpec
from assay.harness.drivers.bisect.layer_probes import _ProbeServer, _search_layers, bisect_layers
from assay.harness.drivers.bisect.layer_task import LayerBisection
from assay.harness.engines.base import ChatRequest, Engine, never
from assay.harness.engines.inside.attachment import ControlReader
from assay.harness.engines.inside.control import substituted_calls, substitution_folder
from assay.harness.errors import EvidenceError, ExitCode, UsageError
from assay.harness.evidence.counters import CounterFile, CounterRow
from assay.harness.evidence.records import Answer, Item
from assay.harness.progress import ProgressDisplay
from assay.harness.run.plan import Plan
from assay.harness.statement import state

LAYERS = frozenset(range(4))
ITEMS = [
    Item(suite="accuracy", id=q.id, prompt=q.prompt, prompt_hash=prompt_hash(q.prompt), expected=q.answer)
    for q in islice(questions(), 16)
]
Says = Callable[[frozenset[int], Item, int], str]
"""Layers that run the candidate, question, number of earlier requests -> text."""


class Server(Engine):
    """Answers with `says`, and counts the layers that it substitutes."""

    role, backend, url, label, startup_s, launch_command = "reference", "torch_native", "", "a stand-in", None, ""

    def __init__(self, folder: Path, says: Says, cached_tokens: int = 40, ignores: frozenset[int] = frozenset()) -> None:
        self.evidence = folder
        self.says, self.cached_tokens, self.ignores = says, cached_tokens, ignores
        self.asked: list[frozenset[int]] = []
        self.flushed = self.primed = False
        self.tokens: set[int] = set()
        self.by_prompt = {item.prompt: item for item in ITEMS}
        count(folder / "counters", LAYERS)

    def start(self) -> None:
        raise AssertionError("it runs already")

    def stop(self) -> None:
        raise AssertionError("who started it stops it")

    def check(self) -> None:
        raise AssertionError("no answer was missing")

    def arguments(self) -> dict[str, object]:
        return {}

    def flush_cache(self) -> None:
        self.flushed, self.primed = True, False

    def ask(
        self,
        asks: Sequence[ChatRequest],
        concurrency: int,
        on_reply: Callable[[int, Answer], None],
        enough: Callable[[], bool] = never,
    ) -> None:
        substitute = frozenset(ControlReader(self.evidence).latest().control.substitute)
        if [one.prompt for one in asks] == [PROMPT_HEADER]:
            self.primed = True
            on_reply(
                0,
                asks[0].answered(
                    "reference", "A", request_id="r", finish_reason="length", prompt_tokens=9, completion_tokens=1, latency_s=0.1
                ),
            )
            return
        assert self.flushed, "the cache was filled under another control"
        self.flushed = False
        token = ControlReader(self.evidence).latest().token
        count(substitution_folder(self.evidence, token), substitute - self.ignores)
        before = self.asked.count(substitute)
        self.asked.append(substitute)
        self.tokens.update(one.max_tokens for one in asks)
        for index, one in enumerate(asks):
            text = self.says(substitute, self.by_prompt[one.prompt], before)
            cached = self.cached_tokens if self.primed else 1
            told = {
                "finish_reason": "stop",
                "prompt_tokens": 100,
                "completion_tokens": 5,
                "cached_tokens": cached,
                "latency_s": 0.1,
            }
            on_reply(index, one.answered("reference", text, **told))


def count(folder: Path, layers: frozenset[int]) -> None:
    file = CounterFile(folder, str(os.getpid()))
    row = file.row(CounterRow(backend="torch_native", kernel="k", phase="extend", cached_prefix=True))
    for layer in layers:
        file.add(row, layer)


def knows(wrong: Callable[[frozenset[int]], bool]) -> Says:
    return lambda candidate, item, before: "Answer: none" if wrong(candidate) else f"Answer: {item.expected}"


def spec(**changes: object) -> RunSpec:
    return RunSpec.of(**{"reference": "torch_native", "candidate": "triton", "questions": 16, **changes})


def bisect(server: Server, **changes: object) -> LayerBisection:
    question = spec(**{"max_tokens": 32, **changes})
    probed = _ProbeServer(server, server.evidence, ITEMS, question.workload.token_limit, 8)
    with ProgressDisplay(Console(quiet=True)) as display:
        return _search_layers(probed, question, display)


def test_the_layer_that_is_wrong_is_found(tmp_path: Path) -> None:
    server = Server(tmp_path, knows(lambda candidate: 2 in candidate))
    result = bisect(server)
    assert (result.outcome, result.exit_code) == ("found", ExitCode.REGRESSION)
    assert [(one.layer, one.alone) for one in result.restored] == [(2, True)]
    assert (result.by, result.floor, result.candidate_floor) == ("answers", 0, 0)
    assert result.layers == (0, 1, 2, 3)
    assert result.findings[0].where == "layer 2 of 0-3"
    assert result.reproduce == "assay bisect layers --reference=torch_native --candidate=triton --questions=16"
    assert LayerBisection.model_validate_json(result.model_dump_json()) == result
    assert '"schema":"assay.bisect/7"' in result.model_dump_json()


def test_the_command_repeats_the_bisection_with_flags_that_it_has(tmp_path: Path) -> None:
    given = {"device": "cuda", "data": "mine.csv", "startup_timeout": 60.0}
    result = bisect(Server(tmp_path, knows(lambda candidate: 2 in candidate)), **given)
    flags = shlex.split(result.reproduce)[3:]
    assert {f"--{name.replace('_', '-')}={value}" for name, value in given.items()} <= set(flags)
    command = load_command("bisect").commands["layers"]
    assert {flag.partition("=")[0] for flag in flags} <= {name for one in command.params for name in one.opts}


def test_each_set_is_asked_once_but_for_the_floors(tmp_path: Path) -> None:
    server = Server(tmp_path, knows(lambda candidate: bool(candidate & {1, 3})))
    result = bisect(server)
    assert [one.layer for one in result.restored] == [1, 3]
    often = {candidate: server.asked.count(candidate) for candidate in set(server.asked)}
    assert often.pop(LAYERS) == 2, "the floor of the candidate, whose first answer is the probe"
    assert often.pop(frozenset()) == 3, "the floor of the reference and the sanity check"
    assert set(often.values()) == {1}


def test_finding_nothing_without_a_cached_prefix_is_inconclusive(tmp_path: Path) -> None:
    result = bisect(Server(tmp_path, knows(lambda candidate: False), cached_tokens=1))
    assert (result.outcome, result.exit_code) == ("inconclusive", ExitCode.NO_VERDICT)
    assert result.why == state("right-without-cached-prefix", layers=4, cached=0, prompts=16, tokens=16)


def test_a_reference_that_cannot_answer_is_judged_by_its_text(tmp_path: Path) -> None:
    server = Server(tmp_path, lambda candidate, item, before: f"{item.id} {'x' if 1 in candidate else 'y'}")
    result = bisect(server, max_tokens=2048)
    assert (result.by, result.reference_right) == ("text", 16)
    assert result.known == 0
    assert [one.layer for one in result.restored] == [1]
    assert server.tokens == {2048, 48}, "texts are short, whatever the limit of an answer"


def test_a_reference_that_never_repeats_itself_is_inconclusive(tmp_path: Path) -> None:
    result = bisect(Server(tmp_path, lambda candidate, item, before: f"text {before}"))
    assert (result.by, result.outcome, result.probes) == ("text", "inconclusive", ())
    assert result.why == state("reference-too-weak", right=0, prompts=16, by="text")


def test_a_candidate_that_does_not_repeat_itself_asks_for_repeats(tmp_path: Path) -> None:
    def says(candidate: frozenset[int], item: Item, before: int) -> str:
        return f"Answer: {'none' if 2 in candidate else item.expected} {before if candidate else ''}"

    result = bisect(Server(tmp_path, says))
    assert (result.floor, result.candidate_floor) == (0, 16)
    assert [one.layer for one in result.restored] == [2]
    assert len(result.probes) > len({probe.candidate for probe in result.probes})


def test_a_floor_that_is_not_identical_asks_for_repeats(tmp_path: Path) -> None:
    # Every third time a set is asked, two of sixteen answers differ.
    def says(candidate: frozenset[int], item: Item, before: int) -> str:
        flips = before % 3 == 1 and item.id in {ITEMS[0].id, ITEMS[1].id}
        return "Answer: none" if 2 in candidate or flips else f"Answer: {item.expected}"

    server = Server(tmp_path, says)
    result = bisect(server)
    assert (result.floor, result.candidate_floor) == (2, 0)
    assert [one.layer for one in result.restored] == [2]
    assert min(server.asked.count(candidate) for candidate in set(server.asked)) >= 2


def test_a_substitution_that_did_not_happen_is_an_error(tmp_path: Path) -> None:
    server = Server(tmp_path, knows(lambda candidate: 2 in candidate), ignores=frozenset({3}))
    with pytest.raises(EvidenceError, match=r"should have run in the layers 0-3; it ran in 0-2"):
        bisect(server)
    assert set(substituted_calls(tmp_path)) == {0, 1, 2}


def plan(items: list[Item]) -> Plan:
    return Plan(spec(), Path(), tuple(items), Backend("torch_native", "native"), Backend("sage_attn", "kernel"))


def test_too_few_questions_and_foreign_folders_are_usage_errors(tmp_path: Path) -> None:
    with ProgressDisplay(Console(quiet=True)) as display:
        with pytest.raises(UsageError, match="at least 5"):
            bisect_layers(plan(ITEMS[:4]), tmp_path / "new", display)
        (tmp_path / "thesis.tex").write_text("x")
        with pytest.raises(UsageError, match="not empty"):
            bisect_layers(plan(ITEMS), tmp_path, display)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
