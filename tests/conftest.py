"""What all tests share."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from itertools import count, repeat
from operator import truediv
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import settings
from torch import Tensor

from assay.harness import extras
from assay.harness.attention.call import CallSpec
from assay.harness.extras import DISTRIBUTION, require

if TYPE_CHECKING:
    from assay.harness.attention.call import Kernel
    from assay.harness.attention.matrix import Case
    from assay.harness.engines.base import Engine
    from assay.harness.evidence.bench_folder import BenchFolder
    from assay.harness.evidence.folder import RunFolder
    from assay.harness.judge.answers import Pair
    from assay.harness.judge.report import Report
    from assay.harness.run.plan import Plan

# Triton decides at import whether kernels are interpreted, so this must come before any test imports one. Where there is a GPU,
# what is tested on it must be compiled.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# In CI, the commands of tests are not those of the workflow.
for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
    os.environ.pop(name, None)
# Tensors are small, and busy-waiting threads would compete for the cores: with one thread, the tests take a third of the time.
torch.set_num_threads(1)
# The same for the processes of tests that run side by side.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# SGLang imports all its model files, which takes seconds of each of a server's processes; the tiny model needs one of them.
if (sglang := importlib.util.find_spec("sglang")) is not None and sglang.submodule_search_locations:
    models = (Path(next(iter(sglang.submodule_search_locations))) / "srt" / "models").glob("*.py")
    unused = sorted({file.stem for file in models} - {"llama", "registry", "utils", "__init__"})
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(unused))

# A shell starts what runs in its background with these signals ignored, and children inherit that: a test of Ctrl-C would wait.
# A handler is not inherited. This process itself goes on after a hang-up.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples where slow tests are left out, and the same ones in CI; no test fails because the machine is busy."""
    examples = 25 if "not slow" in config.option.markexpr else 100
    settings.register_profile("tests", deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=examples)
    settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU, leave out what needs one; where kernels are compiled, what needs the interpreter. Mark what is slow.

    Tests with servers come first, since they take longest. Those that import SGLang follow, so that one worker does.
    """
    markers = ("server", "sglang")
    items.sort(key=lambda item: next((at for at, name in enumerate(markers) if item.get_closest_marker(name)), len(markers)))
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            cases.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    for alike in cases.values():
        marker = alike[0].get_closest_marker("few")
        assert marker is not None
        kept = {len(alike) * number // marker.args[0] for number in range(marker.args[0])}
        for number, item in enumerate(alike):
            if number not in kept:
                item.add_marker("slow")
    left_out = {
        "cuda": None if torch.cuda.is_available() else "needs a GPU",
        "interpreter": None if os.environ.get("TRITON_INTERPRET") == "1" else "needs TRITON_INTERPRET=1",
    }
    for item in items:
        for marker, reason in left_out.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Exempt imported modules from garbage collection, which statsmodels' Holm correction triggers at every call."""
    gc.collect()
    gc.freeze()


_LARGE_BYTES = 1 << 30
_PROCESS, _LIBC = psutil.Process(), ctypes.CDLL(None)


_SEED = 987_654_321


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let each test draw the same numbers every time, and others than those of the small seeds that tests set themselves."""
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Give memory back after a test: the C library keeps that of thousands of freed tensors, after one check 2.2 of 2.8 GB."""
    result = yield
    if _PROCESS.memory_info().rss > _LARGE_BYTES and hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
    return result


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Empty what a module of tests has cached when its last test has run: a fork of a process of gigabytes takes half a second."""
    module = item.getparent(pytest.Module)
    if module is not None and (nextitem is None or nextitem.getparent(pytest.Module) is not module):
        for value in vars(module.obj).values():
            if hasattr(value, "cache_clear") and value.__module__ == module.obj.__name__:
                value.cache_clear()


class SharedResults:
    """Results that are computed once for all arguments of equal contents, the newest ones kept."""

    MOST_BYTES = 2**29

    def __init__(self) -> None:
        self._kept: OrderedDict[object, tuple[Any, int]] = OrderedDict()
        self._bytes = 0

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with results from here. Whoever gets one must not write to it."""

        def shared(*arguments: Any) -> Any:
            while arguments and arguments[-1] is None:  # a default that is given is the same as one that is not
                arguments = arguments[:-1]
            key = (function, *map(contents, arguments))
            if key not in self._kept:
                with torch.inference_mode(False):  # the first to ask may be a kernel that was called in it
                    found = compact(function(*arguments))
                parts = vars(found).values() if is_dataclass(found) else [found]
                size = sum(part.nbytes for part in parts if isinstance(part, Tensor))
                self._kept[key] = (found, size)
                self._bytes += size
                while self._bytes > self.MOST_BYTES:
                    self._bytes -= self._kept.popitem(last=False)[1][1]
            else:
                self._kept.move_to_end(key)
                found = self._kept[key][0]
            return found

        return shared


def compact(value: Any) -> Any:
    """The value with tensors of their own: a view would keep the whole memory that it is a part of."""
    if isinstance(value, Tensor):
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    if is_dataclass(value) and not isinstance(value, type):
        own = {part.name: compact(getattr(value, part.name)) for part in fields(value) if part.init}
        changed = {name: part for name, part in own.items() if part is not getattr(value, name)}
        return replace(value, **changed) if changed else value
    return value


def contents(value: Any) -> object:
    """What a value holds, to look it up by."""
    if isinstance(value, CallSpec):
        return value
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return value.dtype, value.shape, hash(raw.tobytes())
    if is_dataclass(value):
        return type(value), *(contents(getattr(value, one.name)) for one in fields(value))
    return value


@pytest.fixture(scope="session", autouse=True)
def shared_results() -> Iterator[SharedResults]:
    """Many tests check kernels on the same matrix: its calls, their outputs in float64 and noise are made once in a session."""
    from assay.harness.attention.bugs import faults
    from assay.harness.attention.shapes import Shape
    from assay.harness.localize import bounds, kernel_runs

    kept = SharedResults()
    oracle, make = kept.of(faults.oracle), SharedResults().of(Shape.make)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shape, "make", lambda *arguments: make(*arguments).clone())
        patch.setattr(faults, "oracle", lambda call: oracle(call).clone())
        patch.setattr(kernel_runs, "oracle", oracle)
        patch.setattr(bounds, "oracle", lambda *arguments: oracle(*arguments).clone())  # whose NaN it replaces
        patch.setattr(bounds, "simulate", kept.of(bounds.simulate))
        yield kept


@pytest.fixture(scope="module")
def shared_hypotheses(shared_results: SharedResults) -> Iterator[None]:
    """Each hypothesis computes a call once: for modules that compare many kernels with all of them on the same calls."""
    from assay.harness.attention.bugs.family import FAMILY

    computes = [(one, one.compute) for one in FAMILY]
    for one, compute in computes:
        object.__setattr__(one, "compute", shared_results.of(compute))
    yield
    for one, compute in computes:
        object.__setattr__(one, "compute", compute)


@pytest.fixture
def thin_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fifth call of the matrix: for tests that check many kernels whose bugs show in most calls.

    Calls beyond the design stay, since each of them is the only one of its kind.
    """
    from assay.harness.checks import kernel_matrix

    whole = kernel_matrix.matrix_of

    def thin(*arguments: Any, **options: Any) -> list[Case]:
        return [case for n, case in enumerate(whole(*arguments, **options)) if case.beyond or n % 5 == 0]

    for module in (kernel_matrix, importlib.import_module("assay.harness.checks.check")):
        monkeypatch.setattr(module, "matrix_of", thin)


@pytest.fixture(scope="session")
def failing_cases() -> Callable[[Kernel, Sequence[Case]], set[str]]:
    """A function that returns the names of the cases on which a kernel is out of bounds: what `check` reports and then explains."""
    from assay.harness.localize.guard import Guard, run_calls

    def failing(kernel: Kernel, cases: Sequence[Case]) -> set[str]:
        calls = {id(call): (case.name, call) for case in cases for call in [case.make()]}
        run = run_calls(Guard(kernel), [call for _, call in calls.values()], repeats=0)
        return {calls[id(result.call)][0] for result in run.results if result.fails}

    return failing


def _version_of(name: str) -> SimpleNamespace:
    return SimpleNamespace(version=distribution(name).version)


_REQUIREMENTS = extras._requirements


@pytest.fixture(scope="session", autouse=True)
def _runs_are_planned_cheaply() -> Iterator[None]:
    """Hundreds of tests make a run or check a kernel: each would draw the same questions and calls, and parse the same files."""
    from assay.evals import synthetic
    from assay.harness.attention import matrix, published, source

    covering, imported = matrix.covering, source._imported
    rows: dict[object, list[dict[str, Any]]] = {}

    def covering_once(axes: Any, groups: Any, seed: int, covered: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        values = tuple((axis, tuple(some)) for axis, some in axes.items())
        key = values, tuple(groups), seed, tuple(tuple(row.items()) for row in covered)
        if key not in rows:
            rows[key] = covering(axes, groups, seed, covered)
        return [dict(row) for row in rows[key]]

    @cache
    def of_text(module: str, file: Path, _text: bytes) -> tuple[str, ...]:
        return tuple(imported(module, file))

    def of_file(module: str, file: Path) -> tuple[str, ...]:
        return of_text(module, file, file.read_bytes()) if file.is_file() else ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "question", cache(synthetic.question))
        patch.setattr(matrix, "covering", covering_once)
        patch.setattr(published, "entry_points", cache(published.entry_points))
        patch.setattr(source, "_imported", of_file)
        patch.setattr(extras, "distribution", cache(_version_of))
        patch.setattr(extras, "_requirements", cache(extras._requirements))
        yield


@pytest.fixture(autouse=True)
def _memory_is_free(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the memory that other programs leave, except where servers are started."""
    if not request.node.get_closest_marker("server"):
        monkeypatch.setattr("assay.harness.engines.memory.available_bytes", lambda device: 2**36)


@pytest.fixture(scope="session", autouse=True)
def _commands_are_built_once() -> Iterator[None]:
    """A process runs one command; a session of tests runs hundreds, and Typer takes longer to build them than most take to run."""
    app = importlib.import_module("assay.harness.cli.app")
    typer_main = importlib.import_module("typer.main")
    load_command, kept = app.load_command, dict[str, Any]()

    def load_once(name: str) -> Any:
        if name in app.EXTRAS:
            require(app.EXTRAS[name], f"assay {name}")
        if name not in kept:
            kept[name] = load_command(name)
        return kept[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "load_command", load_once)
        patch.setattr(typer_main, "get_command", cache(typer_main.get_command))
        yield


def load(path: Path) -> ModuleType:
    """A module outside of any package: test folders are no packages, so tests cannot import one another."""
    name = f"tests_{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def stand_ins(name: str) -> ModuleType:
    return load(Path(__file__).parent / "stand_ins" / f"{name}.py")


@pytest.fixture
def call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A function that runs assay with these arguments in this process and returns its exit code.

    They follow those of the module's COMMAND, if it has one.
    """
    command = ("assay", *getattr(request.module, "COMMAND", ()))

    def run(*arguments: str | Path) -> int:
        from assay.harness import cli

        monkeypatch.setattr(sys, "argv", [*command, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    return run


@pytest.fixture
def few_experiments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments end after a number of calls, the module's EXPERIMENTS: for tests of something else, which need a few."""
    most = getattr(request.module, "EXPERIMENTS", 20)
    monkeypatch.setattr("assay.harness.checks.check._spent", lambda *_: map(truediv, count(), repeat(most)).__next__)


@pytest.fixture
def jobs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of `assay.worker` are done in this process, where everything has been imported: for kernels that end nothing."""
    from assay import worker

    def run(job: worker.Job, *, on_event: worker.OnEvent, **_: object) -> worker.Done:
        module, _, name = job.function.partition(":")
        arguments = json.loads(json.dumps(job.arguments))
        return worker.Done(getattr(importlib.import_module(module), name)(**arguments, journal=worker.Journal(on_event)))

    monkeypatch.setattr(worker, "run", run)


@pytest.fixture
def left_processes() -> Callable[[], list[psutil.Process]]:
    """A function that returns the processes below this one that the test has started, without those of a browser and templates."""
    from assay import worker

    before = psutil.Process().children(recursive=True)
    browser = ("chromium", "chromedriver")  # of the same worker's other tests; it starts processes whenever it likes

    def left() -> list[psutil.Process]:
        now = psutil.Process().children(recursive=True)
        template = worker._template and worker._template.process
        others = [one for one in now if one not in before and one.pid != (template and template.pid)]
        return [one for one in others if not one.name().startswith(browser)]

    return left


@pytest.fixture(scope="session")
def python() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """A function that runs a program of Python in a process that is forked from a warm one; see warm_python.py."""
    with load(Path(__file__).parent / "warm_python.py").WarmPython() as warm:
        yield warm.run


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """assay is on the path only: there is no distribution of it."""
    real = Distribution.from_name

    def from_name(name: str) -> Distribution:
        if name == DISTRIBUTION:
            raise PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(Distribution, "from_name", from_name)
    monkeypatch.setattr(extras, "distribution", distribution)  # not the kept ones
    monkeypatch.setattr(extras, "_requirements", _REQUIREMENTS)


@pytest.fixture(scope="session")
def stand_in() -> ModuleType:
    """Stand-ins for SGLang's objects."""
    return stand_ins("sglang")


@pytest.fixture(scope="session")
def examples() -> ModuleType:
    """Example reports, one for each verdict."""
    return stand_ins("reports")


@pytest.fixture(scope="session")
def histories() -> ModuleType:
    """Synthetic kernel repositories."""
    return stand_ins("kernel_histories")


@pytest.fixture(scope="session")
def layer_diffs() -> ModuleType:
    """Example layer diffs."""
    return stand_ins("layer_diffs")


@pytest.fixture(scope="session")
def random_kills() -> ModuleType:
    """The benchmark that kills and resumes runs on stand-ins for SGLang."""
    return load(Path(__file__).parents[1] / "benchmarks" / "random_kills.py")


@pytest.fixture(scope="session")
def seeded_engines() -> ModuleType:
    """The module that seeds faults in an engine."""
    return load(Path(__file__).parents[1] / "benchmarks" / "seeded_engines.py")


@pytest.fixture(scope="session")
def runs() -> ModuleType:
    """Runs on disk, from the first answer to complete ones."""
    return stand_ins("runs")


@pytest.fixture(scope="session")
def recorded_runs() -> ModuleType:
    """Complete runs on disk of every kind of outcome."""
    return stand_ins("recorded_runs")


@pytest.fixture(scope="session")
def paired() -> Callable[..., list[Pair]]:
    """A function of the numbers of both right, lost, gained and both wrong that makes paired answers."""
    made: Callable[..., list[Pair]] = stand_ins("paired_answers").paired
    return made


@pytest.fixture(scope="session")
def arm_records() -> ModuleType:
    """Arms of ``assay invariance`` that are made of numbers."""
    return stand_ins("arm_records")


@pytest.fixture(scope="session")
def featured_server() -> ModuleType:
    """A server that starts at once, with features and bugs to order."""
    return stand_ins("featured_server")


@pytest.fixture(scope="session")
def synthetic_bench() -> ModuleType:
    """Benches with synthetic timings."""
    return stand_ins("benches")


@pytest.fixture
def make_bench(tmp_path: Path, synthetic_bench: ModuleType) -> Callable[..., BenchFolder]:
    """A function that writes a bench's folder; its arguments say what is wrong in it."""

    def make(**wrong: Any) -> BenchFolder:
        folder: BenchFolder = synthetic_bench.write_bench(tmp_path / f"bench-{len(list(tmp_path.iterdir()))}", **wrong)
        return folder

    return make


@pytest.fixture(params=["pass", "regression", "inconclusive", "error", "failed server"])
def any_report(request: pytest.FixtureRequest, examples: ModuleType) -> Report:
    report: Report = {**examples.BY_VERDICT, "failed server": examples.failed_server}[request.param]()
    return report


@pytest.fixture(scope="session")
def pages() -> ModuleType:
    """A document of each kind of page."""
    return stand_ins("pages")


@pytest.fixture(scope="session")
def screenshot() -> Any:
    """The tool that takes the pictures of the docs."""
    if os.environ.get("CI") != "true":
        pytest.importorskip("selenium")
    return load(Path(__file__).parents[1] / "docs" / "screenshot.py")


@dataclass(frozen=True)
class PairRun:
    """A run whose two servers are up for the whole session."""

    plan: Plan
    folder: RunFolder
    servers: tuple[Engine, Engine]


@pytest.fixture(scope="session")
def warm_servers() -> Iterator[tuple[ModuleType, Path]]:
    """The module that forks SGLang servers from a template that has imported SGLang, and where this session's template listens."""
    module = load(Path(__file__).parent / "stand_ins" / "forked_processes" / "warm_servers.py")
    with tempfile.TemporaryDirectory() as folder:
        template = module.start_template(Path(folder) / "socket")
        yield module, Path(folder) / "socket"
        template.communicate()


@pytest.fixture(scope="session")
def pair_run(warm_servers: tuple[ModuleType, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[PairRun]:
    """The session's pair of real servers: SGLang's own backend, and a correct kernel of the contract that computes both phases."""
    from assay.harness.config import make_spec
    from assay.harness.engines import guardian
    from assay.harness.run.plan import prepare
    from assay.harness.run.run_folder import open_folder
    from assay.harness.run.servers import make_run_engine, running

    candidate = "assay.harness.attention.bugs.faults:rounded_oracle"
    few = {"questions": 48, "margin": 0.1, "envelope_tokens": 128}
    plan = prepare(make_spec({"device": "cpu", "candidate": candidate, **few}))
    folder = open_folder(plan, tmp_path_factory.mktemp("pair") / "run")
    reference, other = (make_run_engine(plan, folder, role) for role in ("reference", "candidate"))
    with ExitStack() as up:
        with pytest.MonkeyPatch.context() as patch:
            module, socket = warm_servers
            patch.setenv("PYTHONPATH", str(Path(module.__file__ or "").parent), prepend=os.pathsep)
            patch.setattr(guardian, "start", module.start_from(socket))
            up.enter_context(running([reference, other], "cpu"))
        yield PairRun(plan, folder, (reference, other))


@pytest.fixture(scope="session")
def server_pair(pair_run: PairRun) -> tuple[Engine, Engine]:
    """The session's reference and candidate. A test that ends a server must start its own."""
    return pair_run.servers
