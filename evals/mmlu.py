"""Draws MMLU questions from a local CSV file, a Hugging Face dataset, or the built-in synthetic questions.

The order is random, with a seed, since a run stops as soon as the answers decide.
"""

from __future__ import annotations

import csv
import io
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.evals import synthetic
from assay.evals.alike import alike
from assay.evals.questions import BUILTIN_DATA, LETTERS, Question, choice_question, prompt_hash
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.reading import whole_file

# Columns of simple-evals' ``mmlu.csv``; further columns, such as an index, are ignored.
_FILE_COLUMNS = ("Question", "A", "B", "C", "D", "Answer", "Subject")
# Columns of `cais/mmlu`. `answer` is the index of the right choice.
_HUB_COLUMNS = ("question", "subject", "choices", "answer")

_SUBJECTS = {
    "stem": """
        abstract_algebra astronomy college_biology college_chemistry college_computer_science college_mathematics
        college_physics computer_security conceptual_physics electrical_engineering elementary_mathematics
        high_school_biology high_school_chemistry high_school_computer_science high_school_mathematics
        high_school_physics high_school_statistics machine_learning""",
    "humanities": """
        formal_logic high_school_european_history high_school_us_history high_school_world_history international_law
        jurisprudence logical_fallacies moral_disputes moral_scenarios philosophy prehistory professional_law
        world_religions""",
    "social_sciences": """
        econometrics high_school_geography high_school_government_and_politics high_school_macroeconomics
        high_school_microeconomics high_school_psychology human_sexuality professional_psychology public_relations
        security_studies sociology us_foreign_policy""",
    "other": """
        anatomy business_ethics clinical_knowledge college_medicine global_facts human_aging management marketing
        medical_genetics miscellaneous nutrition professional_accounting professional_medicine virology""",
}
# Group of each of the 57 subjects (Hendrycks et al., arXiv 2009.03300), as in simple-evals.
_SUBJECT_TO_GROUP = {subject: group for group, subjects in _SUBJECTS.items() for subject in subjects.split()}

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_WHAT_TO_GIVE = (
    f"give {BUILTIN_DATA!r}, a .csv file with the columns {', '.join(_FILE_COLUMNS)}, or a Hugging Face dataset that "
    "is on this machine or can be downloaded"
)


# A row as read, before it is checked: its place, for errors; text, options, answer and subject.
_Row = tuple[str, str, Sequence[str], str, str]


@dataclass(frozen=True)
class Drawn:
    """Questions in a random order.

    Attributes:
        questions: distinct questions. Those of one unit (`Question.unit`: a passage, a template) follow one another.
        units: number of units in the whole set that the order was drawn from.
    """

    questions: tuple[Question, ...]
    units: int


def draw_questions(data: str, most: int, seed: int = 0) -> Drawn:
    """Draw questions in a random order, without replacement.

    Questions of one passage or template are drawn together, and a repeated prompt is drawn once. The beginning of the order does
    not depend on `most` (for the built-in set, up to `synthetic.BUILTIN_POOL` questions).

    Args:
        data: ``"builtin"``; a ``.csv`` file with simple-evals' columns; or a Hugging Face dataset with the
            columns of ``cais/mmlu``, by hub name or as a local folder (configuration ``all``, split ``test``).
        most: largest number of questions, 1 or more. The built-in set is endless; a smaller dataset is drawn completely.

    Returns:
        The questions. The ids of a dataset are ``mmlu-<index in the dataset>``, so they do not depend on the order.

    Raises:
        UsageError: the file or dataset does not exist, a file cannot be read (with the line), or a row is not a question (with
            its line or row).
    """
    if data == BUILTIN_DATA:
        order = list(range(max(most, synthetic.BUILTIN_POOL)))
        random.Random(seed).shuffle(order)
        return Drawn(tuple(map(synthetic.question, order[:most])), len(order))
    questions = [_question(index, row) for index, row in enumerate(_rows(data))]
    if not questions:
        raise UsageError(f"{data} has no questions.", "at least one row below the header", _WHAT_TO_GIVE)
    return in_random_order(questions, most, seed)


def in_random_order(questions: Iterable[Question], most: int, seed: int) -> Drawn:
    """Draw at most `most` questions, keeping units together and each prompt once; see `draw_questions`."""
    distinct: dict[str, Question] = {}
    for question in questions:
        distinct.setdefault(question.prompt, question)
    units: dict[str, list[Question]] = {}
    for question in _clustered(list(distinct.values())):
        units.setdefault(question.unit, []).append(question)
    shuffled = list(units.values())
    random.Random(seed).shuffle(shuffled)
    return Drawn(tuple(_whole_units(shuffled, most)), len(units))


def _clustered(questions: Sequence[Question]) -> list[Question]:
    """Put similar questions into one unit. Passages are similar if any of their questions are."""
    firsts = alike([question.own for question in questions])
    sizes = Counter(firsts)
    by_unit: dict[str, str] = {}
    for question, first in zip(questions, firsts, strict=True):
        if sizes[first] > 1:
            by_unit.setdefault(question.unit, f"alike-{prompt_hash(questions[first].prompt)}")
    return [replace(question, unit=by_unit.get(question.unit, question.unit)) for question in questions]


def _whole_units(units: Sequence[Sequence[Question]], most: int) -> Iterator[Question]:
    """Yield the first units that have at most `most` questions in total, but at least one unit."""
    given = 0
    for unit in units:
        if given and given + len(unit) > most:
            return
        given += len(unit)
        yield from unit


def _rows(data: str) -> Iterable[_Row]:
    path = Path(data).expanduser()
    if path.is_dir():
        return _hub_rows(str(path))
    if path.suffix.lower() == ".csv":
        return _csv_rows(path)
    if path.exists():
        raise UsageError(f"{data} has an unsupported file type.", ".csv", _WHAT_TO_GIVE)
    if not _HUB_NAME.fullmatch(data):
        raise UsageError(f"{data} does not exist.", "a file, a folder, or the name of a dataset", _WHAT_TO_GIVE)
    return _hub_rows(data)


def _read_bytes(path: Path) -> bytes:
    try:
        return whole_file(path)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist.", "a file", _WHAT_TO_GIVE) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.", "a readable file", _WHAT_TO_GIVE) from None
    except EvidenceError as error:  # not a regular file, or too large
        raise UsageError(error.found, error.expected, _WHAT_TO_GIVE) from None


def _csv_rows(path: Path) -> Iterator[_Row]:
    # Not pandas.read_csv: it silently pads short rows, reads the option "None" as a missing value, and counts records where
    # an editor counts lines (MMLU's quoted questions span several).
    raw = _read_bytes(path)
    try:
        content = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path}, line {line}: byte {raw[error.start]:#04x} is not UTF-8.",
            "a CSV file in UTF-8",
            "convert the file",
        ) from None
    reader = csv.reader(io.StringIO(content, newline=""), strict=True)
    header, line = list[str](), 1  # the first line of a record
    try:
        for cells in reader:
            if cells and not header:
                header = [cell.strip() for cell in cells]
                _require_columns(header, _FILE_COLUMNS, path)
            elif cells and len(cells) != len(header):
                raise UsageError(
                    f"{path}, line {line}: {len(cells)} fields.",
                    f"{len(header)}, as in the header",
                    "check the quotes and commas of that line",
                )
            elif cells:
                yield _file_row(f"{path}, line {line}", dict(zip(header, cells, strict=True)))
            line = reader.line_num + 1
    except csv.Error as error:
        raise UsageError(
            f"{path}, line {line}: malformed CSV: {error}.",
            "fields separated by commas; those with a comma, quote or line break in double quotes",
            "check the quotes from that line on",
        ) from None


def load_set(source: str, columns: Sequence[str], do: str, *arguments: str, **options: str) -> Any:
    """Load a set with ``datasets.load_dataset(*arguments, **options)``.

    Raises:
        UsageError: the set cannot be loaded, or has other columns.
    """
    import datasets  # slow to import, and not needed for other kinds of data

    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would write file names to the terminal unescaped
    try:
        loaded = datasets.load_dataset(*arguments, **options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        laid_out = f"a Hugging Face dataset with the columns {', '.join(columns)}"
        raise UsageError(f"The dataset {source!r} cannot be loaded: {error}.", laid_out, do) from None
    finally:
        datasets.logging.set_verbosity(verbosity)
    _require_columns(loaded.column_names, columns, source)
    return loaded


def _hub_rows(name: str) -> Iterator[_Row]:
    loaded = load_set(name, _HUB_COLUMNS, _WHAT_TO_GIVE, name, "all", split="test")
    for number, row in enumerate(loaded.select_columns(list(_HUB_COLUMNS))):
        where = f"{name}, row {number}"
        answer, choices = row["answer"], row["choices"]
        if not isinstance(answer, int) or not 0 <= answer < len(LETTERS):
            raise UsageError(f"{where}: the answer is {answer!r}.", "0, 1, 2 or 3", "correct or drop that row")
        if not isinstance(choices, list) or len(choices) != len(LETTERS):
            raise UsageError(f"{where}: the choices are {choices!r}.", "a list of four", "correct or drop that row")
        options = [_cell(choice) for choice in choices]
        yield where, _cell(row["question"]), options, LETTERS[answer], _cell(row["subject"])


def _file_row(where: str, row: Mapping[str, Any]) -> _Row:
    options = [_cell(row[letter]) for letter in LETTERS]
    return where, _cell(row["Question"]), options, _cell(row["Answer"]), _cell(row["Subject"])


def _cell(value: Any) -> str:
    return "" if value is None else str(value)


def _require_columns(columns: Sequence[str], needed: Sequence[str], source: Path | str) -> None:
    """Raise UsageError unless each needed column occurs exactly once."""
    missing = [name for name in needed if list(columns).count(name) != 1]
    if missing:
        raise UsageError(
            f"{source} has the columns {', '.join(repr(name) for name in columns)}: "
            f"{', '.join(missing)} missing or duplicated.",
            f"each of {', '.join(needed)} once",
            "rename or add the columns",
        )


def _question(index: int, row: _Row) -> Question:
    where, text, options, given, subject = row
    for name, value in (("question", text), *((f"option {a}", b) for a, b in zip(LETTERS, options, strict=True))):
        if not value.strip():
            raise UsageError(f"{where}: the {name} is empty.", "a text", "fill it in or drop that row")
    answer = given.strip()
    if answer not in LETTERS:
        raise UsageError(f"{where}: the answer is {given!r}.", "A, B, C or D", "correct or drop that row")
    return choice_question(f"mmlu-{index}", subject, _SUBJECT_TO_GROUP.get(subject, "other"), text, options, answer)
