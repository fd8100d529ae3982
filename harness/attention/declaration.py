"""The declaration of a kernel's capabilities, and the decorator `declares` that attaches it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from assay.harness.attention.call import FEATURES, AttentionCall, Kernel
from assay.harness.attention.forms import FORMS, lacking, unknown
from assay.harness.attention.noise import NoiseFamily, family
from assay.harness.conditions import PHASES

# A pattern that matches one of these would match any name, and prove nothing.
_LETTERS = ("", "a", "k", "_", ":", "0")


@dataclass(frozen=True)
class Declaration:
    """A kernel's declaration: the arguments of `declares`, with `noise` as a name. The default is for kernels without one.

    An adapted function also has `ways`: the `CallSpec.ways` of its signature. A check draws some for each call.
    """

    phases: tuple[str, ...] = PHASES
    package: str = ""
    about: str = ""
    noise: str = ""
    kernels: tuple[str, ...] = ()
    head_dims: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    prefix: bool = True
    head_dims_v: tuple[int, ...] = ()
    features: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()

    def excludes(self, call: AttentionCall) -> str:
        """Explain why it does not cover a call, such as "head_dim 80", or return an empty string if it does."""
        head_dim, dtype = call.q.shape[2], str(call.q.dtype).removeprefix("torch.")
        if self.head_dims is not None and head_dim not in self.head_dims:
            return f"head_dim {head_dim}"
        if self.dtypes is not None and dtype not in self.dtypes:
            return dtype
        if not self.prefix and call.causal and max(call.prefixes, default=0) > 0:
            return "a cached prefix"
        return ", ".join(lacking(self.features, call))


def declares(
    phases: tuple[str, ...] | None = None,
    package: str = "",
    about: str = "",
    noise: str | NoiseFamily = "",
    kernels: tuple[str, ...] = (),
    head_dims: tuple[int, ...] | None = None,
    dtypes: tuple[str, ...] | None = None,
    prefix: bool = True,
    head_dims_v: tuple[int, ...] = (),
    features: tuple[str, ...] = (),
) -> Callable[[Kernel], Kernel]:
    """Declare a kernel's capabilities: a decorator. A kernel without a declaration is assumed to compute every phase.

    Args:
        phases: phases that it computes. The reference backend computes the others, and the report says so. None means both, or
            only extend if `prefix` is false.
        package: the distribution that contains it, if any; reports show its version.
        about: one line of description.
        noise: the noise family of its output: a name, such as "int8_qk", or a composition, such as
            `NoiseFamily(k=Quantised("int8", "token"), v=Quantised("e4m3", "head"))`, or an empty string for only the rounding of
            its dtype. It limits the error from above and from below: a kernel with less noise than it declares fails a check.
        kernels: device kernels that it launches, such as ``("_attn_fwd$", "quant_per_block")``: regular expressions, each to be
            found in the name of a kernel that ran. Names are those that a profiler shows: of a Triton function, of a CUDA kernel,
            or of an operator of PyTorch (``aten::bmm``). A run traces passes of each phase, and passes only if all of these
            kernels ran. By default, they are the Triton functions that `package` defines; a kernel that declares `noise` without
            either cannot pass a run.

        head_dims: head dims that it computes, by default all. A check covers only these, and says so.
        dtypes: dtypes that it computes, for example ``("float16", "bfloat16")``, by default all.
        prefix: whether it computes calls with a cached prefix. A kernel only for complete prompts does not, and has no decode.
        head_dims_v: head dims of v that it computes, in addition to that of q and k: ``(128,)`` with ``head_dims=(192,)`` for
            DeepSeek's prefill. A check asks for no others.
        features: the `assay.harness.attention.call.FEATURES` that it supports. Calls that ask for another are refused. With "lse"
            it returns log-sum-exps on every call; see `Outputs`. For "stored_kv" it may name the supported forms: ``"stored_kv:
            e4m3 per tensor"``. A check asks for these, and lists others as not covered.

    Raises:
        ValueError: no phase or an unknown one, an unknown feature or form, no head dim or dtype, no such noise family, or a name
            that is not a regular expression or matches any name.
    """
    if strange := unknown(features):
        raise ValueError(
            f"a kernel declares the features {strange}; expected some of {', '.join(FEATURES)}; or forms of stored_kv, "
            f"as 'stored_kv: {FORMS[0]}', of: {', '.join(FORMS)}"
        )
    if phases is None:
        phases = PHASES if prefix else ("extend",)
    if not phases or set(phases) - set(PHASES):
        raise ValueError(f"a kernel declares the phases {phases}; expected one or more of {PHASES}")
    if not prefix and "decode" in phases:
        raise ValueError(
            "a kernel declares decode and prefix=False; expected extend alone: a decode call has a cached prefix"
        )
    for what, values in (("head_dims", head_dims), ("dtypes", dtypes)):
        if values is not None and (not values or isinstance(values, str)):
            raise ValueError(f"a kernel declares {what}={values!r}; expected a tuple of at least one, or None for all")
    name = noise.name if isinstance(noise, NoiseFamily) else family(noise).name
    for pattern in kernels:
        try:
            in_any_name = any(re.search(pattern, letter) for letter in _LETTERS)
        except re.error as error:
            raise ValueError(f"a kernel declares {pattern!r}, which is not a regular expression: {error}") from None
        if in_any_name:
            raise ValueError(
                f"a kernel declares {pattern!r}, which any kernel's name matches; expected a part of its own kernels' names"
            )

    def attach(kernel: Kernel) -> Kernel:
        vars(kernel)["assay"] = Declaration(
            phases, package, about, name, kernels, head_dims, dtypes, prefix, tuple(head_dims_v), tuple(features)
        )
        return kernel

    return attach


def declaration(kernel: Kernel) -> Declaration:
    """Return the kernel's declaration, or the default with every phase if it has none."""
    declaration = getattr(kernel, "assay", None)
    return declaration if isinstance(declaration, Declaration) else Declaration()
