"""What is installed: one import package, a public API that costs nothing until it is used, and extras."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import assay
from assay.harness import extras
from assay.harness.errors import UsageError
from assay.harness.extras import DISTRIBUTION

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROOMS = {"harness", "evals", "suites", "reports"}
TRACKED = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
FILES = [ROOT / name for name in TRACKED.split("\0") if name.endswith((".py", ".md")) and (ROOT / name).exists()]


def python(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)


# The public API.


def test_every_public_name_is_there_and_listed() -> None:
    for name in assay.__all__:
        assert getattr(assay, name) is not None
    assert dir(assay) == sorted(assay.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        assay.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_see_the_same_names_from_the_same_places() -> None:
    (block,) = [
        node
        for node in ast.parse(inspect.getsource(assay)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    froms = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in froms for alias in node.names if alias.asname}
    assert seen == assay._HOME


def test_every_public_function_and_class_has_a_docstring() -> None:
    for name in assay.__all__:
        found = getattr(assay, name)
        if inspect.isfunction(found) or inspect.isclass(found):
            assert inspect.getdoc(found), name


def test_the_page_of_the_public_api_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "api_page.py"))
    assert made["PAGE"].read_text() == made["page"](), "run python tools/api_page.py"


def assert_light(code: str, heavy: set[str]) -> subprocess.CompletedProcess[str]:
    """Run Python code and assert that it imported none of the heavy modules."""
    done = python("-c", f"{code}\nimport sys\nfound = {heavy!r} & set(sys.modules)\nassert not found, found")
    assert done.returncode == 0, done.stderr
    return done


def test_the_package_is_imported_without_torch() -> None:
    assert_light("import assay", {"torch", "numpy", "pydantic", "pytest"})


def test_the_plugin_is_imported_without_torch() -> None:
    """Every pytest run in an environment with assay imports it."""
    assert_light("import assay.suites.plugin", {"torch", "numpy", "pydantic", "rich", "typer"})


def test_the_list_of_commands_needs_neither_torch_nor_rich_panels() -> None:
    """Each of these imports would take longer than everything that the list needs."""
    code = "import sys\nfrom assay.harness.cli import main\nsys.argv = ['assay', '--help']\ntry: main()\nexcept SystemExit: pass"
    done = assert_light(code, {"torch", "numpy", "pydantic", "typer.rich_utils", "rich.markdown", "rich.traceback"})
    assert "Run in CI, with the policy" in done.stdout


def test_the_readme_counts_the_known_bugs() -> None:
    from assay.harness.attention.bugs.family import FAMILY

    assert f"if one of {len(FAMILY)} known ones explains it" in (ROOT / "README.md").read_text()


TEXTS = [ROOT / name for name in TRACKED.split("\0") if name.endswith((".py", ".md", ".yml", ".toml", ".txt", ".jinja"))]
BARE = r"""(?:pip install|uvx|pipx run|--from)\b[^#&;\n"'`]*["' ]assay(?![\w.:/-])|(?<![\w./-])assay(?:\[[\w,-]*\]| @ )"""
"""A requirement that the package index answers with another project: assay, assay[serve], assay @ URL."""


def test_nothing_installs_another_project_by_the_name_of_the_command() -> None:
    assert PROJECT["name"] == extras.DISTRIBUTION != "assay"
    found = [
        f"{file.relative_to(ROOT)}: {match[0]}"
        for file in TEXTS
        if file.exists() and file != Path(__file__)
        for match in re.finditer(BARE, file.read_text())
    ]
    projects = [tomllib.loads(file.read_text()) for file in TEXTS if file.name == "pyproject.toml" and file.exists()]
    needed = [line for one in projects for line in one.get("project", {}).get("dependencies", [])]
    found += [line for line in needed if Requirement(line).name == "assay"]
    assert not found, f"write {extras.DISTRIBUTION}"
    for bare in ("pip install assay", 'pip install "assay[serve]"', "- run: pip install -e x 'assay @ git+URL'", "uvx assay"):
        assert re.search(BARE, bare), bare
    for other in (f"pip install {extras.DISTRIBUTION}", "pip install -e .  # then: assay check", f'"{extras.DISTRIBUTION}[serve]"'):
        assert not re.search(BARE, other), other


def test_the_repository_has_one_url() -> None:
    urls = {
        found
        for file in TEXTS
        if file.exists() and not file.is_relative_to(ROOT / "tests")
        for found in re.findall(
            r"(?:https://[\w.]+/|git\+|REPOSITORY: )(your-organisation/assay\b|https://[\w./-]+/assay\b)", file.read_text()
        )
    }
    assert {url.removeprefix("https://github.com/") for url in urls} == {"your-organisation/assay"}


README = (ROOT / "README.md").read_text()


def test_the_readme_begins_with_what_its_readers_have_and_is_short() -> None:
    first = README.split("\n## ")[0]
    for has, command in (("a kernel", "check"), ("a server", "run"), ("a log", "ingest"), ("two results", "compare")):
        assert re.search(rf"\| \*\*{has}\*\*.*\| `assay {command} ", first), has
    assert len(README.encode()) <= 7_500


def test_every_command_of_the_readme_is_one() -> None:
    """And what a page of the documentation links to is there."""
    from assay.harness.cli.app import COMMANDS

    pages = [ROOT / "README.md", ROOT / "docs" / "running.md"]
    code = [text for page in pages for text in re.findall(r"```\w*\n.*?```|`[^`]+`", page.read_text(), re.DOTALL)]
    typed = {word for text in code for word in re.findall(r"^`?assay ([a-z][a-z-]+)", text, re.MULTILINE)}
    assert {"check", "run", "ingest", "compare"} <= typed <= set(COMMANDS)
    for page in pages:
        for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
            file, _, anchor = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), link
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if anchor else []
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert not anchor or anchor in anchors, link


# One import package.


def imports(source: str) -> set[str]:
    """Modules that a source imports, by their whole names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


def sources(file: Path) -> list[str]:
    """The Python in a file: all of a module, the code blocks of a page."""
    text = file.read_text()
    return [text] if file.suffix == ".py" else re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.slow
def test_nothing_imports_a_room_by_its_bare_name() -> None:
    found = {
        f"{file.relative_to(ROOT)}: import {name}"
        for file in FILES
        for source in sources(file)
        for name in imports(source)
        if name.split(".")[0] in ROOMS
    }
    assert not found, "write assay.harness, assay.evals, assay.suites, assay.reports"


def test_pages_and_examples_import_only_the_public_api() -> None:
    for file in FILES:
        if file.suffix != ".md" and not file.is_relative_to(ROOT / "examples"):
            continue
        for source in sources(file):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ImportFrom) and node.module == "assay":
                    assert {alias.name for alias in node.names} <= set(assay.__all__), file


@pytest.mark.slow
def test_the_wheel_holds_one_package_with_all_its_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in TRACKED.split("\0"):
        # A build writes into the tree that it builds, so it gets a copy; links stay links, as in a clone.
        if name and name.split("/")[0] in {*ROOMS, "assay", "pyproject.toml", "README.md", "LICENSE"}:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_symlink():
                (source / name).symlink_to((ROOT / name).readlink())
            elif (ROOT / name).exists():
                (source / name).write_bytes((ROOT / name).read_bytes())
    built = python("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source))
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names} == {"assay", f"assay_harness-{assay.__version__}.dist-info"}
    expected = {f"assay/{file}" for file in TRACKED.split("\0") if file.split("/")[0] in ROOMS and (ROOT / file).exists()}
    assert expected <= names, "modules, templates, the report's schema and the tiny model"
    assert {"assay/__init__.py", "assay/py.typed"} <= names
    assert f"assay_harness-{assay.__version__}.dist-info/licenses/LICENSE" in names


# Extras.


def brought(*extras: str) -> set[str]:
    """Distributions that ``pip install assay-harness[extras]`` brings, among those installed here."""
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    todo = [Requirement(line).name for lines in lists for line in lines]
    found: set[str] = set()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in found:
            continue
        found.add(name)
        try:
            lines = requires(name) or [] if name != PROJECT["name"] else []
        except PackageNotFoundError:
            continue
        needed = (one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate({"extra": ""}))
        todo += [one.name for one in needed]
    return found


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_the_default_candidate_has_one_version(profile: str) -> None:
    (pin,) = [line for line in PROJECT["optional-dependencies"]["sage"] if line.startswith("sageattention")]
    assert pin in (ROOT / "requirements" / f"{profile}.txt").read_text().splitlines()


ONLY_BASE = """
import sys
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions

from packaging.utils import canonicalize_name

ALLOWED = {allowed!r}
OTHERS = {{
    name for name, owners in packages_distributions().items() if not {{canonicalize_name(owner) for owner in owners}} & ALLOWED
}} - {{"assay", "sitecustomize"}}


class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in OTHERS else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
"""


def only(folder: Path, *extras: str) -> dict[str, str]:
    """An environment in which only what ``pip install assay-harness[extras]`` brings can be imported."""
    (folder / "sitecustomize.py").write_text(ONLY_BASE.format(allowed=brought(*extras) | {"pip", "setuptools"}))
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


@pytest.fixture(scope="module")
def base_only(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment of nothing but the base install."""
    return only(tmp_path_factory.mktemp("base"))


@pytest.mark.slow  # fast: test_an_extra_is_enough_for_its_commands; the job base-install of CI
def test_the_base_install_checks_a_kernel(base_only: dict[str, str], tmp_path: Path) -> None:
    missing = python("-c", "import openai", **base_only)
    assert "No module named 'openai'" in missing.stderr
    (tmp_path / "mine.py").write_text(
        "from assay import declares, oracle\n\n\n@declares(phases=('decode',))\ndef forward(call):\n"
        "    return oracle(call).to(call.q.dtype)\n"
    )
    env = {**base_only, "PYTHONPATH": f"{base_only['PYTHONPATH']}:{tmp_path}"}
    page = tmp_path / "check.html"
    words = "--dtype fp16,bf16 --head-dim 64 --head-dim 32,128 --case 1+1- --calls 0".split()
    done = python("-m", "assay", "check", "mine:forward", *words, f"--html={page}", f"--junit={tmp_path / 'check.xml'}", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mine:forward is correct on all" in done.stdout
    assert "mine:forward is correct on all" in page.read_text()
    assert 'failures="0"' in (tmp_path / "check.xml").read_text()
    explained = python("-m", "assay", "explain", "mask-top-left", **env)
    assert "causal mask top-left" in explained.stdout, explained.stderr


@pytest.mark.slow
def test_in_the_base_install_the_doctor_says_what_is_true(base_only: dict[str, str]) -> None:
    """Its rows are about what they name, and not about a package that assay needs to find out."""
    hidden = "from assay.harness import extras; here = extras._installed\n"
    hidden += "extras._installed = lambda name: name not in ('openai', 'datasets') and here(name)\n"
    words = ["assay", "doctor", "--json", "--candidate", "assay.harness.attention.bugs.faults:rounded_oracle"]
    command = f"import sys; sys.argv = {words}\n"
    done = python("-c", f"{hidden}{command}from assay.harness.cli import main; main()", **base_only)
    assert done.returncode == 3, done.stderr
    rows = {row["id"]: row for row in json.loads(done.stdout)["examined"]}
    assert list(rows)[:2] == ["check", "packages"]
    assert rows["check"]["status"] == "ok"
    assert "assay check is ready" in rows["check"]["found"]
    assert {"datasets", "openai"} <= set(rows["packages"]["found"].removeprefix("not installed: ").split(", "))
    assert "SGLang is not installed" in rows["sglang"]["found"]
    assert rows["gpu"]["status"] == "not needed"
    assert "GiB free on this machine" in rows["memory"]["found"]


@pytest.mark.slow  # fast: test_every_public_name_is_there_and_listed, test_an_extra_is_enough_for_its_commands
def test_every_public_name_is_there_without_an_extra(base_only: dict[str, str]) -> None:
    code = """
from assay import *
import inspect, assay
assert all(hasattr(assay, name) for name in assay.__all__)
assert len(inspect.getmembers(assay)) >= len(assay.__all__)
Report, RunSpec
try:
    run(RunSpec.of(reference="a", candidate="b"))
except AssayError as error:
    print(error)
"""
    # The distributions are installed here; only their modules cannot be imported.
    hidden = "from assay.harness import extras; extras._installed = lambda name: name not in ('openai', 'datasets')"
    done = python("-c", hidden + code, **base_only)
    assert done.returncode == 0, done.stderr
    assert 'pip install "assay-harness[serve]"' in done.stdout


IMPORTABLE = {
    ("serve",): ("run.collect", "run.bench", "drivers.bisect.layer_probes", "cli.run"),
    (): (
        "checks.check",
        "checks.replay",
        "cli",
        "cli.kernel",
        "judge.build",
        "drivers.bisect.commits.bisection",
        "cli.gate",
        "cli.run",
        "cli.bisect",
    ),
}
"""Modules of the harness that can be imported with each extra; without one, those of the commands that do not need it."""


@pytest.mark.few(1)
@pytest.mark.parametrize("extras", IMPORTABLE, ids=lambda extras: ",".join(extras) or "base")
def test_an_extra_is_enough_for_its_commands(extras: tuple[str, ...], tmp_path: Path) -> None:
    env = only(tmp_path, *extras)
    modules = [f"assay.harness.{module}" for module in IMPORTABLE[extras]]
    modules += ["assay.suites.plugin"] if not extras else ["assay.reports.write"]
    done = python("-c", "\n".join(f"import {module}" for module in modules), **env)
    assert done.returncode == 0, done.stderr


LINES = ["torch>=2", "assay-harness[sage]; extra == 'serve'", "no-such; extra == 'sage'"]


def test_a_missing_extra_is_a_usage_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_requirements", lambda name: LINES)
    with pytest.raises(UsageError) as raised:
        extras.require("serve", "assay run")
    assert raised.value.exit_code == 2
    assert str(raised.value).splitlines() == [
        "assay run needs packages that are not installed: no-such.",
        "Expected: the packages of assay-harness[serve]",
        'What to do: pip install "assay-harness[serve]"',
    ]


def test_what_a_checkout_needs_is_what_its_own_list_says(not_installed: None) -> None:
    base, serve = extras._packages(DISTRIBUTION, ""), extras._packages(DISTRIBUTION, "serve")
    assert {"torch", "filelock", "psutil", "scipy"} <= set(base), "a note of an older installation has other packages"
    assert {"openai", "httpx-aiohttp"} <= set(serve), "those of extras of other distributions, too"
    assert not {DISTRIBUTION, "ray"} & set(base)


def test_a_package_without_its_module_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None if name == "httpx_aiohttp" else object())
    assert extras.missing_packages("serve") == ["httpx-aiohttp"]


def test_a_copy_without_a_list_is_missing(not_installed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "assay" / "harness" / "extras.py"))
    assert extras.missing_packages() == [DISTRIBUTION]


# A repository with packages of the same names.

FOREIGN = {
    **{f"{room}/__init__.py": f'"""Their own {room}."""\n\nOWNER = "foreign"\n' for room in sorted(ROOMS)},
    "harness/attention.py": """
import evals
import reports
import suites
from assay import AttentionCall, declares, oracle

assert evals.OWNER == reports.OWNER == suites.OWNER == "foreign"


@declares(phases=("extend",))
def forward(call: AttentionCall):
    return oracle(call).to(call.q.dtype)
""",
    "conftest.py": """
import harness
import suites

assert harness.OWNER == suites.OWNER == "foreign"
""",
    "tests/test_forward.py": """
import reports
from harness.attention import forward


def test_forward(assay):
    assert reports.OWNER == "foreign"
    result = assay.check(forward, phases=["extend"], dtypes=["float32"], head_dims=[64])
    assert result.computed
""",
}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A kernel repository that has its own harness/, evals/, suites/ and reports/."""
    for name, text in FOREIGN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def there(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module as in that repository: its folder first on the path, assay installed."""
    env = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False
    )


@pytest.mark.slow
def test_a_foreign_repository_uses_the_plugin(foreign: Path) -> None:
    done = there(foreign, "pytest", "-p", "no:cacheprovider", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^assay: 1 kernel, \d+ calls", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_foreign_repository_uses_the_command(foreign: Path) -> None:
    done = there(foreign, "assay", "check", "harness.attention:forward", "--case", "extend-7+")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "harness.attention:forward is correct on all" in done.stdout
