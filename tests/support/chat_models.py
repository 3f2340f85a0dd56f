"""Model directories with the chat templates and special tokens of well-known families, and answers in their writing.

The templates are those of tests/data/chat_templates. The vocabulary is a small one, or SmolLM2's from the package of
`bin/setup --with smollm2`; real vocabularies of the other families are not used.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from runtime.sessions.turns import ToolCall

TEMPLATES: Final = Path(__file__).parents[1] / "data" / "chat_templates"
TEXT: Final = ("Let me see the result of the command, then look at what it says about the file and its lines. " * 3,)
CHATML: Final = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
LLAMA: Final = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|python_tag|>",
)
GLM: Final = (
    *("<|user|>", "<|observation|>", "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<think>"),
    *("</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
DEEPSEEK: Final = (
    *("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    *(f"<｜tool▁{what}▁{side}｜>" for what in ("calls", "call", "outputs", "output") for side in ("begin", "end")),
    "<｜tool▁sep｜>",
)
HARMONY: Final = ("<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")


class ChatModel(NamedTuple):
    """A family as tests use it."""

    template: str
    special: tuple[str, ...]  # the first `num_ends` end an answer
    num_ends: int = 1
    has_tools: bool = True
    has_parallel_calls: bool = True


CHAT_MODELS: Final = {
    "qwen3": ChatModel("qwen3", CHATML),
    "qwen2.5": ChatModel("qwen2_5", CHATML),
    "llama3.1": ChatModel("llama3_1", LLAMA, has_parallel_calls=False),
    "llama3.2": ChatModel("llama3_2", LLAMA, has_parallel_calls=False),
    "smollm2": ChatModel("smollm2", CHATML),
    "glm4": ChatModel("glm4moe", GLM, 3),
    "deepseek-v3": ChatModel("deepseekv3", DEEPSEEK),
    "gpt-oss": ChatModel("gptoss", HARMONY, 2, has_parallel_calls=False),
}


def write_chat_model(directory: Path, name: str, *, vocabulary: str | None = None) -> Path:
    """Write config, tokenizer and chat template of a model.

    Args:
        directory: to write to.
        name: in CHAT_MODELS.
        vocabulary: a tokenizer of the tokenizers library as JSON; None: a small one.
    """
    model = CHAT_MODELS[name]
    tokenizer: Any = Tokenizer.from_str(vocabulary or small_vocabulary())
    tokenizer.add_special_tokens(list(model.special))
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    ends = [tokenizer.token_to_id(text) for text in model.special[: model.num_ends]]
    config = {"vocab_size": tokenizer.get_vocab_size(with_added_tokens=True), "eos_token_id": ends}
    (directory / "config.json").write_text(json.dumps(config))
    settings = {"bos_token": model.special[2 if model.special is LLAMA else 1], "eos_token": model.special[0]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    template = (TEMPLATES / f"{model.template}.jinja").read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory


@cache
def small_vocabulary() -> str:
    """Train a byte-level BPE on a few words, with the splitting of Llama 3."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*TEXT, *(path.read_text() for path in sorted(TEMPLATES.iterdir())[:3])], trainer)
    return tokenizer.to_str()


def smollm2_vocabulary(file: Path) -> str:
    """Read the vocabulary of SmolLM2 from its GGUF file."""
    import gguf

    reader = gguf.GGUFReader(file)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ", 1)) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    tokenizer: Any = Tokenizer(models.BPE(vocab={text: at for at, text in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([text for text, kind in zip(tokens, kinds, strict=True) if kind == 3])
    return tokenizer.to_str()


def written(name: str, text: str, reasoning: str | None, calls: Sequence[ToolCall]) -> str:
    """Return an answer as a model of the family samples it, with the token that ends it."""
    special = CHAT_MODELS[name].special
    if special is HARMONY:
        thoughts = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
        if not calls:
            return f"{thoughts}<|channel|>final<|message|>{text}<|return|>"
        said = f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant" if text else ""
        call = calls[0]
        head = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
        return f"{thoughts}{said}{head}{call.arguments}<|call|>"
    thoughts = "" if reasoning is None else f"<think>\n{reasoning}\n</think>\n\n"
    if special is LLAMA:
        sent = "; ".join(f'{{"name": "{call.name}", "parameters": {call.arguments}}}' for call in calls)
        return f"{sent or text}<|eot_id|>"
    if special is GLM:
        made = "".join(f"\n<tool_call>{call.name}\n{_glm_arguments(call)}</tool_call>" for call in calls)
        return f"\n{thoughts.strip()}\n{text}{made}{'<|observation|>' if calls else '<|user|>'}"
    if special is DEEPSEEK:
        thoughts = "" if reasoning is None else f"{reasoning}\n</think>\n\n"  # the prompt opens them
        made = "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{call.arguments}\n```<｜tool▁call▁end｜>"
            for call in calls
        )
        made = f"<｜tool▁calls▁begin｜>{made}<｜tool▁calls▁end｜>" if calls else ""
        return f"{thoughts}{text}{made}<｜end▁of▁sentence｜>"
    made = "".join(
        f'\n<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>' for call in calls
    )
    return f"{thoughts}{text}{made}<|im_end|>"


def _glm_arguments(call: ToolCall) -> str:
    values = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in json.loads(call.arguments).items()
    }
    return "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
