"""The settings that an attention backend forces on its server, determined before either server starts, and given to both.

SGLang resolves some arguments by the backend: with torch_native, for example, it captures no CUDA graphs. Two servers with
different backends would then differ in more than the backend. `_common_settings` has the flags that make them agree; `agree` asks
SGLang itself, in processes that resolve a command line and start nothing, until nothing differs or nothing more can be done. Such a
process is ``python -m assay.harness.engines.sglang.common FLAGS``: it prints the arguments as JSON on the last line of its output.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from assay.harness.engines.arguments import ABSENT
from assay.harness.engines.launch import Launch, resolved
from assay.harness.engines.sglang.arguments import differences
from assay.harness.errors import EngineError
from assay.harness.evidence.manifest import CommonSettings
from assay.harness.sides import ROLES, Role

_RESOLVER = "assay.harness.engines.sglang.common"
# Most rounds of resolving: a flag may change what SGLang derives from it.
_ROUNDS = 3

# Limits: the smaller one holds for both.
_LEAST = (
    "chunked_prefill_size",
    "max_prefill_tokens",
    "max_running_requests",
    "cuda_graph_max_bs",
    "cuda_graph_max_bs_decode",
)
# A backend forces a page size above the default of 1.
_GREATEST = ("page_size",)
# Arguments that change the numbers of both servers: the user decides about them.
_NUMBERS = (
    "kv_cache_dtype", "dtype", "quantization", "quantization_param_path", "tp_size", "dp_size", "model_path", "random_seed",
)  # fmt: skip


def _common_settings(
    reference: Mapping[str, Any], candidate: Mapping[str, Any], names: Mapping[Role, str], asked: Collection[str] = ()
) -> CommonSettings:
    """Return the flags that make two servers' resolved arguments agree, except those asked to differ."""
    flags: dict[str, None] = {}
    because, impossible = [], []
    for name, values in differences(reference, candidate, asked).items():
        differing = "; ".join(f"{names[role]}: {value}" for role, value in zip(ROLES, values, strict=True))
        flag, why = _flag_for(name, *values)
        if flag:
            flags[flag] = None
            because.append(f"both were given {flag}, because SGLang resolves {name} by the backend ({differing})")
        else:
            impossible.append(f"{name} ({differing}) {why}")
    return CommonSettings(flags=tuple(flags), because=tuple(because), impossible=tuple(impossible))


def _flag_for(name: str, ours: str, theirs: str) -> tuple[str, str]:
    """Return the flag that makes an argument equal in both servers, or "" and the reason."""
    if name.startswith("cuda_graph_config."):
        return "--disable-cuda-graph", ""
    if name in _NUMBERS:
        return "", "changes what both servers compute; set it for both with --engine-arg"
    dashed = f"--{name.replace('_', '-')}"
    if name.startswith("disable_") and {ours, theirs} == {"true", "false"}:
        return dashed, ""
    if name in _LEAST + _GREATEST and ABSENT not in (ours, theirs):
        try:
            numbers = [int(value) for value in (ours, theirs) if value != "null" and int(value) > 0]
        except ValueError:
            numbers = []
        if numbers:
            return f"{dashed}={min(numbers) if name in _LEAST else max(numbers)}", ""
    return "", "has no flag that is known to make it equal; try one with --engine-arg"


def agree(
    launches: Mapping[Role, Launch],
    resolve: Callable[[Launch], Mapping[str, Any]] | None = None,
    asked: Collection[str] = (),
) -> CommonSettings:
    """Find the flags that both servers need so that only the treatment differs. Nothing is started.

    `resolve` returns the resolved arguments of a launch; by default SGLang itself is asked. `asked` names the settings that should
    differ. The result's `impossible` lists what could not be determined or made equal; the servers then show it.
    """
    resolve = resolve or resolved_arguments
    names = {role: launches[role].backend for role in ROLES}
    agreed = CommonSettings()
    for _ in range(_ROUNDS):
        now = [dataclasses.replace(launches[role], common=agreed.flags) for role in ROLES]
        try:
            with ThreadPoolExecutor(len(now)) as pool:
                reference, candidate = pool.map(resolve, now)
        except EngineError as error:
            return agreed.model_copy(update={"impossible": (str(error),)})
        common = _common_settings(reference, candidate, names, asked)
        new = tuple(flag for flag in common.flags if flag not in agreed.flags)
        if not new:
            vain = tuple(f"{reason}, although both were given it" for reason in common.because)
            return agreed.model_copy(update={"impossible": common.impossible + vain})
        agreed = CommonSettings(
            flags=agreed.flags + new, because=agreed.because + common.because, impossible=common.impossible
        )
    return agreed


def resolved_arguments(launch: Launch) -> dict[str, Any]:
    """Resolve a launch's command line. Raises EngineError if SGLang refuses it, or does not answer in time."""
    return resolved(launch, _RESOLVER)


def _resolved(flags: list[str]) -> dict[str, Any]:
    """Resolve the arguments of a server with these flags, by name."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    arguments = prepare_server_args(flags)
    if hasattr(arguments, "resolve_once"):  # later than 0.5.17, resolution comes after parsing
        arguments.resolve_once()
        return dict(arguments.resolved_dict())
    from sglang.srt.arg_groups.overrides import resolved_view

    view = resolved_view(arguments)
    return {field.name: getattr(view, field.name) for field in dataclasses.fields(arguments)}


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)


if __name__ == "__main__":
    print("\n" + json.dumps(_resolved(sys.argv[1:]), default=_plain), flush=True)
    os._exit(0)  # otherwise Python would wait for threads that SGLang's imports leave behind
