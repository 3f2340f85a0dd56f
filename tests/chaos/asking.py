"""A generate function that asks a second model within a sample, and that model, whose tokens are others."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.tiny_models import write_model

POOL = "second"
FEW = 2  # tokens of a turn
DIGITS = "0123456789"
CHARACTERS = [chr(code) for code in range(126, 32, -1)]  # tokens 2 to 95, in an order that the first model has not
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{% endfor %}"
KEPT = 4.0  # value of each token's embedding in the one dimension that no layer changes
NEVER = -8.0  # weight of that dimension in the logits of all tokens but digits


def write_second_model(directory: Path) -> Path:
    """Write a model whose tokens are characters, and which writes digits alone."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {character: 2 + place for place, character in enumerate(CHARACTERS)}
    write_model(directory, seed=11, vocab_size=len(vocabulary), eos_token_id=1, max_position_embeddings=512)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0
    tensors["model.embed_tokens.weight"][:, 0] = KEPT
    tensors["model.norm.weight"][0] = 1.0
    tensors["lm_head.weight"][:, 0] = NEVER
    for digit in DIGITS:
        tensors["lm_head.weight"][vocabulary[digit], 0] = 0.0
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def asks_a_second_model(conversation: Any) -> None:
    """Three turns, of which the second model makes the middle one."""
    await conversation.generate(max_new_tokens=FEW)
    conversation.append("<user>")
    conversation.sample_metadata["asked"] = await conversation.generate(max_new_tokens=FEW, pool=POOL)
    conversation.append("<assistant>")
    await conversation.generate(max_new_tokens=FEW)
