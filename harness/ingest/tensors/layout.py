"""The dimensions of a tensor that are tokens, heads and the place in the batch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.harness.errors import UsageError
from assay.harness.ingest.tensors.names import has_heads
from assay.harness.reading import whole_file

_AXES = "bthd"
"""Letters of a layout: place in the batch, token, head, and the dimension that a cell is summed over."""


@dataclass(frozen=True)
class ModelHeads:
    """Heads of a model, from its ``config.json`` (transformers' names): `heads` of q, `kv_heads` of k and v."""

    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, folder: Path) -> ModelHeads:
        """Read it from a model's folder.

        Raises:
            UsageError: there is no ``config.json``, or it does not name the heads.
        """
        path = folder if folder.is_file() else folder / "config.json"
        try:
            config: dict[str, Any] = json.loads(whole_file(path))
            config = config.get("text_config", config)
            heads = int(config["num_attention_heads"])
            head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
            return cls(heads, int(config.get("num_key_value_heads") or heads), head_dim)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path} does not state a model's heads: {error.strerror if isinstance(error, OSError) else repr(error)}.",
                "a model's folder with config.json, as Hugging Face writes it",
                "give another --model",
            ) from None


@dataclass(frozen=True)
class Layout:
    """The meaning of a tensor's leading dimensions. Its last dimension is summed over, per cell.

    Attributes:
        axes: a letter of "bth" for each leading dimension.
        lead: sizes of the leading dimensions.
        dim: elements of a cell.
    """

    axes: str
    lead: tuple[int, ...]
    dim: int

    @property
    def order(self) -> tuple[int, ...]:
        """Permutation of the leading dimensions into (batch, token, head), for those that there are."""
        return tuple(self.axes.index(letter) for letter in _AXES if letter in self.axes)


def layout_of(name: str, shape: Sequence[int], model: ModelHeads | None = None, axes: str = "") -> Layout:
    """Infer how to read a tensor.

    Args:
        name: of the tensor, which tells whether it has heads.
        shape: its shape.
        model: splits the last dimension of q, k, v and attention outputs into heads, where it fits.
        axes: letters of `_AXES` for all dimensions, such as "bhtd", instead of a guess; used where the number of dimensions fits.
    """
    shape = tuple(shape)
    if axes and len(axes) == len(shape):
        return Layout(axes.removesuffix("d"), shape[:-1], shape[-1])
    if len(shape) <= 1:
        return Layout("t" * len(shape), shape, 1)
    if len(shape) > 4:  # the first dimension is taken for tokens, the rest for the cell
        return Layout("t", shape[:1], math.prod(shape[1:]))
    heads = has_heads(name)
    lead = {2: "t", 3: "th" if heads else "bt", 4: "bht"}[len(shape)]
    sizes, dim = shape[:-1], shape[-1]
    if heads and "h" not in lead and model and dim in (model.heads * model.head_dim, model.kv_heads * model.head_dim):
        return Layout(lead + "h", (*sizes, dim // model.head_dim), model.head_dim)
    return Layout(lead, sizes, dim)


def check_axes(axes: str) -> str:
    """Return `axes`, if it is a layout.

    Raises:
        UsageError: it is not.
    """
    good = len(set(axes)) == len(axes) and set(axes) <= set(_AXES) and "t" in axes and axes.endswith("d")
    if axes and not good:
        raise UsageError(
            f"--layout is {axes!r}.",
            "each of b, t, h at most once, with t, and d at the end, such as bhtd",
            "name the dimensions in order",
        )
    return axes
