"""How well the operator of a kernel is read: hypotheses, the catalogue's faults, held-out kernels, and kernels that are right.

    python benchmarks/read_outs.py hypotheses catalogue held-out right --seeds 200-259 --processes 2
    python benchmarks/read_outs.py --kernels some/kernels.py some/folder --processes 16    # kernels of your own
    PYTHONPATH=some:benchmarks python ...    # where fresh processes need other paths to import the kernels
    python benchmarks/read_outs.py sage_attn torch_sdpa --device cuda --seeds 0-199    # kernels that are right, by name

A wrong kernel is read as `assay check` reads it, after its small matrix; of one that passes, nothing is said. What was read is then
tried on calls of another distribution than those that it was sought in, in a kernel that has seen no call yet, and this decides:

- truly: it gives every output that was tried, right and wrong;
- partly: it gives at least half of the wrong ones, and is wrong on at most 2 % of the right ones;
- silent: nothing was said;
- untried: none of these calls is wrong, or lies within the condition's context, so that they say nothing;
- wrongly: all else.

A module given by path has a list `KERNELS` of (name, function of an `AttentionCall`, true description in one line); of a folder,
all such modules are read. Each module is loaded anew for each kernel, so that none remembers a call. False is what was stated as
exact (it gave all outputs that were seen or compared) and is not truly so.

Whether the printed test fails in a fresh process is counted too: alone, or after other calls.

Calls without a causal mask are left out: assay makes none unless a kernel declares them.

A kernel that declares a quantisation is tried on data on which that is exact, with values of several sizes.

A kernel that is right is read too, and must be silent. One line of JSON is printed for each kernel, and a table at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import runpy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from fault_catalogue import CATALOGUE, SeededFault
from held_out_faults import HELD_OUT
from held_out_faults_second import SECOND
from held_out_faults_third import THIRD
from honest_kernels import KERNELS, Blocked
from torch import Tensor

from assay.harness.attention.bugs.family import FAMILY
from assay.harness.attention.bugs.faults import fault, rounded_oracle
from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.declaration import declaration, declares
from assay.harness.attention.matrix_data import ON_GRID
from assay.harness.attention.shapes import Shape
from assay.harness.checks.check import check
from assay.harness.checks.kernel_matrix import named
from assay.harness.checks.observed import Reader
from assay.harness.evidence.kernel_result import Tried, Value
from assay.harness.localize.faults import wrong_sequences
from assay.harness.localize.features import features, words
from assay.harness.localize.kernel_runs import measure
from assay.harness.localize.rules import meets
from assay.harness.readout.named import said
from assay.harness.readout.operators import Operator
from assay.harness.readout.probing import Prober
from assay.harness.readout.queries import Queries
from assay.harness.readout.readout import ReadOut
from assay.harness.readout.samples import close

TRIED = 60
"""Calls on which what was read is tried."""
CLOSE = 1e-3
"""Relative error, L1, up to which two outputs of a query count as the same."""
PARTLY, FALSE = 0.5, 0.02
"""Share of the wrong outputs that a partial description gives at least, and of the right ones that it changes at most."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """A kernel that is read: its kind, its name, the seed of the read-out, and the device."""

    kind: str
    name: str
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class Outcome:
    """What a read-out said of a kernel, and whether it holds."""

    kind: str
    name: str
    seed: int
    how: str
    said: str
    truth: str
    wrong: int
    explained: int
    right: int
    false: int
    calls: int
    cpu_s: float
    exact: bool = False
    where: str = ""
    where_how: str = "silent"
    alone: str = ""
    all_cpu_s: float = 0.0

    @property
    def exact_and_false(self) -> bool:
        """Whether the sentence was stated as exact, and is not."""
        return bool(self.said) and self.exact and self.how not in ("truly", "untried")


ALONE = {"alone": "it fails alone, in a fresh process", "after others": "right alone, in a fresh process, and wrong"}
"""What fresh processes showed of the smallest failing call, and how its line says so."""
HELD = {"held-out": HELD_OUT, "held-out-second": SECOND, "held-out-third": THIRD}
"""Kernels with bugs that nobody chose for the read-out."""


def __getattr__(name: str) -> Kernel:
    """Make the kernel of a case by its name in `importable`: so that a fresh process can import it."""
    if not name.startswith(_CASE):
        raise AttributeError(name)
    return _imported(name)


@cache  # a module has one kernel of a name, with its state
def _imported(name: str) -> Kernel:
    kind, of_kind = bytes.fromhex(name.removeprefix(_CASE)).decode().split("\0")
    return made(Case(kind, of_kind))[0]()


_CASE = "case_"


def importable(case: Case) -> str:
    """Name what `assay check` imports the kernel of a case by."""
    return f"read_outs:{_CASE}{(case.kind + chr(0) + case.name).encode().hex()}"


def made(case: Case) -> tuple[Callable[[], Kernel], str]:
    """What makes the kernel of a case, without memory of a call; and what is wrong with it."""
    if case.kind == "hypotheses":
        return lambda: fault(case.name), case.name
    if case.kind == "catalogue":
        seeded = next(one for one in CATALOGUE.values() if one.id == case.name)
        return lambda: with_fault(seeded), seeded.about
    if case.kind in HELD:
        held = next(one for one in HELD[case.kind] if one.id == case.name)
        return held.make, held.truth
    if case.kind.endswith(".py"):
        truth = next(about for name, _, about in kernels_of(Path(case.kind)) if name == case.name)
        return lambda: next(made for name, made, _ in kernels_of(Path(case.kind)) if name == case.name), truth
    if case.kind == "named":
        return lambda: named(case.name)[1], ""
    family, number = case.name.split("/")
    kernel = right_kernels()[family][int(number)]
    return lambda: declares(noise=family.split("-")[0])(lambda call: kernel(call)), ""


def kernels_of(module: Path) -> list[tuple[str, Kernel, str]]:
    """The kernels of a module given by path, loaded anew: (name, kernel, what is wrong with it)."""
    found: list[tuple[str, Kernel, str]] = runpy.run_path(str(module))["KERNELS"]
    return found


def modules(paths: list[Path]) -> list[Path]:
    """The modules with kernels among files and folders."""
    files = [file for path in paths for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])]
    return [file.resolve() for file in files if "KERNELS" in runpy.run_path(str(file))]


def with_fault(seeded: SeededFault) -> Kernel:
    seeded.restart()
    return lambda call: seeded.apply(call, rounded_oracle(call))


def right_kernels() -> dict[str, list[Kernel]]:
    """Kernels that are right, by the family that they declare, and a dtype that they are kept to."""
    found = dict(KERNELS)
    for dtype in DTYPES[1:]:
        found[f"-{str(dtype).removeprefix('torch.')}"] = [
            kept_to(dtype, kernel) for kernel in (Blocked(64), Blocked(32, split=True))
        ]
    return found


def kept_to(dtype: torch.dtype, kernel: Kernel) -> Kernel:
    def narrow(call: AttentionCall) -> Tensor:
        if call.q.dtype != dtype:
            raise TypeError(f"q is {call.q.dtype}; expected {dtype}")
        return kernel(call)

    return narrow


def cases(kinds: list[str], seeds: range, device: str) -> Iterator[Case]:
    for kind in kinds:
        if kind == "hypotheses":
            yield from (Case(kind, one.id) for one in FAMILY)
        elif kind == "catalogue":
            yield from (Case(kind, one.id) for one in CATALOGUE.values() if not one.equivalent)
        elif kind.endswith(".py"):
            yield from (Case(kind, name) for name, _, _ in kernels_of(Path(kind)))
        elif kind in HELD:
            yield from (Case(kind, one.id) for one in HELD[kind])
        elif kind != "right":
            yield from (Case("named", kind, seed, device) for seed in seeds)
        else:
            kernels = right_kernels()
            yield from (
                Case(kind, f"{family}/{seed % len(some)}", seed) for seed in seeds for family, some in kernels.items()
            )


def outcome(case: Case) -> Outcome:
    """Read the kernel of a case, and try what was read."""
    torch.set_num_threads(1)
    make, _ = made(case)
    begun = time.process_time()
    reader = Reader()
    kernel = make() if case.kind in ("right", "named") else importable(case)
    result = check(kernel, seed=case.seed, device=case.device, read_out=reader)
    if case.kind in ("right", "named"):
        spent, text = time.process_time() - begun, "; ".join(finding.title for finding in result.findings)
        return Outcome(*case_of(case), "wrongly" if text else "silent", text, "", 0, 0, 0, 0, result.calls, spent)
    spent = time.process_time() - begun
    condition = result.tried
    where, how = (words(condition.rule, condition.context), held(condition, make())) if condition else ("", "silent")
    alone = (
        next((words for words, text in ALONE.items() if text in result.smallest), "no test")
        if result.findings
        else "not caught"
    )
    return replace(judged(case, reader.last or ReadOut()), where=where, where_how=how, alone=alone, all_cpu_s=spent)


def held(condition: Tried, kernel: Kernel) -> str:
    """Tell whether a condition says which sequences a kernel gets wrong, on calls that it has not seen."""
    context, met, prober = condition.context, 0, Prober(kernel, until=time.monotonic() + 600)
    for number, drawn in enumerate(random_shapes(2_000, TRIED)):
        shape = within(context, drawn)
        call = shape.make(number)
        if (out := prober(call)) is None:
            continue
        result = measure(call, out.to(call.q.dtype), declaration(kernel).noise)
        for b, wrong in enumerate(wrong_sequences(result)):
            known = features(shape, b)
            if shape.lens[b][0] and context.items() <= known.items():
                met += wrong
                if wrong != meets(condition, known):
                    return f"wrongly: {shape.phase} {shape.lens} at {b} {shape.heads} {wrong}"
    return "truly" if met else "untried"


def within(context: Mapping[str, Value], shape: Shape) -> Shape:
    """The shape with the heads, head_dim and dtype of a context."""
    q_heads, kv_heads, dtype = (context.get(name) for name in ("q_heads", "kv_heads", "dtype"))
    heads = (int(q_heads), int(kv_heads)) if q_heads and kv_heads else shape.heads
    dim = int(context.get("head_dim", shape.head_dim))
    return replace(shape, heads=heads, head_dim=dim, dtype=getattr(torch, str(dtype or "float32")))


def judged(case: Case, found: ReadOut) -> Outcome:
    """Try what was read of the kernel of a case, on calls that it has not seen."""
    make, truth = made(case)
    text = said(found)
    wrong, explained, right, false = tried(found.operator, make())
    how = "wrongly"
    if not text:
        how = "silent"
    elif not wrong and not false:
        how = "untried"
    elif explained == wrong and not false:
        how = "truly"
    elif explained >= PARTLY * wrong and false <= FALSE * right:
        how = "partly"
    return Outcome(
        *case_of(case), how, text, truth, wrong, explained, right, false, found.calls, found.cpu_seconds, found.exact
    )


def case_of(case: Case) -> tuple[str, str, int]:
    return case.kind, case.name, case.seed


def tried(operator: Operator, kernel: Kernel) -> tuple[int, int, int, int]:
    """Outputs by query and head: wrong ones, those of them that the operator gives, right ones, those of them that it changes."""
    prober = Prober(kernel, until=time.monotonic() + 600)
    counts = np.zeros(4, np.int64)
    quantised = bool(declaration(kernel).noise)
    for number, shape in enumerate(random_shapes(1_000, TRIED // 2)):
        call = (replace(shape, data=ON_GRID) if quantised else shape).make(number)
        if quantised:
            call = replace(call, v=call.v * 2.0 ** (number % 3))
        if (out := prober(call)) is None:
            continue
        rows = np.unique(np.linspace(0, len(call.q) - 1, 24).astype(np.int64))
        queries = Queries(call, rows)
        actual, size = out.numpy()[rows], np.abs(queries.right).sum(-1)
        bad = ~close(actual, queries.right, size, CLOSE)
        given = operator.outputs(queries)
        sizes = [np.nan_to_num(np.abs(out).sum(-1), posinf=0.0) for out in (given, actual)]
        size = np.maximum(0.1 * size, np.maximum(*sizes))
        agrees = close(given, actual, size, 2 * CLOSE)
        counts += [bad.sum(), (bad & agrees).sum(), (~bad).sum(), (~bad & ~agrees).sum()]
    wrong, explained, right, false = counts.tolist()
    return wrong, explained, right, false


def random_shapes(seed: int, forwards: int) -> Iterator[Shape]:
    """Shapes of calls as a server makes them: forward passes, each through two of four layers; on normal data, in float32.

    A batch has 1 to 3 sequences of at most 600 tokens, most of them at most 200; one in ten extend calls has another without new
    tokens. About half of the sequences of extend calls have a cached prefix.
    """
    rng = random.Random(f"calls {seed}")
    for _ in range(forwards):
        phase = rng.choice(("extend", "extend", "decode"))
        lens = [_lens(rng, phase) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
        if phase == "extend" and rng.random() < 0.1:
            lens.insert(rng.randrange(len(lens) + 1), (0, rng.choice((0, 20))))
        heads, dim = rng.choice(((4, 2), (8, 2), (4, 4), (2, 1), (6, 2))), rng.choice((64, 64, 128, 80, 96))
        for layer in sorted(rng.sample(range(4), 2)):
            yield Shape(phase, tuple(lens), heads, dim, layer=layer)


def _lens(rng: random.Random, phase: str) -> tuple[int, int]:
    """New and cached tokens of a sequence; short ones are as frequent as long ones, on a logarithmic scale."""
    most = rng.choice((200, 200, 200, 600))
    new, prefix = (int(math.exp(rng.uniform(0, math.log(most)))) for _ in range(2))
    if phase == "decode":
        return 1, min(prefix, most - 1)
    return new, min(prefix, most - new) if rng.random() < 0.6 else 0


def main() -> None:
    """Read the kernels and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "kinds",
        nargs="*",
        help="hypotheses, catalogue, held-out, held-out-second, held-out-third, right, or a kernel that is right by name",
    )
    parser.add_argument(
        "--kernels", nargs="+", type=Path, default=[], help="modules with a list KERNELS, or folders of such"
    )
    parser.add_argument("--device", default="cpu", help="of kernels by name")
    parser.add_argument("--seeds", default="200-259", help="first and last seed of right kernels")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--number", type=int, help="only so many kernels")
    given = parser.parse_args()
    first, last = (int(number) for number in given.seeds.split("-"))
    kinds = [*given.kinds, *map(str, modules(given.kernels))]
    if not kinds:
        parser.error("no kernels; name kinds of kernels, or give --kernels PATH")
    seeds = range(first, last + 1)
    outcomes = []
    with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
        for one in pool.map(outcome, islice(cases(kinds, seeds, given.device), given.number)):
            outcomes.append(one)
            print(json.dumps(asdict(one)), flush=True)
    print_table(outcomes)


def kind_of(one: Outcome) -> str:
    if one.kind == "right":
        return f"right {one.name.split('/')[0] or 'exact'}"
    return one.name if one.kind == "named" else Path(one.kind).name


def print_table(outcomes: list[Outcome]) -> None:
    print(f"{'':22s} {'':7s}  {'':25s}  {'where it is wrong':29s}  what it computes")
    head = (
        "kernels   test: alone  after  none   truly untried silent wrongly  truly untried partly silent wrongly  false"
    )
    print(f"{'kind':22s} {head}  calls (median, most)  CPU s of all (median, 95 %, most)")
    for kind in dict.fromkeys(kind_of(one) for one in outcomes):
        of = [one for one in outcomes if kind_of(one) == kind]
        there = Counter(one.where_how.partition(":")[0] for one in of)
        how, false = Counter(one.how for one in of), sum(one.exact_and_false for one in of)
        calls, cpu = [one.calls for one in of], sorted(one.all_cpu_s or one.cpu_s for one in of)
        tests = Counter(one.alone for one in of)
        test = f"{tests['alone']:11d} {tests['after others']:6d} {tests['no test']:5d} "
        where = f"{there['truly']:7d} {there['untried']:7d} {there['silent']:6d} {there['wrongly']:7d}"
        what = f"{how['truly']:6d} {how['untried']:7d} {how['partly']:6d} {how['silent']:6d} {how['wrongly']:7d}"
        print(
            f"{kind:22s} {len(of):7d} {test} {where} {what} {false:6d}  "
            f"{statistics.median(calls):10.0f} {max(calls):6d}  "
            f"{statistics.median(cpu):14.1f} {cpu[int(0.95 * (len(cpu) - 1))]:6.1f} {cpu[-1]:6.1f}"
        )


if __name__ == "__main__":
    main()
