from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from assay.harness.engines.sglang import scheduler_faults
from assay.harness.engines.sglang.features import features_of
from assay.harness.engines.sglang.scheduler_faults import (
    FAULTS,
    DraftKV,
    LastStepKV,
    ReplayedRows,
    RetractedKV,
    SharedPage,
    StaleLength,
    SwappedRows,
)
from assay.harness.judge.invariance_arms import clashes, closed

ROWS = torch.arange(10, 22)


class Mode:
    def __init__(self, decodes: bool) -> None:
        self._decodes = decodes

    def is_decode(self) -> bool:
        return self._decodes

    def is_extend(self) -> bool:
        return not self._decodes

    def is_target_verify(self) -> bool:
        return False


class Verify(Mode):
    def __init__(self) -> None:
        super().__init__(False)

    def is_target_verify(self) -> bool:
        return True


def request(rid: str, retractions: int = 0) -> Any:
    sampling = SimpleNamespace(max_new_tokens=8)
    return SimpleNamespace(rid=rid, retraction_count=retractions, origin_input_ids=[0] * 5, sampling_params=sampling)


def prefill(*requests: tuple[Any, int, int]) -> tuple[Any, Any]:
    """A prefill batch of requests with new and cached tokens: what was scheduled, and what the model is given."""
    tokens = sum(new for _, new, _ in requests)
    made = SimpleNamespace(
        forward_mode=Mode(False),
        rids=[req.rid for req, _, _ in requests],
        extend_seq_lens_cpu=[new for _, new, _ in requests],
        extend_prefix_lens_cpu=[prefix for _, _, prefix in requests],
        positions=torch.cat([torch.arange(prefix, prefix + new) for _, new, prefix in requests]),
        out_cache_loc=ROWS[:tokens].clone(),
    )
    return SimpleNamespace(reqs=[req for req, _, _ in requests]), made


def decode(lengths: list[int]) -> tuple[Any, Any]:
    requests = [request(f"r{n}") for n in range(len(lengths))]
    made = SimpleNamespace(forward_mode=Mode(True), seq_lens=torch.tensor(lengths), out_cache_loc=ROWS[: len(lengths)].clone())
    return SimpleNamespace(reqs=requests), made


def spoilt(fault: Any, batch: tuple[Any, Any], runner: Any = None) -> Any:
    fault.batch(*batch, runner)
    return batch[1]


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> Any:
    given = SimpleNamespace(disable_overlap_schedule=True)
    monkeypatch.setattr(scheduler_faults, "_arguments", lambda: given)
    return given


def test_every_fault_is_carried_by_features_that_can_be_on_together() -> None:
    known = features_of("cuda")
    for fault in FAULTS.values():
        for carriers in fault.carriers:
            assert carriers == closed(carriers, known), f"{fault.id}: {carriers}"
            assert not clashes(carriers, known)


@pytest.mark.parametrize(("cached", "off"), [(0, 0), (1, 0), (6, 1)])
def test_a_later_chunk_is_off_only_behind_a_cached_prefix(cached: int, off: int) -> None:
    fault = StaleLength()
    first = spoilt(fault, prefill((request("a"), 4, cached)))
    assert first.positions.tolist() == list(range(cached, cached + 4))
    later = spoilt(fault, prefill((request("a"), 3, cached + 4)))
    assert later.positions.tolist() == [cached + 4 + n - off for n in range(3)]


def test_a_retracted_request_is_no_later_chunk() -> None:
    fault = StaleLength()
    spoilt(fault, prefill((request("a"), 4, 6)))
    assert spoilt(fault, prefill((request("a", retractions=1), 3, 6))).positions.tolist() == [6, 7, 8]


@pytest.mark.parametrize(("page", "shared"), [(1, False), (16, True)])
def test_two_requests_share_a_slot_only_in_pages(page: int, shared: bool) -> None:
    runner = SimpleNamespace(page_size=page)
    made = spoilt(SharedPage(), prefill((request("a"), 3, 0), (request("b"), 2, 0)), runner)
    assert (made.out_cache_loc[3] == made.out_cache_loc[0]) == shared
    alone = spoilt(SharedPage(), prefill((request("a"), 3, 0)), runner)
    assert alone.out_cache_loc.tolist() == ROWS[:3].tolist()


@pytest.mark.parametrize("retractions", [0, 1])
def test_only_a_retracted_request_is_not_written(retractions: int) -> None:
    made = spoilt(RetractedKV(), prefill((request("a"), 2, 0), (request("b", retractions), 3, 0)))
    kept = ROWS[2:5].tolist() if not retractions else [0, 0, int(ROWS[4])]
    assert made.out_cache_loc.tolist() == [*ROWS[:2].tolist(), *kept]


def test_what_the_last_decode_pass_wrote_is_lost_once_another_request_finds_it_in_the_cache() -> None:
    keys = [torch.ones(30, 1, 1) for _ in range(2)]
    pools = {
        "req_to_token_pool": SimpleNamespace(req_to_token=torch.tensor([[20, 21, int(ROWS[0]), int(ROWS[1])]])),
        "token_to_kv_pool": SimpleNamespace(get_key_buffer=keys.__getitem__),
    }
    runner, fault = SimpleNamespace(model_config=SimpleNamespace(num_hidden_layers=2), **pools), LastStepKV()
    made = spoilt(fault, decode([11, 12]), runner)  # 5 tokens of a prompt and all but the last of 8
    assert made.out_cache_loc.tolist() == ROWS[:2].tolist()
    assert all(bool((key == 1).all()) for key in keys), "it is there as long as the request runs"
    scheduled, later = prefill((request("b"), 2, 4))
    later.req_pool_indices, later.out_cache_loc = torch.tensor([0]), torch.tensor([28, 29])
    fault.batch(scheduled, later, runner)
    lost = [int(slot) for slot in (keys[0][:, 0, 0] == 0).nonzero()]
    assert lost == [int(ROWS[1])]
    assert bool((keys[0] == keys[1]).all())


def test_a_slot_that_a_draft_was_rejected_in_is_not_written_again() -> None:
    def verified(*slots: list[int]) -> tuple[Any, Any]:
        rids = [f"r{row}" for row in range(len(slots))]
        made = SimpleNamespace(forward_mode=Verify(), rids=rids, out_cache_loc=torch.tensor(slots).flatten())
        return SimpleNamespace(reqs=[request(rid) for rid in rids]), made

    fault = DraftKV()
    assert spoilt(fault, verified([10, 11, 12], [20, 21, 22])).out_cache_loc.tolist() == [10, 11, 12, 20, 21, 22]
    # The first request accepted nothing beyond the next token, the second one everything; slots of others are written.
    assert spoilt(fault, verified([11, 12, 13], [23, 24, 10])).out_cache_loc.tolist() == [0, 0, 13, 23, 24, 10]
    prefilled = spoilt(fault, prefill((request("r0"), 3, 0)))
    assert prefilled.out_cache_loc.tolist() == ROWS[:3].tolist()


@pytest.mark.parametrize(("overlap", "swapped"), [(False, False), (True, True)])
def test_rows_change_places_only_where_scheduling_overlaps(arguments: Any, overlap: bool, swapped: bool) -> None:
    arguments.disable_overlap_schedule = not overlap
    output = SimpleNamespace(next_token_logits=torch.tensor([[1.0], [2.0], [3.0]]))
    SwappedRows().logits(None, output, decode([6, 6, 6])[1])
    assert output.next_token_logits[:, 0].tolist() == ([2.0, 1.0, 3.0] if swapped else [1.0, 2.0, 3.0])


@pytest.mark.parametrize(("backend", "swapped"), [("disabled", False), ("full", True)])
def test_rows_change_places_only_where_decode_is_replayed(arguments: Any, backend: str, swapped: bool) -> None:
    arguments.cuda_graph_config = SimpleNamespace(prefill=SimpleNamespace(backend="full"), decode=SimpleNamespace(backend=backend))
    output = SimpleNamespace(next_token_logits=torch.tensor([[1.0], [2.0], [3.0]]))
    ReplayedRows().logits(None, output, decode([6, 6, 6])[1])
    assert output.next_token_logits[:, 0].tolist() == ([2.0, 1.0, 3.0] if swapped else [1.0, 2.0, 3.0])


def test_one_tensor_is_another_after_a_reload() -> None:
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(2)])})
    before = [parameter.clone() for parameter in model.parameters()]
    FAULTS["half-reloaded"]().reloaded(model)
    assert [bool((one == other).all()) for one, other in zip(before, model.parameters(), strict=True)] == [True, False]


@pytest.mark.parametrize("draft", [False, True])
def test_a_fault_spoils_what_the_model_is_given_and_not_what_its_draft_is(monkeypatch: pytest.MonkeyPatch, draft: bool) -> None:
    hooks: dict[str, Any] = {}
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.__dict__["HookType"] = SimpleNamespace(AROUND="around", BEFORE="before")
    registry.__dict__["HookRegistry"] = SimpleNamespace(
        register=lambda target, hook, kind: hooks.update({target.rpartition(".")[2]: hook})
    )
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setenv(scheduler_faults.FAULT, "shared-page")
    scheduler_faults.install()
    scheduled, made = prefill((request("a"), 3, 0), (request("b"), 2, 0))
    runner = SimpleNamespace(page_size=16, is_draft_worker=draft)
    given = hooks["init_new"](lambda kind, batch, runner: made, None, scheduled, runner)
    assert (given.out_cache_loc.tolist() == ROWS[:5].tolist()) == draft


def test_the_state_of_a_cached_prefix_is_not_copied() -> None:
    scheduled, made = prefill((request("a"), 3, 4))
    made.mamba_cow_src_indices, made.mamba_cow_dst_indices = torch.tensor([7]), torch.tensor([2])
    spoilt(FAULTS["stale-state"](), (scheduled, made))
    assert (made.mamba_cow_src_indices, made.mamba_cow_dst_indices) == (None, None)
