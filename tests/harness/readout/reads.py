"""Kernels of tests, and what is read off them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from assay.harness.attention.call import Kernel
from assay.harness.attention.declaration import declaration
from assay.harness.attention.shapes import Lens, Shape
from assay.harness.localize.kernel_runs import CallResult, measure
from assay.harness.readout.readout import ReadOut, read_out

LENS: tuple[Lens, ...] = (
    ((7, 0),), ((40, 0),), ((17, 16),), ((34, 157),), ((5, 64),), ((66, 0),), ((67, 63),), ((3, 200),), ((12, 33), (7, 0)),
    ((7, 0), (12, 33)), ((5, 20), (9, 0), (6, 41)), ((40, 10), (3, 100)), ((20, 64), (20, 64)), ((2, 0),), ((130, 70),),
)  # fmt: skip
DECODE: tuple[Lens, ...] = (
    ((1, 1),), ((1, 15),), ((1, 16),), ((1, 64),), ((1, 130),), ((1, 5), (1, 40)), ((1, 40), (1, 5), (1, 90)), ((1, 63), (1, 200)),
)  # fmt: skip
HEADS = ((4, 2), (8, 2), (4, 4))


def shapes(layers: Iterable[int] = (0, 3)) -> Iterator[Shape]:
    """Yield shapes of some calls."""
    for number, (lens, heads) in enumerate(product((*LENS, *DECODE), HEADS)):
        phase = "decode" if lens in DECODE else "extend"
        layer = (*layers,)[number % len((*layers,))]
        yield Shape(phase, lens, heads, layer=layer)


def results(kernel: Kernel, some: Iterable[Shape] | None = None) -> list[CallResult]:
    """Have a kernel compute calls."""
    calls = [shape.make(number) for number, shape in enumerate(shapes() if some is None else some)]
    return [measure(call, kernel(call.clone()), declaration(kernel).noise) for call in calls]


def read(kernel: Kernel, **options: float) -> ReadOut:
    """Read a wrong kernel as `assay check` does, without experiments, and with time to spare on a busy machine."""
    more = (replace(shape, lens=tuple((n + (n > 1), p + 3) for n, p in shape.lens)) for shape in shapes())
    return read_out(kernel, results(kernel), shapes=more, **{"seconds": 300.0, **options})  # type: ignore[arg-type]
