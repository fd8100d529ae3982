"""Numbers of the decoder layers that SGLang's attention modules are in.

SGLang's ``layer_id`` names a place in the KV pool, and several layers may read the same one: Gemma 3n and 4 have layers that read K
and V of an earlier one under its id. A layer is therefore known by the path of its module. The two attentions of a layer of
DeepSeek's, one on latents and one on K and V made of them, have the same number, as they are the same layer.
"""

from __future__ import annotations

import re
from typing import Any

_PATH = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_NUMBER = "assay_layer"


def number_layers(model: Any) -> None:
    """Note in each attention module of a model the number in its path; one without such a path keeps its ``layer_id``."""
    for path, module in model.named_modules():
        numbers = _PATH.findall(path)
        if hasattr(module, "layer_id") and hasattr(module, "tp_q_head_num") and numbers:
            setattr(module, _NUMBER, int(numbers[-1]))


def layer_number(attention: Any) -> int:
    """Return the number of the decoder layer that an attention module is in."""
    return int(getattr(attention, _NUMBER, attention.layer_id))
