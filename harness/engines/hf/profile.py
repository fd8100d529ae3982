"""Facts about transformers that assay knows before it starts its server: see `assay.harness.sides.profile_of`."""

from __future__ import annotations

from assay.harness.sides import EngineProfile, MemoryProfile

PROFILE = EngineProfile(
    title="transformers",
    distributions=("transformers",),
    oldest="5.0.0",
    references={"cpu": "hf", "cuda": "hf"},
    cpu_backends=("hf",),
    limits=(),
    own_flags=("--model", "--host", "--port", "--served-model-name", "--device"),
    example_flag="--trust-remote-code",
    kernels={},
    settings={},
    noise={},
    # One process takes 0.6 GB (measured, 5.19.0). bf16 weights become fp32, twice the bytes, and loading holds a file besides.
    memory=MemoryProfile(2**30, 3.0, "", 0.40),
    install="pip install transformers, or name the Python of another environment with --reference-python",
    backends=("hf",),
    instrumented=False,
)
