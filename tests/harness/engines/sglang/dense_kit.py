"""Run SGLang's own dense attention kit on a backend of the plugin; prints one JSON line per case.

    python dense_kit.py BACKEND [HEAD_DIM]

Runs in a separate process, because the kit changes SGLang's global state. On the CPU it needs what a CPU server needs (see
``harness/engines/sglang/launch.py``).
"""

from __future__ import annotations

import json
import sys
import unittest

import torch
from sglang.srt.plugins import load_plugins

load_plugins()
if not torch.cuda.is_available():
    torch.cuda.manual_seed_all = lambda seed: None  # the kit seeds GPUs that are not there
torch.set_grad_enabled(False)

from sglang.test.kits.attention_unittest.attention_methods import dense_attention as kit  # noqa: E402


def main(backend: str, head_dim: int = 64) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for case in kit.make_dense_cases(backend):
        line = {"case": case.name, "prefix": list(case.prefix_lens), "page_size": case.page_size, "error": ""}
        line["tolerance"] = kit.DENSE_ATOL
        try:
            kit.run_dense_attention_case(
                unittest.TestCase(),
                case,
                head_dim=head_dim,
                hidden_size=head_dim * case.num_heads,
                dtype=torch.float16,
                device=device,
            )
        except Exception as error:  # the kit asserts; a failed case must not hide the next
            line["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
