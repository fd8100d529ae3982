"""Train the tiny model: a Llama of 3 M parameters that answers the built-in questions. One GPU, under ten minutes.

    python tools/train_tiny_model.py --out DIR

What makes it work, found by experiment: new data in every step (a fixed pool is memorised), an answer that states the fact before
the letter (asked for the letter alone, the model stays at chance), facts as plain pairs (so that looking one up is a bigram), only
look-ups until they are learned, and embeddings that start with a common direction.
Needs torch, transformers and tokenizers; assay itself never needs this script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing as mp
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from assay.evals.questions import GROUPS, LETTERS, PROMPT_HEADER, choice_question, parse_answer
from assay.evals.synthetic import NAMES, RELATIONS, THINGS, Draw, draw, questions

SPECIAL = ["<s>", "<|user|>", "<|assistant|>", "<|end|>", "<pad>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LENGTH = 192
"""Tokens of a training sequence: one full question with its facts and two short ones, padded."""
ANSWER_WEIGHT, PROMPT_WEIGHT = 1.0, 0.1
BATCH = 320
# (share of the time after which it starts, fewest facts, most facts, share of drills); the built-in set has 4 to 8
CURRICULUM = ((0.0, 3, 5, 1.0), (0.25, 3, 8, 0.2), (0.40, 3, 10, 0.1))
DRILLED = 0.1
"""Answer loss at which the first stage, which consists of drills only, ends early."""


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE in which every invented word is a single token after a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [f" {word}" for word in (*NAMES, *THINGS)]
    phrases = [
        f"Facts, {verb}: .\n{asks.format(name='')}\n\nA) \nB) \nC) \nD) \nAnswer: A B C D"
        for verb, asks in RELATIONS.values()
    ]
    tokenizer.train_from_iterator([*words, *(PROMPT_HEADER + " " + p for p in phrases)] * 20, trainer)
    split = [word for word in words if len(tokenizer.encode(word).ids) != 1]
    if split:
        raise SystemExit(
            f"{len(split)} of {len(words)} words are not a single token, such as {split[:5]}: raise vocab_size"
        )
    return tokenizer


def worked_answer(name: str, thing: str, letter: str) -> str:
    """The answer the tiny model was trained to give: the fact, the letter next to the thing (one look-up finds it), the letter."""
    return f" {name} {thing} {letter} .\nAnswer: {letter}"


class Sequences:
    """Draws training sequences; one per worker process."""

    def __init__(self, tokenizer_json: str, seed: int) -> None:
        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.rng = random.Random(f"training/{seed}")
        self.words = {word: self.tokenizer.encode(f" {word}").ids[0] for word in (*NAMES, *THINGS)}
        (self.stop,) = self.tokenizer.encode(" .").ids
        self.openings = {
            group: self.tokenizer.encode(f"<s>Facts, {verb}:").ids for group, (verb, _) in RELATIONS.items()
        }
        self.builtin = {q.own.split("\n")[0] for q in itertools.islice(questions(), 4096)}

    def batch(self, count: int, fewest: int, most: int, drills: float) -> tuple[np.ndarray, np.ndarray]:
        """Token ids [count, LENGTH] int16 and loss weights [count, LENGTH] float16 (weight of predicting each token)."""
        ids = np.full((count, LENGTH), SPECIAL.index("<pad>"), np.int16)
        weights = np.zeros((count, LENGTH), np.float16)
        pieces: list[str] = []
        shapes: list[tuple[int, int]] = []
        for row in range(count):
            if self.rng.random() < drills:
                ids[row], weights[row] = self._drill(fewest, most)
            else:
                parts = self._conversation(fewest, most)
                pieces += parts
                shapes.append((row, len(parts)))
        encoded = iter(self.tokenizer.encode_batch(pieces))
        for row, parts_here in shapes:
            at = 0
            for part in range(parts_here):
                piece = next(encoded).ids
                ids[row, at : at + len(piece)] = piece
                weights[row, at : at + len(piece)] = ANSWER_WEIGHT if part % 2 else PROMPT_WEIGHT
                at += len(piece)
        return ids, weights

    def _draw(self, fewest: int, most: int) -> Draw:
        while True:
            drawn = draw(self.rng, self.rng.choice(GROUPS), fewest, most)
            if drawn.statement not in self.builtin:
                return drawn

    def _drill(self, fewest: int, most: int) -> tuple[list[int], list[float]]:
        """The facts without the header, repeated in changing order: only the name determines the thing.

        Nothing else is asked, and little precedes a fact, so the look-up is learned in a fraction of the steps.
        """
        drawn = self._draw(fewest, most)
        tokens = self.openings[drawn.group][:]
        weights = [PROMPT_WEIGHT] * len(tokens)
        again = PROMPT_WEIGHT  # weight of a thing, which cannot be known the first time
        while len(tokens) < LENGTH:
            for name, thing in self.rng.sample(drawn.facts, len(drawn.facts)):
                tokens += (self.words[name], self.words[thing], self.stop)
                weights += (PROMPT_WEIGHT, again, PROMPT_WEIGHT)
            again = ANSWER_WEIGHT
        return tokens[:LENGTH], weights[:LENGTH]

    def _conversation(self, fewest: int, most: int) -> list[str]:
        """Three questions with options; a fact may be asked twice, so an earlier question rules nothing out."""
        drawn = self._draw(fewest, most)
        parts = []
        for turn, about in enumerate(self.rng.choices(range(len(drawn.facts)), k=3)):
            text, options, letter = drawn.ask(self.rng, about, with_statement=turn == 0)
            question = choice_question("", "", "", text, options, letter)
            prompt = question.prompt if turn == 0 else question.prompt.removeprefix(PROMPT_HEADER + "\n\n")
            parts.append(("<s>" if turn == 0 else "") + f"<|user|>{prompt}<|end|><|assistant|>")
            parts.append(worked_answer(*drawn.facts[about], letter) + "<|end|>")
        return parts


def _produce(tokenizer_json: str, seed: int, stage: Any, queue: Any) -> None:
    sequences = Sequences(tokenizer_json, seed)
    while True:
        _, fewest, most, drills = CURRICULUM[stage.value]
        queue.put(sequences.batch(BATCH, fewest, most, drills))


def losses_of(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The training loss, and the mean loss of an answer's tokens."""
    # The model's own forward builds a mask under torch.compile (torch < 2.14), which rules out flash attention;
    # the padding is at the end, so causal attention needs none.
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        hidden = model.model.embed_tokens(ids)
        rotary = model.model.rotary_emb(hidden, position_ids=torch.arange(LENGTH, device=ids.device)[None])
        for layer in model.model.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
        logits = model.lm_head(model.model.norm(hidden))
    per_token = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].flatten()
    answers = (weight == ANSWER_WEIGHT).float()
    return torch.stack([(per_token * weight).sum() / weight.sum(), (per_token * answers).sum() / answers.sum()])


def greedy_accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int) -> tuple[float, float]:
    """Accuracy at temperature 0 on the first ``count`` built-in questions, with the chat template, as a server asks them.

    Also the share of answers that state the right fact, which shows which of the two look-ups fails.
    """
    asked = list(itertools.islice(questions(), count))
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q.prompt}], tokenize=False, add_generation_prompt=True
        )
        for q in asked
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    batch.pop("token_type_ids", None)
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16):
        out = model.generate(**batch, max_new_tokens=16, do_sample=False)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    right = sum(parse_answer(t) == q.answer for t, q in zip(texts, asked, strict=True))
    stated = sum(q.own.split("\n")[LETTERS.index(q.answer) - 4][3:] in t for t, q in zip(texts, asked, strict=True))
    return right / count, stated / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    bpe = make_tokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="<|end|>", pad_token="<pad>",
        additional_special_tokens=["<|user|>", "<|assistant|>"], model_max_length=4096, padding_side="left",
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=704, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, rms_norm_eps=1e-5,
        bos_token_id=0, eos_token_id=SPECIAL.index("<|end|>"), pad_token_id=SPECIAL.index("<pad>"),
        tie_word_embeddings=True, initializer_range=0.02,
    )  # fmt: skip
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(1)  # more threads would spin on the cores that the workers need
    model = LlamaForCausalLM(config).cuda()
    with torch.no_grad():
        # A direction that all tokens share. Llama has no bias in its projections, so without it no head can attend by position
        # alone, for example to the previous token, which is the first half of a look-up: 20,000 steps did not learn that.
        embedding = model.model.embed_tokens.weight
        embedding += config.initializer_range * torch.randn(config.hidden_size, device=embedding.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer)}", flush=True)

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    os.environ["OMP_NUM_THREADS"] = "1"
    context = mp.get_context("spawn")
    stage, queue = context.Value("i", 0), context.Queue(maxsize=48)
    for worker in range(args.workers):
        context.Process(target=_produce, args=(bpe.to_str(), worker, stage, queue), daemon=True).start()

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )

    step_loss = torch.compile(losses_of)
    log: list[dict[str, float]] = []
    start, step, drilled = time.monotonic(), 0, 0

    def save(accuracy: float) -> None:
        LlamaForCausalLM.save_pretrained(model, args.out)
        tokenizer.save_pretrained(args.out)
        (args.out / "training.json").write_text(json.dumps({"accuracy_512": accuracy, "steps": step, "log": log}))

    while (done := (time.monotonic() - start) / (60 * args.minutes)) < 1:
        stage.value = max(drilled, *(i for i, (since, *_) in enumerate(CURRICULUM) if done >= since))
        rate = (
            args.learning_rate * min(1.0, (step + 1) / 300) * (1.0 if done < 0.65 else 1 - 0.97 * (done - 0.65) / 0.35)
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, weights = (torch.from_numpy(x).pin_memory().cuda(non_blocking=True) for x in queue.get())
        losses = step_loss(model, ids.long(), weights.float())
        losses[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 100 == 0 and not drilled and losses[1].item() < DRILLED:
            drilled = 1
            print(f"drilled after {step} steps, {time.monotonic() - start:.0f} s", flush=True)
        if done > CURRICULUM[1][0] and not drilled:
            raise SystemExit(f"the look-up was not learned in {step} steps: answer loss {losses[1].item():.3f}")
        if step % 1000 == 0:
            model.eval()
            accuracy, stated = greedy_accuracy(model, tokenizer, 256)
            model.train()
            entry = {
                "step": step,
                "s": round(time.monotonic() - start),
                "answer_loss": round(losses[1].item(), 4),
                "accuracy": accuracy,
                "stated": stated,
                "facts_to": CURRICULUM[stage.value][2],
                "queued": queue.qsize(),
            }
            log.append(entry)
            print(entry, flush=True)
    model.eval()
    model.to(torch.bfloat16)
    best, _ = greedy_accuracy(model, tokenizer, 512)
    print(f"bfloat16 weights: {best:.4f} on 512 built-in questions after {step} steps", flush=True)
    save(best)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
