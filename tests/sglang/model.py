"""Model of the contract tests: a tiny random Qwen3 whose tokens are letters, digits, and letter pairs around a dot.

A stop text can therefore lie inside a token ("A.a" contains "."). Some texts have no token ("?").
"""

import string
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.sglang.server import write_json
from tests.support.tiny_models import write_model, write_weights

PAD: Final = 0
EOS: Final = 1
DOT: Final = 54
VOCAB_SIZE: Final = 64
CONTEXT: Final = 512
DOTTED: Final = {28 + index: f"{upper}.{upper.lower()}" for index, upper in enumerate(string.ascii_uppercase)}
TOKENS: Final = {
    PAD: "<pad>",
    EOS: "<eos>",
    **{2 + index: letter for index, letter in enumerate(string.ascii_lowercase)},
    **DOTTED,
    DOT: ".",
    **{55 + digit: str(digit) for digit in range(9)},
}
KEPT: Final = 4.0  # value of each token's embedding in the one dimension that no layer changes
NEVER, OFTEN = -8.0, 0.6  # weight of that dimension in the end token's logit
UNKNOWN: Final = "?"  # in no token, and the tokenizer has no token for unknown text


def write_contract_model(directory: Path) -> Path:
    """Write the model and its tokenizer. Tests replace its weights."""
    write_model(directory, eos_token_id=EOS, max_position_embeddings=CONTEXT, vocab_size=VOCAB_SIZE)
    tokenizer = Tokenizer(models.WordLevel({text: token for token, text in TOKENS.items()}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(TOKENS[token], special=True) for token in (PAD, EOS)])
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": TOKENS[PAD], "eos_token": TOKENS[EOS]},
    )
    return directory


def write_versions(directory: Path, model: Path) -> dict[int, Path]:
    """Write three versions of weights as a trainer publishes them. With the third, answers end by themselves."""
    found = {version: write_weights(directory / f"v{version}", model, seed=version) for version in (1, 2, 3)}
    for version, weights in found.items():
        _set_end(weights / "model.safetensors", OFTEN if version == 3 else NEVER)
    return found


def _set_end(file: Path, logit: float) -> None:
    """Give the end token about the same logit at every position, by a dimension with a constant value."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0
    tensors["model.embed_tokens.weight"][:, 0] = KEPT
    tensors["model.norm.weight"][0] = 1.0
    tensors["lm_head.weight"][:, 0] = 0.0
    tensors["lm_head.weight"][EOS] = 0.0
    tensors["lm_head.weight"][EOS, 0] = logit
    save_file(tensors, file, metadata={"format": "pt"})


def text_of(ids: list[int]) -> str:
    """Decode tokens, including special ones."""
    return "".join(TOKENS[token] for token in ids)
