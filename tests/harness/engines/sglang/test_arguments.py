from typing import Any

import pytest

from assay.harness.engines.sglang.arguments import differences, flat, settled

# From /server_info of two SGLang 0.5.23 servers, shortened.
REFERENCE = {
    "attention_backend": "torch_native",
    "port": 31800,
    "served_model_name": "assay-reference-1",
    "launch_command": "--port 31800",
    "dtype": "float32",
    "page_size": 1,
    "disable_radix_cache": False,
    "nccl_port": None,
    "cuda_graph_config": {"decode": {"backend": "disabled", "bs": [1, 2]}, "prefill": {"backend": "disabled"}},
    "internal_states": [{"last_gen_throughput": 1.0}],
    "startup_time": {"load_weight": 0.18},
    "max_total_num_tokens": 100,
    "hicache_object_layout": {"enabled": False, "page_size": 1},
    "version": "0.5.23",
}
GRAPHS = {"decode": {"backend": "full", "bs": [1, 2]}, "prefill": {"backend": "disabled"}}
CANDIDATE = REFERENCE | {
    "attention_backend": "sage_attn",
    "port": 31801,
    "served_model_name": "assay-candidate-2",
    "launch_command": "--port 31801",
    "startup_time": {"load_weight": 0.19},
    "internal_states": [{"last_gen_throughput": 2.0}],
    "max_total_num_tokens": 90,
    "hicache_object_layout": {"enabled": False, "page_size": 16},
}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, {}),
        ({"dtype": "bfloat16", "page_size": 64}, {"dtype": ("float32", "bfloat16"), "page_size": ("1", "64")}),
        ({"disable_radix_cache": True}, {"disable_radix_cache": ("false", "true")}),
        ({"nccl_port": 0}, {"nccl_port": ("null", "0")}),
        ({"new_flag": "x"}, {"new_flag": ("absent", "x")}),
        ({"cuda_graph_config": GRAPHS}, {"cuda_graph_config.decode.backend": ("disabled", "full")}),
        ({"sidecar": {"port": 2}}, {"sidecar.port": ("absent", "2")}),  # named as one that must differ, below another
    ],
)
def test_arguments_are_compared_leaf_by_leaf_but_for_those_that_must_differ(changes: Any, found: dict[str, Any]) -> None:
    assert differences(REFERENCE, CANDIDATE | changes) == found
    assert differences(CANDIDATE | changes, REFERENCE) == {name: values[::-1] for name, values in found.items()}


def test_settled_arguments_hold_no_state() -> None:
    state = {"internal_states", "startup_time", "max_total_num_tokens", "hicache_object_layout"}
    assert REFERENCE.keys() - settled(REFERENCE).keys() == state
    assert flat(REFERENCE)["attention_backend"] == "torch_native"
    assert "port" not in flat(REFERENCE)


def test_what_was_asked_to_differ_is_no_second_difference() -> None:
    other = CANDIDATE | {"page_size": 64, "dtype": "bfloat16", "model_path": "other"}
    assert set(differences(REFERENCE, other)) == {"page_size", "dtype", "model_path"}
    assert set(differences(REFERENCE, other, {"--page-size": ("1", "64")})) == {"dtype", "model_path"}
    assert set(differences(REFERENCE, other, {"model": ("tiny", "other")})) == {"page_size"}
    # A version is asked for by its package or its interpreter; nothing else brings one.
    older = CANDIDATE | {"version": "0.5.22"}
    assert set(differences(REFERENCE | {"version": "0.5.23"}, older, {"--page-size": ("1", "64")})) == {"version"}
    for asked in ("packages", "interpreter"):
        assert differences(REFERENCE | {"version": "0.5.23"}, older, {asked: ("", "x")}) == {}


def test_arguments_have_no_secrets() -> None:
    told = {
        "ssl_keyfile_password": "hunter2",
        "watermark_key": 1234,
        "watermark_config": None,
        "launch_command": "python -m sglang.launch_server --ssl-keyfile-password hunter2 --page-size 1",
        "hicache": {"password": "hunter2"},
        "encoder_urls": ["http://me:hunter2@host"],
        "api_key": "hunter2",
        "page_size": 1,
    }
    kept = settled(told)
    assert kept["launch_command"].endswith("--ssl-keyfile-password *** --page-size 1")
    assert (kept["watermark_key"], kept["watermark_config"], kept["page_size"]) == ("***", None, 1)
    for written in (str(kept), str(flat(told))):
        assert "hunter2" not in written
        assert "1234" not in written
    assert flat(told)["hicache.password"] == "***"
