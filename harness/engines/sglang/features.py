"""Features of an SGLang server that should not affect outputs: how to toggle each, how it shows, and its allowed cost.

The base is the plainest server: every feature off. A feature is toggled by flags and environment variables of a newly started
server, or by how requests are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

from assay.evals.probes import CHUNK, PAGE
from assay.harness.engines.sglang.beside_model import ADAPTER, DRAFT, MODEL, attends_by_request, has_experts, like_llama
from assay.harness.sides import Device, flag_values

# Name of the adapter of zeros in a server.
ADAPTER_NAME = "assay-zeros"
_GPU: tuple[Device, ...] = ("cuda",)
# Tokens of the KV pool if it extends into the host's memory: all probes at once fit, and a few more requests evict the prefix.
# SGLang takes twice as much of the host's memory, which is 60 GB for a whole pool.
_HOST_TOKENS = 16384
# The declared cost of a feature: nothing beyond the order of sums; a kernel, whose rounding differs; or different numbers, so that
# variants with it are compared among themselves.
_Cost = Literal["nothing", "another kernel", "a base of its own"]


@dataclass(frozen=True)
class Feature:
    """One feature.

    Attributes:
        id: kebab-case and stable.
        title: its effect, a clause.
        on: flags of a server with the feature on.
        off: flags of a server with the feature off.
        environment: environment variables of a server with the feature on.
        backend: attention backend to use instead of the base's, or empty for the same.
        resolved: arguments that the server resolves when it is on.
        declares: other parts of the fingerprint that it may change, as ``assay compare --allow`` names them.
        seen: id of the proof that it was on, beyond its arguments (`assay.harness.run.probe_proof`).
        cost: the declared change of outputs.
        requires: features without which it has no effect.
        excludes: features that cannot be on together with it.
        devices: devices on which it can be on.
        lacks: what the other devices lack.
        gpus: number of GPUs that it needs on a GPU.
        package: package that it needs.
        drafts: least tokens of a pass that verifies a model's drafts, or 0 if drafts depend on earlier requests.
        bitwise: whether it changes not even a bit if kernels are deterministic.
        stays: whether it cannot be switched off again in a running server.
        lacking: returns why it cannot be on for a model's configuration, or an empty string.
    """

    id: str
    title: str
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    backend: str = ""
    resolved: Mapping[str, Any] = field(default_factory=dict)
    declares: tuple[str, ...] = ()
    seen: str = ""
    cost: _Cost = "nothing"
    requires: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ("cpu", "cuda")
    lacks: str = ""
    gpus: int = 1
    package: str = ""
    drafts: float = 0.0
    bitwise: bool = False
    stays: bool = False
    lacking: Callable[[Mapping[str, Any]], str] = lambda config: ""

    @property
    def restarts(self) -> bool:
        """True if a server has to be started for it."""
        return bool(self.on or self.off or self.environment or self.backend)

    def unavailable(self, device: Device, gpus: int, config: Mapping[str, Any]) -> str:
        """Say why it cannot be toggled here, for a model with this configuration, or return an empty string."""
        if device not in self.devices:
            return f"not on {device}: {self.lacks}"
        if device == "cuda" and gpus < self.gpus:
            return f"needs {self.gpus} GPUs; {gpus} found"
        if self.package and find_spec(self.package) is None:
            return f"needs the package {self.package}"
        return self.lacking(config)

    def decided(self, flags: Mapping[str, str], environment: Mapping[str, str], backend: str) -> str:
        """Say what already decides, in every server, whether it is on, or return an empty string.

        The engine's own flags override the feature's; `backend` is the attention backend of the base.
        """
        own = {f"--{name.replace('_', '-')}": str(value) for name, value in self.resolved.items()}
        for flag in [*flag_values(self.off), *(flag for flag, value in own.items() if _differ(flags.get(flag), value))]:
            if flag in flags:
                return f"{flag}={flags[flag]} overrides the flag that switches it"
        on = flag_values(self.on) | dict(self.environment)
        given = {**flags, **environment}
        if on and not self.stays and all(name in given and not _differ(given[name], on[name]) for name in on):
            return f"the base has it too: {', '.join(f'{name}={value}' for name, value in on.items())}"
        if self.backend and self.backend == backend:
            return f"the base has it too: its attention backend is {backend}"
        return ""


def _differ(given: str | None, value: str) -> bool:
    return given is not None and given.casefold() != value.casefold()


def _features(device: Device) -> Iterable[Feature]:
    chunk = CHUNK[device]
    yield Feature(
        "prefix-cache",
        "the prefix of a prompt comes from the cache",
        seen="cached",
        excludes=("no-radix-cache", "force-miss"),
    )
    yield Feature("batch", "requests of all lengths are sent at once", seen="batched", bitwise=True)
    yield Feature("order", "requests arrive in another order", seen="reordered", bitwise=True)
    yield Feature(
        "conversation", "the end of a prefix was generated in an earlier turn", seen="continued",
        requires=("prefix-cache",), excludes=("ngram",),
    )  # fmt: skip
    yield Feature("streamed", "answers are streamed", seen="streamed", bitwise=True)
    yield Feature(
        "weights-again", "the same weights were loaded again while the server ran", seen="reloaded", stays=True
    )
    yield Feature(
        "chunked-prefill", f"prompts are prefilled in chunks of {chunk} tokens", on=(f"--chunked-prefill-size={chunk}",),
        resolved={"chunked_prefill_size": chunk}, seen="chunked",
    )  # fmt: skip
    yield Feature("page-size", f"pages of {PAGE} tokens", on=(f"--page-size={PAGE}",), resolved={"page_size": PAGE})
    yield Feature(
        "overlap", "the scheduler overlaps with the model", off=("--disable-overlap-schedule",),
        resolved={"disable_overlap_schedule": False},
    )  # fmt: skip
    yield Feature(
        "mixed-chunk", "chunks of prompts and decode share a batch", on=("--enable-mixed-chunk",),
        resolved={"enable_mixed_chunk": True}, seen="mixed", requires=("chunked-prefill", "batch", "prefix-cache"),
        excludes=("conversation",),
    )  # fmt: skip
    yield Feature(
        "no-radix-cache", "no prefix cache", on=("--disable-radix-cache",), resolved={"disable_radix_cache": True}
    )
    yield Feature(
        "force-miss", "the prefix cache is searched and never hit", environment={"SGLANG_RADIX_FORCE_MISS": "1"}, seen="missed",
        excludes=("no-radix-cache",),
    )  # fmt: skip
    yield Feature(
        "retraction", "requests are retracted and computed again", environment={"SGLANG_TEST_RETRACT": "1"}, seen="retracted",
        requires=("batch",),
    )  # fmt: skip

    kernels = ("--lora-backend=torch_native",) if device == "cpu" else ()
    yield Feature(
        "zero-lora", "every request names an adapter that adds zeros",
        on=("--enable-lora", f"--lora-paths={ADAPTER_NAME}={ADAPTER}", *kernels), resolved={"enable_lora": True}, seen="adapted",
        # SGLang refuses adapters together with a draft model up to 0.5.17, loads no weights below an adapter, and compiles none.
        excludes=("draft-model", "eagle", "dp-attention", "weights-again", "torch-compile"), lacking=like_llama,
    )  # fmt: skip

    yield Feature(
        "tensor-parallel",
        "two ranks share every layer",
        on=("--tp-size=2",),
        resolved={"tp_size": 2},
        cost="another kernel",
        gpus=2,
    )

    yield from _on_gpus()


def _on_gpus() -> Iterable[Feature]:
    yield Feature(
        "attention-backend", "attention is computed by FlashInfer", backend="flashinfer",
        resolved={"attention_backend": "flashinfer"}, cost="another kernel", devices=_GPU,
        lacks="it needs a GPU", package="flashinfer",
    )  # fmt: skip
    for phase in ("decode", "prefill"):
        yield Feature(
            f"cuda-graph-{phase}", f"{phase} runs in CUDA graphs", off=(f"--disable-{phase}-cuda-graph",),
            seen=f"{phase} graphs", devices=_GPU,
            lacks="nothing is captured there",
        )  # fmt: skip
    yield Feature(
        "torch-compile", "the model is compiled, for batches of up to 4",
        # A batch size takes half a minute; SGLang would compile eight.
        on=("--enable-torch-compile", "--torch-compile-max-bs=4"), resolved={"enable_torch_compile": True}, seen="compiled",
        cost="another kernel", requires=("cuda-graph-decode",), devices=_GPU,
        lacks="SGLang's backends there cannot be compiled",
    )  # fmt: skip
    yield Feature(
        "deterministic", "kernels do not depend on the batch", on=("--enable-deterministic-inference",),
        resolved={"enable_deterministic_inference": True}, cost="a base of its own",
        declares=("arguments.sampling_backend", "backends.sampler"),  # SGLang takes its own in PyTorch there
        # 0.5.17 splits a prompt there at multiples of 4,096 tokens, 0.5.23 only with FlashInfer: prompts beyond a smaller
        # chunk would wait forever. FlashInfer turns the prefix cache off.
        excludes=("chunked-prefill", "attention-backend"), devices=_GPU,
        lacks="SGLang wants Triton for it, which is interpreted there",
    )  # fmt: skip
    yield Feature(
        "ngram", "drafts of n-grams are verified", on=("--speculative-algorithm=NGRAM", "--speculative-num-draft-tokens=12"),
        resolved={"speculative_algorithm": "NGRAM"}, seen="speculated",
        declares=("arguments.speculative_eagle_topk", "arguments.speculative_num_steps"),
        # Its drafts are trees, which SGLang refuses with pages of more than one token.
        excludes=("conversation", "mixed-chunk", "page-size", "dp-attention"), devices=_GPU,
        lacks="SGLang's kernels for drafts need AMX there",
    )  # fmt: skip
    yield Feature(
        "draft-model", "drafts of a model are verified: of the model itself",
        on=(
            "--speculative-algorithm=STANDALONE", f"--speculative-draft-model-path={MODEL}", "--speculative-num-steps=2",
            "--speculative-eagle-topk=1", "--speculative-num-draft-tokens=3",
        ),
        resolved={"speculative_algorithm": "STANDALONE"}, seen="speculated", drafts=3.0,
        excludes=("conversation", "mixed-chunk", "ngram", "dp-attention"), devices=_GPU,
        lacks="SGLang's kernels for drafts need AMX there",
    )  # fmt: skip
    yield Feature(
        "eagle", "drafts of a model of one layer are verified, and most are rejected: its weights are random",
        on=(
            "--speculative-algorithm=EAGLE", f"--speculative-draft-model-path={DRAFT}", "--speculative-num-steps=3",
            "--speculative-eagle-topk=1", "--speculative-num-draft-tokens=4",
        ),
        resolved={"speculative_algorithm": "EAGLE"}, seen="speculated", drafts=1.0,
        # SGLang would load the model's weights into the draft again.
        excludes=("conversation", "mixed-chunk", "ngram", "draft-model", "weights-again"), devices=_GPU,
        lacks="SGLang's kernels for drafts need AMX there", lacking=like_llama,
    )  # fmt: skip
    yield Feature(
        "hicache", "the prefix cache goes on in the host's memory",
        on=("--enable-hierarchical-cache", f"--max-total-tokens={_HOST_TOKENS}"),
        resolved={"enable_hierarchical_cache": True}, seen="read back", requires=("prefix-cache",), devices=_GPU,
        lacks="it copies with CUDA",
    )  # fmt: skip
    yield Feature(
        "sleep-wake", "the server gave its memory back and took it again",
        on=("--enable-memory-saver", "--enable-weights-cpu-backup", "--enable-draft-weights-cpu-backup"),
        resolved={"enable_memory_saver": True}, seen="woken", devices=_GPU,
        lacks="it needs CUDA's virtual memory", package="torch_memory_saver", stays=True,
    )  # fmt: skip
    yield Feature(
        "dp-attention", "two GPUs share the requests of attention", on=("--tp-size=2", "--dp-size=2", "--enable-dp-attention"),
        resolved={"enable_dp_attention": True}, cost="another kernel",
        declares=("arguments.chunked_prefill_size",),
        # A prefix is in the cache of one of the two, and each has half of a chunk.
        excludes=("tensor-parallel", "prefix-cache", "chunked-prefill"), devices=_GPU,
        lacks="SGLang's torch_native computes no idle batch", gpus=2, lacking=attends_by_request,
    )  # fmt: skip
    yield Feature(
        "expert-parallel", "two GPUs share the experts", on=("--tp-size=2", "--ep-size=2"), resolved={"tp_size": 2, "ep_size": 2},
        cost="another kernel", excludes=("tensor-parallel", "dp-attention"), devices=_GPU, lacks="it needs two GPUs", gpus=2,
        lacking=has_experts,
    )  # fmt: skip


def features_of(device: Device) -> dict[str, Feature]:
    """Return all features by id, in the order in which they are listed."""
    return {feature.id: feature for feature in _features(device)}
