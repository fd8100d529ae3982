"""The kinds of line in an MLC-LLM engine trace: an instrumented engine prints one line for each function that it calls.

The names of the functions are the members of ``FunctionTable`` in ``cpp/serve/function_table.h`` of MLC-LLM at 79d603f (July
2026); the actions are those of its engine of spring 2024. The marks of segments, requests and outputs are those of the program that
drove it, in the two spellings that occur.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

LineKind = Literal[
    "note", "request-mark", "engine", "setup-call", "add-request", "action", "call", "segment-begin", "segment-end",
    "output", "blank",
]  # fmt: skip

PREFILL, JUMP_FORWARD, DECODE = "NewRequestPrefill", "Batch jump forward", "Batch decode"
POLLING_ORDER = (PREFILL, JUMP_FORWARD, DECODE)
"""The order in which an engine's step polls its actions; the first one that computes something ends the step."""

ADD, FORK = "kv_cache_add_sequence_func_", "kv_cache_fork_sequence_func_"
BEGIN, END = "kv_cache_begin_forward_func_", "kv_cache_end_forward_func_"
EMBED, SOFTMAX = "embed_func_", "softmax_func_"
SAMPLE = ("gpu_multinomial_from_uniform_func_", "gpu_sample_with_top_p_func_")
_EITHER_PREFILL = "single_batch_prefill_func_ or single_batch_extend_func_"
PREFILLS = frozenset({
    _EITHER_PREFILL, "single_batch_prefill_func_", "single_batch_extend_func_", "prefill_func_", "extend_func_",
    "single_batch_prefill_to_last_hidden_func_", "prefill_to_last_hidden_func_",
})  # fmt: skip
DECODES = frozenset({
    "single_batch_decode_func_", "decode_func_", "single_batch_decode_to_last_hidden_func_", "decode_to_last_hidden_func_",
})  # fmt: skip
VERIFIES = frozenset({"verify_func_", "verify_to_last_hidden_func_"})
MODEL_CALLS = PREFILLS | DECODES | VERIFIES
_SETUP_CALLS = frozenset({
    "create_kv_cache_func_", "create_rnn_state_func_", "alloc_embedding_tensor_func_", "cuda_graph_alloc_init_func_",
    "reset_kv_cache_func_",
})  # fmt: skip
_CALLS = MODEL_CALLS | {
    ADD, FORK, BEGIN, END, EMBED, SOFTMAX, *SAMPLE,
    "kv_cache_get_num_available_pages_func_", "kv_cache_get_total_sequence_length_func_", "kv_cache_popn_func_",
    "kv_cache_remove_sequence_func_", "kv_cache_commit_accepted_token_tree_nodes_func_",
    "kv_cache_disagg_mark_send_func_", "kv_cache_disagg_prepare_recv_func_", "image_embed_func_", "fuse_embed_hidden_func_",
    "apply_bitmask_func_", "apply_logit_bias_func_", "apply_penalty_func_", "batch_get_logits_func_", "get_logits_func_",
    "batch_select_last_hidden_func_", "gather_hidden_states_func_", "scatter_hidden_states_func_", "gather_probs_func_",
    "scatter_probs_func_", "gpu_argsort_probs_func_", "gpu_renormalize_by_top_p_func_", "gpu_sampler_take_probs_func_",
    "gpu_verify_draft_tokens_func_", "nd_copy_embedding_to_offset_func_", "nd_get_shape_func_", "nd_view_func_",
    "tuple_getitem_func_",
}  # fmt: skip
RELOAD = "***Reload engine***"
"""The mark with which an engine starts anew: what it was doing is over."""
_ENGINE_MARKS = frozenset({RELOAD, "EngineReloadImpl", "AutoDecideEngineConfig START"})
_ENGINE, _NOTE, _ACTION, _OUTPUT = "[engine debug] ", "[debug] ", "ACTION - ", "MLC-LLM Output: "
_ADD_REQUEST = "***Add Request***"
_REQUEST_MARK = re.compile(r"# [A-Z]+ REQUEST")
_SEGMENT = {
    "PRE_SEGMENT": "segment-begin", "PRE SEGMENT": "segment-begin",
    "POST_SEGMENT": "segment-end", "POST SEGMENT": "segment-end",
}  # fmt: skip


class Kind(NamedTuple):
    """The kind of a line, and the part of it that varies."""

    kind: LineKind
    name: str = ""


_FIXED: dict[str, Kind] = {
    "": Kind("blank"),
    f"{_ENGINE}{_ADD_REQUEST}": Kind("add-request"),
    **{line: Kind(kind) for line, kind in _SEGMENT.items()},  # type: ignore[arg-type]
    **{f"{_ENGINE}{name}": Kind("engine", name) for name in sorted(_ENGINE_MARKS)},
    **{f"{_ENGINE}{_ACTION}{name}": Kind("action", name) for name in POLLING_ORDER},
    **{f"{_ENGINE}{name}": Kind("setup-call", name) for name in sorted(_SETUP_CALLS)},
    **{f"{_ENGINE}{name}": Kind("call", name) for name in sorted(_CALLS)},
}


def kind_of(line: str) -> Kind | None:
    """Find the kind of a line that stands alone; None if no rule knows it.

    The text of an answer goes on over further lines, which only their place tells: they follow an "output" line.
    """
    known = _FIXED.get(line)
    if known is not None:
        return known
    if line.startswith(_OUTPUT):
        return Kind("output", line.removeprefix(_OUTPUT))
    if line.startswith(_NOTE):
        return Kind("note", line.removeprefix(_NOTE))
    return Kind("request-mark", line.removeprefix("# ")) if _REQUEST_MARK.fullmatch(line) else None


def belongs_to_engine(line: str) -> bool:
    """Return True if a line has the engine's or the driver's prefix, and so cannot be the text of an answer."""
    return line.startswith((_ENGINE, _NOTE)) or _REQUEST_MARK.fullmatch(line) is not None
