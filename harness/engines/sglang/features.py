"""Features of an SGLang server that should not affect outputs (`assay.harness.engines.features`).

The base is the plainest server: every feature off. A feature is toggled by flags and environment variables of a newly started
server, or by how requests are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from assay.evals.probes import CHUNK, PAGE
from assay.harness.engines.features import (
    Feature,
    Pass,
    Seen,
    batched,
    cached,
    chunked,
    continued,
    missed,
    probe_of,
    reordered,
    shown_if,
    streamed,
)
from assay.harness.engines.model import configuration
from assay.harness.engines.sglang.beside_model import (
    ADAPTER,
    ADAPTER_NAME,
    DRAFT,
    MODEL,
    attends_by_request,
    filled,
    has_experts,
    like_llama,
)
from assay.harness.sides import Device

DERIVED = ("arguments.cuda_graph_config",)
"""Differences between servers that follow from features: the sizes of CUDA graphs depend on chunks and drafts; the passes that
graphs served show whether there were any."""
_GPU: tuple[Device, ...] = ("cuda",)
# Tokens of the KV pool if it extends into the host's memory: all probes at once fit, and a few more requests evict the prefix.
# SGLang takes twice as much of the host's memory, which is 60 GB for a whole pool.
_HOST_TOKENS = 16384
# Most tokens that SGLang recomputes instead of reading them back from the host's memory: its ``load_back_threshold`` is 10.
_LEFT_ON_HOST = 9
# A pass that verifies drafts computes several tokens of each request, with the kernel of prefill.
_VERIFIED: Literal["another kernel"] = "another kernel"


def _cached(over: Pass) -> Seen:
    return cached(over, _LEFT_ON_HOST if over.arguments.get("enable_hierarchical_cache") else 0)


def _read_back(over: Pass) -> Seen:
    # SGLang reports what it found there, even if it was too little to be read back, or too much for the pool.
    read = [reply.host_tokens for reply in over.replies if _LEFT_ON_HOST < reply.host_tokens <= reply.cached_tokens]
    said = f"{len(read)} prefixes were read back from the host's memory, up to {max(read, default=0):,} tokens"
    return shown_if(read, said, "no prefix was read back from the host's memory")


def _said(feature: str, why: str) -> Callable[[Pass], Seen]:
    return lambda over: shown_if(over.said.get(feature), over.said.get(feature, ""), why)


_RELOADED = _said("weights-again", "the server did not confirm that it loaded them")
_WOKEN = _said("sleep-wake", "the server did not confirm that it slept and woke")
_ADAPTED = _said("zero-lora", "a nonzero adapter changed nothing")


def _graphs(phase: str) -> Callable[[Pass], Seen]:
    def seen(over: Pass) -> Seen:
        config = over.arguments.get("cuda_graph_config") or {}
        backend = (config.get(phase) or {}).get("backend") or "disabled"
        if backend == "disabled":
            return "", f"the server resolved no graph for {phase}"
        passes = _replayed(over, phase)
        said = f"{passes:,} passes of {phase} ran in CUDA graphs ({backend})"
        return shown_if(passes, said, f"the server resolved {backend} graphs for {phase}, and no pass ran in one")

    return seen


def _replayed(over: Pass, phase: str, requests: int = 1 << 30) -> int:
    """Count the passes of a phase that CUDA graphs served with at most this many requests."""
    return sum(passes for (of, size), passes in over.replays.items() if of == phase and size <= requests)


def _compiled(over: Pass) -> Seen:
    most = int(over.arguments.get("torch_compile_max_bs") or 0)
    passes = _replayed(over, "decode", most)
    why = f"no pass of at most {most} requests, the compiled ones, ran in a CUDA graph"
    return shown_if(passes, f"{passes:,} passes of at most {most} requests ran in compiled code", why)


def _mixed(over: Pass) -> Seen:
    lengths = {reply.probe: reply.prompt_tokens for reply in over.replies}
    mixed = sum(
        any(new == 1 and prefix >= lengths.get(probe_of(rid), 1 << 60) for rid, new, prefix in rows)
        and any(new > 1 for _, new, _ in rows)
        for admission in over.admissions
        for rows in [list(zip(admission.rids, admission.new, admission.prefix, strict=True))]
    )
    return shown_if(mixed, f"{mixed} batches held both", "no batch held both")


def _retracted(over: Pass) -> Seen:
    times = sum(reply.retractions for reply in over.replies)
    return shown_if(times, f"requests were retracted {times} times", "no request was retracted")


def _speculated(over: Pass) -> Seen:
    passes = sum(reply.verifications for reply in over.replies)
    written = sum(len(reply.decode.tokens) for reply in over.replies if reply.verifications)
    said = f"{passes} passes verified drafts, {written / max(passes, 1):.2f} tokens each"
    return shown_if(passes, said, "no draft was verified")


def _features(device: Device) -> Iterable[Feature]:
    chunk = CHUNK[device]
    yield Feature(
        "prefix-cache",
        "the prefix of a prompt comes from the cache",
        seen=_cached,
        excludes=("no-radix-cache", "force-miss"),
    )
    yield Feature("batch", "requests of all lengths are sent at once", seen=batched, bitwise=True)
    yield Feature("order", "requests arrive in another order", seen=reordered, bitwise=True)
    yield Feature(
        "conversation", "the end of a prefix was generated in an earlier turn", seen=continued,
        requires=("prefix-cache",), excludes=("ngram",),
    )  # fmt: skip
    yield Feature("streamed", "answers are streamed", seen=streamed, bitwise=True)
    yield Feature(
        "weights-again",
        "the same weights were loaded again while the server ran",
        seen=_RELOADED,
        stays=True,
    )
    yield Feature(
        "chunked-prefill", f"prompts are prefilled in chunks of {chunk} tokens", on=(f"--chunked-prefill-size={chunk}",),
        resolved={"chunked_prefill_size": chunk}, seen=chunked,
    )  # fmt: skip
    yield Feature("page-size", f"pages of {PAGE} tokens", on=(f"--page-size={PAGE}",), resolved={"page_size": PAGE})
    yield Feature(
        "overlap", "the scheduler overlaps with the model", off=("--disable-overlap-schedule",),
        resolved={"disable_overlap_schedule": False},
    )  # fmt: skip
    yield Feature(
        "mixed-chunk", "chunks of prompts and decode share a batch", on=("--enable-mixed-chunk",),
        resolved={"enable_mixed_chunk": True}, seen=_mixed, requires=("chunked-prefill", "batch", "prefix-cache"),
        excludes=("conversation",),
    )  # fmt: skip
    yield Feature(
        "no-radix-cache", "no prefix cache", on=("--disable-radix-cache",), resolved={"disable_radix_cache": True}
    )
    yield Feature(
        "force-miss", "the prefix cache is searched and never hit", environment={"SGLANG_RADIX_FORCE_MISS": "1"}, seen=missed,
        excludes=("no-radix-cache",),
    )  # fmt: skip
    yield Feature(
        "retraction", "requests are retracted and computed again", environment={"SGLANG_TEST_RETRACT": "1"}, seen=_retracted,
        requires=("batch",),
    )  # fmt: skip

    kernels = ("--lora-backend=torch_native",) if device == "cpu" else ()
    yield Feature(
        "zero-lora", "every request names an adapter that adds zeros",
        on=("--enable-lora", f"--lora-paths={ADAPTER_NAME}={ADAPTER}", *kernels), resolved={"enable_lora": True}, seen=_ADAPTED,
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
            seen=_graphs(phase), devices=_GPU,
            lacks="nothing is captured there",
        )  # fmt: skip
    yield Feature(
        "torch-compile", "the model is compiled, for batches of up to 4",
        # A batch size takes half a minute; SGLang would compile eight.
        on=("--enable-torch-compile", "--torch-compile-max-bs=4"), resolved={"enable_torch_compile": True}, seen=_compiled,
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
        resolved={"speculative_algorithm": "NGRAM"}, seen=_speculated, cost=_VERIFIED,
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
        resolved={"speculative_algorithm": "STANDALONE"}, seen=_speculated, cost=_VERIFIED, drafts=3.0,
        excludes=("conversation", "mixed-chunk", "ngram", "dp-attention"), devices=_GPU,
        lacks="SGLang's kernels for drafts need AMX there",
    )  # fmt: skip
    yield Feature(
        "eagle", "drafts of a model of one layer are verified, and most are rejected: its weights are random",
        on=(
            "--speculative-algorithm=EAGLE", f"--speculative-draft-model-path={DRAFT}", "--speculative-num-steps=3",
            "--speculative-eagle-topk=1", "--speculative-num-draft-tokens=4",
        ),
        resolved={"speculative_algorithm": "EAGLE"}, seen=_speculated, cost=_VERIFIED, drafts=1.0,
        # SGLang would load the model's weights into the draft again.
        excludes=("conversation", "mixed-chunk", "ngram", "draft-model", "weights-again"), devices=_GPU,
        lacks="SGLang's kernels for drafts need AMX there", lacking=like_llama,
    )  # fmt: skip
    yield Feature(
        "hicache", "the prefix cache goes on in the host's memory",
        on=("--enable-hierarchical-cache", f"--max-total-tokens={_HOST_TOKENS}"),
        resolved={"enable_hierarchical_cache": True}, seen=_read_back, requires=("prefix-cache",), devices=_GPU,
        lacks="it copies with CUDA", evicts=_HOST_TOKENS,
    )  # fmt: skip
    yield Feature(
        "sleep-wake", "the server gave its memory back and took it again",
        on=("--enable-memory-saver", "--enable-weights-cpu-backup", "--enable-draft-weights-cpu-backup"),
        resolved={"enable_memory_saver": True}, seen=_WOKEN, devices=_GPU,
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


def with_models(flags: tuple[str, ...], model: Path, folder: Path) -> tuple[str, ...]:
    """Put folders into flags, of the model and of those made for it, which are written into the server's folder.

    Raises:
        EvidenceError: the folder cannot be written.
    """
    return filled(flags, model, configuration(model), folder)
