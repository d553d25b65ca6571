"""Make the shipped tiny models from seeds: `python -m workloads.hops.make_models [--out DIR]`.

Stages (each with a fresh AdamW, 20 warm-up steps and a cosine to 5 %):
  policy  150 x 96 clean chains of 1 to 3 hops, 260 x 32 of full length, then 120 x 32 noisy
          demonstrations, half of them guesses, so that RL has something to find
  judge   from the dense policy's clean base: 100 x 64 short critiques, then 400 x 32 full ones
Three things are needed together, or training stays on a plateau at 38 to 48 %: sources written before
destinations in the prompt, the short-chain curriculum, and an initialisation that plants a
previous-token head in layer 0. The printed evidence is committed beside the models.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from systems.machine.files import replace_file
from systems.model.config import ModelConfig
from systems.model.engine import Engine, Request
from systems.model.qwen3 import MoeFfn, Qwen3
from systems.model.sampling import Sampler
from systems.model.serving import ServingModel
from systems.model.weights import digest, save_model, to_standard
from workloads.hops import demonstrations as demo
from workloads.hops import task

MODELS = Path(__file__).parent / "models"
DENSE = ModelConfig(
    vocab=80, hidden=64, layers=3, heads=4, kv_heads=2, head_dim=32, ffn=192,
    max_positions=1024, rope_theta=1e10, pad_id=task.PAD, eos_id=task.STOP,
)  # fmt: skip
MOE = ModelConfig(
    vocab=80, hidden=64, layers=3, heads=4, kv_heads=2, head_dim=32, ffn=192,
    max_positions=1024, rope_theta=1e10, pad_id=task.PAD, eos_id=task.STOP,
    experts=8, experts_per_token=2, expert_ffn=96, router_aux_coef=0.01,
)  # fmt: skip
SORT_POOL = 4  # batches drawn together and split by length, to pad less


@torch.no_grad()
def initialise(config: ModelConfig, seed: int) -> Qwen3:
    """Random weights with a previous-token head in layer 0 (ordinary parameters, nothing added)."""
    torch.manual_seed(seed)
    model = Qwen3(config)
    residual = 1 / math.sqrt(2 * config.layers)
    torch.nn.init.normal_(model.embedding, 0, 0.5)
    torch.nn.init.normal_(model.head, 0, 0.02)
    for block in model.layers:
        torch.nn.init.normal_(block.qkv, 0, config.hidden**-0.5)
        torch.nn.init.normal_(block.out, 0, block.out.shape[-1] ** -0.5 * residual)
        torch.nn.init.normal_(block.ffn.gate_up, 0, config.hidden**-0.5)
        torch.nn.init.normal_(block.ffn.down, 0, block.ffn.down.shape[-1] ** -0.5 * residual)
        if isinstance(block.ffn, MoeFfn):
            torch.nn.init.normal_(block.ffn.router, 0, 0.02)
    _plant_previous_token_head(model)
    return model


def _plant_previous_token_head(model: Qwen3) -> None:
    """KV head 0 of layer 0 attends one position back.

    A constant embedding channel feeds q and k through the fast rotary pairs; q is rotated by one
    position, so its score peaks at distance 1.
    """
    config, block = model.config, model.layers[0]
    width = config.head_dim
    model.embedding[:, 0] = 1.5
    frequency = config.rope_theta ** -(torch.arange(0, width, 2).double() / width)
    fast = (torch.arange(width // 2) < max(3, int((frequency > 0.1).sum()))).double()
    query = torch.cat([fast * torch.cos(-frequency), fast * torch.sin(-frequency)]).float()
    key = torch.cat([fast, torch.zeros_like(fast)]).float()
    for head in range(config.heads // config.kv_heads):
        rows = slice(head * width, (head + 1) * width)
        block.qkv[rows] *= 0.1
        block.qkv[rows, 0] += query
    rows = slice(config.heads * width, (config.heads + 1) * width)
    block.qkv[rows] *= 0.1
    block.qkv[rows, 0] += key
    block.norm_q.weight.fill_(2.0)
    block.norm_k.weight.fill_(2.0)


def _batches(pair: Callable[[random.Random], demo.Pair], size: int, rng: random.Random) -> Iterator[
    tuple[Tensor, Tensor]
]:  # fmt: skip
    """Endless (ids [B, T], mask [B, T]) with the mask on completions."""
    while True:
        pool = sorted((pair(rng) for _ in range(size * SORT_POOL)), key=lambda p: len(p[0]) + len(p[1]))
        parts = [pool[i * size : (i + 1) * size] for i in range(SORT_POOL)]
        rng.shuffle(parts)
        for part in parts:
            width = max(len(context) + len(completion) for context, completion in part)
            ids = torch.zeros(size, width, dtype=torch.long)
            mask = torch.zeros(size, width)
            for row, (context, completion) in enumerate(part):
                text = task.encode(context + completion)
                ids[row, : len(text)] = torch.tensor(text)
                mask[row, len(context) : len(text)] = 1
            yield ids, mask


def finetune(
    model: Qwen3, pair: Callable[[random.Random], demo.Pair], *, steps: int, batch: int, lr: float,
    seed: int, name: str, tokens_per_row: float | None = None,
) -> None:  # fmt: skip
    """Supervised training. With `tokens_per_row` the loss is divided by a constant, so that batches
    bucketed by length weigh their tokens alike; otherwise by the batch's tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98), weight_decay=0.01)
    stream = _batches(pair, batch, random.Random(seed))
    for step in range(steps):
        ids, mask = next(stream)
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps)) * 0.95 + 0.05
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * cosine
        logits = model(ids[:, :-1]).flatten(0, 1)
        nll = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
        total = (nll * mask[:, 1:].flatten()).sum()
        tokens = mask[:, 1:].sum()
        loss = total / (batch * tokens_per_row if tokens_per_row else tokens)
        loss = loss + model.config.router_aux_coef * model.aux_loss()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            print(f"{name} step {step + 1} nll/token {(total / tokens).item():.4f}", flush=True)


def make_base(config: ModelConfig, seed: int, name: str) -> Qwen3:
    """A model that follows chains without error."""
    model = initialise(config, seed)
    print(f"{name} parameters {sum(p.numel() for p in model.parameters())}")
    finetune(model, demo.short_pair, steps=150, batch=96, lr=4e-3, seed=seed + 50, name=f"{name} short")
    finetune(model, demo.clean_pair, steps=260, batch=32, lr=4e-3, seed=seed + 60, name=f"{name} full")
    return model


def generate(model: Qwen3, prompts: list[str], temperature: float, max_new: int) -> list[str]:
    engine = Engine(
        ServingModel(model.config, to_standard(model)),
        Sampler(vocab=task.VOCAB, temperature=temperature, seed=123),
        stop=task.STOP,
    )
    requests = [Request(i, i, task.encode(prompt), max_new) for i, prompt in enumerate(prompts)]
    return [task.decode(request.tokens) for request in engine.run(requests)]


def report_policy(model: Qwen3, name: str, problems: int = 256) -> None:
    rng = random.Random(123)
    drawn = [task.make_problem(rng) for _ in range(problems)]
    responses = generate(model, [problem.prompt for problem in drawn], 1.0, 224)
    right = sum(task.is_correct(p, r) for p, r in zip(drawn, responses, strict=True)) / problems
    lengths = sorted(map(len, responses))
    guesses = sum(response.startswith("#") for response in responses) / problems
    print(
        f"{name} accuracy {right:.3f} guesses {guesses:.2f} response tokens mean "
        f"{sum(lengths) / problems:.1f} p50 {lengths[problems // 2]} "
        f"p95 {lengths[int(0.95 * problems)]} max {lengths[-1]}"
    )


def report_judge(model: Qwen3, name: str, problems: int = 512) -> None:
    rng = random.Random(99)
    cases = []
    for _ in range(problems):
        problem = task.make_problem(rng)
        cases.append((problem, demo.flawed(problem, rng)))
    prompts = [problem.prompt + response + task.JUDGE_MARK for problem, response in cases]
    critiques = generate(model, prompts, 0.0, 240)
    verdicts = [task.verdict(text) for text in critiques]
    truths = [float(task.is_correct(problem, response)) for problem, response in cases]
    agree = sum((v or 0.0) == t for v, t in zip(verdicts, truths, strict=True)) / problems
    false_positive = sum(v == 1.0 and t == 0.0 for v, t in zip(verdicts, truths, strict=True)) / problems
    unparsed = sum(v is None for v in verdicts) / problems
    lengths = sorted(map(len, critiques))
    print(
        f"{name} agrees with the truth {agree:.3f} false positives {false_positive:.3f} unparsed "
        f"{unparsed:.3f} critique tokens mean {sum(lengths) / problems:.1f} max {lengths[-1]}"
    )


def save(model: Qwen3, directory: Path) -> None:
    save_model(model, directory)
    _save_tokenizer(directory, model.config.vocab)
    print(f"{directory.name} weights sha256 {digest(to_standard(model))}", flush=True)


def _save_tokenizer(directory: Path, vocab: int) -> None:
    """A character tokenizer that transformers and vLLM load, with the same ids as `task.encode`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    words = {"<pad>": task.PAD} | {c: i for c, i in task.IDS.items() if i != task.PAD}
    words |= {f"<unused{i}>": i for i in range(task.VOCAB, vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True), AddedToken(".", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": ".",
        "unk_token": "<pad>", "clean_up_tokenization_spaces": False, "model_max_length": 1024,
    }  # fmt: skip
    replace_file(directory / "tokenizer_config.json", json.dumps(settings, indent=1) + "\n")
    generation = {"eos_token_id": task.STOP, "pad_token_id": task.PAD, "do_sample": False}
    replace_file(directory / "generation_config.json", json.dumps(generation, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODELS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["dense", "moe", "judge"], action="append")
    options = parser.parse_args()
    wanted = options.only or ["dense", "moe", "judge"]
    torch.set_num_threads(1)
    started = time.perf_counter()
    print(f"torch {torch.__version__} seed {options.seed}")
    for name, config in (("dense", DENSE), ("moe", MOE)):
        if name not in wanted and not (name == "dense" and "judge" in wanted):
            continue
        model = make_base(config, options.seed, name)
        clean = {key: value.clone() for key, value in model.state_dict().items()}
        if name in wanted:
            finetune(
                model, demo.policy_pair, steps=120, batch=32, lr=2e-3, seed=options.seed,
                name=f"{name} policy", tokens_per_row=20.0,
            )  # fmt: skip
            report_policy(model, name)
            save(model, options.out / name)
        if name == "dense" and "judge" in wanted:
            judge = Qwen3(config)
            judge.load_state_dict(clean)
            finetune(
                judge, demo.short_judge_pair, steps=100, batch=64, lr=4e-3,
                seed=options.seed + 70, name="judge short",
            )  # fmt: skip
            finetune(
                judge, demo.judge_pair, steps=400, batch=32, lr=4e-3, seed=options.seed,
                name="judge full",
            )  # fmt: skip
            report_judge(judge, "judge")
            save(judge, options.out / "judge")
    print(f"made in {time.perf_counter() - started:.0f} s, one thread")


if __name__ == "__main__":
    main()
