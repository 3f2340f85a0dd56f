"""Writes the prompts, tokenizer and model config of recipes/reverse-digits.toml below topologies/."""

import hashlib
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NUM_HELD_OUT = 22
PAD, END, USER, ASSISTANT = "<pad>", "<end>", "<user>", "<assistant>"
VOCABULARY = (PAD, END, USER, ASSISTANT, "\\boxed{", "}", *"0123456789")
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def files() -> dict[str, str]:
    """Text of every file, by its path below topologies/."""
    prompts = sorted((f"{number:02}" for number in range(100)), key=lambda p: hashlib.sha256(p.encode()).hexdigest())
    model = "models/reverse-digits"
    return {
        "data/reverse-digits/eval.jsonl": _rows(sorted(prompts[:NUM_HELD_OUT])),
        "data/reverse-digits/train.jsonl": _rows(sorted(prompts[NUM_HELD_OUT:])),
        f"{model}/config.json": _json(MODEL),
        f"{model}/generation_config.json": _json({"eos_token_id": 1, "pad_token_id": 0}),
        f"{model}/tokenizer.json": _json(tokenizer()),
        f"{model}/tokenizer_config.json": _json(TOKENIZER),
    }


def _rows(prompts: list[str]) -> str:
    return "".join(json.dumps({"input": prompt, "label": prompt[::-1]}) + "\n" for prompt in prompts)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}

TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": PAD,
    "eos_token": END,
    "model_max_length": 64,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}


def tokenizer() -> dict[str, Any]:
    """Tokenizer with one token per digit and one per marker; other text is an error."""
    markers = VOCABULARY[:5]
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": number < 4,  # \boxed{ belongs to the answer
        }
        for number, token in enumerate(markers)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(?m)."}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {token: number for number, token in enumerate(VOCABULARY)},
            "unk_token": "<unk>",  # not in the vocabulary, so unknown characters are refused
        },
    }


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).parent.mkdir(parents=True, exist_ok=True)
        (HERE / name).write_text(text, encoding="utf-8")
