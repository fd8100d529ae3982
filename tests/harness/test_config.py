from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from assay.harness.config import REPEATED, RUN_FLAGS, RunSpec, flag, make_spec
from assay.harness.errors import ExitCode, UsageError
from assay.harness.sides import Side


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without an ``assay.toml``."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def from_toml(text: str, **flags: Any) -> RunSpec:
    Path("assay.toml").write_text(text, encoding="utf-8")
    return make_spec(flags)


def failure(text: str = "", **flags: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        from_toml(text, **flags)
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.found
    assert caught.value.expected
    assert caught.value.do
    return caught.value


def test_the_default_is_the_cpu_profile() -> None:
    spec = make_spec({})
    assert (spec.device, spec.reference.backend, spec.candidate.backend) == ("cpu", "torch_native", "sage_attn")
    assert (spec.policy.margin, spec.workload.concurrency, spec.workload.synthetic) == (0.02, 32, True)


def test_the_device_chooses_the_reference_unless_one_is_named() -> None:
    assert make_spec({"device": "cuda"}).reference.backend == "triton"
    assert make_spec({"device": "cuda", "reference": "fa3"}).reference.backend == "fa3"
    assert from_toml('[run]\ndevice = "cuda"').reference.backend == "triton"


def test_each_engine_has_its_own_reference_and_another_candidate_engine_serves_its_own() -> None:
    both = make_spec({"engine": "vllm", "candidate": "mine:forward"})
    assert [(side.engine, side.backend) for side in both.sides.values()] == [("vllm", "CPU_ATTN"), ("vllm", "mine:forward")]
    other = make_spec({"reference_engine": "sglang", "candidate_engine": "vllm", "candidate_python": "p"})
    assert [(side.engine, side.backend) for side in other.sides.values()] == [("sglang", "torch_native"), ("vllm", "CPU_ATTN")]
    assert set(other.treatment) == {"engine", "backend", "interpreter"}
    named = make_spec({"reference": "hf", "candidate": "vllm", "engine_arg": ("--block-size=64",)})
    assert [(side.engine, side.backend, side.flags) for side in named.sides.values()] == [
        ("hf", "hf", ()), ("vllm", "CPU_ATTN", ("--block-size=64",)),
    ], "an engine's name is its usual backend, and flags of engines are not for transformers"  # fmt: skip
    assert make_spec({"reference": "hf"}).candidate.backend == "torch_native"
    assert from_toml('[reference]\nengine = "hf"\n').reference.backend == "hf"
    assert from_toml('[run]\nengine = "vllm"\ncandidate = "CPU_ATTN"\n').candidate.engine == "vllm"
    assert "vllm" in failure(engine="vlm").do


def test_flags_override_the_file_and_the_file_the_profile() -> None:
    text = '[run]\nquestions = 7\nreference = "triton"\nengine_arg = ["--a", "--b"]\n[policy]\nmargin = 0.02'
    spec = from_toml(text, questions=9, margin=None)
    assert (spec.workload.questions, spec.policy.margin, spec.reference.backend, spec.reference.flags) == (
        9,
        0.02,
        "triton",
        ("--a", "--b"),
    )


def test_a_line_of_policy_names_its_source() -> None:
    text = "[policy]\nmargin = 0.02\nbounds = { int8_qk = 0.06 }"
    spec = from_toml(text, alpha=0.01)
    assert spec.policy.line("margin") == "margin = 0.02 (assay.toml, [policy])"
    assert spec.policy.line("alpha") == "alpha = 0.01 (--alpha)"
    assert spec.policy.line("greedy_margin") == "greedy_margin = 0.1 (default)"
    assert spec.policy.line("int8_qk") == "bounds.int8_qk = 0.06 (assay.toml, [policy])"


def test_suites_are_a_list_or_separated_by_commas() -> None:
    assert make_spec({"suites": "layers, accuracy,layers"}).workload.suites == ("layers", "accuracy")
    assert from_toml('[run]\nsuites = ["greedy"]\n[policy]\nrequire = ["greedy"]').policy.require == ("greedy",)
    for suites in ("", "speed", ["accuracy", "speed"], ()):
        assert failure(suites=suites).found.startswith("--suites is ")


def test_a_named_file_is_read_and_must_exist(work: Path) -> None:
    (work / "other.toml").write_text("[run]\nquestions = 3")
    assert make_spec({}, work / "other.toml").workload.questions == 3
    with pytest.raises(UsageError, match="does not exist"):
        make_spec({}, work / "absent.toml")
    with pytest.raises(UsageError, match="is a folder"):
        make_spec({}, work)
    (work / "assay.toml").write_bytes(b'[run]\nmodel = "\xff"')
    with pytest.raises(UsageError, match="cannot be read"):
        make_spec({})


MOVE = "move it there: [run] sets what is run, [policy] the bounds that apply, [reference] and [candidate] the sides"


@pytest.mark.parametrize(
    ("text", "found", "do"),
    [
        ("[run]\nquestons = 3", "key 'questons' is unknown", "did you mean 'questions'?"),
        ("[run]\nengine-arg = []", "key 'engine-arg' is unknown", "did you mean 'engine_arg'?"),
        ("[run]\nzzz = 3", "key 'zzz' is unknown", "remove it"),
        ("[rum]\nquestions = 3", "section 'rum' is unknown", "did you mean 'run'?"),
        ("questions = 3", "section 'questions' is unknown", "remove it"),
        ("run = 3", "run is 3", "put the keys under a line [run]"),
        ("[run", "cannot be read", "correct it at the position named"),
        ("[run]\nmargin = 0.1", "the key 'margin' belongs to [policy]", MOVE),
        ("[policy]\nquestions = 1", "the key 'questions' belongs to [run]", MOVE),
        ("[policy]\nmargn = 0.1", "key 'margn' is unknown", "did you mean 'margin'?"),
    ],
)
def test_a_wrong_file_is_refused(text: str, found: str, do: str) -> None:
    error = failure(text)
    assert found in error.found
    assert "assay.toml" in error.found
    assert error.do == do


OUT_OF_RANGE: dict[str, list[Any]] = {
    "device": ["gpu", ["cpu"]], "reference": [""], "candidate": [""], "model": [""], "data": [""],
    "questions": [0, -1, 1.5, "many", True], "margin": [0, 1, 5, -0.1, float("nan")], "alpha": [0, 0.21],
    "greedy_prompts": [-1], "logits_prompts": [0], "logits_limit": [0.0, 0.26, 1e9], "greedy_margin": [1.0, 0.26],
    "concurrency": [0, 1025], "max_tokens": [0], "engine_arg": ["--one-string", [1]], "servers": ["apart"], "budget_mb": [0],
    "bounds": [{"int8_qk": 0.0}], "startup_timeout": [0, float("inf")], "request_timeout": [-1],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in OUT_OF_RANGE.items() for value in values])
def test_a_value_out_of_range_names_its_flag_and_what_was_found(name: str, value: Any) -> None:
    error = failure(**{name: value})
    assert error.found.startswith(f"{flag(name)} is ")
    first = value[0] if name == "engine_arg" and isinstance(value, list) else value
    assert repr(first) in error.found


@pytest.mark.parametrize(("name", "says"), [("qestions", "did you mean 'questions'?"), ("given_by", "remove it")])
def test_a_name_that_a_run_does_not_have_is_refused_with_the_nearest(name: str, says: str) -> None:
    with pytest.raises(UsageError, match=name) as raised:
        RunSpec.of(reference="triton", candidate="mine:forward", **{name: 5})
    assert "one of alpha, bounds" in raised.value.expected
    assert raised.value.do == says
    with pytest.raises(UsageError, match="--questions is 0"):
        RunSpec.of(reference="triton", candidate="mine:forward", questions=0)


def test_an_unknown_field_is_refused() -> None:
    assert "--nonsense" in failure(nonsense=1).found


def test_the_token_limit_depends_on_the_questions() -> None:
    assert make_spec({}).workload.token_limit == 32
    assert make_spec({"data": "cais/mmlu"}).workload.token_limit == 2048
    assert make_spec({"data": "cais/mmlu", "max_tokens": 5}).workload.token_limit == 5


def test_a_spec_survives_its_manifest() -> None:
    spec = make_spec({"engine_arg": ("--disable-radix-cache",), "max_tokens": 9})
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


def test_loads_are_lists_in_a_file_and_comma_lists_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "assay.toml"
    file.write_text('[run]\nlatency_shapes = ["short", "256:256"]\nlatency_concurrency = [1, 8]\n[policy]\nlatency_bound = 1.2\n')
    spec = make_spec({}, file)
    assert (spec.workload.latency_shapes, spec.workload.latency_concurrency) == (("short", "256:256"), (1, 8))
    assert spec.policy.line("latency_bound") == f"latency_bound = 1.2 ({file}, [policy])"
    flags = make_spec({"latency_concurrency": "2, 4", "latency_shapes": "long"}, file)
    assert (flags.workload.latency_shapes, flags.workload.latency_concurrency) == (("long",), (2, 4))
    with pytest.raises(UsageError, match="--latency-concurrency is '0'"):
        make_spec({"latency_concurrency": "1,0"})
    with pytest.raises(UsageError, match="--latency-bound"):
        make_spec({"latency_bound": 0.9})


@pytest.mark.parametrize(
    ("flags", "weakened"),
    [
        ({}, ()),
        ({"margin": 0.01, "alpha": 0.01, "greedy_margin": 0.05, "envelope_tokens": 4096}, ()),
        ({"margin": 0.1}, ("margin = 0.1 (--margin)",)),
        ({"alpha": 0.2, "greedy_margin": 0.2}, ("alpha = 0.2 (--alpha)", "greedy_margin = 0.2 (--greedy-margin)")),
        ({"logits_limit": 0.1}, ("logits_limit = 0.1 (--logits-limit)",)),
        ({"latency_bound": 2.0}, ("latency_bound = 2.0 (--latency-bound)",)),
        ({"envelope_tokens": 128}, ("envelope_tokens = 128 (--envelope-tokens)",)),
        ({"require": ""}, ("require = () (--require)",)),
        ({"require": "accuracy"}, ()),
        ({"envelope_tokens": 1024, "device": "cuda"}, ("envelope_tokens = 1024 (--envelope-tokens)",)),
    ],
)
def test_lines_of_policy_that_pass_more_than_the_defaults_are_named(flags: dict[str, Any], weakened: tuple[str, ...]) -> None:
    assert make_spec(flags).weakened == weakened


def test_an_empty_file_changes_nothing_and_a_byte_order_mark_is_read(work: Path) -> None:
    assert from_toml("") == make_spec({}) == from_toml("[run]")
    (work / "assay.toml").write_bytes('\ufeff[run]\nmodel = "modèle"'.encode())
    assert make_spec({}).reference.model == "modèle"


@pytest.mark.parametrize(("margin", "alpha"), [(0.001, 0.2), (0.1, 0.001)])
def test_the_ranges_include_their_ends(margin: float, alpha: float) -> None:
    spec = make_spec({"margin": margin, "alpha": alpha, "questions": 1, "greedy_prompts": 1, "concurrency": 1024})
    assert (spec.policy.margin, spec.policy.alpha) == (margin, alpha)


def test_two_sides_differ_in_what_is_named_for_one_of_them() -> None:
    """A candidate with settings of its own has the reference's backend: what differs is what was named."""
    spec = make_spec({"candidate_arg": ("--page-size=16",), "candidate_env": ("A=b=c",), "engine_arg": ("--x",)})
    assert spec.reference.backend == spec.candidate.backend == "torch_native"
    assert spec.treatment == {"--page-size": ("", "16"), "environment.A": ("", "b=c")}
    assert (spec.reference.flags, spec.candidate.flags) == (("--x",), ("--x", "--page-size=16"))
    written = '[run]\nmodel = "a"\n[candidate]\nmodel = "b"\nflags = ["--y"]\nenvironment = { C = "d" }\ninterpreter = "/p"'
    spec = from_toml(f'{written}\nwith = ["e==1", "f==2"]', reference_python="/q")
    assert spec.treatment == {
        "model": ("a", "b"), "--y": ("", "true"), "environment.C": ("", "d"), "interpreter": ("/q", "/p"),
        "packages": ("", "e==1, f==2"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        {"candidate_arg": ("--a=1", "--b")}, {"reference_model": "x"}, {"candidate_env": ("A=b",)},
        {"candidate_with": ("a==1", "b==2")},
    ],
)  # fmt: skip
def test_the_flags_that_repeat_a_run_make_the_same_sides(flags: dict[str, Any]) -> None:
    spec = make_spec({"engine_arg": ("--c",), "candidate": "triton", **flags})
    given: dict[str, Any] = {}
    for words in spec.given_flags(RUN_FLAGS):
        name, _, value = words.removeprefix("--").partition("=")
        field = name.replace("-", "_")
        given[field] = (*given.get(field, ()), value) if field in REPEATED else value
    assert make_spec(given).sides == spec.sides


def test_a_side_is_named_in_one_place() -> None:
    both = failure('[run]\ncandidate = "triton"\n[candidate]\nbackend = "mine:forward"')
    assert both.found == "assay.toml sets candidate in [run] and in [candidate]."
    assert failure(candidate_env=("A",)).found.startswith("--candidate-env is ('A',)")


def test_a_candidate_of_its_own_settings_begins_as_the_reference_is() -> None:
    reference = Side(backend="triton", model="tiny-qwen3", flags=("--a",))
    spec = RunSpec.of(reference=reference, candidate_arg=("--a", "--b"))
    assert spec.candidate == reference.model_copy(update={"flags": ("--a", "--b")})
    assert failure(device="tpu", candidate_arg=("--b",)).found == "--device is 'tpu'."
