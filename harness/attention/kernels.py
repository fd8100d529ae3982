"""Names, loads and runs kernels.

A kernel is a function of the contract (`assay.harness.attention.call.Kernel`), published in the entry-point group ``assay.kernels``
or named directly as ``module:function``. It may declare what it computes (`assay.harness.attention.declaration`). One of
an engine's own attention backends is a kernel too, as ``sglang:triton``; and so is a function with a signature that is known
(`assay.harness.attention.adapters`), as ``flash_attn:flash_attn_varlen_func``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused, tensor_of
from assay.harness.attention.declaration import declaration
from assay.harness.attention.forms import lacking
from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.attention.published import adapter_and_path, module_of, native_backend, working_folder_searched
from assay.harness.attention.published import is_path as is_path
from assay.harness.attention.published import published as published
from assay.harness.errors import UsageError
from assay.harness.text import did_you_mean, one_line

if TYPE_CHECKING:  # see assay.harness.attention.call
    from torch import Tensor

_A_CLASS, _NO_ARGUMENT = "it is a class, not an instance", "it takes no argument"


def load(name: str) -> Kernel:
    """Return the kernel of a published name, a ``module:function`` path, or an engine's own backend, as ``sglang:triton``.

    The signature of a function is recognised, unless it is named, as ``flash_attn@module:function``.

    Raises:
        KernelRefused: the kernel does not exist or cannot be imported; or the backend cannot compute on this machine.
    """
    native = native_backend(name)
    path = native[0] if native else name if is_path(name) else published().get(name)
    if path is None:
        raise KernelRefused(f"no kernel is named {name!r}; published are {', '.join(sorted(published()))}")
    adapter, at_path = ("", path) if native else adapter_and_path(path)
    module, _, attribute = at_path.partition(":")
    if not module or not attribute:
        raise KernelRefused(f"kernel {name!r} names no {'function' if module else 'module'}")
    what = f"kernel {name!r}" if path == name or native else f"kernel {name!r} ({path})"
    interpret_without_gpu()
    try:
        with working_folder_searched(module), exits_raised():
            kernel: Any = importlib.import_module(module)
            for part in attribute.split("."):
                kernel = getattr(kernel, part)
            if native:
                kernel = kernel(native[1])
    except (ImportError, AttributeError) as error:
        raise KernelRefused(f"{what} cannot be imported: {error}") from error
    except SystemExit as error:  # as assay's own exit code, 0 would be a pass
        raise KernelRefused(
            f"{what} cannot be imported: its module ends the process with status {error.code}"
        ) from error
    except (KernelRefused, KeyboardInterrupt):  # of an engine's own backend, with its reason; of the user
        raise
    except BaseException as error:  # the kernel's code may raise anything
        raise KernelRefused(f"{what} cannot be imported: its module raises {_raised(error)}") from error
    if not callable(kernel):
        raise KernelRefused(f"{what} is {type(kernel).__name__}, expected a function of an AttentionCall")
    return taking_calls(what, kernel, adapter)


def taking_calls(what: str, function: Callable[..., Any], adapter: str = "") -> Kernel:
    """Return a kernel of the contract: the function itself if it takes a call, or else an adapter of it.

    Args:
        what: the function, for errors.
        function: the function, or a class with `plan` and `run`, like FlashInfer's wrappers.
        adapter: name of its signature, or an empty string to recognise it.

    Raises:
        KernelRefused: it takes no call, and has no known signature.
    """
    kernel: Kernel = function
    fault = _signature_fault(function)
    if not (fault or adapter or inspect.isbuiltin(function)):
        return kernel
    if fault in (_A_CLASS, _NO_ARGUMENT) and not adapter:
        raise KernelRefused(f"{what} takes no call: {fault}")
    from assay.harness.attention.adapters.table import adapted  # brings torch along

    try:
        return adapted(function, adapter)
    except KernelRefused as error:
        if not (fault or adapter):  # a built-in function whose parameters are not known
            return kernel
        raise KernelRefused(f"{what} takes no call: {fault and fault + '; '}{error}") from None


def _raised(error: BaseException) -> str:
    """Describe an exception and the last line that it passed: "ValueError: no licence (mine.py, line 3)"."""
    if isinstance(error, SyntaxError):
        name, line, said = error.filename or "", error.lineno, error.msg
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        name, line, said = last.filename, last.lineno, str(error)
    return f"{type(error).__name__}: {one_line(said)} ({Path(name).name}, line {line})"


def _signature_fault(kernel: Callable[..., Any]) -> str:
    """Explain why a callable cannot be called with one argument, or return an empty string."""
    if inspect.isclass(kernel) and hasattr(kernel, "plan") and hasattr(kernel, "run"):
        return "it is a class"
    try:
        signature = inspect.signature(kernel)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(None)
    except TypeError as error:
        if inspect.isclass(kernel):
            return _A_CLASS
        return str(error) if signature.parameters else _NO_ARGUMENT
    return ""


@contextmanager
def exits_raised() -> Iterator[None]:
    """Turn ``os._exit`` of this process into `SystemExit`, so that a module cannot end a run before it has a report."""
    kept, process = os._exit, os.getpid()

    def raise_exit(status: int) -> NoReturn:
        if os.getpid() != process:  # a process that the module forked may end
            kept(status)
        raise SystemExit(status)

    os._exit = raise_exit
    try:
        yield
    finally:
        os._exit = kept


def find(flag: str, name: str) -> Kernel:
    """Load the kernel that a user named: `load`, with a usage error that states the remedy.

    Args:
        flag: the flag that named it, for the error, or an empty string for an argument.
        name: the name.

    Raises:
        UsageError: the kernel does not exist, or cannot be imported.
    """
    try:
        return load(name)
    except KernelRefused as error:
        expected, do = "a published kernel, or a function of an AttentionCall as module:function", "see assay backends"
        engine = name.partition(":")[0] if native_backend(name) else ""
        if engine:
            expected = "an attention backend of the engine that computes on this machine"
            is_missing = isinstance(error.__cause__, ImportError) and error.__cause__.name == engine
            do = f"install {engine}" if is_missing else "name another one, or install what this one needs"
        elif isinstance(error.__cause__, ImportError):
            module = module_of(name) if is_path(name) else ""
            do = _respelt(name) or _advice(error.__cause__, module)
        elif isinstance(error.__cause__, SystemExit):
            do = "remove the call that ends the process when the module is imported"
        elif is_path(name):
            do = _advice_on_path(name, error.__cause__)
        else:
            module = name.removesuffix(".py")
            named = f"{module} is a module: name its function too, as {module}:FUNCTION" if _is_module(module) else ""
            do = named or _respelt(name) or did_you_mean(name, sorted(published())) or do
        refusal = f"{flag}: {error}." if flag else f"{str(error)[0].upper()}{str(error)[1:]}."
        raise UsageError(refusal, expected, do) from None


def _advice_on_path(name: str, cause: BaseException | None) -> str:
    """Advise on a ``module:function`` path that is not a kernel, with the exception that its import raised, if any."""
    module, _, function = adapter_and_path(name)[1].partition(":")
    if not module or not function:
        return f"name both, as {module or 'MODULE'}:{function or 'FUNCTION'}"
    if isinstance(cause, Exception) and not isinstance(cause, AttributeError):
        return f"fix the module until this runs cleanly: python -c 'import {module}'"
    named = getattr(sys.modules.get(module), function, None)
    if callable(named):
        adapter, path = adapter_and_path(name)
        signature = "" if adapter else f"; or name its signature, as flash_attn@{path}"
        return (
            "name a function of one argument, an AttentionCall, or an instance of a class that has such a __call__: "
            f"def forward(call): return f(call.q, call.k, call.v, ...){signature}"
        )
    near = did_you_mean(function, _functions_of(module))
    return near.replace("did you mean '", f"did you mean '{module}:") or "check the name of the function"


def _respelt(name: str) -> str:
    """Advise on a name that means ``module:function`` but is a path or has a dot, or return an empty string."""
    module, colon, function = name.partition(":")
    file = Path(module)
    if file.is_absolute() and file.suffix == ".py" and file.is_file():
        return f"kernels are named as modules: in {file.parent}, write it as {file.stem}:{function or 'FUNCTION'}"
    module = module.removeprefix("./").removesuffix(".py").replace("/", ".")
    if not colon:
        module, _, function = module.rpartition(".")
    spelt = f"{module}:{function or 'FUNCTION'}"
    return f"write it as {spelt}" if module and spelt != name and _is_module(module) else ""


def _is_module(name: str) -> bool:
    """Return True if a module of this name can be imported here. Imports the package around it to find out."""
    try:
        with working_folder_searched(name):
            return all(part.isidentifier() for part in name.split(".")) and importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _functions_of(module: str) -> list[str]:
    """List the names of everything that can be called in a module that was imported."""
    return [key for key, value in vars(sys.modules.get(module, object)).items() if callable(value)]


def missing_package(error: ImportError) -> UsageError:
    """Make the error for a kernel that raised an ImportError when called: an incomplete installation is not its bug."""
    return UsageError(f"The kernel cannot run here: {error}.", "every package that it imports", _advice(error))


def _advice(error: ImportError, module: str = "") -> str:
    """Advise on an ImportError. `module` is the kernel's own, or empty if it was not named by its module."""
    missing = error.name or "the missing package"
    if (
        not isinstance(error, ModuleNotFoundError) and error.name
    ):  # the module exists, but not the name imported from it
        return f"correct the import, or install the version of {missing.partition('.')[0]} that it was written for"
    if module and f"{module}.".startswith(f"{missing}."):
        return f"run in the folder that contains {missing.partition('.')[0]}, or add that folder to PYTHONPATH"
    return f"install {missing.partition('.')[0]}"


def output_fault(call: AttentionCall, out: object) -> str:
    """Describe how an output breaks the contract, "found, expected ...", or return an empty string."""
    return tensor_fault(out, call.q, (*call.q.shape[:2], call.v.shape[2]))


def lse_fault(call: AttentionCall, lse: Tensor | None) -> str:
    """Describe how the log-sum-exps of a kernel that declares them break the contract, like `output_fault`."""
    if lse is None:
        return "no log-sum-exps, for which the call asks"
    shape = call.q.shape[:2]
    if not (fault := tensor_fault(lse, call.q, shape, "torch.float32")):
        return ""
    turned = "; they are transposed" if getattr(lse, "shape", ()) == shape[::-1] else ""
    return f"log-sum-exps {fault}{turned}"


def tensor_fault(out: object, like: Tensor, shape: tuple[int, ...], dtype: str = "") -> str:
    """Describe how an output differs from a tensor of `shape` with the dtype and device of `like`, or return "" if it does not.

    Args:
        out: the output.
        like: a tensor.
        shape: the shape.
        dtype: name of the expected dtype if it differs from that of `like`.
    """
    import torch

    returned, dtype = type(out).__name__, dtype or str(like.dtype)
    if isinstance(out, torch.Tensor):
        if (out.shape, str(out.dtype), out.device) == (shape, dtype, like.device):
            return ""
        returned = f"{out.dtype} {list(out.shape)} on {out.device}"
    return f"{returned}, expected {dtype} {list(shape)} on {like.device}"


def refuse_features(name: str, kernel: Kernel, call: AttentionCall) -> None:
    """Refuse a call with a feature, or a form of one, that a kernel does not declare.

    Raises:
        KernelRefused: it has one.
    """
    if missing := lacking(declaration(kernel).features, call):
        raise KernelRefused(f"{name} does not declare {', '.join(missing)}, which this call asks for")


def run_kernel(name: str, kernel: Kernel, call: AttentionCall) -> Tensor:
    """Run the kernel and return its output, [total_q, num_q_heads, head_dim_v].

    Raises:
        KernelRefused: the call asks for a feature that the kernel does not declare, or the output's shape, dtype or device breaks
            the contract.
    """
    refuse_features(name, kernel, call)
    out = tensor_of(kernel(call))
    if fault := output_fault(call, out):
        raise KernelRefused(f"{name} returned {fault}, in layer {call.layer}")
    return out


def title(name: str, kernel: Kernel, interpreted: bool) -> str:
    """Return the kernel's title in reports, for example "sageattention 1.0.6 (Triton interpreter)"."""
    package = declaration(kernel).package
    if not package:
        return name
    try:
        text = f"{package} {version(package)}"
    except PackageNotFoundError:
        text = package
    return f"{text} (Triton interpreter)" if interpreted else text
