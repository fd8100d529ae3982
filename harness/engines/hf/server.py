"""A server of transformers, started and stopped by assay: the witness of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from assay.harness.engines.base import ChatRequest, Score
from assay.harness.engines.client import INFO_TIMEOUT_S, Client, read_answer
from assay.harness.engines.generation import readable
from assay.harness.engines.launched import LaunchedServer
from assay.harness.engines.served_fingerprint import fingerprint_of
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.evidence.records import Answer, Item


class HFServer(LaunchedServer):
    """A server of transformers, which is one process."""

    essential = "assay-hf::"  # it starts no other process

    def _told(self, client: Client) -> tuple[str, dict[str, Any]]:
        info = client.json("GET", "/server_info", timeout_s=INFO_TIMEOUT_S)
        return info.pop("version"), info

    def fingerprint(self) -> Fingerprint | None:
        def write(label: str) -> None:
            self.send("/fingerprint", {"label": label})

        return fingerprint_of(self, self.launch.evidence, self.launch.model, 1, write)

    def generate_all(
        self, items: Sequence[Item], prompts: Sequence[Sequence[int]], tokens: Sequence[int], top_logprobs: int
    ) -> list[Answer]:
        made, client = [], self.client()
        for item, ids, most in zip(items, prompts, tokens, strict=True):
            begun = time.monotonic()
            reply = client.text("POST", "/generate", {"ids": list(ids), "tokens": most, "top": top_logprobs})
            with readable(self, "/generate", "an answer with log-probabilities"):
                ask = ChatRequest.of(item, most, top_logprobs)
                made.append(read_answer(reply, ask, self.role, time.monotonic() - begun))
        return made

    def score(self, ids: Sequence[int], start: int, top_k: int, at: Sequence[int] = ()) -> Score:
        positions = len(ids) - start - 1
        if start < 0 or positions < 1:
            raise ValueError(f"{len(ids)} tokens leave nothing to score after a prefix of {start} and the next token")
        reply = self.send("/score", {"ids": list(ids), "start": start, "top": top_k, "at": list(at)})
        with readable(self, "/score", "log-probabilities of the given tokens"):
            return Score(
                cached_tokens=reply["cached_tokens"],
                token=np.asarray(reply["token"], dtype=np.float32),
                top_ids=np.asarray(reply["top_ids"], dtype=np.int32),
                top=np.asarray(reply["top"], dtype=np.float32),
                at=np.asarray(reply["at"], dtype=np.float32).reshape(positions, len(at)),
            )

    def flush_cache(self) -> None:
        self.send("/flush", {})


SERVER = HFServer
