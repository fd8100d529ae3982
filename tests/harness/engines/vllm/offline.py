"""Runs steps in vLLM's Python, on its offline `LLM` class: ``python offline.py STEPS.json``; see `test_inside.Step`.

The model is in this process, which loads assay's plugin like a server's worker. The last line printed is a list of the answers of
each step: cached tokens and the ids of each answer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from assay.harness.engines.inside.control import EVIDENCE, Control, set_control


def main(steps: dict[str, Any]) -> list[list[tuple[int, list[int]]]]:
    """Make the engine, and take each step under its control, with an empty prefix cache."""
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        **{
            "enforce_eager": True, "seed": 0, "generation_config": "vllm", "max_model_len": 2048, "max_num_batched_tokens": 128,
            "block_size": 32, "kv_cache_memory_bytes": 64 * 2**20, "dtype": "float32", **steps["engine"],
        }
    )  # fmt: skip
    answers = []
    for step in steps["steps"]:
        engine.reset_prefix_cache()
        set_control(Path(os.environ[EVIDENCE]), Control.model_validate(step["control"]))
        done = []
        for wave in step["waves"]:
            asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in wave]
            limits = [SamplingParams(max_tokens=3 + number % 3, temperature=0, ignore_eos=True) for number in range(len(wave))]
            done += engine.generate(asked, limits, use_tqdm=False)
        answers.append([(each.num_cached_tokens, list(each.outputs[0].token_ids)) for each in done])
    return answers


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
