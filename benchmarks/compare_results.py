"""Two real lm-eval runs of the tiny model on two backends: `assay compare` beside lm-eval's own comparator.

lm-eval runs in an environment of its own (``--python``), asks the servers that this starts, and logs its samples. Its comparator
(``scripts/model_comparator.py``) is a two-sided z test of two accuracies with their standard errors, as if the documents were
others; the same formula is used here on the same result files. The exact test of `assay compare` pairs the documents.

    python benchmarks/compare_results.py --python /path/to/venv/bin/python --questions 512

Measured on two CPU cores, SGLang 0.5.23, lm-eval 0.4.13: see ``docs/compare.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import NormalDist

from common import HERE, python_path

from assay.evals.questions import GROUPS, choice_question
from assay.evals.synthetic import draw
from assay.harness.config import make_spec
from assay.harness.ingest.recognise import compare
from assay.harness.ingest.tensor_diff import TensorRule
from assay.harness.run.plan import prepare
from assay.harness.run.servers import core_of, make_engine, running

TASK = """\
task: assay_synthetic
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: [], max_gen_toks: 32, do_sample: false, temperature: 0.0}}
filter_list:
  - name: letter
    filter:
      - {{function: regex, regex_pattern: '(?i)Answer[ \\t]*:[ \\t]*\\$?([A-D])\\$?'}}
      - {{function: take_first}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""


def write_task(folder: Path, questions: int, facts: int) -> None:
    """Write a task of questions like the built-in ones, which needs no download.

    With more facts than the tiny model has learned to read, it gets some of them wrong, as real models do: only then does it matter
    whether documents are paired.
    """
    data = folder / "synthetic.jsonl"
    rows = []
    for index in range(questions):
        rng = random.Random(index)
        drawn = draw(rng, GROUPS[index % len(GROUPS)], facts, facts)
        text, options, answer = drawn.ask(rng, rng.randrange(facts))
        asked = choice_question(f"synthetic-{index}", "", "other", text, options, answer)
        rows.append({"id": asked.id, "prompt": asked.prompt, "answer": answer})
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "assay_synthetic.yaml").write_text(TASK.format(data=data))


def evaluate(python: str, folder: Path, backend: str, number: int, concurrency: int) -> Path:
    """Serve the tiny model with a backend, and have lm-eval ask it; return the folder of its results."""
    spec = make_spec({"reference": backend, "candidate": backend, "suites": ("accuracy",), "questions": 1})
    out, server = folder / f"results-{number}", folder / f"server-{number}"
    server.mkdir()
    engine = make_engine(prepare(spec), "reference", server, server / "log", cpu_core=core_of("cpu"), eager=True)
    with running([engine], "cpu"):
        arguments = (
            f"model=tiny,base_url={engine.url}/v1/chat/completions,num_concurrent={concurrency},tokenizer_backend=None"
        )
        command = [python, "-m", "lm_eval", "--model", "local-chat-completions", "--model_args", arguments,
                   "--tasks", "assay_synthetic", "--include_path", str(folder), "--apply_chat_template", "--log_samples",
                   "--output_path", str(out)]  # fmt: skip
        key = engine._key  # type: ignore[attr-defined]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
            "OPENAI_API_KEY": key,
            "HF_DATASETS_OFFLINE": "1",
        }
        subprocess.run(command, env=environment, check=True, capture_output=True)
    return out


def comparator(a: Path, b: Path) -> float:
    """lm-eval's two-sided p value; nan where both standard errors are 0."""
    found = [
        json.loads(next(path.rglob("results_*.json")).read_text())["results"]["assay_synthetic"] for path in (a, b)
    ]
    scores = [one["exact_match,letter"] for one in found]
    error = math.hypot(*(one["exact_match_stderr,letter"] for one in found))
    return 2 * NormalDist().cdf(-abs(scores[0] - scores[1]) / error) if error else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="Python of an environment with lm-eval")
    parser.add_argument("--questions", type=int, default=512)
    parser.add_argument("--facts", type=int, default=12, help="facts of a question; the tiny model learned 4 to 10")
    parser.add_argument(
        "--candidates", nargs="+", default=["torch_native", "sage_attn", "faulty:noisy", "faulty:very_noisy"]
    )
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = python_path()  # the servers find the kernels of this folder
    sys.path.append(str(HERE))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder, arguments.questions, arguments.facts)
        reference = evaluate(arguments.python, folder, "torch_native", 0, 16)
        print(
            "candidate; A; B; lost; gained; z test p; McNemar p; non-inferiority p; regression p; verdict", flush=True
        )
        for number, backend in enumerate(arguments.candidates, 1):
            other = evaluate(arguments.python, folder, backend, number, 8)
            result = compare(reference, other, 0.02, TensorRule())
            assert result.answers is not None
            one = result.answers.overall
            assert one is not None
            print(
                f"{backend}; {one.a:.4f}; {one.b:.4f}; {one.lost}; {one.gained}; {comparator(reference, other):.2g}; "
                f"{one.p_mcnemar:.2g}; {one.p_inferior:.2g}; {one.p_regression:.2g}; {result.verdict}",
                flush=True,
            )


if __name__ == "__main__":
    main()
