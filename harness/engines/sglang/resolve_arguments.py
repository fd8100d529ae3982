"""SGLang's reading of a command line, without a server: ``python -m assay.harness.engines.sglang.resolve_arguments FLAGS``.

Prints the resolved arguments as JSON, on the last line of its output. They are those that ``/server_info`` of the started server
would show, except for what only a running server knows.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any


def _resolved(flags: list[str]) -> dict[str, Any]:
    """Resolve the arguments of a server with these flags, by name."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    arguments = prepare_server_args(flags)
    if hasattr(
        arguments, "resolve_once"
    ):  # later than 0.5.17, resolution comes after parsing and leaves the fields as they are
        arguments.resolve_once()
        return dict(arguments.resolved_dict())
    from sglang.srt.arg_groups.overrides import resolved_view

    view = resolved_view(arguments)
    return {field.name: getattr(view, field.name) for field in dataclasses.fields(arguments)}


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)


if __name__ == "__main__":
    print("\n" + json.dumps(_resolved(sys.argv[1:]), default=_plain), flush=True)
    os._exit(0)  # SGLang's imports leave threads behind that would be waited for
