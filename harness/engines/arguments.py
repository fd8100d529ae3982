"""Arguments of servers in any engine's names: their leaves, without secrets, and those in which two servers differ."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from assay.harness.engines import registry
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.sides import ROLES, Role, hide, hide_flags, is_secret, profile_of

ABSENT = "absent"


def differences(
    servers: Mapping[Role, ServerManifest], treatment: Mapping[str, tuple[str, str]]
) -> dict[str, tuple[str, str]]:
    """Return the server arguments that differ between the roles beyond the treatment: (reference, candidate) by name.

    Two engines have no names in common, so only what decides the numbers of any engine is compared (`registry.Arguments.numerics`).
    """
    if len(servers) < len(ROLES):
        return {}
    reference, candidate = (servers[role] for role in ROLES)
    if reference.kind == candidate.kind:
        return registry.arguments(reference.kind).differences(reference.arguments, candidate.arguments, treatment)
    if not all(profile_of(server.kind).instrumented for server in servers.values()):
        return {}  # a witness computes in its own dtype: what that costs is measured (`assay.harness.run.rounding`)
    left, right = map(numerics, (reference, candidate))
    flags = {name.removeprefix("--").replace("-", "_") for name in treatment}
    return differing(left, right, flags)


def compared(servers: Mapping[Role, ServerManifest]) -> int:
    """Return the number of arguments that `differences` compares."""
    reference, candidate = (servers[role] for role in ROLES)
    return len(reference.arguments if reference.kind == candidate.kind else numerics(reference))


def numerics(server: ServerManifest) -> dict[str, str]:
    """Return what decides a server's numbers, in neutral names, or an empty mapping if it did not report its arguments."""
    return registry.arguments(server.kind).numerics(server.arguments) if server.arguments else {}


def differing(
    left: Mapping[str, str], right: Mapping[str, str], skip: Collection[str] = ()
) -> dict[str, tuple[str, str]]:
    """Return the leaves in which two mappings differ, except those `skip` names."""
    return {
        name: (left.get(name, ABSENT), right.get(name, ABSENT))
        for name in sorted(left.keys() | right.keys())
        if name not in skip and left.get(name, ABSENT) != right.get(name, ABSENT)
    }


def plain(name: str, value: Any) -> Any:
    """Return an argument without secrets, nested ones included."""
    if isinstance(value, Mapping):
        return {key: plain(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(name, inner) for inner in value]
    if name == "launch_command" and isinstance(value, str):
        return " ".join(hide_flags(value.split(" ")))
    if isinstance(value, str) or (is_secret(name) and not isinstance(value, bool | None)):
        return hide(name, str(value))
    return value


def leaves(arguments: Mapping[str, Any], without: Collection[str] = (), prefix: str = "") -> dict[str, str]:
    """Return arguments leaf by leaf, named with dots; `without` names those of the first level that are left out."""
    flat: dict[str, str] = {}
    for key, value in arguments.items():
        if not prefix and key in without:
            continue
        if isinstance(value, Mapping) and value:
            flat |= leaves(value, (), f"{prefix}{key}.")
        else:
            shown = plain(key, value)
            flat[f"{prefix}{key}"] = shown if isinstance(shown, str) else json.dumps(shown, sort_keys=True, default=str)
    return flat
