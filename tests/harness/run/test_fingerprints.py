"""Fingerprints of models that transformers loads, and of endpoints: the first lines of diffs that public bugs give."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from assay.evals.probe_texts import CHATS
from assay.harness.errors import EngineError
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.fingerprint.differences import compare_fingerprints
from assay.harness.fingerprint.parts import faults
from assay.harness.run import fingerprints
from assay.harness.run.fingerprints import of_side, of_url
from assay.harness.sides import Engine, Side
from assay.reports.fingerprint import diff_document, fingerprint_document
from tests.harness.fingerprint.models import LLAMA_3_SPLIT, random_weights, write_model

LOGS = Path(__file__).parents[2] / "data" / "server_failures"
PLAIN: dict[str, Any] = {"rope_theta": 10000.0}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load models in this process: an interpreter takes seconds to start."""
    pytest.importorskip("transformers")
    from assay.harness.engines.hf.process import Served

    monkeypatch.setattr(fingerprints, "_served", lambda launch: Served(launch.model, "m", "cpu").describe())


def loaded(model: Path, python: str = "", engine: Engine = "hf") -> Fingerprint:
    return of_side(Side(engine=engine, backend="torch_native", model=str(model), interpreter=python), "cpu", 300.0)


def first(left: Fingerprint, right: Fingerprint) -> tuple[int, str]:
    result = compare_fingerprints(left, right)
    return result.exit_code, result.differences[0].says


@pytest.mark.usefixtures("here")
def test_parts_of_a_model_are_observed(tmp_path: Path) -> None:
    made = loaded(write_model(tmp_path, PLAIN))
    assert all(map(made.has, ("tokens", "rope", "weights", "generation", "packages", "environment")))
    assert made.generation is not None
    assert made.generation["temperature"] == "0.6"
    assert [(fault.name, fault.outputs) for fault in faults(made)] == [("folder.note", False)], "its temperature"


@pytest.mark.usefixtures("here")
def test_tokens_that_were_not_observed_are_not_said_to_be_right(tmp_path: Path) -> None:
    made = loaded(write_model(tmp_path, PLAIN))
    assert fingerprint_document(made).headline.endswith("; nothing is wrong in itself.")
    made = made.model_copy(update={"tokens": None, "not_observed": {"tokens": "no tokenizer"}})
    assert fingerprint_document(made).headline.endswith("; no observed part is wrong in itself; tokens were not observed.")


@pytest.mark.usefixtures("here")
def test_a_fingerprint_holds_no_secret_that_was_given(tmp_path: Path) -> None:
    model = str(write_model(tmp_path, PLAIN))
    made = of_side(Side(engine="hf", backend="hf", model=model, environment={"HF_TOKEN": "hunter2"}), "cpu", 300.0)
    assert "hunter2" not in made.model_dump_json()
    assert made.asked["environment.HF_TOKEN"] == "***"


@pytest.mark.usefixtures("here")
def test_a_class_that_splits_otherwise_is_seen_beside_tokenizer_json(tmp_path: Path) -> None:
    right = loaded(write_model(tmp_path / "a", PLAIN, splits=LLAMA_3_SPLIT))
    wrong = loaded(write_model(tmp_path / "b", PLAIN, splits=LLAMA_3_SPLIT, tokenizer_class="GPT2Tokenizer"))
    if not (wrong.tokens and wrong.tokens.written):
        pytest.skip("these transformers keep what tokenizer.json says")
    code, says = first(right, wrong)
    assert code == 1
    assert says.startswith("B: token ids of ")
    assert says.endswith("of the corpus do not match tokenizer.json, which is read as GPT2Tokenizer")


@pytest.mark.usefixtures("here")
def test_two_bos_where_a_client_renders_the_chat(tmp_path: Path) -> None:
    once = loaded(
        write_model(tmp_path / "a", PLAIN, template="{% for m in messages %}{{ m['content'] }}{% endfor %}", adds_bos=True)
    )
    twice = loaded(write_model(tmp_path / "b", PLAIN, adds_bos=True))
    code, says = first(once, twice)
    assert (code, says.partition(" begin")[0]) == (1, "B: two BOS tokens")
    assert [(fault.name, fault.outputs) for fault in faults(twice)] == [("tokens.twice", False), ("folder.note", False)]


@pytest.mark.usefixtures("here")
def test_a_checkpoint_saved_in_another_dtype(tmp_path: Path) -> None:
    rounded = {name: weight.bfloat16() for name, weight in random_weights().items()}
    left, right = loaded(write_model(tmp_path / "a", PLAIN)), loaded(write_model(tmp_path / "b", PLAIN, weights=rounded))
    result = compare_fingerprints(left, right)
    assert result.differences[0].says == "21 of 21 parameters are the same weights rounded to bfloat16 in B"
    assert result.differences[0].declared == "model"  # two folders were asked for


def test_a_process_that_fails_is_an_engine_error_with_its_last_lines(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", PLAIN)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no transformers here >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(EngineError, match=r"exited with status 3") as caught:
        loaded(model, str(python))
    assert "no transformers here" in caught.value.details


def test_a_known_cause_says_what_to_do(tmp_path: Path) -> None:
    python, log = tmp_path / "python", LOGS / "backend_model.log"
    python.write_text(f"#!/bin/sh\ncat {log} >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(EngineError, match="AssertionError: GptOssForCausalLM requires one of") as caught:
        loaded(write_model(tmp_path / "model", PLAIN), str(python), "sglang")
    assert "assay fingerprint --backend triton" in caught.value.do
    assert caught.value.expected


class Endpoint(BaseHTTPRequestHandler):
    """Answers as a server does that has `/tokenize` or has not."""

    tokenizes = True
    prompt_tokens = 7
    late = ""
    attention = "triton"
    seed = 1
    chats_begin: tuple[int, ...] = ()
    refuses_tools = False
    root = ""
    told: Mapping[str, Any] = {}

    def do_GET(self) -> None:
        documents = {
            "/v1/models": {"data": [{"id": "m", **({"root": self.root} if self.root else {})}]},
            "/server_info": {
                "version": "0.5.23",
                "attention_backend": self.attention,
                "page_size": 1,
                "api_key": "secret",
                "random_seed": self.seed,
                **self.told,
            },
        }
        self._answer(documents.get(self.path))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "tools" in asked and self.refuses_tools:
            self._answer(None)
        elif self.path == "/tokenize" and self.tokenizes:
            ids = [ord(letter) for letter in str(asked.get("prompt") or asked.get("messages"))][:5]
            begin = self.chats_begin if "messages" in asked else [0] * asked.get("add_special_tokens", 0)
            self._answer({"tokens": [*begin, *ids]})
        elif self.path == "/v1/chat/completions":
            time.sleep(0.5 * (asked["messages"][0]["content"] == self.late))
            message = {"role": "assistant", "content": "x"}
            usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": 1, "total_tokens": self.prompt_tokens + 1}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            self._answer({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage})
        else:
            self._answer(None)

    def _answer(self, document: Any) -> None:
        content = json.dumps(document or {"error": "not found"}).encode()
        self.send_response(200 if document else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *words: Any) -> None: ...


@contextmanager
def serving(**changed: Any) -> Iterator[str]:
    handler = type("Handler", (Endpoint,), changed)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(**getattr(request, "param", {})) as address:
        yield address


def test_an_endpoint_tells_its_arguments_and_tokens(url: str) -> None:
    pytest.importorskip("openai")
    made = of_url(url, "", 30.0)
    assert (made.source, made.model) == ("endpoint", "m")
    assert made.arguments is not None
    assert made.arguments["page_size"] == "1"
    assert "secret" not in made.model_dump_json()
    assert made.tokens is not None
    assert len(made.tokens.texts) == len(made.tokens.bare) == 34
    assert set(made.tokens.counts.values()) == {7}
    assert made.not_observed["weights"] == "an endpoint does not tell"
    assert made.packages == {"sglang": "0.5.23"}
    assert made.tokens.bos == 0


@pytest.mark.parametrize(
    ("changed", "code", "says"),
    [
        ({"seed": 2}, 3, "random_seed is 1 in A, 2 in B"),  # another port, and a seed that was drawn
        ({"attention": "fa3"}, 1, "attention_backend is triton in A, fa3 in B"),
        ({"refuses_tools": True}, 1, "the chat template refuses the chats 'tools' and 'tool answer' only in B"),
        ({"chats_begin": (0, 0)}, 1, "B: two BOS tokens begin a chat (user, system, turns and 2 more)"),
    ],
)
def test_two_endpoints(changed: dict[str, Any], code: int, says: str) -> None:
    pytest.importorskip("openai")
    with serving() as ours, serving(**changed) as theirs:
        left, right = (of_url(address, "", 30.0) for address in (ours, theirs))
    assert first(left, right) == (code, says)


def test_an_endpoint_beside_what_was_started_is_declared_by_nothing(url: str) -> None:
    pytest.importorskip("openai")
    told = of_url(url, "", 30.0)
    started = told.model_copy(
        update={
            "source": "own server",
            "asked": {"backend": "triton", "model": "m"},
            "packages": {**(told.packages or {}), "torch": "2"},
            "arguments": {**(told.arguments or {}), "chunked_prefill_size": "1"},
        }
    )
    assert compare_fingerprints(started, told, ["config"]).exit_code == 0
    other = started.model_copy(update={"arguments": {**(told.arguments or {}), "attention_backend": "fa3"}})
    assert first(other, told) == (1, "attention_backend is fa3 in A, triton in B")
    assert "packages" not in compare_fingerprints(started.model_copy(update={"packages": {}}), told).compared


@pytest.mark.parametrize("url", [{"tokenizes": False, "prompt_tokens": 8, "late": CHATS["user"][0][0]["content"]}], indirect=True)
def test_without_tokenize_the_numbers_of_prompt_tokens_are_compared(url: str) -> None:
    pytest.importorskip("openai")
    made = of_url(url, "", 30.0)
    assert made.tokens is not None
    assert made.tokens.texts == {}
    counts = {name: count - 1 for name, count in made.tokens.counts.items()}
    other = made.model_copy(update={"tokens": made.tokens.model_copy(update={"counts": counts})})
    code, says = first(other, made)
    assert (code, says) == (1, "35 of 35 chats have different numbers of prompt tokens (user: 7 in A, 8 in B)")


@pytest.mark.usefixtures("here")
def test_a_setting_of_the_model_is_seen(tmp_path: Path) -> None:
    right, wrong = (loaded(write_model(tmp_path / str(eps), PLAIN | {"rms_norm_eps": eps})) for eps in (1e-5, 0.5))
    assert first(right, wrong) == (
        1, "the model's setting layers.LlamaRMSNorm.variance_epsilon is 1e-05 in A, 0.5 in B",
    )  # fmt: skip
    unread = right.model_copy(update={"config": None, "not_observed": {"config": "OSError: no config.json"}})
    for left, other in ((right, unread), (unread, right), (unread, unread)):
        result = compare_fingerprints(left, other)
        assert result.exit_code == 3
        assert "OSError: no config.json" in diff_document(result).headline
        assert "Nothing that changes outputs differs" not in diff_document(result).headline
    assert compare_fingerprints(right, unread, ["config"]).exit_code == 0


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_setting_of_the_model_is_read_where_a_server_here_names_its_folder(tmp_path: Path, engine: str) -> None:
    pytest.importorskip("openai")
    paths = [str(write_model(tmp_path / str(eps), PLAIN | {"rms_norm_eps": eps})) for eps in (1e-5, 0.5)]
    told = [{"told": {"model_path": path}} if engine == "sglang" else {"root": path} for path in paths]
    with serving(**told[0]) as ours, serving(**told[1]) as theirs:
        left, right = (of_url(address, "", 30.0) for address in (ours, theirs))
    assert (left.config or {})["rms_norm_eps"] == "1e-05"
    named = [difference.says for difference in compare_fingerprints(left, right).undeclared if difference.part == "config"]
    assert named == ["the model's setting rms_norm_eps is 1e-05 in A, 0.5 in B"]
    overridden = {"told": {"model_path": paths[0], "json_model_override_args": '{"rms_norm_eps": 0.5}'}}
    with serving(**overridden) as address:
        assert (of_url(address, "", 30.0).config or {})["rms_norm_eps"] == "0.5"


def test_a_server_that_names_no_folder_says_that_settings_of_the_model_were_not_read(url: str) -> None:
    pytest.importorskip("openai")
    made = of_url(url, "", 30.0)
    assert made.config is None
    assert "settings of the model not read" in made.not_observed["config"]
    assert compare_fingerprints(made, made).exit_code == 3
