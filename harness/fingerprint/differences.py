"""Compares two fingerprints: the differences, ranked by their effect on numbers, and the setting that declares each.

A setting declares the differences that it was meant to cause; a caller can also allow a difference by name. If a setting was meant
to differ but nothing does, that is a difference too: an engine ignored a flag, or did not apply an adapter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from pydantic import Field, computed_field

from assay.harness.errors import ExitCode
from assay.harness.evidence.fingerprint import PARTS, Fingerprint
from assay.harness.fingerprint.parts import COMPARED, A, B, Difference, faults, in_any_order
from assay.harness.schema import RULE, Part
from assay.harness.sides import HIDDEN

SCHEMA: Literal["assay.fingerprint-diff/1"] = "assay.fingerprint-diff/1"
RANKS = (
    "unseen", "tokens", "rope", "folder", "config", "weights", "adapters", "positions", "quantisation", "experts", "ignored",
    "generation", "backends", "arguments", "packages", "hardware", "environment",
)  # fmt: skip
"""The parts, by how much they change outputs: different tokens change everything, a different variable perhaps nothing."""
# Arguments for running requests -> a part of the name of the flag that sets them. A server that was started for its fingerprint
# alone neither captures graphs nor gets the chunks of a run.
_OF_REQUESTS = {
    "arguments.chunked_prefill_size": "chunked-prefill-size",
    "arguments.cuda_graph_config": "cuda-graph",
    "arguments.disable_cuda_graph": "cuda-graph",
}
_TABLED = re.compile(r"config\.(\w+\.)?rope_(theta|scaling|parameters)(\.|$)")
# Source of a URL's fingerprint. No setting was requested of it, so no setting declares a difference from it.
_ENDPOINT = "endpoint"
# Parts that the servers of a run have, and those that were started for their fingerprint alone.
_IN_BOTH = ("tokens", "generation", "rope", "weights", "environment", "packages")
# Parts that only one of two servers may have: ignored features are measured without a server, positions need a request.
_APART = ("ignored", "positions")
# Differences of weights that make it a different model: most weights differ, or are rounded.
_OTHER_MODEL = {"weights.other": True, "weights.dtype": True}
_WITHOUT_RUN = "started for its fingerprint alone"
_SAVED_DTYPE = "config.dtype"
# Prefixes of the differences that a setting declares, in addition to its own argument.
_DECLARES: Mapping[str, Sequence[str]] = {
    "interpreter": ("packages", "config"),
    "packages": ("packages", "config"),
    "engine": ("packages", "arguments", "backends", "config"),
    "backend": ("backends.attention", "backends.linear attention", "arguments.*attention_backend", "ignored"),
    # A few different parameters do not make a different model: one was not sent, or an adapter was merged.
    "model": (
        "weights.other", "weights.dtype", "weights.missing", "rope.table", "config", "quantisation", "generation", "positions",
        "experts", "ignored", "backends",
        *(f"arguments.{name}" for name in ("model_path", "context_length", "dtype", "quantization")),
    ),
    "--dtype": ("weights.dtype", "config.dtype", "quantisation.weights", "quantisation.kv cache", "rope.table"),
    "--quantization": (
        "weights", "quantisation", "config.layers", "config.quantization_config", "config.hf_quant_config", "backends.gemm",
        "backends.moe", "backends.kv cache",
    ),
    "--kv-cache-dtype": ("quantisation.kv cache", "backends.kv cache"),
    "--attention-backend": ("backends.attention", "arguments.*attention_backend", "ignored"),
    "--prefill-attention-backend": ("backends.attention", "ignored"),
    "--decode-attention-backend": ("backends.attention", "ignored"),
    "--moe-runner-backend": ("backends.moe", "backends.moe runner"),
    "--fp8-gemm-backend": ("arguments.fp8_gemm_runner_backend", "backends.gemm"),
    "--fp4-gemm-backend": ("arguments.fp4_gemm_runner_backend", "backends.gemm"),
    "--bf16-gemm-backend": ("arguments.bf16_gemm_backend", "backends.gemm"),
    "--sampling-backend": ("backends.sampler",),
    "--tp-size": ("backends.all-reduce",),
    "--tp": ("backends.all-reduce", "arguments.tp_size"),
    "--context-length": ("rope.table",),
    "--chat-template": ("tokens.chats", "tokens.template"),
    "--lora-paths": ("adapters", "config.layers"),
    "--load-format": ("weights",),
    "--speculative-algorithm": (  # SGLang 0.5.23 derives these from it
        "arguments.speculative_algorithm", "arguments.speculative_draft_model_path", "arguments.speculative_num_steps",
        "arguments.speculative_eagle_topk", "arguments.speculative_num_draft_tokens", "arguments.enable_mixed_chunk",
        "arguments.cuda_graph_config",
    ),
    "--enable-deterministic-inference": (  # likewise
        "arguments.enable_deterministic_inference", "arguments.sampling_backend", "arguments.disable_radix_cache",
        "arguments.disable_custom_all_reduce", "arguments.enable_flashinfer_allreduce_fusion", "backends.sampler",
        "backends.all-reduce", "backends.gemm", "environment.NCCL_ALGO",
    ),
    "--json-model-override-args": ("rope", "config", "weights", "quantisation", "generation"),
}  # fmt: skip
# Differences that follow from a fault on one side.
_FAULT_OF = {"rope.table": "rope.wrong", "tokens.bare": "tokens.wrong"}
_NO_TRACE = frozenset(("--port", "--host", "--log-level"))


class FingerprintDiff(Part):
    __doc__ = f"""The differences between two fingerprints. {RULE}"""

    schema_id: Literal["assay.fingerprint-diff/1"] = Field(SCHEMA, alias="schema")
    left: str
    right: str
    treatment: dict[str, tuple[str, str]] = Field(description="settings meant to differ: (A, B) by name")
    differences: tuple[Difference, ...] = Field(description="differences that change outputs come first")
    shared: tuple[str, ...] = Field((), description="faults that both sides share, one sentence each")
    compared: tuple[str, ...]
    unread: str = Field(
        "", description="why the model's settings were not compared, so that nothing is known to be equal"
    )
    lost: tuple[str, ...] = Field((), description="parts that one side lacks although its kind of source has them")
    not_compared: dict[str, str] = Field(
        description="parts that a side did not observe, with the reason, and settings hidden on both sides"
    )

    @property
    def undeclared(self) -> tuple[Difference, ...]:
        """The differences that change outputs and are not declared."""
        return tuple(difference for difference in self.differences if difference.counts)

    @computed_field(description="0 nothing undeclared changes outputs, 1 something does, 3 unknown")  # type: ignore[prop-decorator]
    @property
    def exit_code(self) -> int:
        """The command's exit code."""
        if self.undeclared:
            return int(ExitCode.REGRESSION)
        return int(ExitCode.PASS if self.compared and not self.unread and not self.lost else ExitCode.NO_VERDICT)


def compare_fingerprints(left: Fingerprint, right: Fingerprint, allowed: Collection[str] = ()) -> FingerprintDiff:
    """Compare two fingerprints.

    Args:
        left: A's fingerprint.
        right: B's fingerprint.
        allowed: names or prefixes of names that may differ, such as "packages" or "arguments.page_size".
    """
    sources = {left.source, right.source}
    asked = {
        name: (left.asked.get(name, ""), right.asked.get(name, ""))
        for name in sorted(left.asked.keys() | right.asked.keys())
        if left.asked.get(name, "") != right.asked.get(name, "") and _ENDPOINT not in sources
    }
    lost = [part for part in _seen_in(sources) if left.has(part) != right.has(part) and part not in allowed]
    if _ENDPOINT in sources:  # a URL reports only the version of its engine
        left, right = _with_names_of("packages", left, right), _with_names_of("packages", right, left)
    # A server adds the settings of its layers, a URL has only those of ``config.json``.
    if _ENDPOINT in sources and len(sources) > 1:
        left, right = _with_names_of("config", left, right), _with_names_of("config", right, left)
    compared = [part for part in PARTS if left.has(part) and right.has(part)]
    # Two folders may hold different weights that cannot be read.
    if (
        "weights" not in compared
        and _ENDPOINT not in sources
        and left.model != right.model
        and "weights" not in allowed
    ):
        lost = list(dict.fromkeys((*lost, "weights")))
    differ = [
        difference
        for part in compared
        for difference in COMPARED[part](getattr(left, part), getattr(right, part))
        # The settings behind RoPE tables can be written in several ways without changing the tables.
        if not ("rope" in compared and _TABLED.match(difference.name))
    ]
    if _ENDPOINT not in sources and {"weights", "quantisation"} <= set(compared):
        # Where both compute in the same dtype, that of config.json says only in which one the checkpoint was saved.
        computed = {"weights.dtype", "quantisation.weights"}.isdisjoint(each.name for each in differ)
        differ = [each for each in differ if not (computed and each.name == _SAVED_DTYPE)]
    of_chats = all(side.tokens and side.tokens.chats for side in (left, right))
    visible = {setting: values for setting, values in asked.items() if of_chats or setting != "--chat-template"}
    differ += _unseen(visible, differ, compared)
    ours, theirs = faults(left), faults(right)
    said = {fault.name for fault in (*ours, *theirs)}  # a fault states the difference, and which side is right
    differ = [difference for difference in differ if _FAULT_OF.get(difference.name) not in said]
    common = {fault.says for fault in ours} & {fault.says for fault in theirs}
    for side, own, other in ((A, ours, right), (B, theirs, left)):
        differ += [
            fault.model_copy(
                update={
                    "says": f"{side}: {fault.says}",
                    "outputs": fault.outputs or (fault.part == "tokens" and bool(other.tokens and other.tokens.retold)),
                }
            )
            for fault in own
            if fault.says not in common
        ]
    settings = set(asked)
    if "weights" in compared and not any(
        _OTHER_MODEL.get(difference.name) == difference.outputs for difference in differ
    ):
        settings -= {"model"}  # the same weights at another path, or one tensor more or less, are the same model
    flags = left.asked.keys() | right.asked.keys()
    alone = "own server" in sources and len(sources) > 1
    excused = [name for name, part in _OF_REQUESTS.items() if alone and not any(part in flag for flag in flags)]
    declared = [
        difference.model_copy(update={"declared": _declared(difference, settings, allowed, excused)})
        for difference in differ
    ]
    not_compared = {
        part: "; ".join(
            f"{side}: {difference.not_observed.get(part, 'not observed')}"
            for side, difference in ((A, left), (B, right))
            if not difference.has(part)
        )
        for part in PARTS
        if part not in compared
    }
    return FingerprintDiff(
        left=_named(left),
        right=_named(right),
        treatment=asked,
        differences=tuple(sorted(declared, key=_rank)),
        shared=tuple(sorted(common)),
        compared=tuple(compared),
        unread="" if "config" in allowed else not_compared.get("config", ""),
        lost=tuple(lost),
        not_compared=not_compared
        | ({"weights.order": unordered} if (unordered := in_any_order(left, right)) else {})
        | dict.fromkeys(_hidden(left, right), "hidden on both sides as a possible secret, so not known to be equal"),
    )


def _seen_in(sources: Collection[str]) -> Sequence[str]:
    """Return the parts that both sides should have. Two sides from the same kind of source have the same parts, except `_APART`."""
    if len(sources) == 1:
        return [part for part in PARTS if part not in _APART]
    return _IN_BOTH if _ENDPOINT not in sources else ()


def _hidden(left: Fingerprint, right: Fingerprint) -> Iterator[str]:
    """Yield the settings and arguments that are hidden on both sides."""
    for prefix, ours, theirs in (
        ("", left.asked, right.asked),
        ("arguments.", left.arguments or {}, right.arguments or {}),
    ):
        yield from (f"{prefix}{name}" for name, value in ours.items() if value == theirs.get(name) == HIDDEN)


def _with_names_of(part: str, fingerprint: Fingerprint, other: Fingerprint) -> Fingerprint:
    """Return a fingerprint whose part keeps only the names that the other one has too, or is not observed if it has none."""
    ours, theirs = getattr(fingerprint, part) or {}, getattr(other, part) or {}
    named = {name: value for name, value in ours.items() if name in theirs}
    return fingerprint.model_copy(update={part: named or None})


def _named(fingerprint: Fingerprint) -> str:
    return f"{fingerprint.model}, {fingerprint.engine}"


def _rank(difference: Difference) -> tuple[bool, bool, int, bool]:
    """Return a sort key: differences that count, then those that change outputs, then by part, with faults first in each."""
    part = RANKS.index(difference.part)
    return not difference.counts, not difference.outputs, part, not difference.name.endswith((".wrong", ".twice"))


def _declared(
    difference: Difference, asked: Collection[str], allowed: Collection[str], excused: Collection[str]
) -> str:
    for name in allowed:
        if difference.name == name or difference.name.startswith(f"{name}."):
            return f"--allow {name}"
    if difference.part == "unseen" or difference.name.endswith((".wrong", ".twice")):
        return ""
    for setting in asked:
        own = setting.removeprefix("--").replace("-", "_")
        names = [f"arguments.{own}"] if setting.startswith("--") else []
        names += [setting] if setting.startswith("environment.") else []
        if any(_covers(name, difference.name) for name in (*names, *_DECLARES.get(setting, ()))):
            return setting
    return _WITHOUT_RUN if any(_covers(name, difference.name) for name in excused) else ""


def _covers(declares: str, name: str) -> bool:
    begin, star, end = declares.partition("*")
    return (
        name.startswith(begin) and name.endswith(end) if star else name == declares or name.startswith(f"{declares}.")
    )


def _unseen(
    asked: Mapping[str, tuple[str, str]], differ: Sequence[Difference], compared: Collection[str]
) -> Iterator[Difference]:
    """Yield the settings that were meant to differ but have no effect, although an effect would be visible."""
    for setting, (ours, theirs) in asked.items():
        covered = [name for name in _DECLARES.get(setting, ()) if name.partition(".")[0] in compared]
        if setting in ("engine", "interpreter", "packages", "model") or setting in _NO_TRACE or not covered:
            continue
        if any(_covers(name, difference.name) for difference in differ for name in covered):
            continue
        yield Difference(
            name=f"unseen.{setting}",
            says=f"{setting} was set to {theirs or 'absent'}, not {ours or 'absent'}, but nothing that is served differs",
            outputs=True,
        )
