"""What each form, effect and step of the read-out alone explains: kernels are read again without it.

    python benchmarks/read_outs_without.py hypotheses held-out held-out-second held-out-third \\
        --kernels benchmarks/held_out_faults_fourth.py --processes 56 --minutes 8 --out some/folder

A kernel is checked once and read; what took part is noted. It is read again without each of these: a form that fitted no query and
an effect that gave no wrong output change nothing when they are missing (``--unseen`` tries some of them all the same). What is
read is judged as `read_outs.py` does. Each result is written at once to the folder, where the next call goes on; the table is of
what lies there, also if the time is over.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch
from read_outs import Case, cases, judged, made, modules

from assay.harness.attention.call import Kernel
from assay.harness.offline import observed
from assay.harness.offline.check import check
from assay.harness.offline.observed import Reader, read_kernel
from assay.harness.readout import candidates, finding, fitting, formulas, mining
from assay.harness.readout.edges import Sum
from assay.harness.readout.finding import Finder
from assay.harness.readout.forms import BLANK, Fit, Row
from assay.harness.readout.formulas import Formula
from assay.harness.readout.key_factors import KeyFactors
from assay.harness.readout.mining import Condition
from assay.harness.readout.named import said
from assay.harness.readout.operators import Effect, Told
from assay.harness.readout.readout import ReadOut

FEATURES = "feature "
"""Begins the mark of a rule that speaks of one feature, which is left out last."""
PLAIN = frozenset(("decode", "head", "kv", "layer", "causal", "seq", "seqs", "prefix", "new", "total", "pos", "i", "j"))
"""Features that no read-out does without."""
COSTLY = (FEATURES, "step ", "rule ", "term ")
"""Begin the marks that nearly every kernel has, and that are left out last."""
AT_ONCE = 3
"""Marks that one process leaves out of a kernel in one go."""
LEAST_S = 6.0
"""Seconds that a read-out without something gets besides twice what it took with all."""
ASKED = "asked.pt"
"""File of what a read-out was asked with."""


class Switch:
    """Leaves out what has a mark, and notes the marks of all else that takes part. One stands in each process."""

    def __init__(self) -> None:
        self.off, self.seen = "", set[str]()

    def keeps(self, marks: Iterable[str]) -> bool:
        """Return True if nothing of this is left out, and note it."""
        every = set(marks)
        if self.off in every:
            return False
        self.seen |= every
        return True


SWITCH = Switch()


def install() -> None:
    """Have forms, effects, conditions and steps of the read-out go through the switch of this process."""
    torch.set_num_threads(1)
    fits, rated, mine = fitting.fits, fitting.Fitter._rated, mining.mine

    def kept_fits(row: Row) -> list[Fit]:
        return [fit for fit in fits(row) if fit.form == "right" or SWITCH.keeps([f"form {fit.form}"])]

    def kept_effects(self: fitting.Fitter, effects: Iterable[Effect], *few: Any) -> list[Any]:
        found = rated(self, (effect for effect in effects if SWITCH.off not in marks(effect)), *few)
        for _, _, effect in found:
            SWITCH.keeps(marks(effect))
        return found

    def kept_conditions(*given: Any) -> list[Condition]:
        return [condition for condition in mine(*given) if SWITCH.keeps(marks_of(condition))]

    fitting.fits, fitting.Fitter._rated = kept_fits, kept_effects  # type: ignore[method-assign]
    for room in (fitting, candidates):
        room.mine = kept_conditions  # type: ignore[attr-defined]
    for name in ("_telling", "_edges", "_again", "_bisect"):
        setattr(Finder, name, step(f"step {name.strip('_')}", getattr(Finder, name), []))
    for name in ("steep_plans", "extreme_plans", "repeated_plans"):
        setattr(finding, name, step(f"step {name.removesuffix('_plans')}", getattr(finding, name), []))


def step(mark: str, does: Callable[..., Any], nothing: Any) -> Callable[..., Any]:
    """A step of the read-out that does nothing where it is left out."""

    def kept(*given: Any) -> Any:
        return does(*given) if SWITCH.keeps([mark]) else nothing

    return kept


def marks(effect: Effect) -> set[str]:
    """What an effect is made of, each of which can be left out."""
    if isinstance(effect, KeyFactors):
        of = {f"keys {part.universe}" for part in effect.parts}
        of |= {f"keys of {len(effect.parts)} parts"} if len(effect.parts) > 1 else set()
        of |= {"keys blank"} if any(part.factor == BLANK for part in effect.parts) else set()
        of |= {"keys times"} if any(part.factor not in (0, 1, BLANK) for part in effect.parts) else set()
        of |= {"phantom"} if effect.phantom is not None else set()
        return of.union(*(marks_of(part.condition) for part in effect.parts))
    assert isinstance(effect, Told)
    name = effect.compute.__name__.strip("_")
    args = effect.args
    if name == "multiplied":
        return {f"multiplied {formula(*args)}"}
    if name == "edge":
        side, at, within, beyond, counted = args
        assert isinstance(at, Sum)
        of = {"edge", f"edge {side}{' within' if within else ''}", f"edge of {len(at.amounts)}"}
        of |= {"edge rounded"} if at.rounding else set()
        of |= {"edge beyond"} if beyond else set()
        return of | ({"edge counted"} if counted else set())
    if name in ("merged", "online", "other_scales"):
        law = args[{"merged": 1, "online": 1, "other_scales": 2}[name]]
        return {name, f"{name} {law}"}
    if name == "from_elsewhere":
        source, what = args
        in_memory = "packed row" in source.words or "memory" in source.words  # type: ignore[attr-defined]
        return {f"elsewhere {what}", f"elsewhere {'memory' if in_memory else 'near'}"}
    if name == "moved":
        what, row = args
        part = row.args[0] if isinstance(row.args[0], str) else "pool"  # type: ignore[attr-defined]
        return {"address", f"address {part}", f"address of {what}"}
    if name == "changed":
        return {"rounding", f"rounding {effect.id}"}
    return {name}


def formula(scores: Formula | None, output: Formula | None) -> str:
    """The table that a factor of scores or outputs is from."""
    if scores and output:
        return "descales"
    if scores:
        return "scales" if scores in formulas.SCALES else "scores"
    return "largest" if output in formulas.TIMES else "output"


def marks_of(condition: Condition) -> set[str]:
    """What a condition is made of."""
    found = {"rule negated"} if condition.negated else set()
    found |= {"rule of three"} if len(condition.literals) > 2 else set()
    for literal in condition.literals:
        term = literal.term
        found |= {f"term {term.rounding}"} if term.rounding else set()
        found |= {"term blocks"} if term.block > 1 else set()
        found |= {"term modulo"} if term.modulo else set()
        for name in {term.name, term.minus} - PLAIN - {""}:
            tile = name.startswith(("first_", "last_")) and name[-1].isdigit()
            found.add(FEATURES + ("tile" if tile else name))
    return found


@dataclass(frozen=True)
class Task:
    """A kernel that is read without some marks; without any named ones, first with all."""

    case: Case
    out: Path
    until: float
    without: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where what is found of the kernel is written."""
        return self.out / Path(self.case.kind).stem / self.case.name.replace("/", "_")

    @property
    def known(self) -> dict[str, Any] | None:
        """What is known of the kernel as it is read with all; None if nothing is."""
        path = self.folder / "none.json"
        return json.loads(path.read_text()) if path.exists() else None

    def write(self, mark: str, entry: dict[str, Any]) -> None:
        """Write a result, as a whole or not at all."""
        part = self.folder / f"{mark or 'none'}.part"
        part.write_text(json.dumps(entry | {"without": mark}))
        part.rename(self.folder / f"{mark or 'none'}.json")

    def left(self, marks: tuple[str, ...]) -> list[str]:
        """The marks that begin so, took part and were not left out yet; those that nearly every kernel has come last."""
        seen = (self.known or {"seen": ()})["seen"]
        left = [mark for mark in seen if mark.startswith(marks) and not (self.folder / f"{mark}.json").exists()]
        return sorted(left, key=lambda mark: mark.startswith(COSTLY))


def ablate(task: Task) -> Task:
    """Read a kernel with all, or without each mark of the task as long as there is time; write what is found."""
    case, make = task.case, made(task.case)[0]
    task.folder.mkdir(parents=True, exist_ok=True)
    SWITCH.off = ""
    known = task.known
    if known is None or not task.without:
        check_and_read(task, make)
        return task
    asked = torch.load(task.folder / ASKED, weights_only=False)
    again: str | None = None
    for mark in task.without:
        if time.time() > task.until:
            break
        SWITCH.off = mark
        read = read_kernel(make(), *asked)
        SWITCH.off = ""
        now = read if isinstance(read, ReadOut) else ReadOut()
        if said(now) == known["raw"]:
            task.write(mark, known | {"seen": []})
            continue
        # A kernel that remembers calls, or a busy machine, may give another sentence without any change.
        if again is None:
            twice = read_kernel(make(), *asked)
            again = said(twice) if isinstance(twice, ReadOut) else ""
        task.write(mark, asdict(judged(case, now)) | {"seen": [], "steady": again == known["raw"]})
    return task


def check_and_read(task: Task, make: Callable[[], Kernel]) -> None:
    """Check a kernel and read it with all; write what was said, and what a read-out was asked with."""
    SWITCH.seen = set()
    asked: list[tuple[Any, ...]] = []
    reads: list[ReadOut | str] = []

    def kept(kernel: Kernel, *given: Any) -> ReadOut | str:
        asked.append(given)
        reads.append(read_kernel(kernel, *given))
        return reads[0]

    observed.read_kernel = kept
    reader = Reader()
    check(make(), seed=task.case.seed, read_out=reader)
    read = reader.last or ReadOut()
    observed.read_kernel = read_kernel
    raw = reads[0] if reads and isinstance(reads[0], ReadOut) else ReadOut()
    if asked:
        declared, device, seconds, *rest = asked[0]
        torch.save((declared, device, min(seconds, LEAST_S + 2 * raw.cpu_seconds), *rest), task.folder / ASKED)
    task.write("", asdict(judged(task.case, read)) | {"seen": sorted(SWITCH.seen), "raw": said(raw)})


def following(task: Task, marks: tuple[str, ...]) -> list[Task]:
    """What remains to be left out of a kernel that was read."""
    left = task.left(marks)
    at_once = 1 if (task.known or {"how": "silent"})["how"] == "silent" else AT_ONCE
    return [replace(task, without=tuple(left[n : n + at_once])) for n in range(0, len(left), at_once)]


def unseen(tasks: Sequence[Task], number: int) -> list[Task]:
    """Kernels and marks that did not take part, by chance: that this changes nothing is what spares the others."""
    draw = random.Random(0)
    told = [task for task in tasks if (task.known or {"how": "silent"})["how"] != "silent"]
    every = sorted({mark for task in tasks for mark in (task.known or {"seen": ()})["seen"]})
    pairs = [(task, mark) for task in told for mark in every if mark not in (task.known or {})["seen"]]
    return [replace(task, without=(mark,)) for task, mark in draw.sample(pairs, min(number, len(pairs)))]


def run(tasks: Sequence[Task], processes: int, until: float, number: int, marks: tuple[str, ...]) -> None:
    """Do the tasks in processes: first all kernels, then what follows of those of which something is said, then of the others."""
    with get_context("spawn").Pool(processes, install) as pool:
        do(
            pool,
            [
                task
                for task in tasks
                if task.known is None or (task.known["seen"] and not (task.folder / ASKED).exists())
            ],
            until,
        )
        do(pool, unseen(tasks, number), until)
        for silent in (False, True):
            known = [task for task in tasks if task.known and (task.known["how"] == "silent") == silent]
            do(pool, [more for task in known for more in following(task, marks)], until)


def do(pool: Pool, tasks: Sequence[Task], until: float) -> None:
    """Do the tasks, until the time is over."""
    pending = [pool.apply_async(ablate, (task,)) for task in tasks]
    while pending and time.time() < until:
        time.sleep(0.2)
        done = [result for result in pending if result.ready()]
        pending = [result for result in pending if result not in done]
        for result in done:
            case = result.get().case
            print(f"{until - time.time():.0f} s and {len(pending)} tasks left: {case.kind} {case.name}", flush=True)


def print_table(out: Path) -> None:
    """Print for each mark in how many kernels it took part, how many are described otherwise without it, and which are lost."""
    entries = [json.loads(path.read_text()) for path in sorted(out.rglob("*.json"))]
    whole = {(Path(e["kind"]).stem, e["name"]): e for e in entries if not e["without"]}
    sets = sorted({kind for kind, _ in whole})
    for kind in sets:
        how = Counter(e["how"] for (of, _), e in whole.items() if of == kind)
        false = sum(
            e["exact"] and bool(e["said"]) and e["how"] != "truly" for (of, _), e in whole.items() if of == kind
        )
        print(f"{kind:24s} {sum(how.values()):4d} kernels: {dict(how)}, stated as exact and false: {false}")
    without = defaultdict[str, list[tuple[dict[str, Any], dict[str, Any]]]](list)
    for e in entries:
        if e["without"]:
            without[e["without"]].append((whole[Path(e["kind"]).stem, e["name"]], e))
    took = Counter(mark for e in whole.values() for mark in e["seen"])
    apart = [(whole[Path(e["kind"]).stem, e["name"]], e) for some in without.values() for _, e in some]
    apart = [(before, now) for before, now in apart if now["without"] not in before["seen"]]
    other = [f"{e['name']} without {e['without']}" for before, e in apart if e["how"] != before["how"]]
    print(
        f"\nread without what did not take part: {len(apart)}, judged otherwise then: {len(other)} {', '.join(other)}"
    )
    print(
        f"\n{'without':28s} took part  read again  truly lost (won)  wrongly more (fewer)  lost, won (+), wrongly (!)"
    )
    for mark in sorted(took):
        pairs = [(before, now) for before, now in without[mark] if mark in before["seen"]]
        steady = [(before, now) for before, now in pairs if now.get("steady", True)]
        lost = [now for before, now in steady if before["how"] == "truly" != now["how"]]
        won = [now for before, now in steady if before["how"] != "truly" == now["how"]]
        wrong = [now for before, now in steady if before["how"] != "wrongly" == now["how"]]
        fewer = sum(before["how"] == "wrongly" != now["how"] for before, now in steady)
        names = [
            f"{sign}{Path(e['kind']).stem}/{e['name']}"
            for sign, some in (("", lost), ("+", won), ("!", wrong))
            for e in some
        ]
        counts = f"{took[mark]:9d} {len(pairs):11d} {len(lost):11d} ({len(won)}) {len(wrong):17d} ({fewer})"
        print(f"{mark:28s} {counts}  {', '.join(names)}")


def main() -> None:
    """Read the kernels without each mark, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="of `read_outs.py`, wrong kernels only; none to print the table alone")
    parser.add_argument(
        "--kernels", nargs="+", type=Path, default=[], help="modules with a list KERNELS, or folders of such"
    )
    parser.add_argument("--seeds", default="200-259", help="first and last seed of random faults")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e6, help="after which the table is printed of what there is")
    parser.add_argument("--number", type=int, help="only so many kernels of each kind")
    parser.add_argument(
        "--unseen", type=int, default=0, help="kernels that are also read without what did not take part"
    )
    parser.add_argument(
        "--marks", nargs="*", default=[""], help="beginnings of what is left out, such as step; default: all"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    given = parser.parse_args()
    until = time.time() + 60 * given.minutes
    first, last = (int(number) for number in given.seeds.split("-"))
    tasks: list[Task] = []
    for kind in [*map(str, modules(given.kernels)), *given.kinds]:
        chosen = list(cases([kind], range(first, last + 1), "cpu"))[: given.number]
        tasks += [Task(case, given.out, until) for case in chosen]
    run(tasks, given.processes, until, given.unseen, tuple(given.marks))
    print_table(given.out)


if __name__ == "__main__":
    main()
