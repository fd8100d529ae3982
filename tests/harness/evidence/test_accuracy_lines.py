"""The lines of a server's log in which an engine warns about its accuracy, as vLLM 0.27 and 0.32 and SGLang write them."""

from __future__ import annotations

import pytest

from assay.harness.evidence.accuracy_lines import warned, weight_of

SCALE = (
    "(EngineCore_0 pid=4242) WARNING 08-31 10:12:58 [kv_cache.py:104] Using KV cache scaling factor 1.0 for fp8_e4m3. If this is "
    "unintended, verify that k/v_scale scaling factors are properly set in the checkpoint."
)
DROP = (
    "INFO 08-31 10:12:09 [cache.py:214] Using fp8 data type to store kv cache. It reduces the GPU memory footprint and boosts the "
    "performance. Meanwhile, it may cause accuracy drop without a proper scaling factor."
)
SAMPLING = (
    "WARNING 08-31 10:14:02 [config.py:1528] Default sampling parameters have been overridden by the model's Hugging Face "
    "generation config recommended from the model creator."
)


def test_the_worst_comes_first_once_and_without_its_time() -> None:
    lines = warned("\n".join([DROP, SAMPLING, "INFO 08-31 10:12:01 [a.py:1] all is well", SCALE, SCALE]))
    assert [line[:40] for line in lines] == [
        "Using KV cache scaling factor 1.0 for fp",
        "Using fp8 data type to store kv cache. I",
        "Default sampling parameters have been ov",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "Checkpoint does not provide a q scaling factor. Setting it to k_scale. This only matters for FP8 Attention backends.",
        "Using uncalibrated q_scale 1.0 and/or prob_scale 1.0 with fp8 attention.",
        "Casting torch.float16 to torch.bfloat16.",
        "Failed to create oneDNN linear, fallback to torch linear.",
        "Cannot use FLASHINFER backend on CPU.",
        "KV cache dtype fp8 without scaling factors. Defaulting to scaling factors of 1.0. This may lead to less accurate results!",
    ],
)
def test_each_kind_is_seen(line: str) -> None:
    assert weight_of(f"(EngineCore pid=1) WARNING 11-30 12:00:00 [x.py:1] {line}") is not None


@pytest.mark.parametrize("line", ["Upcasting torch.bfloat16 to torch.float32.", "Using max model len 4096", "accuracy: 0.61"])
def test_other_lines_are_not(line: str) -> None:
    assert weight_of(line) is None
