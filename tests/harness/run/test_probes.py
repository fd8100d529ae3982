from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from assay.evals.probes import ProbeLoad, probe_load
from assay.harness.engines.base import ProbeRequest
from assay.harness.engines.sglang import probing
from assay.harness.engines.sglang.beside_model import ADAPTER_NAME, OTHER_ADAPTER
from assay.harness.judge.invariance_arms import Arm
from assay.harness.run.probes import AskedArm, ask

LOAD = ProbeLoad(probe_load("cpu", 4096, 97).prefix, probe_load("cpu", 4096, 97).probes[:2])


class Server:
    """A stand-in for a server whose log-probabilities depend on the adapter that a request names, or not."""

    who, role, kind = "the server", "reference", "sglang"

    def __init__(self, applies: bool, folder: Path) -> None:
        self.adapter, self.applies, self.launch = "", applies, SimpleNamespace(evidence=folder)
        self.sent: list[tuple[str, Mapping[str, Any]]] = []

    def flush_cache(self) -> None:
        pass

    def arguments(self) -> dict[str, Any]:
        return {}

    def limits(self, context: int) -> None:
        pass

    def request_id(self, name: str) -> str:
        return name

    def toggle(self, features: Any, probe: ProbeRequest) -> dict[str, str]:
        return probing.toggle(self, features, probe)  # type: ignore[arg-type]

    def probe(self, requests: Any, *, streamed: bool = False) -> Any:
        return probing.probe(self, requests, streamed=streamed)  # type: ignore[arg-type]

    def send(self, path: str, body: Mapping[str, Any]) -> Any:
        self.sent.append((path, body))
        if path != "/generate":
            return {"success": True}
        named = body.get("lora_path") or [""] * len(body["rid"])
        shifts = [0.25 * (self.applies and name == OTHER_ADAPTER) for name in named]
        return [
            self._reply(*each)
            for each in zip(body["input_ids"], body["logprob_start_len"], body["sampling_params"], shifts, strict=True)
        ]

    def _reply(self, ids: list[int], start: int, sampling: Mapping[str, Any], shift: float) -> Any:
        depth, entry = sampling["max_new_tokens"], [-1.0 - shift, 5, None]
        return {
            "output_ids": [5] * depth,
            "meta_info": {
                "prompt_tokens": len(ids),
                "cached_tokens": 9,
                "cached_tokens_details": {"device": 2, "host": 7},
                "input_token_logprobs": [[None, ids[start], None], *([-1.0 - shift, token, None] for token in ids[start + 1 :])],
                "input_top_logprobs": [None, *([entry] for _ in ids[start + 1 :])],
                "output_token_logprobs": [entry] * depth,
                "output_top_logprobs": [[entry]] * depth,
            },
        }


def asked(server: Any, arm: Arm, folder: Path, evicts: int = 0) -> Any:
    (folder / "admissions.jsonl").touch()
    return ask(server, folder, AskedArm(LOAD, arm, "007", {}, evicts=evicts))


def test_every_request_names_the_adapter_of_the_server(tmp_path: Path) -> None:
    server = Server(True, tmp_path)
    asked(server, frozenset({"batch", "zero-lora"}), tmp_path)
    assert server.sent[-1][1]["lora_path"] == [ADAPTER_NAME] * len(LOAD.probes)
    asked(server, frozenset({"batch"}), tmp_path)
    assert "lora_path" not in server.sent[-1][1]


@pytest.mark.parametrize("applies", [True, False])
def test_an_adapter_was_on_where_another_one_changes_what_a_probe_gets(applies: bool, tmp_path: Path) -> None:
    server = Server(applies, tmp_path)
    over = asked(server, frozenset({"zero-lora"}), tmp_path)
    assert over.said["zero-lora"].endswith("by 0.25 nats") == applies
    assert bool(over.said["zero-lora"]) == applies
    first, *others, last = [path for path, _ in server.sent if "lora" in path]
    assert (first, others, last) == ("/load_lora_adapter", [], "/unload_lora_adapter")
    assert server.adapter == ADAPTER_NAME


@pytest.mark.parametrize("recurrent", [False, True])
def test_states_are_left_in_the_cache_at_the_end_of_every_prefix(recurrent: bool, tmp_path: Path) -> None:
    (tmp_path / "admissions.jsonl").touch()
    load, server = probe_load("cpu", 4096, 97), Server(False, tmp_path)
    ask(server, tmp_path, AskedArm(load, frozenset({"prefix-cache", "batch"}), "007", {}, recurrent=recurrent))  # type: ignore[arg-type]
    *warm, probes = [body["input_ids"] for path, body in server.sent if path == "/generate"]
    assert len(probes) == len(load.probes)
    lengths = sorted({probe.shared for probe in load.probes} - {0}) if recurrent else [len(load.prefix)]
    assert warm == [[list(load.prefix[:length])] for length in lengths]


def test_a_pool_that_goes_on_in_the_hosts_memory_is_filled_behind_the_prefix(tmp_path: Path) -> None:
    server = Server(False, tmp_path)
    over = asked(server, frozenset({"prefix-cache", "hicache", "batch"}), tmp_path, 16384)
    prefix, *others, _ = [body["input_ids"][0] for path, body in server.sent if path == "/generate"]
    assert prefix == list(LOAD.prefix)
    assert sum(map(len, others)) >= 16384, "nothing that was there before is left"
    assert len({tuple(ids[:8]) for ids in (prefix, *others)}) == 1 + len(others), "none begins with what another one left"
    assert {reply.host_tokens for reply in over.replies} == {7}


def test_a_longer_prompt_scores_a_probe_and_its_answer_in_one_prefill(tmp_path: Path) -> None:
    server, answers = Server(True, tmp_path), {probe.id: tuple(range(probe.depth)) for probe in LOAD.probes}
    (tmp_path / "admissions.jsonl").touch()
    over = ask(server, tmp_path, AskedArm(LOAD, frozenset(), "002", answers, longer=True))  # type: ignore[arg-type]
    sent = [ids for _, body in server.sent for ids in body["input_ids"]]
    for probe, ids, reply in zip(LOAD.probes, sent, over.replies, strict=True):
        known = [*probe.ids, *answers[probe.id]]
        assert ids[: len(known)] == known
        assert len(ids) > len(known)
        assert reply.decode == reply.prefill
        assert reply.decode.tokens[: len(known) - probe.shared - 1] == tuple(known[probe.shared + 1 :])
