"""Taking fingerprints: of a side, whose server is started for it, and of a URL."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from assay.evals.probe_texts import CHATS, TEXTS
from assay.harness.backend import LOOPBACK
from assay.harness.engines import registry
from assay.harness.engines.base import ChatRequest, answers
from assay.harness.engines.client import INFO_TIMEOUT_S, Client
from assay.harness.engines.environments import python_of
from assay.harness.engines.launch import Launch
from assay.harness.engines.launched import server
from assay.harness.engines.model import resolve_model
from assay.harness.engines.remote import RemoteServer
from assay.harness.engines.served_fingerprint import chats_of
from assay.harness.errors import EngineError, EvidenceError
from assay.harness.evidence.fingerprint import PARTS, Fingerprint, FolderNote, Tokens
from assay.harness.fingerprint import folder_readings
from assay.harness.fingerprint.checkpoint import beside_checkpoint, checkpoint_weights
from assay.harness.fingerprint.model_folder import folder_notes
from assay.harness.reading import reading, whole_file
from assay.harness.run.preflight import ignored_of
from assay.harness.sides import Device, Side, flag_values, settings, without_secrets

# Requests in flight to an endpoint that others use too.
_AT_ONCE = 4


def of_side(side: Side, device: Device, timeout_s: float) -> Fingerprint:
    """Start a server of a side, take its fingerprint, and stop it; it answers one short request.

    Raises:
        UsageError: there is no such model, or a flag does not exist.
        EngineError: the server did not start, or did not report a fingerprint.
    """
    model = resolve_model(side.model, side.flags)
    with tempfile.TemporaryDirectory(prefix="assay-fingerprint-") as temporary:
        folder = Path(temporary)
        launch = Launch(
            engine=side.engine,
            role="candidate",
            backend=side.backend,
            model=model,
            device=device,
            evidence=folder / "server",
            log=folder / "log",
            decode_backend=side.backend,
            startup_timeout=timeout_s,
            request_timeout=timeout_s,
            engine_args=side.flags,
            cpu_core=0 if device == "cpu" else None,
            extra=side.environment,
            interpreter=python_of(side),
        )
        made = _served(launch)
    update: dict[str, Any] = {
        "source": "own server",
        "model": side.model,
        "asked": dict(settings(without_secrets(side))),
    }
    update |= {"ignored": ignored_of(model, side), "folder": _notes(model)}
    if made.weights and flag_values(side.flags).get("--load-format") != "dummy":
        with suppress(EvidenceError):  # too large, or in another format: it is then compared only with other servers
            update["weights"] = beside_checkpoint(made.weights, checkpoint_weights(model))
    return made.model_copy(update=update)


def _served(launch: Launch) -> Fingerprint:
    with server(launch) as engine:
        if (made := engine.fingerprint()) is not None:
            return made
        raise EngineError(
            f"{engine.who} did not report a fingerprint.", "a server that loads assay's plugin",
            "see the version of its engine; --engine hf loads the model with transformers alone",
        )  # fmt: skip


def _notes(model: Path) -> tuple[FolderNote, ...] | None:
    """Return what the files of a folder contradict each other in, or None if they cannot be read."""
    with suppress(EvidenceError):
        return folder_notes(model)
    return None


def _absent(observed: Mapping[str, Any]) -> list[str]:
    return [part for part in PARTS if part not in observed and part != "environment"]


def of_url(url: str, model: str, timeout_s: float) -> Fingerprint:
    """Observe what a running server reveals: its models and arguments, and the tokens that it counts or names.

    Raises:
        EngineError: it does not answer.
    """
    remote = RemoteServer("candidate", url, timeout_s, model)
    client = remote.client()
    read = folder_readings.observed({
        "arguments": lambda: _told_arguments(client), "tokens": lambda: _told_tokens(remote, client),
    })  # fmt: skip
    told = read.get("arguments", {})
    config = folder_readings.observed({"config": lambda: _told_settings(remote, client, told)})
    if why := config.pop("not_observed").get("config"):
        read["not_observed"]["config"] = f"settings of the model not read: {why}"
    read |= {name: config[name] for name in config if name != "seconds"}
    if told.get("version"):
        read["packages"] = {"sglang" if "attention_backend" in told else "engine": told["version"]}
    return Fingerprint(
        source="endpoint",
        engine=f"OpenAI-compatible server {remote.url}",
        model=client.model,
        not_observed={
            **dict.fromkeys([*_absent(read), "environment"], "an endpoint does not tell"),
            **read.pop("not_observed"),
        },
        **read,
    )


def _told_arguments(client: Client) -> dict[str, str]:
    flat = registry.arguments("sglang").flat  # other engines' servers do not tell theirs
    try:
        return flat(client.json("GET", "/server_info", timeout_s=INFO_TIMEOUT_S))
    except EngineError:  # the older name of the endpoint
        return flat(client.json("GET", "/get_server_info", timeout_s=INFO_TIMEOUT_S))


def _told_settings(server: RemoteServer, client: Client, told: Mapping[str, str]) -> dict[str, str]:
    """Read ``config.json`` in the folder that the server names, with its overrides, if the server runs on this machine.

    Raises:
        EvidenceError: the folder cannot be read here.
    """
    named = told.get("model_path", "")
    for path in ("/get_model_info", "/v1/models"):
        if not named:
            with suppress(EngineError, KeyError, IndexError, AttributeError, TypeError):
                answer = client.json("GET", path, timeout_s=INFO_TIMEOUT_S)
                models = [model for model in answer.get("data", []) if model["id"] == client.model]
                named = str(answer.get("model_path") or models[0].get("root") or "")
    config = Path(named or ".") / "config.json"
    # A folder of the same name on another machine may hold another model.
    if not named or urlsplit(server.url).hostname not in LOOPBACK or not config.is_file():
        elsewhere = ", which is not a folder on this machine" if named else ""
        says = f"the server names {named or 'no model folder'}{elsewhere}."
        raise EvidenceError(says, "a folder that can be read here", "fingerprint it where it runs")
    with reading(config, "config.json"):
        written, overrides = (
            json.loads(text) for text in (whole_file(config), told.get("json_model_override_args") or "{}")
        )
        made = folder_readings.overridden(written, overrides) | folder_readings.beside_config(
            str(config.parent), code=False
        )
        return folder_readings.settings_of(made)


def _told_tokens(server: RemoteServer, client: Client) -> Tokens:
    """Ask for the token ids of the corpus, and of the chats if the server names them; or else for their numbers of tokens."""
    told: dict[str, Any] = {"texts": {}, "bare": {}}
    names = [name for name, text in TEXTS.items() if text]
    # If an endpoint is missing, or accepts less, keep what the server has returned so far.
    with suppress(EngineError, KeyError, TypeError, ValueError):
        for field, special in (("texts", True), ("bare", False)):
            body = {"model": client.model, "add_special_tokens": special}
            for name in names:
                ids = client.json("POST", "/tokenize", {**body, "prompt": TEXTS[name]})["tokens"]
                told[field][name] = tuple(int(id_) for id_ in ids)
        told["chats"], told["refused"] = chats_of(
            lambda body: client.json("POST", "/tokenize", {"model": client.model, **body})
        )
    firsts = {ids[:1] for name, ids in told["texts"].items() if ids[1:] == told["bare"].get(name)}
    if len(firsts) == 1 and len(told["texts"]) == len(names):  # the tokens added before every text
        ((told["bos"],),) = firsts
    prompts = {name: chat[0]["content"] for name, (chat, tools) in CHATS.items() if len(chat) == 1 and not tools}
    if not told["texts"]:
        prompts |= {name: TEXTS[name] for name in names}
    asks = [ChatRequest(prompt, 1) for prompt in prompts.values()]
    counts = [answer.prompt_tokens for answer in answers(server, asks, _AT_ONCE)]
    return Tokens(**told, counts=dict(zip(prompts, counts, strict=True)))
