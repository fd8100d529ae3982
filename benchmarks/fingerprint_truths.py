"""Ground truths of `assay fingerprint`: public accuracy bugs, set up again, and the first line of the diff of each.

It ends with status 1 if a line is not the expected one.

    python benchmarks/fingerprint_truths.py                            what one environment can show
    python benchmarks/fingerprint_truths.py --transformers-4 PYTHON    also transformers 4.57, of that Python, beside this one's
    python benchmarks/fingerprint_truths.py --server                   also an SGLang server on the CPU that gets its weights again
    python benchmarks/fingerprint_truths.py --parts [--device cuda --model M]    seconds by part, of a server

Each model has a few hundred kilobytes: RoPE, tokenizers and templates of the reports, random weights. Where the bug was in an
engine that is not installed here (vLLM), its reading of the configuration comes as code with the model.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from assay.harness.engines.launch import Launch
from assay.harness.engines.sglang.server import SGLangServer
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.fingerprint.differences import compare_fingerprints
from assay.harness.run.fingerprints import of_side
from assay.harness.sides import BUILTIN_MODEL, Side
from tests.harness.fingerprint.models import LLAMA_3_SPLIT, random_weights, write_model

GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 128, "query_pre_attn_scalar": 32,
    "layer_types": ["sliding_attention", "full_attention"], "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
}  # fmt: skip
"""What transformers 5 saves of Gemma 3."""
CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rope_parameters = {"rope_type": "default"}


class OwnRotaryEmbedding(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        base = (config.rope_parameters or {}).get("rope_theta", 10000)
        self.register_buffer("inv_freq", base ** (-torch.arange(0, 32, 2, device="cpu") / 32), persistent=False)


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.rotary_emb = OwnRotaryEmbedding(config)
        self.post_init()
"""
"""A model that reads the base of RoPE as vLLM's BailingMoeV2 did: from ``rope_parameters`` alone, 10,000 where it is not there."""
TIMEOUT_S = 900.0


def loaded(model: Path, python: str = "", *flags: str) -> Fingerprint:
    """Load a model with the transformers of a Python."""
    side = Side(engine="hf", backend="hf", model=str(model), interpreter=python, flags=flags)
    return of_side(side, "cpu", TIMEOUT_S)


def first_line(left: Fingerprint, right: Fingerprint) -> str:
    """Return the first line and the exit code, as of two servers of one name: nothing was asked to differ."""
    diff = compare_fingerprints(left.model_copy(update={"asked": {}}), right.model_copy(update={"asked": {}}))
    return f"{diff.differences[0].says} (exit code {diff.exit_code})" if diff.differences else "no difference"


def as_expected(line: str, expected: str) -> str:
    """Say whether a first line is the one that a truth has to have; what was not run tells its reason itself."""
    if line.startswith("not run: "):
        return "not run"
    return "yes" if re.fullmatch(expected + r" \(exit code 1\)", line) else f"no: {expected}"


def versions(folder: Path, four: str, config: dict[str, Any], **model: Any) -> str:
    """Compare the readings of transformers 4.57 and of the installed one."""
    if not four:
        return "not run: needs --transformers-4"
    written = write_model(folder, config, **model)
    return first_line(loaded(written, four), loaded(written))


def own_class(folder: Path) -> str:
    """Compare a model whose base stands where its class looks for it with one where it does not."""
    config = {"model_type": "own", "architectures": ["OwnModel"], "auto_map": {
        "AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel", "AutoModelForCausalLM": "own.OwnModel",
    }}  # fmt: skip
    read = []
    for name, theta in (("right", 10000.0), ("wrong", 600000.0)):
        written = write_model(folder / name, {**config, "rope_theta": theta})
        (written / "own.py").write_text(CODE)
        read.append(loaded(written, "", "--trust-remote-code"))
    return first_line(*read)


def double_bos(folder: Path) -> str:
    plain = write_model(
        folder / "plain",
        {"rope_theta": 1e4},
        template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
        adds_bos=True,
    )
    return first_line(loaded(plain), loaded(write_model(folder / "both", {"rope_theta": 1e4}, adds_bos=True)))


def another_dtype(folder: Path) -> str:
    weights = {name: weight.bfloat16() for name, weight in random_weights().items()}
    saved = write_model(folder / "bf16", {"rope_theta": 1e4}, weights=weights)
    return first_line(loaded(write_model(folder / "fp32", {"rope_theta": 1e4})), loaded(saved))


def adapter(folder: Path) -> str:
    """Compare a merged checkpoint with the base that is served in its place."""
    merged = random_weights()
    for number in range(2):
        merged[f"model.layers.{number}.self_attn.o_proj.weight"] += 0.002
    base = write_model(folder / "base", {"rope_theta": 1e4})
    return first_line(loaded(write_model(folder / "merged", {"rope_theta": 1e4}, weights=merged)), loaded(base))


def sent_again(folder: Path) -> str:
    """Send new weights to a running server with one tensor missing, and compare it with the checkpoint that was sent."""
    from safetensors.torch import load_file, save_file

    from assay.evals.tiny_model.families import SOURCE

    sent, partly = folder / "sent", folder / "partly"
    shutil.copytree(SOURCE, sent)
    weights = {name: weight * 1.25 for name, weight in load_file(SOURCE / "model.safetensors").items()}
    save_file(weights, sent / "model.safetensors", {"format": "pt"})
    shutil.copytree(sent, partly)
    save_file(
        {name: weight for name, weight in weights.items() if name != "model.layers.2.mlp.down_proj.weight"},
        partly / "model.safetensors", {"format": "pt"},
    )  # fmt: skip
    launch = Launch(
        role="candidate", backend="torch_native", model=SOURCE, device="cpu", evidence=folder / "server", log=folder / "log",
        decode_backend="torch_native", startup_timeout=TIMEOUT_S, request_timeout=300, cpu_core=0,
    )  # fmt: skip
    with SGLangServer(launch) as server:
        before = server.fingerprint()
        server.send("/update_weights_from_disk", {"model_path": str(partly)})
        after = server.fingerprint()
    changed = compare_fingerprints(before, after)
    assert changed.exit_code == 1, "the server did not take the weights"
    return first_line(of_side(Side(backend="torch_native", model=str(sent)), "cpu", TIMEOUT_S), after)


def truths(four: str, server: bool) -> dict[str, tuple[Callable[[Path], str], str]]:
    """Return the ground truths by name: what sets one up, and the pattern of its first line, which ends in exit code 1."""
    late = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    return {
        "vllm #42624: a checkpoint of transformers 5 in 4": (
            lambda folder: versions(folder, four, late),
            r"A: rope_theta is 10,000; config\.json says 500,000",
        ),
        "sglang #21537: Gemma 3's RoPE across 4 and 5": (
            lambda folder: versions(folder, four, GEMMA),
            r"A: RoPE is not scaled; config\.json says linear scaling by 8 for full attention",
        ),
        "vllm #56066: theta beside rope_parameters": (own_class, r"B: rope_theta is 10,000; config\.json says 600,000"),
        "mellea #947: class of the tokenizer across 4 and 5": (
            lambda folder: versions(
                folder, four, {"rope_theta": 1e4}, tokenizer_class="GPT2Tokenizer", splits=LLAMA_3_SPLIT
            ),
            r"[AB]: token ids of .* do not match tokenizer\.json, .*",
        ),
        "mellea #947: the same in one environment": (
            lambda folder: first_line(
                loaded(write_model(folder / "a", {"rope_theta": 1e4}, splits=LLAMA_3_SPLIT)),
                loaded(
                    write_model(
                        folder / "b", {"rope_theta": 1e4}, splits=LLAMA_3_SPLIT, tokenizer_class="GPT2Tokenizer"
                    )
                ),
            ),
            r"B: token ids of .* do not match tokenizer\.json, which is read as GPT2Tokenizer",
        ),
        "two BOS: a rendered chat sent as text (lm-eval)": (
            double_bos,
            r"B: two BOS tokens begin a chat that a client renders .*",
        ),
        "a checkpoint saved in another dtype": (
            another_dtype,
            r"21 of 21 parameters are the same .* rounded to bfloat16 in B",
        ),
        "a LoRA adapter that was not applied (verl #7495)": (
            adapter,
            r"2 of 21 parameters have different weights: .*o_proj.*",
        ),
        "weights sent again, one tensor missing": (
            sent_again if server else lambda folder: "not run: needs --server",
            r".*model\.layers\.2\.mlp\.down_proj\.weight.*",
        ),
    }


def parts(device: Any, model: str) -> None:
    """Show the seconds of each part of a model's fingerprint."""
    begun = time.perf_counter()
    side = Side(backend="torch_native" if device == "cpu" else "triton", model=model)
    made = of_side(side, device, TIMEOUT_S)
    table = Table("part", "seconds", title=f"{model} on {device}: {time.perf_counter() - begun:.1f} s in all")
    for name, seconds in made.seconds.items():
        table.add_row(name, f"{seconds:.3f}")
    Console().print(table)
    Console().print(json.dumps(made.not_observed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--transformers-4", default="", metavar="PYTHON", help="a Python with transformers 4.57 and PyTorch"
    )
    parser.add_argument("--server", action="store_true", help="also start a server")
    parser.add_argument("--parts", action="store_true", help="show the seconds of each part instead")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default=BUILTIN_MODEL)
    given = parser.parse_args()
    if given.parts:
        parts(given.device, given.model)
        return
    table = Table(
        "case", "first line of the diff", "as expected", "seconds", title="Ground truths of assay fingerprint"
    )
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        for number, (name, (truth, expected)) in enumerate(truths(given.transformers_4, given.server).items()):
            begun = time.perf_counter()
            line = truth(Path(temporary) / str(number))
            right = as_expected(line, expected)
            table.add_row(name, line, right, f"{time.perf_counter() - begun:.1f}")
            print(f"{name} | {line} | {right} | {time.perf_counter() - begun:.1f} s", flush=True)
            missed += [name] if right.startswith("no: ") else []
    Console(width=200).print(table)
    if missed:
        sys.exit(f"not the expected line: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
