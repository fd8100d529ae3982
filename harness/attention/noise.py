"""Noise families: declarations of the values that a kernel stores or accumulates in fewer bits than the call's dtype.

A family is a composition: the storage of Q, K, V and of the softmax weights P, and the arithmetic of both products.
`assay.harness.attention.honest` simulates its error on a call, from which lower and upper limits follow.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

_Granularity = Literal["tensor", "head", "block", "token", "none"]
_Arithmetic = Literal["fp32", "tf32", "fp16"]
_STORED = ("q", "k", "v", "p")


@dataclass(frozen=True)
class NumberFormat:
    """A format of few bits. A new one is a row of `FORMATS`.

    Attributes:
        largest: its largest number.
        relative_error: root mean square of its rounding error, relative to that of the values. With m bits of mantissa
            2^-(m+1) / sqrt(3), averaged over a binade; int8: a step of 1/127 of the largest of a block of normal values, 4 standard
            deviations, over sqrt(12).
        mantissa: bits of mantissa that are stored, or None for integers.
        least: exponent of its smallest normal numbers; below, steps stay the same.
        scaled: whether a scale maps the largest magnitude of a tensor or a part of it to `largest`.
    """

    largest: float
    relative_error: float
    mantissa: int | None = None
    least: int = 0
    scaled: bool = True


FORMATS = {
    "int8": NumberFormat(127.0, 0.009),
    "e4m3": NumberFormat(448.0, 0.026, mantissa=3, least=-6),
    "e5m2": NumberFormat(57344.0, 0.052, mantissa=2, least=-14),
    "fp16": NumberFormat(65504.0, 2**-12, mantissa=10, least=-14, scaled=False),
}
"""int8 (symmetric), FP8 (OCP 8-bit floating point) and fp16, by name."""


@dataclass(frozen=True)
class Quantised:
    """The format in which a tensor is stored.

    Attributes:
        format: a name of `FORMATS`.
        per: the part that shares a scale: the whole tensor, a head, a block of tokens of a head, or a token of a head; "none" if
            numbers are stored without one. "fp16" has no scale.
        smooth: whether the mean over tokens is subtracted first, which only K allows (arXiv 2410.02367, section 4.2).
    """

    format: str
    per: _Granularity = "block"
    smooth: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS or self.per not in get_args(_Granularity):
            raise ValueError(
                f"no storage {self.format!r} per {self.per!r}; expected a format of {', '.join(FORMATS)} "
                f"and a scale per {', '.join(get_args(_Granularity))}"
            )

    def __str__(self) -> str:
        per = f"-{self.per}" if FORMATS[self.format].scaled else ""
        return f"{self.format}{per}{'-smooth' * self.smooth}"


@dataclass(frozen=True)
class NoiseFamily:
    """The values that a kernel stores and computes in fewer bits than the call's dtype.

    Attributes:
        q: storage of Q, or None for the call's dtype.
        k: storage of K.
        v: storage of V.
        p: storage of the softmax weights on their way into the product with V, or None for the call's dtype.
        accumulation: arithmetic of both products: "fp32"; "tf32", in which float32 operands have 10 bits of mantissa; or "fp16", in
            which sums are kept in fp16.
        dropped: share of a query's weights that a kernel may drop, for example by skipping blocks of small weights or attending
            only to the largest scores: 0.01 for one percent. The others are divided by their own sum.
        merged: whether the outputs on the cached keys of a sequence and on its new ones are stored in the call's dtype, and then
            merged by their log-sum-exps.
    """

    q: Quantised | None = None
    k: Quantised | None = None
    v: Quantised | None = None
    p: Quantised | None = None
    accumulation: _Arithmetic = "fp32"
    dropped: float = 0.0
    merged: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.dropped < 1:
            raise ValueError(f"a share of {self.dropped} of the weights is dropped; expected one from 0 to below 1")
        if self.accumulation not in get_args(_Arithmetic):
            raise ValueError(f"no arithmetic {self.accumulation!r}; expected one of {', '.join(get_args(_Arithmetic))}")
        if any(stored is not None and stored.smooth for stored in (self.q, self.v, self.p)):
            raise ValueError("only K can be smoothed: its mean shifts all scores of a query alike")

    @property
    def name(self) -> str:
        """Its name in `FAMILIES`, or its parts, such as "k:int8-token,v:e4m3-head"; empty for the exact family."""
        known = next((name for name, family in FAMILIES.items() if family == self), None)
        if known is not None:
            return known
        parts = [f"{what}:{stored}" for what in _STORED if (stored := getattr(self, what)) is not None]
        parts += [f"accumulation:{self.accumulation}"] * (self.accumulation != "fp32")
        parts += ["merged:prefix"] * self.merged
        return ",".join(parts + [f"dropped:{self.dropped:g}"] * (self.dropped > 0))

    @property
    def quantises(self) -> bool:
        """True if something is stored in 8 bits or fewer: the rounding of fp16 cannot hide that error."""
        return any(
            isinstance(stored, Quantised) and FORMATS[stored.format].scaled
            for stored in (getattr(self, f.name) for f in fields(self))
        )

    @property
    def beside_fp8(self) -> bool:
        """True if only Q and weights are stored, in FP8 without scales: they are cast to the dtype of K and V."""
        return self.q == self.p == _E4M3_AS_IT_COMES and self.k is None and self.v is None

    @property
    def has_least(self) -> bool:
        """True if a kernel of this family must have at least some share of its error.

        One that casts Q and weights to the dtype of a cache need not read new tokens from there, as triton does not.
        """
        return self.quantises and not self.beside_fp8


_INT8, _FP16, _E4M3 = Quantised("int8"), Quantised("fp16"), Quantised("e4m3", "tensor")
_E4M3_AS_IT_COMES = Quantised("e4m3", "none")
_SMOOTH = Quantised("int8", "block", smooth=True)
FAMILIES: dict[str, NoiseFamily] = {
    "": NoiseFamily(),
    "int8_qk": NoiseFamily(q=_INT8, k=_SMOOTH, v=_FP16, p=_FP16),
    "int8_kv": NoiseFamily(k=Quantised("int8", "token"), v=Quantised("int8", "token")),
    "fp8_kv": NoiseFamily(k=_E4M3, v=_E4M3),
    "fp8_e5m2_kv": NoiseFamily(k=Quantised("e5m2", "tensor"), v=Quantised("e5m2", "tensor")),
    "fp8_pv": NoiseFamily(v=_E4M3, p=_E4M3),
    "fp8_qkv": NoiseFamily(q=_E4M3, k=_E4M3, v=_E4M3, p=_E4M3),
    "int8_qk_fp8_pv": NoiseFamily(q=_INT8, k=_SMOOTH, v=Quantised("e4m3", "head"), p=_E4M3),
    "fp8_qp": NoiseFamily(q=_E4M3_AS_IT_COMES, p=_E4M3_AS_IT_COMES),
    "tf32": NoiseFamily(accumulation="tf32"),
    "fp16_accumulation": NoiseFamily(accumulation="fp16"),
    "merged_prefix": NoiseFamily(merged=True),
}
"""Families that have a name.

"int8_qk" is SageAttention's: K minus its mean, Q and K in int8 with a scale per block of a head, weights and values in fp16 (arXiv
2410.02367). "int8_qk_fp8_pv" is SageAttention2's (arXiv 2411.10958), "fp8_qkv" FlashAttention-3's in FP8 (arXiv 2407.08608).
"fp8_kv" and "fp8_e5m2_kv" are the caches of vLLM and SGLang (``--kv-cache-dtype fp8_e4m3`` and ``fp8_e5m2``), and "fp8_qp" is what
SGLang's triton does with such a cache: it casts queries and weights to the dtype of K and V, without scales. "merged_prefix" is
what SGLang's flashinfer does after a cached prefix, by ``merge_state``."""

BESIDE_FP8 = "fp8_qp"


def family(name: str) -> NoiseFamily:
    """Return the family of a name of `FAMILIES`, or of parts as `NoiseFamily.name` gives them.

    Raises:
        ValueError: the family does not exist.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    try:
        return NoiseFamily(**dict(_part(part) for part in name.split(",")))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"no noise family is called {name!r}; expected one of {', '.join(filter(None, FAMILIES))}, or parts such as "
            f"k:int8-token,v:e4m3-head ({error})"
        ) from None


def _part(text: str) -> tuple[str, Quantised | str | float]:
    what, _, value = text.partition(":")
    if text == "merged:prefix":
        return what, True
    if what == "accumulation":
        return what, value
    if what == "dropped":
        return what, float(value)
    if what not in _STORED:
        raise ValueError(f"{what!r} is neither accumulation, dropped, merged:prefix nor one of {', '.join(_STORED)}")
    smooth = value.endswith("-smooth")
    stored, _, per = value.removesuffix("-smooth").partition("-")
    return what, Quantised(stored, per or "block", smooth)  # type: ignore[arg-type]
