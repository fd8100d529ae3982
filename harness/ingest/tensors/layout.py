"""The dimensions of a dumped tensor that are tokens, heads and the place in the batch."""

from __future__ import annotations

import json
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
class DumpedModel:
    """Heads of a model, from its ``config.json`` (transformers' names).

    Attributes:
        heads: q heads.
        kv_heads: k and v heads.
        head_dim: of q and k.
        layers: number of layers.
    """

    heads: int
    kv_heads: int
    head_dim: int
    layers: int

    @classmethod
    def of(cls, folder: Path) -> DumpedModel:
        """Read it from a model's folder.

        Raises:
            UsageError: there is no ``config.json``, or it does not name the heads.
        """
        if not folder.exists():
            raise UsageError(
                f"There is no {folder}.", "a model's folder with config.json", "check the path given with --model"
            )
        path = folder / "config.json" if folder.is_dir() else folder
        try:
            config: dict[str, Any] = json.loads(whole_file(path))
            config = config.get("text_config", config)
            heads = int(config["num_attention_heads"])
            head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
            return cls(
                heads, int(config.get("num_key_value_heads") or heads), head_dim, int(config["num_hidden_layers"])
            )
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


def layout_of(name: str, shape: Sequence[int], model: DumpedModel | None = None, axes: str = "") -> Layout:
    """Infer how to read a tensor.

    Args:
        name: of the tensor, which tells whether it has heads.
        shape: its shape.
        model: splits the last dimension of q, k, v and attention outputs into heads, where it fits.
        axes: letters of `_AXES` for all dimensions, such as "bhtd", instead of a guess; used where the number of dimensions fits.
    """
    shape = tuple(shape)
    if axes and len(axes) == len(shape):
        kept = axes.replace("d", "")
        if "d" in axes:
            return Layout(kept, shape[:-1], shape[-1])
        return Layout(kept, shape, 1)
    if len(shape) <= 1:
        return Layout("t" * len(shape), shape, 1)
    heads = has_heads(name)
    lead = {2: "t", 3: "th" if heads else "bt", 4: "bht"}.get(len(shape), "")
    if not lead:  # five dimensions or more: the first is taken for tokens, the rest for the cell
        dim = 1
        for n in shape[1:]:
            dim *= n
        return Layout("t", shape[:1], dim)
    sizes, dim = shape[:-1], shape[-1]
    if (
        heads
        and "h" not in lead
        and model
        and dim % model.head_dim == 0
        and dim // model.head_dim in (model.heads, model.kv_heads)
    ):
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
