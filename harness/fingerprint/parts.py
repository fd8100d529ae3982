"""Compares a part of two fingerprints, one sentence per difference, and finds faults within a single fingerprint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from assay.harness.evidence.fingerprint import Fingerprint, Resolved, RopeTable, Tokens, Weight
from assay.harness.fingerprint.canonical import by_canonical_name
from assay.harness.fingerprint.facts import CHANGE_NUMBERS, as_read
from assay.harness.fingerprint.rope import read_theta, same_frequencies
from assay.harness.fingerprint.weights import (
    by_projections,
    by_rank,
    distance,
    distance_in_any_order,
    rounded_to,
    same_bytes,
    same_numbers,
)
from assay.harness.schema import Part
from assay.harness.text import counted, few, listed

A, B = "A", "B"
_SHOWN = 3
# Server arguments that change outputs, or the order of summation.
_NUMBERS = frozenset((
    "dtype", "kv_cache_dtype", "quantization", "quantization_param_path", "tp_size", "dp_size", "ep_size", "pp_size", "load_format",
    "attention_backend", "prefill_attention_backend", "decode_attention_backend", "mm_attention_backend", "sampling_backend",
    "grammar_backend", "moe_runner_backend", "moe_a2a_backend", "fp8_gemm_runner_backend", "fp4_gemm_runner_backend",
    "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk",
    "speculative_num_draft_tokens", "context_length", "page_size", "chunked_prefill_size", "enable_mixed_chunk",
    "disable_radix_cache", "disable_cuda_graph", "enable_torch_compile", "enable_deterministic_inference", "chat_template",
    "json_model_override_args", "tokenizer_mode", "revision", "lora_paths", "enable_lora",
    "enable_eplb", "sampling_defaults", "reasoning_parser", "tool_call_parser", "disable_custom_all_reduce",
    "enable_flashinfer_allreduce_fusion", "rl_on_policy_target", "model_impl", "cuda_graph_config",
    "enable_fp32_lm_head", "mamba_ssm_dtype", "preferred_sampling_params", "enable_tf32_matmul", "bf16_gemm_backend",
    "triton_attention_reduce_in_fp32", "triton_attention_num_kv_splits", "linear_attn_backend", "linear_attn_decode_backend",
    "linear_attn_prefill_backend", "linear_attn_verify_backend", "dsa_prefill_backend", "dsa_decode_backend", "dsa_topk_backend",
    "flashinfer_mxfp4_moe_precision", "default_chat_template_kwargs", "hf_chat_template_name",
    "speculative_accept_threshold_single", "speculative_accept_threshold_acc", "prefill_kv_cache_dequant_dtype",
))  # fmt: skip


class Difference(Part):
    """A difference between two fingerprints, or a fault of one."""

    name: str = Field(
        description='the name for --allow: the part and its differing item, such as "rope" or "arguments.page_size"'
    )
    says: str = Field(description="a sentence without a full stop")
    outputs: bool = Field(description="whether it is known to change outputs")
    declared: str = Field(
        "",
        description="the setting that was meant to differ, --allow NAME, or a note that one side was loaded without a "
        "server, or an empty string if it is not declared",
    )
    details: tuple[str, ...] = Field((), description="further lines")

    @property
    def part(self) -> str:
        """The part of the fingerprint."""
        return self.name.partition(".")[0]

    @property
    def counts(self) -> bool:
        """True if it changes outputs and is not declared."""
        return self.outputs and not self.declared


# Faults of one fingerprint

JUDGED = ("tokens", "rope", "weights", "folder")
"""The parts that `faults` judges: those of a server, and the files of its model's folder."""


def faults(fingerprint: Fingerprint) -> list[Difference]:
    """List a fingerprint's own faults: contradictions of ``config.json``, and states that nobody intends."""
    return [
        *_rope_faults(fingerprint.rope or ()),
        *_token_faults(fingerprint.tokens),
        *_weight_faults(fingerprint.weights or ()),
        *(
            Difference(
                name="folder.wrong" if note.changes_outputs else "folder.note",
                says=note.says,
                outputs=note.changes_outputs,
            )
            for note in fingerprint.folder or ()
        ),
    ]


def _rope_faults(tables: Sequence[RopeTable]) -> Iterator[Difference]:
    by_words: dict[str, list[RopeTable]] = {}
    for table in tables:
        if table.wrong:
            by_words.setdefault(table.wrong, []).append(table)
    for words, wrong in by_words.items():
        yield Difference(
            name="rope.wrong",
            says=words,
            outputs=True,
            details=tuple(f"{table.name} ({table.kind})" for table in wrong),
        )


def _token_faults(tokens: Tokens | None) -> Iterator[Difference]:
    if tokens is None:
        return
    if tokens.written:
        first = next(iter(tokens.written))
        kind = f", which is read as {tokens.tokenizer}" if tokens.tokenizer else ""
        yield Difference(
            name="tokens.wrong",
            says=f"token ids of {counted(len(tokens.written), 'text')} of the corpus do not match tokenizer.json{kind}",
            outputs=True,
            details=(f"{first}: {_near(tokens.bare[first], tokens.written[first], 'as read', 'in tokenizer.json')}",),
        )
    if tokens.bos is None:
        return
    twice = [tokens.bos, tokens.bos]
    if doubled := [name for name, ids in tokens.chats.items() if list(ids[:2]) == twice]:
        yield Difference(
            name="tokens.wrong",
            says=f"two BOS tokens begin a chat ({few(doubled, _SHOWN)})",
            outputs=True,
            details=(f"{doubled[0]}: {list(tokens.chats[doubled[0]][:6])}",),
        )
    elif doubled := [name for name, ids in tokens.retold.items() if list(ids[:2]) == twice]:
        yield Difference(
            name="tokens.twice",
            says="two BOS tokens begin a chat that a client renders to text: the template has one, and the tokenizer adds one",
            outputs=False,  # true of most models: it matters only if a client does so, or if two servers differ
            details=(f"{doubled[0]}: {list(tokens.retold[doubled[0]][:6])}",),
        )


def _weight_faults(weights: Sequence[Weight]) -> Iterator[Difference]:
    for field, what in (
        ("not_in_checkpoint", "served, but missing from the checkpoint, wholly or in part"),
        ("unlike_checkpoint", "different from the checkpoint"),
        ("copies_differ", "different in processes that should hold identical copies"),
    ):
        if names := [weight.name for weight in weights if getattr(weight, field)]:
            says = f"{_some(names)} {_is(names)} {what}"
            yield Difference(name="weights.wrong", says=says, outputs=True, details=tuple(names[:20]))
    for kept in sorted({weight.kept for weight in weights if weight.kept}):
        narrow = [weight for weight in weights if weight.kept == kept and weight.dtype in ("bfloat16", "float16")]
        if narrow:
            yield Difference(
                name="weights.wrong",
                says=f"{kept} is {narrow[0].dtype}",
                outputs=True,
                details=tuple(weight.name for weight in narrow[:_SHOWN]),
            )


# Parts


def _tokens(left: Tokens, right: Tokens) -> Iterator[Difference]:
    classes = ""
    if left.tokenizer and right.tokenizer and left.tokenizer != right.tokenizer:
        classes = f" (tokenizer {left.tokenizer} in A, {right.tokenizer} in B)"
    for field, what in (
        ("bare", "texts"),
        ("texts", "texts with special tokens"),
        ("chats", "chats"),
        ("retold", "rendered chats"),
    ):
        ours, theirs = getattr(left, field), getattr(right, field)
        both = [name for name in ours if name in theirs]
        other = [name for name in both if tuple(ours[name]) != tuple(theirs[name])]
        if not other:
            continue
        first = other[0]
        bos = _added_bos(left, right, [(ours[name], theirs[name]) for name in other])
        yield Difference(
            name=f"tokens.{field}",
            says=bos
            or f"token ids differ in {len(other)} of {counted(len(both), 'text')} of the corpus{_kind(what)}{classes}",
            outputs=True,
            details=(
                f"{first}: {_near(ours[first], theirs[first])}",
                *([f"all: {', '.join(other)}"] if len(other) > 1 else []),
            ),
        )
        if field == "bare":
            break
    yield from _refused_chats(left, right)
    if classes and not left.bare:
        yield Difference(name="tokens.tokenizer", says=f"the tokenizers differ{classes}", outputs=False)
    for name in ("bos", "eos"):
        ours, theirs = getattr(left, name), getattr(right, name)
        if ours != theirs and left.tokenizer and right.tokenizer:  # a URL names neither
            yield Difference(name=f"tokens.{name}", says=f"{name.upper()} is {ours} in A, {theirs} in B", outputs=True)
    other = [name for name, count in left.counts.items() if right.counts.get(name, count) != count]
    if other:
        first = other[0]
        yield Difference(
            name="tokens.counts",
            says=f"{len(other)} of {counted(len(left.counts), 'chat')} {_has(other)} different numbers of prompt tokens ({first}: "
            f"{left.counts[first]} in A, {right.counts[first]} in B)",
            outputs=True,
        )
    other = [name for name, digest in left.digests.items() if right.digests.get(name, digest) != digest]
    if "template" in other:
        says = "the chat templates differ, but not for the chats of the corpus"
        same = left.chats == right.chats
        yield Difference(name="tokens.template", says=says if same else "the chat templates differ", outputs=True)
    if rules := [name.replace("_", " ") for name in other if name != "template"]:
        yield Difference(name="tokens.rules", says=f"the tokenizer's files differ in {listed(rules)}", outputs=True)


def _refused_chats(left: Tokens, right: Tokens) -> Iterator[Difference]:
    for side, own, other in ((A, left, right), (B, right, left)):
        if names := [name for name in own.refused if name in other.chats]:
            chats = "the chat" if len(names) == 1 else "the chats"
            yield Difference(
                name="tokens.chats",
                says=f"the chat template refuses {chats} {listed([repr(name) for name in names])} only in {side}",
                outputs=True,
                details=tuple(f"{name}: {own.refused[name]}" for name in names),
            )


def _kind(what: str) -> str:
    return "" if what == "texts" else f" ({what})"


def _added_bos(left: Tokens, right: Tokens, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str:
    """State that the only difference is an additional BOS on one side, or return "" if there are others."""
    for side, tokens, longer in ((B, right, 1), (A, left, 0)):
        if tokens.bos is not None and all(list(pair[longer]) == [tokens.bos, *pair[1 - longer]] for pair in pairs):
            twice = all(list(pair[1 - longer][:1]) == [tokens.bos] for pair in pairs)
            return f"two BOS tokens in {side}, one in the other" if twice else f"BOS begins every text only in {side}"
    return ""


def _near(ours: Sequence[int], theirs: Sequence[int], left: str = "in A", right: str = "in B") -> str:
    """Show where two lists of ids diverge."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    begin = max(0, at - 2)
    return f"from token {at} on, {list(ours[begin : at + 4])} {left}, {list(theirs[begin : at + 4])} {right}"


def _ropes(left: Sequence[RopeTable], right: Sequence[RopeTable]) -> Iterator[Difference]:
    for ours, theirs in _paired(left, right):
        if len(ours.frequencies) != len(theirs.frequencies):
            says = f"RoPE rotates {2 * len(ours.frequencies)} dims per head in A, {2 * len(theirs.frequencies)} in B"
        elif not same_frequencies(ours.frequencies, theirs.frequencies, 2.0**-8 if _coarse(ours, theirs) else 2.0**-12):
            says = _frequencies(ours, theirs)
        elif abs(ours.scale - theirs.scale) > 2.0**-10 * abs(ours.scale):
            says = f"cos and sin are scaled by {ours.scale:.4g} in A, {theirs.scale:.4g} in B"
        elif ours.rows and theirs.rows and ours.dtype != theirs.dtype:
            says = f"cos and sin are {ours.dtype} in A, {theirs.dtype} in B"
        elif _other_rows(ours, theirs):
            says = (
                f"cos and sin are off by up to {ours.error:.2g} in A, {theirs.error:.2g} in B, at the same frequencies"
            )
        else:
            continue
        where = f" (layers {ours.layers})" if ours.layers and len(left) > 1 else ""
        yield Difference(name="rope.table", says=says + where, outputs=True, details=(f"{ours.name}; {theirs.name}",))
    if len(left) != len(right):
        yield Difference(
            name="rope.table",
            says=f"{counted(len(left), 'RoPE table')} in A, {len(right)} in B",
            outputs=bool(left and right),
        )


def _other_rows(ours: RopeTable, theirs: RopeTable) -> bool:
    """Return True if tables of equal size and dtype have different errors, beyond the rounding of inferred frequencies."""
    if ours.error is None or theirs.error is None or ours.rows != theirs.rows or ours.digest == theirs.digest:
        return False
    return not abs(ours.error - theirs.error) <= 4 * ours.rows * 2.0 ** -(7 if _coarse(ours) else 23)


def _coarse(*tables: RopeTable) -> bool:
    return any(table.dtype in ("bfloat16", "float16") for table in tables)


def _paired(left: Sequence[RopeTable], right: Sequence[RopeTable]) -> list[tuple[RopeTable, RopeTable]]:
    """Pair each table with the closest one, since names and order depend on the package."""
    pairs, rest = [], list(right)
    for ours in left:
        if rest:
            closest = min(rest, key=lambda table: _far(ours.frequencies, table.frequencies))
            rest.remove(closest)
            pairs.append((ours, closest))
    return pairs


def _far(left: Sequence[float], right: Sequence[float]) -> float:
    if len(left) != len(right):
        return math.inf
    return sum(abs(math.log(max(a, 1e-30) / max(b, 1e-30))) for a, b in zip(left, right, strict=True))


# Mean log ratio of frequencies that bfloat16 explains: its cosines have 3 digits.
_ROUNDED = 0.01


def _frequencies(ours: RopeTable, theirs: RopeTable) -> str:
    if ours.dtype != theirs.dtype and _far(ours.frequencies, theirs.frequencies) < _ROUNDED * len(ours.frequencies):
        return f"cos and sin are {ours.dtype} in A, {theirs.dtype} in B"
    bases = [read_theta(table.frequencies) for table in (ours, theirs)]
    if all(bases):
        a, b = (f"{float(f'{base:.4g}'):,.0f}" for base in bases if base)
        return f"rope_theta is {a} in A, {b} in B"
    ratios = [a / b for a, b in zip(ours.frequencies, theirs.frequencies, strict=True)]
    if max(ratios) - min(ratios) < 0.01 * max(ratios):
        return f"RoPE frequencies in A are {ratios[0]:.4g} times those in B"
    count = sum(abs(ratio - 1) > 2.0**-8 for ratio in ratios)
    return f"{count} of {len(ratios)} RoPE frequencies differ, the last by a factor of {ratios[-1]:.4g}"


@dataclass(frozen=True)
class _Changed:
    weight: Weight
    far: float | None
    to: str = ""
    order: bool = False


def _weights(left: Sequence[Weight], right: Sequence[Weight]) -> Iterator[Difference]:
    ours, theirs = by_canonical_name(left, right)
    for side, own, other_side in ((A, ours, theirs), (B, theirs, ours)):
        if missing := [name for name in own if name not in other_side]:
            says = f"{_some(missing)} {_is(missing)} only in {side}"
            yield Difference(name="weights.missing", says=says, outputs=True)
    both = [name for name in ours if name in theirs]
    changed = [change for change in (_changed(ours[name], theirs[name]) for name in both) if change is not None]
    other = [change for change in changed if not change.to and not change.order]
    if other:
        yield _other_weights(other, both)
    if names := [change.weight.name for change in changed if change.order]:
        yield Difference(
            name="weights.order",
            says=f"{len(names)} of {counted(len(both), 'parameter')} {_has(names)} the same numbers in another order: "
            f"{few(names, _SHOWN)}",
            outputs=True,
            details=tuple(names[:20]),
        )
    for to in sorted({change.to for change in changed if change.to}):
        rounded = [change for change in changed if change.to == to]
        kept = next((change.weight.kept for change in rounded if change.weight.kept), "")
        a, b = ours[rounded[0].weight.name], theirs[rounded[0].weight.name]
        in_a = to in (a.grid, a.dtype) and to not in (b.grid, b.dtype)
        yield Difference(
            name="weights.dtype",
            says=f"{len(rounded)} of {counted(len(both), 'parameter')} are the same weights rounded to {to} in {A if in_a else B}"
            + (f", {kept} included" if kept else ""),
            outputs=True,
            details=(
                f"{rounded[0].weight.name}: {_dtypes(a)} in A, {_dtypes(b)} in B, relative distance {rounded[0].far:.2g}",
            ),
        )
    stored = [
        name
        for name in both
        if ours[name].dtype != theirs[name].dtype and name not in {change.weight.name for change in changed}
    ]
    for pair in sorted({(ours[name].dtype, theirs[name].dtype) for name in stored}):
        names = [name for name in stored if (ours[name].dtype, theirs[name].dtype) == pair]
        yield Difference(
            name="weights.dtype",
            says=f"{_some(names)} {_is(names)} {pair[0]} in A, {pair[1]} in B, with the same values",
            outputs=False,  # the device and its arguments decide the compute dtype, and they are compared separately
        )


def _dtypes(weight: Weight) -> str:
    return weight.dtype + (f" with values of {weight.grid}" if weight.grid and weight.grid != weight.dtype else "")


def _changed(ours: Weight, theirs: Weight) -> _Changed | None:
    if same_bytes(ours, theirs):
        return None
    far = distance(ours, theirs)
    if far is not None and same_numbers(far):
        return None
    to = rounded_to(ours, theirs, far) if far is not None else ""
    in_any_order = distance_in_any_order(ours, theirs)
    return _Changed(ours, far, to, not to and in_any_order is not None and same_numbers(in_any_order))


def in_any_order(left: Fingerprint, right: Fingerprint) -> str:
    """Name the parameters compared only by their sums, which do not depend on order, or return "" if there are none."""
    ours, theirs = by_canonical_name(left.weights or (), right.weights or ())
    names = [
        name
        for name, weight in ours.items()
        if name in theirs
        and weight.sums
        and not same_bytes(weight, theirs[name])
        and not by_projections(weight, theirs[name])
        and not by_rank(weight, theirs[name])
    ]
    if not names:
        return ""
    return f"of {_some(names)}: not known which parts each rank holds; compare equal numbers of ranks"


def _other_weights(other: Sequence[_Changed], both: Sequence[str]) -> Difference:
    shaped = [change for change in other if change.far is None]
    if shaped:
        names = [change.weight.name for change in shaped]
        says = f"{_some(names)} {_is(names)} of a different shape or kind"
        return Difference(name="weights.other", says=says, outputs=True)
    worst = max(other, key=lambda change: change.far or 0.0)
    names = [change.weight.name for change in sorted(other, key=lambda change: -(change.far or 0.0))]
    sharded = any(not change.weight.projections for change in other)
    return Difference(
        name="weights.other" if 2 * len(other) > len(both) else "weights.some",
        says=f"{len(other)} of {counted(len(both), 'parameter')} {_has(other)} different weights: {few(names, _SHOWN)}"
        + ("" if sharded else f" (relative distance up to {worst.far:.2g})"),
        outputs=True,
        details=tuple(names[:20]),
    )


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} parameters ({few(names, 2)})"


def _is(names: Sequence[Any]) -> str:
    return "is" if len(names) == 1 else "are"


def _has(names: Sequence[Any]) -> str:
    return "has" if len(names) == 1 else "have"


def _backends(left: Sequence[Resolved], right: Sequence[Resolved]) -> Iterator[Difference]:
    phases: dict[tuple[str, str], list[str]] = {}
    for operation, phase in dict.fromkeys((resolved.operation, resolved.phase) for resolved in (*left, *right)):
        ours, theirs = (
            {
                resolved.runs: resolved.layers
                for resolved in side
                if (resolved.operation, resolved.phase) == (operation, phase)
            }
            for side in (left, right)
        )
        if ours != theirs:
            phases.setdefault((operation, f"{_runs(ours)} in A, {_runs(theirs)} in B"), []).append(phase)
    for (operation, says), of in phases.items():
        only = f" ({of[0]})" if len(of) == 1 and of[0] else ""
        yield Difference(name=f"backends.{operation}", says=f"{operation}{only}: {says}", outputs=True)


def _runs(names: Mapping[str, str]) -> str:
    """State which layers run which backend: "triton (layers 7-11), flashinfer (layers 0-6)"."""
    if len(names) <= 1:
        return next(iter(names), "nothing")
    return ", ".join(f"{name} (layers {layers})" for name, layers in names.items())


def _ignored(left: Sequence[str], right: Sequence[str]) -> Iterator[Difference]:
    for side, own, other in ((A, left, right), (B, right, left)):
        for says in own:
            if says not in other:
                yield Difference(name="ignored", says=f"{side}: {says}", outputs=True)


def _positions(left: Sequence[int], right: Sequence[int]) -> Iterator[Difference]:
    both = min(len(left), len(right))  # prompts of different lengths begin alike
    if tuple(left[:both]) != tuple(right[:both]):
        yield Difference(
            name="positions", says=f"position ids are {_few_ids(left)} in A, {_few_ids(right)} in B", outputs=True
        )


def _few_ids(ids: Sequence[int]) -> str:
    return f"{list(ids[:4])}".replace("]", ", ...]" if len(ids) > 4 else "]")


_Value = str | None


def _mapping(part: str, what: str, outputs: Callable[[str, _Value, _Value], bool] = lambda *_: True) -> Any:
    """Make the comparison for a part that maps names to values. `outputs` decides if a difference changes outputs."""

    def differences(left: Mapping[str, str], right: Mapping[str, str]) -> Iterator[Difference]:
        for name in sorted(left.keys() | right.keys()):
            ours, theirs = left.get(name), right.get(name)
            if ours == theirs:
                continue
            counts = outputs(name, ours, theirs)
            decides = f": it decides {CHANGE_NUMBERS[name][1]}" if counts and part == "environment" else ""
            says = f"{what.format(name=name)} is {_shown(ours)} in A, {_shown(theirs)} in B{decides}"
            yield Difference(name=f"{part}.{name}", says=says, outputs=counts)

    return differences


def _argument_counts(name: str, ours: _Value, theirs: _Value) -> bool:
    return name.partition(".")[0] in _NUMBERS


def _variable_counts(name: str, ours: _Value, theirs: _Value) -> bool:
    return name in CHANGE_NUMBERS and as_read(name, ours) != as_read(name, theirs)


def _shown(value: str | None) -> str:
    return "absent" if value is None else value or "empty"


COMPARED: Mapping[str, Any] = {
    "tokens": _tokens,
    "generation": _mapping("generation", "the default of {name}"),
    "positions": _positions,
    "rope": _ropes,
    "config": _mapping("config", "the model's setting {name}"),
    "weights": _weights,
    "adapters": _mapping("adapters", "the LoRA adapter {name}"),
    "quantisation": _mapping("quantisation", "quantisation: {name}"),
    "experts": _mapping("experts", "the expert map of layer {name}"),
    "backends": _backends,
    "ignored": _ignored,
    "arguments": _mapping("arguments", "{name}", _argument_counts),
    "environment": _mapping("environment", "{name}", _variable_counts),
    "packages": _mapping("packages", "{name}"),
    "hardware": _mapping("hardware", "{name}"),
}
"""Comparisons of each part of two fingerprints, by name. Each yields the differences."""
