"""A plugin of SGLang with faults in what its scheduler hands to the model: the ground truth of ``assay invariance``.

A server with this folder on PYTHONPATH and `FAULT` in its environment has one of them, the base's server included. It shows only
where the features that carry it are on: that is what the features' pairs must find.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

# Environment variable: id of a fault of `FAULTS`; empty for none.
FAULT = "TEST_SCHEDULER_FAULT"
# Slot of the KV pool that SGLang keeps for padding: what is written there is not read.
NOWHERE = 0


class Fault:
    """One fault, in one process."""

    def batch(self, scheduled: Any, made: Any, runner: Any) -> None:
        """Spoil what the model is given: the ForwardBatch made of a ScheduleBatch, which stays as it is, for a ModelRunner."""

    def logits(self, runner: Any, logits_output: Any, made: Any) -> None:
        """Spoil the logits of the next tokens, before one is chosen."""

    def reloaded(self, model: Any) -> None:
        """Spoil a model that loaded its weights again."""


class StaleLength(Fault):
    """The positions of a later chunk are counted without what the first one found in the cache."""

    def __init__(self) -> None:
        self._cached: dict[str, int] = {}

    def batch(self, scheduled: Any, made: Any, runner: Any) -> None:
        retracted = {req.rid for req in scheduled.reqs if req.retraction_count}
        for rid, rows, new, prefix in _extended(made):
            if rid not in self._cached:
                self._cached[rid] = prefix
            elif self._cached[rid] > 1 and new > 1 and rid not in retracted:
                made.positions[rows] -= 1


class SharedPage(Fault):
    """Two requests of a batch write to one page."""

    def batch(self, scheduled: Any, made: Any, runner: Any) -> None:
        rows = [rows for _, rows, _, _ in _extended(made)]
        if len(rows) > 1 and runner.page_size > 1:
            slots = made.out_cache_loc.clone()
            slots[rows[1].start] = slots[rows[0].start]
            made.out_cache_loc = slots


class RetractedKV(Fault):
    """A request that was retracted reads the K and V that others left in its slots meanwhile."""

    def batch(self, scheduled: Any, made: Any, runner: Any) -> None:
        retracted = {req.rid for req in scheduled.reqs if req.retraction_count}
        for rid, rows, new, _ in _extended(made):
            if rid in retracted and new > 1:
                slots = made.out_cache_loc.clone()
                slots[rows.start : rows.stop - 1] = NOWHERE
                made.out_cache_loc = slots


class SwappedRows(Fault):
    """Two rows of a decode batch change places."""

    def logits(self, runner: Any, logits_output: Any, made: Any) -> None:
        rows = logits_output.next_token_logits
        if made.forward_mode.is_decode() and len(rows) > 1 and self._shows():
            rows[[0, 1]] = rows[[1, 0]]

    def _shows(self) -> bool:
        """Return True if this server has what carries the fault beside batches."""
        return not _arguments().disable_overlap_schedule


class ReplayedRows(SwappedRows):
    """Two rows of a decode batch that is replayed from a CUDA graph change places."""

    def _shows(self) -> bool:
        return not _arguments().disable_cuda_graph and str(_arguments().cuda_graph_config.decode.backend) != "disabled"


class LastStepKV(Fault):
    """What the last decode pass of a request wrote is gone when the prefix cache gives it to another one."""

    def __init__(self) -> None:
        self._last: set[int] = set()

    def batch(self, scheduled: Any, made: Any, runner: Any) -> None:
        if made.forward_mode.is_decode():
            for row, req in enumerate(scheduled.reqs):
                # In the last pass, its length is that of all but the last token.
                length = len(req.origin_input_ids) + req.sampling_params.max_new_tokens - 1
                if int(made.seq_lens[row]) == length:
                    self._last.add(int(made.out_cache_loc[row]))
            return
        self._last.difference_update(made.out_cache_loc.tolist())
        for row, (_, _, _, prefix) in enumerate(_extended(made)):
            slots = runner.req_to_token_pool.req_to_token[int(made.req_pool_indices[row]), :prefix].tolist()
            if lost := self._last.intersection(slots):
                for layer in range(runner.model_config.num_hidden_layers):
                    runner.token_to_kv_pool.get_key_buffer(layer)[list(lost)] = 0


class HalfReloaded(Fault):
    """One tensor is left out where the weights are loaded again."""

    def reloaded(self, model: Any) -> None:
        tensor = next(each for name, each in model.named_parameters() if "layers.1." in name)
        tensor.data.mul_(1.25)


class DraftKV(Fault):
    """What a rejected draft token left in a slot stays there when the slot is written again."""

    def __init__(self) -> None:
        self._verified: dict[str, set[int]] = {}

    def batch(self, scheduled: Any, made: Any, runner: Any) -> None:
        if not made.forward_mode.is_target_verify():
            return
        slots, width = made.out_cache_loc.tolist(), len(made.out_cache_loc) // len(made.rids)
        verified = {rid: set(slots[row * width : (row + 1) * width]) for row, rid in enumerate(made.rids)}
        # A request writes to a slot again where the token that it verified there was rejected.
        again = set().union(*(self._verified.get(rid, set()) & written for rid, written in verified.items()))
        self._verified = verified
        made.out_cache_loc = made.out_cache_loc.new_tensor([NOWHERE if slot in again else slot for slot in slots])


class StaleState(Fault):
    """A request whose prefix is in the cache goes on with the state that another one left in its slot."""

    def batch(self, scheduled: Any, made: Any, runner: Any) -> None:
        made.mamba_cow_src_indices = made.mamba_cow_dst_indices = None


FAULTS: dict[str, type[Fault]] = {
    "stale-length": StaleLength,
    "shared-page": SharedPage,
    "retracted-kv": RetractedKV,
    "swapped-rows": SwappedRows,
    "replayed-rows": ReplayedRows,
    "last-step-kv": LastStepKV,
    "half-reloaded": HalfReloaded,
    "draft-kv": DraftKV,
    "stale-state": StaleState,
}


def install() -> None:
    """Seed the fault that `FAULT` names in this process."""
    if not (name := os.environ.get(FAULT)):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    fault = FAULTS[name]()

    def init_new(original: Any, kind: Any, batch: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(kind, batch, runner, *args, **kwargs)
        if getattr(made, "rids", None) and not runner.is_draft_worker:
            fault.batch(batch, made, runner)
        return made

    def sample(runner: Any, logits_output: Any, forward_batch: Any) -> None:
        if getattr(forward_batch, "rids", None):
            fault.logits(runner, logits_output, forward_batch)

    def update(original: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
        done = original(updater, *args, **kwargs)
        fault.reloaded(updater.get_model())
        return done

    HookRegistry.register("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", init_new, HookType.AROUND)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.sample", sample, HookType.BEFORE)
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk",
        update,
        HookType.AROUND,
    )


def _extended(made: Any) -> Iterator[tuple[str, slice, int, int]]:
    """Yield id, rows, new tokens and cached prefix of each request of a prefill batch."""
    if not made.forward_mode.is_extend() or made.extend_seq_lens_cpu is None:
        return
    begin = 0
    for rid, new, prefix in zip(made.rids, made.extend_seq_lens_cpu, made.extend_prefix_lens_cpu, strict=True):
        yield rid, slice(begin, begin + int(new)), int(new), int(prefix)
        begin += int(new)


def _arguments() -> Any:
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()
