"""How attention backends treat the features that a layer asks for: the result of ``assay backends --honours``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from assay.harness.schema import Record

State = Literal["honours", "ignores", "wrong", "refuses", "crashes", "not measured"]
# The states, worst first: an ignored feature gives wrong outputs without any warning.
_WORST: tuple[State, ...] = ("ignores", "wrong", "crashes", "refuses", "not measured", "honours")


class Shape(Record):
    """The shape of a call: its dtype and head_dim, and the keys of its longest sequence."""

    dtype: str
    head_dim: int
    keys: int


class Measured(Record):
    """A backend's treatment of an attribute in a phase.

    Attributes:
        attribute: name of the attribute.
        phase: "prefill", "prefill with a cached prefix" or "decode".
        state: the backend's behaviour.
        says: the wrong result, the precision if it is not the output's, the first line of the exception, or the reason why it was
            not measured.
        error: relative L1 to attention with the attribute, for the worst query and head, or None if it computed nothing.
        test: a failing test for a call that shows it, or empty if the contract has no such call.
        shapes: the measured shapes.
        where: the shape with this state, if another shape has a better one, or None if all shapes have it.
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
    """Return the first cell with the worst state."""
    return min(cells, key=lambda cell: _WORST.index(cell.state))


class BackendResult(Record):
    """A backend's treatment of all attributes.

    Attributes:
        backend: its name in the engine.
        problem: why it cannot run here, or empty if it can.
    """

    backend: str
    problem: str = ""
    measured: tuple[Measured, ...] = ()

    def state(self, attribute: str) -> State | None:
        """Return an attribute's worst state over the phases, or None if it was not measured."""
        cells = [cell for cell in self.measured if cell.attribute == attribute]
        return worst_of(cells).state if cells else None


class Honours(Record):
    """How an installation's backends treat the features that a layer can ask for.

    Attributes:
        engine: the engine and its version, or an empty string if it could not be imported.
        torch: PyTorch's version there.
        device: the device, or "cpu (Triton interpreted)" if Triton's kernels are interpreted.
    """

    engine: str
    torch: str
    device: str
    backends: tuple[BackendResult, ...]
