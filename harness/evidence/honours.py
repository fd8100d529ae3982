"""What attention backends do with what a layer asks of them: the result of ``assay backends --honours``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from assay.harness.schema import Record

State = Literal["honours", "ignores", "wrong", "refuses", "crashes", "not measured"]
# The states, the worst first: what is ignored gives wrong outputs, and nobody is told.
_WORST: tuple[State, ...] = ("ignores", "wrong", "crashes", "refuses", "not measured", "honours")


class Shape(Record):
    """The shape of a call: its dtype and head_dim, and the keys of its longest sequence."""

    dtype: str
    head_dim: int
    keys: int


class Measured(Record):
    """The answer of a backend to an attribute in a phase.

    Attributes:
        attribute: name of the attribute.
        phase: "prefill", "prefill with a cached prefix" or "decode".
        state: what the backend does.
        says: what it computes if it is wrong, in which precision if that is not the output's, the first line of what it raised, or
            why it was not measured.
        error: relative L1 to attention with the attribute, of the worst query and head; None if it computed nothing.
        test: a test that fails, of a call that shows it; empty where the contract has no such call.
        shapes: those in which it was measured.
        where: that which has this state, where another one has a better one; None where all have it.
    """

    attribute: str
    phase: str
    state: State
    says: str = ""
    error: float | None = None
    test: str = ""
    shapes: tuple[Shape, ...] = ()
    where: Shape | None = None


def worst_of(cells: Sequence[Measured]) -> Measured:
    """Return the first of those with the worst state."""
    return min(cells, key=lambda cell: _WORST.index(cell.state))


class BackendResult(Record):
    """The answers of a backend to all attributes.

    Attributes:
        backend: SGLang's name of it.
        problem: why it cannot be run here; empty if it can.
    """

    backend: str
    problem: str = ""
    measured: tuple[Measured, ...] = ()

    def state(self, attribute: str) -> State | None:
        """Return the worst state of an attribute over the phases; None if it was not measured."""
        cells = [cell for cell in self.measured if cell.attribute == attribute]
        return worst_of(cells).state if cells else None


class Honours(Record):
    """The answers of an installation's backends to what a layer can ask for.

    Attributes:
        sglang: its version.
        device: where they ran; "cpu (Triton interpreted)" where Triton's kernels are interpreted.
    """

    sglang: str
    torch: str
    device: str
    backends: tuple[BackendResult, ...]
