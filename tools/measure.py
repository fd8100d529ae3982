"""Measure the size of the code and of its vocabulary, for one tree or for two side by side.

    python tools/measure.py                    # the working tree
    python tools/measure.py --against REV      # the same for a git revision, before it
    python tools/measure.py --files            # and the files and functions behind the counts
    python tools/measure.py --lint             # what `nox -s lint` refuses: words out, names and docstrings that say nothing

Reads source and imports none of it, so that it works on any revision. It counts:

- *product*: Python of ``assay/``, ``harness/``, ``evals/``, ``reports/`` and ``suites/``, ``conftest.py`` and ``noxfile.py``;
- *code lines*: lines that hold a token of code: not blank, not only a comment, not part of a docstring;
- *public names*: functions and classes at module level, and methods of any class, without a leading underscore. Constants are
  counted separately;
- *record types*: dataclasses, pydantic models, NamedTuples and TypedDicts, by their decorator or their bases, including bases
  defined in the product;
- *twins*: names of classes defined at least twice; names of files in at least two rooms (except ``__init__.py``);
- *functions*: including methods and nested functions; a length is from ``def`` to the last line of the body, without decorators;
- *complexity*: McCabe's number as ruff's C901 and the package mccabe count it: 1 + branches, loops and handlers, including those
  of nested functions. The lint limits this count, because it is the number of paths that a reader follows from statement to
  statement. *Conditions* is a stricter count alongside: ``and``/``or``, conditional expressions, assertions, comprehensions and
  their conditions too, nested functions separately. It is high for flat expressions, such as a table of comprehensions or a chain
  of ``or``, that read in one go;
- *parameters*: all of them but ``self`` and ``cls``;
- *names that say nothing*: bindings of `NO_NAMES`: variables, parameters, fields, functions, classes and imports. A field or
  parameter ``found: str`` is allowed: it is the first part of an error or a check, "what was found";
- *words out*: words that messages (string constants of the product other than docstrings) and docs must not use.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
FOLDERS = ("assay", "harness", "evals", "reports", "suites")
TOP = ("conftest.py", "noxfile.py")
OTHERS = ("tests", "benchmarks", "tools", "examples")
WORDS = {
    "mend": r"\bmend(s|ed|ing)?\b",
    "for want of": r"\bfor want of\b",
    "in vain": r"\bin vain\b",
    "by right": r"\bby rights?\b",
    "dear": r"\bdear(er|ly)?\b",
    "somebody else's": r"\bsomebody else['’]s\b",
    "told": r"\btold\b",
}
"""Words banned from messages and docs, as regular expressions that ignore case."""
HABITS = {
    "; empty if": r"; (?:empty|none|None) (?:if|where) ",
    "of which": r"(?<!one )(?<!values )(?<!\d )(?<!any )(?<!each )(?<!some )(?<!most )(?<!all )(?<!many )(?<!both )\bof which\b",
    "read off": r"\bread off\b",
    "behind a prefix": r"\bbehind (?:a|the|its) (?:cached |shared )?prefix",
}
"""Turns of phrase that read as translated, as regular expressions. Neither the product nor docs are to use them."""
NO_NAMES = {"one", "found"}
CLASSES_TITLE = "docstrings of classes that do"
NO_VERB = re.compile(r"(What|Whether|How|Which)\b")
RECORD_BASES = {"BaseModel", "NamedTuple", "TypedDict"}
COMPLEX, MANY_PARAMETERS, LONG_CLASS, LONG_MODULE, SHORT_MODULE, STUB_MODULE = 15, 8, 250, 400, 60, 40

Function = ast.FunctionDef | ast.AsyncFunctionDef
Tree = Mapping[str, str]
"""Path from the root, with slashes -> text."""


@dataclass
class Measures:
    """The measures of a tree.

    Attributes:
        counts: the rows of the table in their order, as numbers by title.
        rooms: lines by room.
        where: the places behind each title of `counts`, a line each.
    """

    counts: dict[str, float] = field(default_factory=dict)
    rooms: dict[str, int] = field(default_factory=dict)
    where: dict[str, list[str]] = field(default_factory=dict)

    def listed(self, title: str, places: Iterable[str]) -> None:
        """Add a row that counts places."""
        self.where[title] = list(places)
        self.counts[title] = len(self.where[title])


def tree_at(folder: Path) -> dict[str, str]:
    """The files of a working tree that git knows or would add."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=folder, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    files = (folder / name for name in names if _wanted(name))
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in files if path.is_file()}


def tree_of(revision: str) -> dict[str, str]:
    """The files of a git revision."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = [member for member in tar if member.isfile() and _wanted(member.name)]
        return {one.name: opened.read().decode() for one in files if (opened := tar.extractfile(one))}


def _wanted(name: str) -> bool:
    return name.endswith((".py", ".md")) and "/data/" not in f"/{name}"


def room_of(path: str) -> str:
    """The room of a product's file: the package or module of ``harness/``, or the top folder."""
    parts = PurePosixPath(path).parts
    return "/".join(parts[:2]) if parts[0] == "harness" and len(parts) > 1 else parts[0]


def code_lines(text: str, tree: ast.Module) -> int:
    """The lines of a module that hold code."""
    code: set[int] = set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            code.update(range(token.start[0], token.end[0] + 1))
    for constant in docstrings(tree):
        code.difference_update(range(constant.lineno, (constant.end_lineno or constant.lineno) + 1))
    return len(code)


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Every string that stands alone as a statement: docstrings, and documentation of constants and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def functions_of(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Every function with its qualified name."""

    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{child.name}" if isinstance(child, Function | ast.ClassDef) else ""
            if isinstance(child, Function):
                yield name, child
            yield from below(child, f"{name}." if name else prefix)

    return below(tree, "")


def length(node: Function | ast.ClassDef) -> int:
    """Lines of a function or class, without its decorators."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def complexity(function: Function) -> int:
    """McCabe's number of a function, as ruff's C901 counts it."""
    count = 1
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.match_case):
            count += 1
        elif isinstance(node, ast.Try | ast.TryStar):
            count += bool(node.orelse)
        elif isinstance(node, ast.Match):
            last = node.cases[-1]
            count -= isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None and last.guard is None
        elif isinstance(node, Function) and node is not function:
            count += 1
    return count


def conditions(function: Function) -> int:
    """McCabe's number of a function, including short-circuits and comprehensions, without nested functions."""
    plain = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case)

    def below(node: ast.AST) -> int:
        count = 0
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function | ast.ClassDef):
                continue
            count += isinstance(child, plain)
            if isinstance(child, ast.BoolOp):
                count += len(child.values) - 1
            if isinstance(child, ast.comprehension):
                count += 1 + len(child.ifs)
            if isinstance(child, ast.For | ast.AsyncFor | ast.While | ast.Try) and child.orelse:
                count += 1
            count += below(child)
        return count

    return 1 + below(function)


def parameters(function: Function) -> int:
    """The number of a function's parameters, without ``self`` and ``cls``."""
    given = function.args
    named = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    rest = [one for one in (given.vararg, given.kwarg) if one]
    return len(named) - (named[:1] in (["self"], ["cls"])) + len(rest)


def public_names(tree: ast.Module) -> list[str]:
    """Functions, classes and methods without a leading underscore."""
    found = []
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            found.append(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [one.name for one in node.body if isinstance(one, Function) and not one.name.startswith("_")]
            found += [f"{node.name}.{name}" for name in methods]
    return found


def public_constants(tree: ast.Module) -> list[str]:
    """Variables of a module without a leading underscore."""
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found += [one.id for one in ast.walk(target) if isinstance(one, ast.Name) and one.id[0] != "_"]
    return found


def record_types(modules: Mapping[str, ast.Module]) -> list[str]:
    """Places of the classes that only hold values."""
    classes = [
        (path, node) for path, tree in modules.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    records = set(RECORD_BASES)
    while True:  # until no class inherits from a record that is not known yet
        found = [(path, node) for path, node in classes if _is_record(node, records)]
        if (known := RECORD_BASES | {node.name for _, node in found}) == records:
            return [f"{path}: {node.name}" for path, node in found]
        records = known


def _is_record(node: ast.ClassDef, records: set[str]) -> bool:
    return any("dataclass" in _names(one) for one in node.decorator_list) or any(
        records & set(_names(base)) for base in node.bases
    )


def _names(node: ast.expr) -> list[str]:
    """The last name of an expression such as ``a.B``, ``B[int]`` or ``B(...)``."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    if isinstance(node, ast.Attribute):
        return [node.attr]
    return [node.id] if isinstance(node, ast.Name) else []


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """String constants that are not docstrings, with their lines."""
    apart = {id(one) for one in docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
            yield node.lineno, node.value


def measure(files: Tree) -> Measures:
    """Measure a tree of files."""
    python = {path: text for path, text in files.items() if path.endswith(".py")}
    product = {path: text for path, text in python.items() if _is_product(path)}
    modules = {path: ast.parse(text) for path, text in product.items()}
    done = Measures()
    for path, text in product.items():
        room = room_of(path)
        done.rooms[room] = done.rooms.get(room, 0) + len(text.splitlines())
    _sizes(done, python, product, modules)
    _vocabulary(done, modules)
    _functions(done, modules)
    _names_that_say_nothing(done, modules)
    _prose(done, files, modules)
    return done


def refused(files: Tree) -> Iterator[str]:
    """Yield the lint's refusals in a tree, a line each."""
    modules = {path: ast.parse(text) for path, text in files.items() if path.endswith(".py") and _is_product(path)}
    if not modules:
        yield "no module of the product: is this a working tree?"
    done = Measures()
    _names_that_say_nothing(done, modules)
    _prose(done, files, modules)
    for title, places in done.where.items():
        if title != CLASSES_TITLE:
            yield from (f"{title}: {place}" for place in places)


def _names_that_say_nothing(done: Measures, modules: Mapping[str, ast.Module]) -> None:
    unnamed = (f"{path}:{line}: {name}" for path, tree in modules.items() for line, name in bindings_of(tree))
    done.listed("names that say nothing", unnamed)


def _is_product(path: str) -> bool:
    return path.split("/")[0] in FOLDERS or path in TOP


def _sizes(done: Measures, python: Tree, product: Tree, modules: Mapping[str, ast.Module]) -> None:
    lines = {path: len(text.splitlines()) for path, text in product.items()}
    done.counts["product: lines"] = sum(lines.values())
    done.counts["product: code lines"] = sum(code_lines(text, modules[path]) for path, text in product.items())
    comments = sum(text.lstrip().startswith("#") for one in product.values() for text in one.splitlines())
    done.counts["product: comment lines"] = comments
    done.counts["product: modules"] = len(product)
    done.counts["product: rooms"] = len(done.rooms)
    for folder in OTHERS:
        texts = {path: text for path, text in python.items() if path.split("/")[0] == folder}
        done.counts[f"{folder}: lines"] = sum(len(text.splitlines()) for text in texts.values())
        done.counts[f"{folder}: code lines"] = sum(code_lines(text, ast.parse(text)) for text in texts.values())
    own = {path: number for path, number in lines.items() if not path.endswith("__init__.py")}
    done.listed(f"modules over {LONG_MODULE} lines", _by_size(own, lambda n: n > LONG_MODULE))
    done.listed(f"modules under {SHORT_MODULE} lines", _by_size(own, lambda n: n < SHORT_MODULE))
    done.listed(f"modules under {STUB_MODULE} lines", _by_size(own, lambda n: n < STUB_MODULE))


def _by_size(sizes: Mapping[str, int], keep: Callable[[int], bool]) -> list[str]:
    return [f"{number} {path}" for path, number in sorted(sizes.items(), key=lambda one: -one[1]) if keep(number)]


def _vocabulary(done: Measures, modules: Mapping[str, ast.Module]) -> None:
    thousands = done.counts["product: lines"] / 1_000
    names = sum(len(public_names(tree)) for tree in modules.values())
    done.counts["public names"] = names
    done.counts["public names per 1,000 lines"] = round(names / thousands, 1)
    done.counts["public constants"] = sum(len(public_constants(tree)) for tree in modules.values())
    done.listed("record types", record_types(modules))
    done.counts["record types per 1,000 lines"] = round(done.counts["record types"] / thousands, 1)
    classes, files = defaultdict(list), defaultdict(set)
    for path, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(path)
        files[PurePosixPath(path).name].add(room_of(path))
    files.pop("__init__.py", None)
    twins = {name: paths for name, paths in sorted(classes.items()) if len(paths) > 1}
    done.listed("twins: class names", (f"{name}: {', '.join(paths)}" for name, paths in twins.items()))
    public = [line for line in done.where["twins: class names"] if not line.startswith("_")]
    done.listed("twins: class names, public", public)
    shared = {name: rooms for name, rooms in sorted(files.items()) if len(rooms) > 1}
    done.listed("twins: file names", (f"{name}: {', '.join(sorted(rooms))}" for name, rooms in shared.items()))


def bindings_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every binding of one of `NO_NAMES` with its line, except the fields and parameters ``found: str``."""
    fields = (node for of in ast.walk(tree) if isinstance(of, ast.ClassDef) for node in of.body)
    parts = {
        id(node.target) for node in fields if isinstance(node, ast.AnnAssign) and _names(node.annotation) == ["str"]
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) if not (name == "found" and id(node) in parts):
                bound = name
            case ast.arg(arg=name) if not (name == "found" and node.annotation and _names(node.annotation) == ["str"]):
                bound = name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound = name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                bound = name
            case ast.alias(name=name, asname=alias):
                bound = alias or name
            case _:
                continue
        if bound in NO_NAMES:
            yield getattr(node, "lineno", 0), bound


def _functions(done: Measures, modules: Mapping[str, ast.Module]) -> None:
    found = [(f"{path}: {name}", node) for path, tree in modules.items() for name, node in functions_of(tree)]
    sizes = sorted(length(node) for _, node in found)
    done.counts["functions"] = len(found)
    done.counts["functions: median lines"] = statistics.median(sizes) if sizes else 0
    done.counts["functions: 90 % lines"] = sizes[int(0.9 * (len(sizes) - 1))] if sizes else 0
    done.counts["functions: longest, lines"] = max(sizes, default=0)
    hard = {place: complexity(node) for place, node in found}
    harder = {place: conditions(node) for place, node in found}
    many = {place: parameters(node) for place, node in found}
    classes = {
        f"{path}: {node.name}": length(node)
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    done.listed(f"functions: complexity over {COMPLEX}", _by_size(hard, lambda n: n > COMPLEX))
    done.listed(f"functions: conditions over {COMPLEX}", _by_size(harder, lambda n: n > COMPLEX))
    done.listed(f"functions: parameters over {MANY_PARAMETERS}", _by_size(many, lambda n: n > MANY_PARAMETERS))
    done.listed(f"classes over {LONG_CLASS} lines", _by_size(classes, lambda n: n > LONG_CLASS))


def _prose(done: Measures, files: Tree, modules: Mapping[str, ast.Module]) -> None:
    docs = {path: text for path, text in files.items() if path.endswith(".md") and path.split("/")[0] != "tests"}
    said = {path: [text for _, text in messages(tree)] for path, tree in modules.items()}
    for word, pattern in WORDS.items():
        wanted, in_messages, in_docs = re.compile(pattern, re.IGNORECASE), Counter[str](), Counter[str]()
        for path, texts in said.items():
            in_messages[path] += sum(len(wanted.findall(text)) for text in texts)
        for path, text in docs.items():
            in_docs[path] += len(wanted.findall(text))
        for kind, counted in (("messages", in_messages), ("docs", in_docs)):
            title = f"words out: {word}, {kind}"
            done.counts[title] = counted.total()
            done.where[title] = [f"{count} {path}" for path, count in counted.most_common() if count]
    weak = [
        f"{path}: {name}"
        for path, tree in modules.items()
        for name, node in functions_of(tree)
        if NO_VERB.match(ast.get_docstring(node) or "")
    ]
    done.listed("docstrings of functions that begin with What, Whether, How, Which", weak)
    classes = [
        f"{path}: {node.name}"
        for path, tree in modules.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and NO_VERB.match(ast.get_docstring(node) or "")
    ]
    done.listed(CLASSES_TITLE, classes)
    texts = {path: files[path] for path in modules} | docs
    for habit, pattern in HABITS.items():
        places = (
            f"{path}:{number}"
            for path, text in texts.items()
            for number, line in enumerate(text.splitlines(), 1)
            if re.search(pattern, line)
        )
        done.listed(f"habits of prose: {habit}", places)
    for kind in ("messages", "docs"):
        done.counts[f"words out: all, {kind}"] = sum(done.counts[f"words out: {word}, {kind}"] for word in WORDS)


def table(after: Measures, before: Measures | None) -> Iterator[str]:
    """The lines of the Markdown table."""
    yield "| | before | after |\n|---|--:|--:|" if before else "| | |\n|---|--:|"
    rooms = {f"lines of {room}": number for room, number in sorted(after.rooms.items())}
    old = before.counts | {f"lines of {room}": number for room, number in before.rooms.items()} if before else {}
    new = after.counts | rooms
    for title in new | {title: 0 for title in sorted(old) if title not in new}:
        cells = [old.get(title)] * bool(before) + [new.get(title)]
        yield f"| {' | '.join([title, *('' if cell is None else f'{cell:,.10g}' for cell in cells)])} |"


def main(words: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Measure the size of the code and of its vocabulary.")
    parser.add_argument("--tree", type=Path, default=ROOT, help="a working tree; by default this one")
    parser.add_argument("--against", metavar="REV", help="a git revision to show in front of the tree")
    parser.add_argument("--files", action="store_true", help="list the places behind the counts")
    parser.add_argument("--lint", action="store_true", help="list only the lint's refusals, and fail if there are any")
    given = parser.parse_args(words)
    if given.lint:
        wrong = list(refused(tree_at(given.tree)))
        print("\n".join(wrong) or "no word, name or docstring that the lint refuses")
        return int(bool(wrong))
    after = measure(tree_at(given.tree))
    for line in table(after, measure(tree_of(given.against)) if given.against else None):
        print(line)
    for title, places in after.where.items() if given.files else ():
        if places:
            print(f"\n## {title}: {after.counts[title]:g}\n")
            print("\n".join(f"- {place}" for place in places))
    return 0


if __name__ == "__main__":
    sys.exit(main())
