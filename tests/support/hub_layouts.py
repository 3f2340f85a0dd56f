"""Model directories as the hub has them: the keys of published configurations, with tiny sizes.

Written by hand from the public model cards and files of each family. A tokenizer has one token per byte, and the
special tokens of the family. Token ids of the files stand as their texts here.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TOKENS: Final = ("_token_id", "_token_index")  # endings of keys
VOCABULARY: Final = 288  # 256 bytes, and special tokens
OLD: Final[dict[str, Any]] = {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True}
OLD_TYPE: Final[dict[str, Any]] = {**OLD, "torch_dtype": "bfloat16", "vocab_size": VOCABULARY}
SIZES: Final[dict[str, Any]] = {
    **{"hidden_act": "silu", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6},
}
WINDOWS: Final[dict[str, Any]] = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 2}
CODE: Final = {  # as DeepSeek-V3 and Kimi-K2 name it
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
FP8: Final = {
    **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
}
DEEPSEEK: Final[dict[str, Any]] = {
    **OLD_TYPE,
    **SIZES,
    **{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "auto_map": CODE, "ep_size": 1},
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "moe_layer_freq": 1, "n_shared_experts": 1},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 16},
    **{"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "tie_word_embeddings": False},
    **{"first_k_dense_replace": 1, "quantization_config": FP8},
}
YARN: Final = {"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
CHAT_ML: Final = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
THINKING: Final = (
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)


def with_system(text: str) -> str:
    """Return a ChatML template that adds this system message to conversations without one."""
    own = "{{- '<|im_start|>system\\n" + text + "<|im_end|>\\n' }}"
    return "{%- if messages[0].role != 'system' %}" + own + "{%- endif %}" + CHAT_ML


@dataclass(frozen=True)
class Layout:
    """One family's files. `<...>` tokens in `config` and `generation` become ids of the tiny tokenizer."""

    config: dict[str, Any]
    generation: dict[str, Any]
    specials: tuple[str, ...]
    template: str
    prompt: str  # of TALK, by hand
    tokenizer: dict[str, Any] = field(default_factory=dict)  # further keys of tokenizer_config.json
    template_file: str = "chat_template.jinja"  # or tokenizer_config.json
    unread: tuple[str, ...] = ()  # keys that no class of transformers reads
    quantized: bool = False  # published in FP8
    shards: bool = False  # several files with an index

    def ids(self, texts: str | list[str] | None) -> Any:
        """Return the ids of special tokens."""
        if texts is None:
            return None
        return [self.ids(text) for text in texts] if isinstance(texts, list) else 256 + self.specials.index(texts)

    def with_ids(self, values: dict[str, Any]) -> dict[str, Any]:
        """Replace special tokens by their ids, those of a text model inside too."""
        found = {key: self.ids(value) if key.endswith(TOKENS) else value for key, value in values.items()}
        return found | ({"text_config": self.with_ids(values["text_config"])} if "text_config" in values else {})

    def write(self, directory: Path, **changes: Any) -> None:
        """Write all files but the weights. A change to None leaves the key out."""
        config = self.with_ids(self.config) | changes
        left = {key: value for key, value in config.items() if key not in changes or changes[key] is not None}
        files = {"config.json": left, "generation_config.json": self.with_ids(self.generation)}
        settings = {"model_max_length": 4096, "tokenizer_class": "PreTrainedTokenizerFast", **self.tokenizer}
        if self.template_file == "tokenizer_config.json":
            settings["chat_template"] = self.template
        else:
            (directory / self.template_file).write_text(self.template, encoding="utf-8")
        for name, values in (files | {"tokenizer_config.json": settings}).items():
            (directory / name).write_text(json.dumps(values, indent=2), encoding="utf-8")
        for name in ("README.md", "LICENSE", ".gitattributes"):
            (directory / name).write_text("text\n", encoding="utf-8")
        self._write_tokenizer(directory)

    def _write_tokenizer(self, directory: Path) -> None:
        alphabet = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([*self.specials])
        tokenizer.save(str(directory / "tokenizer.json"))


TALK: Final = [{"role": "user", "content": "1+1?"}]
_CHAT_ML_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SAMPLING: Final = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
_LLAMA3: Final = ("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|start_header_id|>")
_GLM: Final = ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_CHAT: Final = (
    "[gMASK]<sop>{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{{- '\\n<think></think>' if "
    "(enable_thinking is defined and not enable_thinking) else '' }}{%- endif %}"
)
_DEEPSEEK: Final = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_GEMMA4: Final = (
    *("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|tool_response>", "<|image>", "<|image|>", "<image|>"),
    *("<|audio>", "<|audio|>", "<audio|>", "<|video|>"),
)
_KIMI: Final = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")


def _glm(config: dict[str, Any], *, unread: tuple[str, ...] = ()) -> Layout:
    """A model of GLM-4: its sizes published with the same generation config, template and tokenizer."""
    return Layout(
        config,
        {
            **{"_from_model_config": True, "do_sample": True, "pad_token_id": "<|endoftext|>"},
            "eos_token_id": ["<|endoftext|>", "<|user|>", "<|observation|>"],
        },
        _GLM,
        _GLM_CHAT,
        "[gMASK]<sop><|user|>\n1+1?<|assistant|>",
        {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "padding_side": "left", "do_lower_case": False},
        unread=unread,
        shards=True,
    )


def _deepseek(config: dict[str, Any], *, unread: tuple[str, ...] = ()) -> Layout:
    """A model of DeepSeek, published in FP8."""
    return Layout(
        {key: value for key, value in config.items() if value is not None},
        {"bos_token_id": "<｜begin▁of▁sentence｜>", "eos_token_id": "<｜end▁of▁sentence｜>", **_SAMPLING},
        _DEEPSEEK,
        "{{ bos_token }}{%- for message in messages %}"
        "{%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}{%- endif %}"
        "{%- if message['role'] == 'assistant' %}"
        "{{- '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
        "<｜begin▁of▁sentence｜><｜User｜>1+1?<｜Assistant｜>",
        {
            "bos_token": {"__type": "AddedToken", "content": "<｜begin▁of▁sentence｜>", "lstrip": False},
            "eos_token": {"__type": "AddedToken", "content": "<｜end▁of▁sentence｜>", "lstrip": False},
        },
        template_file="tokenizer_config.json",
        unread=unread,
        quantized=True,
        shards=True,
    )


def _gemma4(**text: Any) -> Layout:
    """A model of Gemma 4: the text model inside of one with an image tower. From memory, not compared with the hub."""
    layers = ["sliding_attention", "full_attention"]
    ends = ["<eos>", "<turn|>"]
    return Layout(
        {
            **{"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "audio_config": None},
            **{"audio_token_id": "<|audio|>", "boa_token_id": "<|audio>", "eoa_token_id": "<audio|>"},
            **{"eoa_token_index": "<audio|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"},
            **{"image_token_id": "<|image|>", "video_token_id": "<|video|>", "vision_soft_tokens_per_image": 4},
            **{"dtype": "bfloat16", "eos_token_id": ends, "initializer_range": 0.02, "tie_word_embeddings": True},
            "text_config": {
                **{key: value for key, value in SIZES.items() if key != "hidden_act"},
                **{"model_type": "gemma4_text", "dtype": "bfloat16", "vocab_size": VOCABULARY, **OLD},
                **{"attention_bias": False, "attention_k_eq_v": True, "final_logit_softcapping": 30.0},
                **{"bos_token_id": "<bos>", "eos_token_id": "<eos>", "pad_token_id": "<pad>"},
                **{"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": 8},
                **{"hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "layer_types": layers},
                **{"num_kv_shared_layers": 0, "tie_word_embeddings": True, "use_bidirectional_attention": "vision"},
                **{"use_double_wide_mlp": False, "vocab_size_per_layer_input": VOCABULARY},
                "rope_parameters": {
                    "full_attention": {
                        **{"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
                    },
                    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
                },
                **text,
            },
            "vision_config": {
                **{"model_type": "gemma4_vision", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1},
                **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "patch_size": 2},
                **{"position_embedding_size": 4, "pooling_kernel_size": 1},
            },
            "transformers_version": "5.5.0.dev0",
        },
        {
            **{"bos_token_id": "<bos>", "eos_token_id": [*ends, "<|tool_response>"], "pad_token_id": "<pad>"},
            **{"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95},
        },
        _GEMMA4,
        "{{- bos_token }}{%- for message in messages %}"
        "{{- '<|turn>' + message['role'] + '\\n' + message['content'] | trim + '<turn|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|turn>model\\n' }}{%- endif %}",
        "<bos><|turn>user\n1+1?<turn|>\n<|turn>model\n",
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": None},
        shards=True,
    )


LAYOUTS: Final[dict[str, Layout]] = {
    "Qwen3-0.6B": Layout(
        {
            **OLD_TYPE,
            **SIZES,
            **WINDOWS,
            "sliding_window": None,
            **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 16},
            **{"bos_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>", "rope_scaling": None},
            **{"rope_theta": 1000000, "tie_word_embeddings": True, "transformers_version": "4.51.0"},
        },
        {
            **{"bos_token_id": "<|endoftext|>", "pad_token_id": "<|endoftext|>", "top_k": 20, **_SAMPLING},
            **{"eos_token_id": ["<|im_end|>", "<|endoftext|>"], "transformers_version": "4.51.0"},
        },
        _CHAT_ML_TOKENS,
        CHAT_ML + THINKING,
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        {"eos_token": "<|im_end|>", "bos_token": None, "add_prefix_space": False},
        template_file="tokenizer_config.json",
    ),
    "Qwen2.5-0.5B-Instruct": Layout(
        {
            **OLD_TYPE,
            **SIZES,
            **WINDOWS,
            **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1000000.0},
            **{"bos_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>", "tie_word_embeddings": True},
            "transformers_version": "4.43.1",
        },
        {
            **{"bos_token_id": "<|endoftext|>", "pad_token_id": "<|endoftext|>", "repetition_penalty": 1.1},
            **{"eos_token_id": ["<|im_end|>", "<|endoftext|>"], **_SAMPLING},
        },
        _CHAT_ML_TOKENS,
        with_system("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None},
        template_file="tokenizer_config.json",
    ),
    "Llama-3.1-8B-Instruct": Layout(
        {
            **OLD_TYPE,
            **SIZES,
            **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False},
            **{"bos_token_id": "<|begin_of_text|>", "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-05},
            **{"eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "tie_word_embeddings": False},
            "rope_scaling": {
                **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"},
                "original_max_position_embeddings": 8192,
            },
            **{"rope_theta": 500000.0, "transformers_version": "4.42.3"},
        },
        {
            **{"bos_token_id": "<|begin_of_text|>", **_SAMPLING, "transformers_version": "4.42.3"},
            "eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        },
        (*_LLAMA3, "<|end_header_id|>"),
        "{{- bos_token }}{%- for message in messages %}"
        "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}"
        "{{- '<|eot_id|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "clean_up_tokenization_spaces": True},
        template_file="tokenizer_config.json",
        shards=True,
    ),
    "Llama-3.2-1B-Instruct": Layout(
        {
            **OLD_TYPE,
            **SIZES,
            **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "head_dim": 16},
            **{"bos_token_id": "<|begin_of_text|>", "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-05},
            **{"eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "tie_word_embeddings": True},
            "rope_scaling": {
                **{"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"},
                "original_max_position_embeddings": 8192,
            },
            **{"rope_theta": 500000.0, "transformers_version": "4.45.0.dev0"},
        },
        {"eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], **_SAMPLING},
        (*_LLAMA3, "<|end_header_id|>"),
        "{{- bos_token }}{%- for message in messages %}"
        "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}"
        "{{- '<|eot_id|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        {"bos_token": {"__type": "AddedToken", "content": "<|begin_of_text|>"}, "eos_token": "<|eot_id|>"},
        template_file="tokenizer_config.json",
    ),
    "SmolLM2-135M-Instruct": Layout(
        {
            **OLD_TYPE,
            **SIZES,
            **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False},
            **{"bos_token_id": "<|im_start|>", "eos_token_id": "<|im_end|>", "pad_token_id": "<|im_end|>"},
            **{"is_llama_config": True, "mlp_bias": False, "pretraining_tp": 1, "rope_interleaved": False},
            **{"rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "rms_norm_eps": 1e-05},
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
            "transformers_version": "4.42.3",
        },
        {
            **{"_from_model_config": True, "bos_token_id": "<|im_start|>", "eos_token_id": "<|im_end|>"},
            **{"pad_token_id": "<|im_end|>", "transformers_version": "4.42.3"},
        },
        _CHAT_ML_TOKENS,
        with_system("You are a helpful AI assistant named SmolLM, trained by Hugging Face"),
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "vocab_size": 49152},
        template_file="tokenizer_config.json",
        unread=("is_llama_config", "rope_interleaved", "transformers.js_config"),
    ),
    "GLM-4.5-Air": _glm(
        {
            **OLD_TYPE,
            **SIZES,
            **{"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True},
            **{"pad_token_id": "<|endoftext|>", "eos_token_id": ["<|endoftext|>", "<|user|>", "<|observation|>"]},
            **{"head_dim": 8, "partial_rotary_factor": 0.5, "moe_intermediate_size": 16, "norm_topk_prob": True},
            **{"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
            **{"routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
            **{"rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False},
            **{"use_qk_norm": False, "transformers_version": "4.54.0"},
        },
    ),
    "GLM-4-9B-0414": _glm(
        {
            **OLD_TYPE,
            **SIZES,
            **{"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": True, "head_dim": 16},
            **{"pad_token_id": "<|endoftext|>", "eos_token_id": ["<|endoftext|>", "<|user|>", "<|observation|>"]},
            **{"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0},
            **{"tie_word_embeddings": False, "transformers_version": "4.52.0.dev0"},
        },
    ),
    "GLM-4.7-Flash": _glm(
        {
            **OLD,
            **SIZES,
            **{"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "attention_bias": False},
            **{"pad_token_id": "<|endoftext|>", "eos_token_id": ["<|endoftext|>", "<|user|>", "<|observation|>"]},
            **{"dtype": "bfloat16", "vocab_size": VOCABULARY, "num_key_value_heads": 4, "moe_intermediate_size": 16},
            **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 16},
            **{"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
            **{"routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
            **{"topk_method": "noaux_tc", "norm_topk_prob": True, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05},
            **{"rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False},
            "transformers_version": "5.0.0rc0",
        },
    ),
    "Mistral-7B-Instruct-v0.3": Layout(
        {
            **OLD_TYPE,
            **SIZES,
            **{"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
            **{"bos_token_id": "<s>", "eos_token_id": "</s>", "rms_norm_eps": 1e-05, "rope_theta": 1000000.0},
            **{"tie_word_embeddings": False, "transformers_version": "4.42.0.dev0"},
        },
        {"_from_model_config": True, "bos_token_id": "<s>", "eos_token_id": "</s>"},
        ("<s>", "</s>", "[INST]", "[/INST]"),
        "{{- bos_token }}{%- for message in messages %}"
        "{%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] + '[/INST]' }}"
        "{%- else %}{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}",
        "<s>[INST] 1+1?[/INST]",
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": None, "add_prefix_space": True},
        template_file="tokenizer_config.json",
    ),
    "gemma-3-1b-it": Layout(
        {
            **OLD_TYPE,
            **{key: value for key, value in SIZES.items() if key != "hidden_act"},
            **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False},
            **{"attn_logit_softcapping": None, "final_logit_softcapping": None, "cache_implementation": "hybrid"},
            **{"bos_token_id": "<bos>", "eos_token_id": ["<eos>", "<end_of_turn>"], "pad_token_id": "<pad>"},
            **{"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16},
            **{"rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000},
            **{"sliding_window": 8, "sliding_window_pattern": 2, "transformers_version": "4.50.0.dev0"},
        },
        {
            **{"bos_token_id": "<bos>", "eos_token_id": ["<eos>", "<end_of_turn>"], "pad_token_id": "<pad>"},
            **{"cache_implementation": "hybrid", "do_sample": True, "top_k": 64, "top_p": 0.95},
        },
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        "{{- bos_token }}{%- for message in messages %}"
        "{{- '<start_of_turn>' + message['role'] + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}",
        "<bos><start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n",
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": None},
        template_file="tokenizer_config.json",
        unread=("cache_implementation",),
    ),
    "gemma-4-26B-A4B-it": _gemma4(enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=16),
    "gemma-4-31B-it": _gemma4(enable_moe_block=False, num_experts=None, top_k_experts=None, moe_intermediate_size=None),
    "ERNIE-4.5-21B-A3B-PT": Layout(  # from memory, not compared with the hub
        {
            **OLD_TYPE,
            **SIZES,
            **{"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "use_bias": False},
            **{"bos_token_id": "<s>", "eos_token_id": "</s>", "pad_token_id": "<unk>", "rms_norm_eps": 1e-05},
            **{"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 2},
            **{"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True},
            **{"moe_layer_start_index": 1, "moe_layer_interval": 1, "num_nextn_predict_layers": 1},
            **{"rope_theta": 500000.0, "tie_word_embeddings": True, "transformers_version": "4.54.0"},
        },
        {
            **{"bos_token_id": "<s>", "eos_token_id": "</s>", "pad_token_id": "<unk>"},
            **{"do_sample": True, "top_p": 0.8, "temperature": 0.8, "repetition_penalty": 1.0},
        },
        ("<unk>", "<s>", "</s>", "<|begin_of_sentence|>", "<|end_of_sentence|>"),
        "{{- '<|begin_of_sentence|>' }}{%- for message in messages %}"
        "{%- if message['role'] == 'user' %}{{- 'User: ' + message['content'] + '\n' }}{%- endif %}"
        "{%- if message['role'] == 'assistant' %}"
        "{{- 'Assistant: ' + message['content'] + '<|end_of_sentence|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'Assistant: ' }}{%- endif %}",
        "<|begin_of_sentence|>User: 1+1?\nAssistant: ",
        {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>", "unk_token": "<unk>"},
        unread=("moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers"),
    ),
    "MiniMax-M2": Layout(
        {
            **OLD_TYPE,
            **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
            **{"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "attn_type_list": [1, 1]},
            "auto_map": {
                "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
                "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM",
            },
            **{"bos_token_id": "]~!b[", "eos_token_id": "[e~[", "head_dim": 16, "rotary_dim": 8, "rope_theta": 5000000},
            **{"intermediate_size": 16, "mlp_intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"num_mtp_modules": 3, "mtp_transformer_layers": 1, "use_mtp": True, "output_router_logits": False},
            **{"qk_norm_type": "per_layer", "use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid"},
            **{"router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "shared_intermediate_size": 0},
            **{"shared_moe_mode": "sigmoid", "sliding_window": None, "tie_word_embeddings": False},
            "quantization_config": FP8 | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "lm_head"]},
            "transformers_version": "4.57.1",
        },
        {"bos_token_id": "]~!b[", "eos_token_id": "[e~[", "do_sample": True, "top_k": 40, "top_p": 0.95},
        ("]~!b[", "]~b]", "[e~[", "<think>"),
        "{{- ']~!b[]~b]system\\nYou are a helpful assistant.[e~[\\n' }}{%- for m in messages %}"
        "{{- ']~b]' + ('ai' if m.role == 'assistant' else m.role) + '\\n' + m.content + '[e~[\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{%- endif %}",
        "]~!b[]~b]system\nYou are a helpful assistant.[e~[\n]~b]user\n1+1?[e~[\n]~b]ai\n<think>\n",
        {"bos_token": "]~!b[", "eos_token": "[e~[", "unk_token": "]!d~["},
        unread=(
            *("auto_map", "mlp_intermediate_size", "num_mtp_modules", "mtp_transformer_layers", "use_mtp"),
            "shared_moe_mode",
        ),
        quantized=True,
        shards=True,
    ),
    "DeepSeek-V3": _deepseek(
        {
            **DEEPSEEK,
            **{"model_type": "deepseek_v3", "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4},
            **{"topk_group": 2, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, "rope_theta": 10000},
            **{"bos_token_id": "<｜begin▁of▁sentence｜>", "eos_token_id": "<｜end▁of▁sentence｜>"},
            "rope_scaling": {**YARN, "beta_fast": 32, "factor": 40, "type": "yarn"},
            "transformers_version": "4.33.1",
        },
        unread=("auto_map", "ep_size"),
    ),
    "DeepSeek-V3.2-Exp": _deepseek(
        {
            **DEEPSEEK,
            **{"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "auto_map": None},
            **{"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "rope_theta": 10000},
            **{"index_head_dim": 8, "index_n_heads": 4, "index_topk": 2, "routed_scaling_factor": 2.5},
            **{"bos_token_id": "<｜begin▁of▁sentence｜>", "eos_token_id": "<｜end▁of▁sentence｜>"},
            "quantization_config": FP8 | {"scale_fmt": "ue8m0"},
            "rope_scaling": {**YARN, "beta_fast": 32, "factor": 40, "type": "yarn"},
            **{"num_nextn_predict_layers": 1, "transformers_version": "4.44.2"},
        },
        unread=("ep_size",),
    ),
    "GLM-5": _glm(
        {
            **OLD,
            **SIZES,
            **{"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "attention_bias": False},
            **{"pad_token_id": "<|endoftext|>", "eos_token_id": ["<|endoftext|>", "<|user|>", "<|observation|>"]},
            **{"dtype": "bfloat16", "vocab_size": VOCABULARY, "num_key_value_heads": 4, "moe_intermediate_size": 16},
            **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 16},
            **{"head_dim": 4, "qk_head_dim": 16, "index_head_dim": 8, "index_n_heads": 4, "index_topk": 2},
            **{"indexer_rope_interleave": True, "rope_interleave": True, "ep_size": 1, "pretraining_tp": 1},
            **{"n_group": 1, "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
            **{"routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": True},
            **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1},
            **{"rms_norm_eps": 1e-05, "tie_word_embeddings": False, "transformers_version": "5.0.2.dev0"},
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        },
        unread=("ep_size",),
    ),
    "Kimi-K2-Instruct": Layout(
        {
            **DEEPSEEK,
            **{"model_type": "kimi_k2", "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
            **{"routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, "rope_theta": 50000.0, "seq_aux": True},
            **{"aux_loss_alpha": 0.001, "bos_token_id": "[BOS]", "eos_token_id": "[EOS]", "pretraining_tp": 1},
            "rope_scaling": {**YARN, "beta_fast": 1.0, "factor": 32.0, "type": "yarn"},
            "transformers_version": "4.48.3",
        },
        {"max_length": 4096, "eos_token_id": "<|im_end|>"},
        _KIMI,
        "{%- for message in messages %}{%- if loop.first and messages[0]['role'] != 'system' %}"
        "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>{%- endif %}"
        "{{- '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' + message['content'] }}"
        "<|im_end|>{%- endfor %}"
        "{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{%- endif %}",
        "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>"
        "<|im_user|>user<|im_middle|>1+1?<|im_end|><|im_assistant|>assistant<|im_middle|>",
        {"bos_token": "[BOS]", "eos_token": "[EOS]", "additional_special_tokens": ["<|im_end|>", "<|im_user|>"]},
        unread=("auto_map", "ep_size", "seq_aux", "aux_loss_alpha"),
        quantized=True,
    ),
}
