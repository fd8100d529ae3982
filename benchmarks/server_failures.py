"""A server fails: is its cause in the first line of everything that a run writes, and its one remedy beside it?

    python benchmarks/server_failures.py [--only NAME] [--markdown FILE]

For each log in ``tests/data/server_failures``, ``assay gate`` runs on stand-ins for SGLang (``tests/stand_ins/engine``). The
candidate's writes the log and ends as SGLang did: with status 1, or by killing itself. Everything else is what a user's run does.
``expected.toml`` beside the logs says which words name the cause, and which the remedy. Read are

- terminal: the line below the sign of the verdict,
- HTML: the headline of ``report.html``, with the remedy right below it,
- Markdown: the bold line of ``report.md``,
- JUnit: the message of the one ``<error>`` of ``report.junit.xml``,
- annotation: the one workflow command for GitHub.

Exits with 1 unless all of them name both.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from junitparser import JUnitXml

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "tests" / "stand_ins" / "engine"
LOGS = ROOT / "tests" / "data" / "server_failures"
FLAGS = ("--reference=torch_native", "--candidate=triton", "--questions=8", "--suites=accuracy", "--require=accuracy")
OUTPUTS = ("terminal", "html", "markdown", "junit", "annotation")
WHO = "the candidate server (triton)"


@dataclass(frozen=True)
class Expected:
    """What a log must lead to.

    Attributes:
        line: words of the line that names the cause.
        cause: id of the known cause; empty if it is not known.
        do: words of its one remedy.
    """

    line: str
    cause: str
    do: str


@dataclass(frozen=True)
class Shown:
    """What one output shows of a failure, without its own markup.

    Attributes:
        first: its first line, or headline.
        remedies: every remedy in it.
    """

    first: str
    remedies: tuple[str, ...]

    def names(self, expected: Expected) -> bool:
        """Whether the first line names the cause and whose failure it was."""
        return plain(expected.line) in self.first and WHO in self.first

    def remedied(self, expected: Expected) -> bool:
        """Whether there is one remedy, that of the cause."""
        return len(self.remedies) == 1 and plain(expected.do) in self.remedies[0]


def expectations(folder: Path = LOGS) -> dict[str, Expected]:
    """What is expected of each log, by its name."""
    return {name: Expected(**one) for name, one in tomllib.loads((folder / "expected.toml").read_text()).items()}


def plain(text: str) -> str:
    """Text on one line without Markdown's escapes, HTML's entities and GitHub's."""
    unescaped = html.unescape(re.sub(r"<!-- -->|\\(?=[^a-zA-Z0-9\s])|</?b>", "", text)).replace("%25", "%")
    return " ".join(unescaped.split())


def shown(terminal: str, files: Mapping[str, str], annotations: str) -> dict[str, Shown]:
    """What the outputs of a failed run show.

    Args:
        terminal: what was printed.
        files: texts of the report files, by name.
        annotations: workflow commands for GitHub.
    """
    page, lines = files["report.html"], terminal.splitlines()
    verdict = next((n for n, line in enumerate(lines) if "ERROR   exit code 3" in line), len(lines) - 2)
    cases = [case for suite in JUnitXml.fromstring(files["report.junit.xml"].encode()) for case in suite]
    errors = [result for case in cases for result in case.result if type(result).__name__ in ("Error", "Failure")]
    junit = errors[0] if len(errors) == 1 else None
    commands = annotations.splitlines()
    return {
        "terminal": Shown(plain(lines[verdict + 1]), _remedies("\n".join(lines[verdict + 1 :]))),
        "html": Shown(
            plain(_found(r'<p class="headline">(.*?)</p>', page)),
            _remedies(re.sub(r"<style.*?</style>|<script.*?</script>", "", page, flags=re.DOTALL)),
        ),
        "markdown": Shown(plain(files["report.md"].split("\n")[2]), _remedies(files["report.md"])),
        "junit": Shown(plain(junit.message), _remedies(junit.text)) if junit is not None else Shown("", ()),
        "annotation": Shown(plain(commands[0]), _remedies(commands[0])) if len(commands) == 1 else Shown("", ()),
    }


def _remedies(text: str) -> tuple[str, ...]:
    """What follows each "What to do:", and every other advice that is none of the failure's."""
    said = [plain(one) for one in re.findall(r"What to do:(.*?)(?:</p>|\n|$)", text, re.DOTALL)]
    other = re.findall(r"to resolve:[^\n]*", text, re.IGNORECASE)
    doctor = ["assay doctor"] if "assay doctor" in text and not any("assay doctor" in one for one in said) else []
    return (*said, *other, *doctor)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.DOTALL)
    return match[1] if match else ""


def failed_run(log: Path, place: Path) -> dict[str, Shown]:
    """Run ``assay gate`` with a candidate that writes `log` and is killed, and read what it shows.

    Raises:
        RuntimeError: the run ended otherwise than with exit code 3 and a report.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ENGINE}:{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "GITHUB_ACTIONS": "true",
        "STAND_IN_FAILS": "candidate:says",
        "STAND_IN_SAYS": str(log),
        "COLUMNS": "80",
    }
    command = [sys.executable, "-m", "assay", "gate", "--out", "run", *FLAGS]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    printed = (done.stdout + done.stderr).splitlines()
    files = {path.name: path.read_text() for path in (place / "run").glob("report.*")}
    if done.returncode != 3 or not files:
        raise RuntimeError(f"{log.name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    annotations = "".join(f"{line}\n" for line in printed if line.startswith("::"))
    return shown("\n".join(line for line in printed if not line.startswith("::")), files, annotations)


def measure(name: str) -> dict[str, Shown]:
    """What a failed run with this log shows."""
    with tempfile.TemporaryDirectory() as place:
        return failed_run(LOGS / f"{name}.log", Path(place))


def table(expected: Mapping[str, Expected], seen: Mapping[str, Mapping[str, Shown]]) -> list[str]:
    """A Markdown row for each failure: in each output, whether the first line names the cause, and whether its remedy is there."""
    rows = [f"| failure | cause | {' | '.join(OUTPUTS)} | first line |", f"|---|---|{'---|' * len(OUTPUTS)}---|"]
    for name, outputs in seen.items():
        cells = [
            f"{'cause' if outputs[one].names(expected[name]) else 'NO CAUSE'}, "
            f"{'remedy' if outputs[one].remedied(expected[name]) else 'NO REMEDY'}"
            for one in OUTPUTS
        ]
        first = outputs["terminal"].first.replace("|", "\\|")
        rows.append(f"| {name} | {expected[name].cause or '(unknown)'} | {' | '.join(cells)} | {first[:160]} |")
    counts = [
        f"{sum(outputs[one].names(expected[name]) for name, outputs in seen.items())} causes, "
        f"{sum(outputs[one].remedied(expected[name]) for name, outputs in seen.items())} remedies of {len(seen)}"
        for one in OUTPUTS
    ]
    return [*rows, f"| **all** | | {' | '.join(counts)} | |"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="logs whose names contain this")
    parser.add_argument("--markdown", type=Path, help="a file for the table")
    given = parser.parse_args()
    expected = {name: one for name, one in expectations().items() if given.only in name}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        seen = dict(zip(expected, pool.map(measure, expected), strict=True))
    rows = table(expected, seen)
    print("\n".join(rows))
    if given.markdown:
        given.markdown.write_text("\n".join(rows) + "\n")
    good = [
        outputs[one].names(expected[name]) and outputs[one].remedied(expected[name])
        for name, outputs in seen.items()
        for one in OUTPUTS
    ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
