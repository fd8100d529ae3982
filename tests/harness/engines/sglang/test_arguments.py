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
    "version": "0.5.23",
}
CANDIDATE = REFERENCE | {
    "attention_backend": "sage_attn",
    "port": 31801,
    "served_model_name": "assay-candidate-2",
    "launch_command": "--port 31801",
    "startup_time": {"load_weight": 0.19},
    "internal_states": [{"last_gen_throughput": 2.0}],
    "max_total_num_tokens": 90,
}


def test_servers_that_differ_in_what_must_differ_have_no_differences() -> None:
    assert differences(REFERENCE, CANDIDATE) == {}


def test_another_value_is_found_in_both_orders() -> None:
    assert differences(REFERENCE, CANDIDATE | {"dtype": "bfloat16"}) == {"dtype": ("float32", "bfloat16")}
    assert differences(CANDIDATE | {"page_size": 64}, REFERENCE) == {"page_size": ("64", "1")}


def test_booleans_and_none_differ_from_similar_values() -> None:
    assert differences(REFERENCE, CANDIDATE | {"disable_radix_cache": True}) == {"disable_radix_cache": ("false", "true")}
    assert differences(REFERENCE, CANDIDATE | {"nccl_port": 0}) == {"nccl_port": ("null", "0")}


def test_an_argument_that_one_server_lacks_is_a_difference() -> None:
    assert differences(REFERENCE, CANDIDATE | {"new_flag": "x"}) == {"new_flag": ("absent", "x")}


def test_nested_arguments_are_named_by_leaf() -> None:
    graphs = {"decode": {"backend": "full", "bs": [1, 2]}, "prefill": {"backend": "disabled"}}
    found = differences(REFERENCE, CANDIDATE | {"cuda_graph_config": graphs})
    assert found == {"cuda_graph_config.decode.backend": ("disabled", "full")}


def test_a_nested_argument_is_compared_even_if_named_as_one_that_must_differ() -> None:
    found = differences(REFERENCE | {"sidecar": {"port": 1}}, CANDIDATE | {"sidecar": {"port": 2}})
    assert found == {"sidecar.port": ("1", "2")}


def test_settled_arguments_hold_no_state() -> None:
    kept = settled(REFERENCE)
    assert "internal_states" not in kept
    assert "startup_time" not in kept
    assert kept["version"] == "0.5.23"
    assert kept["served_model_name"] == "assay-reference-1"


def test_what_was_asked_to_differ_is_no_second_difference() -> None:
    other = CANDIDATE | {"page_size": 64, "dtype": "bfloat16", "model_path": "other"}
    assert set(differences(REFERENCE, other)) == {"page_size", "dtype", "model_path"}
    assert set(differences(REFERENCE, other, {"--page-size": ("1", "64")})) == {"dtype", "model_path"}
    assert set(differences(REFERENCE, other, {"model": ("tiny", "other")})) == {"page_size"}


def test_the_backend_is_an_argument_of_a_fingerprint() -> None:
    assert flat(REFERENCE)["attention_backend"] == "torch_native"
    assert "port" not in flat(REFERENCE)


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
