"""Tiny models in Hugging Face format: random weights, and a tokenizer with one token per character."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from actors.tiny_engine.model.forward import allocate
from runtime.models.config import read_model
from tests.support.tiny_engine import write_config

EOS: Final = 1
CHARACTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"  # tokens 2 to 63

QWEN3: Final[dict[str, Any]] = {}
QWEN2: Final[dict[str, Any]] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3_MOE: Final[dict[str, Any]] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
LLAMA: Final[dict[str, Any]] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LLAMA3_ROPE: Final[dict[str, Any]] = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
}


def write_model(directory: Path, *, seed: int = 0, tokenizer: bool = False, **changes: Any) -> Path:
    """Write config and weights. All tensors are random, norms around one, so that no missing term goes unnoticed."""
    write_config(directory, **changes)
    write_weights(directory, directory, seed=seed)
    if tokenizer:
        write_tokenizer(directory)
    return directory


def write_weights(directory: Path, model: Path, *, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """Write random weights for the model whose config is in `model`."""
    generator = torch.Generator().manual_seed(seed)
    named = allocate(read_model(model).shape).named
    tensors = {
        name: (torch.randn(tensor.shape, generator=generator) * 0.15 + float(name.endswith("norm.weight"))).to(dtype)
        for name, tensor in named.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of single characters, with two special tokens."""
    vocabulary = {"<pad>": 0, "<eos>": EOS} | {character: 2 + index for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))


def write_generation_config(directory: Path, **values: Any) -> None:
    (directory / "generation_config.json").write_text(json.dumps(values))


def all_logits(
    directory: Path, prompt_ids: list[int], output_ids: list[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Compute the logits [T, vocabulary] that predict an output, with transformers' own forward pass."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt_ids + output_ids])).logits[0]
    return logits[len(prompt_ids) - 1 : -1].clone()


def teacher_forced(
    directory: Path,
    prompt_ids: list[int],
    output_ids: list[int],
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Compute the log-probs [T] of an output with transformers' own forward pass."""
    logits = all_logits(directory, prompt_ids, output_ids, dtype).float()
    log_probs = (logits / temperature).log_softmax(-1)
    return log_probs.gather(1, torch.tensor(output_ids)[:, None])[:, 0]
