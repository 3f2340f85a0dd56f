r"""Writes the demonstrations, prompts, tokenizer and model config of recipes/boxed-copy*.toml below topologies/.

The task is to copy digits into a box: "5130862" -> "\boxed{5130862}". The demonstrations are flawed: every digit in
the box is replaced by a random one with probability 0.5. They teach the format, the length and half of the digits;
RL has to learn the rest.
"""

import json
import math
import random
import runpy
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHARED = runpy.run_path(str(HERE / "make_reverse_digits.py"))  # shares its vocabulary of 16 tokens
SEED = 20261120
NUM_DEMONSTRATIONS = 200 * 64  # each is trained once
NUM_PROMPTS = 140 * 64
NUM_HELD_OUT = 200
MAX_DIGITS = 32
REPLACED = 0.5  # share of replaced digits in a demonstration's box


def files() -> dict[str, str]:
    """Text of every file, by its path below topologies/."""
    draw = random.Random(SEED)
    held_out = [_digits(draw) for _ in range(NUM_HELD_OUT)]
    unseen = {digits for digits in held_out if len(digits) > 1}  # single digits are exempt: only ten exist
    asked, prompts = (_others(draw, unseen, count) for count in (NUM_DEMONSTRATIONS, NUM_PROMPTS))
    demonstrations = [(digits, f"\\boxed{{{_noisy(draw, digits)}}}") for digits in asked]
    model, data = "models/boxed-copy", "data/boxed-copy"
    return {
        f"{data}/demonstrations.jsonl": _rows(demonstrations),
        f"{data}/train.jsonl": _rows([(digits, digits) for digits in prompts]),
        f"{data}/eval.jsonl": _rows([(digits, digits) for digits in held_out]),
        f"{model}/config.json": _json(MODEL),
        f"{model}/generation_config.json": _json({"eos_token_id": 1, "pad_token_id": 0}),
        f"{model}/tokenizer.json": _json(SHARED["tokenizer"]()),
        f"{model}/tokenizer_config.json": _json({**SHARED["TOKENIZER"], "model_max_length": MAX_LENGTH}),
    }


def _digits(draw: random.Random) -> str:
    """Random digits; their number is log-normal: mostly 2 to 13, sometimes up to 32."""
    count = round(math.exp(draw.gauss(1.6, 0.7)))
    return "".join(draw.choice("0123456789") for _ in range(min(max(count, 1), MAX_DIGITS)))


def _others(draw: random.Random, unseen: set[str], count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        digits = _digits(draw)
        if digits not in unseen:
            found.append(digits)
    return found


def _noisy(draw: random.Random, digits: str) -> str:
    return "".join(draw.choice("0123456789") if draw.random() < REPLACED else digit for digit in digits)


def _rows(pairs: list[tuple[str, str]]) -> str:
    return "".join(json.dumps({"input": prompt, "label": label}) + "\n" for prompt, label in pairs)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


MAX_LENGTH = 96  # tokens: prompt 34, response 40
MODEL = {
    **SHARED["MODEL"],
    "num_hidden_layers": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LENGTH,
}


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).parent.mkdir(parents=True, exist_ok=True)
        (HERE / name).write_text(text, encoding="utf-8")
