"""Reads every model script of slime and of miles, and says which models train here; writes a page of results.

Run: python -m tests.support.model_scripts SLIME COMMIT MILES COMMIT > docs/results/DATE-model-scripts.md

A model script has the flags that describe a model to Megatron-LM. `MODELS` maps it to a model type, by hand. A model
trains if its family is declared and each of its flags is a key or a block of the family's tiny configuration, which
the tests compare with transformers' class.
"""

import ast
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from runtime.models.blocks import Attention, ModelShape
from runtime.models.config import read_model
from runtime.models.family import families
from tests.actors.trainer.tiny import config_of

FOLDER: Final = "scripts/models"
MODELS: Final[Mapping[str, str]] = {  # beginning of a script's name: the model type; the longest one counts
    **{"deepseek-v3": "deepseek_v3", "deepseek-v32": "deepseek_v32", "deepseek-v4": "deepseek_v4"},
    **{"gemma-4": "gemma4", "gpt-oss": "gpt_oss", "inkling": "inkling", "joyai": "joyai_llm_flash"},
    **{"glm4-": "glm4", "glm4.5-": "glm4_moe", "glm4.7-": "glm4_moe_lite", "glm5": "glm_moe_dsa"},
    **{"kimi-k2": "kimi_k2", "kimi-k25": "kimi_k25", "moonlight": "deepseek_v3", "llama3": "llama"},
    **{"mimo": "mimo", "minimax-m2": "minimax_m2", "nemotron-3": "nemotron_h"},
    **{"qwen2.5-": "qwen2", "qwen3-": "qwen3", "qwen3-30B-A3B": "qwen3_moe", "qwen3-235B-A22B": "qwen3_moe"},
    **{"qwen3-next": "qwen3_next", "qwen3.5-": "qwen3_5", "qwen3.5-35B-A3B": "qwen3_5_moe", "qwen3.6-": "qwen3_5"},
    **{"qwen3.6-35B-A3B": "qwen3_5_moe", "qwen3.8-": "qwen3_5"},
}
IMAGES: Final = ("-vl",)  # endings of scripts that train an image tower too
WITHOUT: Final = {  # model types without a declaration: the block that is missing
    "deepseek_v4": "compressed attention, hyper-connections, experts chosen by a hash",
    "inkling": "attention without RoPE of its own kind, its model provider",
    "mimo": "a declaration with its MTP layer",
    "nemotron_h": "Mamba-2 layers, experts with a latent",
}
NO_SHAPE: Final = frozenset(  # how Megatron computes and trains, and how others name a model's code
    (
        "disable-bias-linear normalization position-embedding-type no-position-embedding "
        "use-rotary-position-embeddings spec custom-model-provider-path enable-experimental allgather-cp seq-length "
        "make-vocab-size-divisible-by max-position-embeddings attention-softmax-in-fp32 no-rope-fusion "
        "no-masked-softmax-fusion no-bias-swiglu-fusion moe-grouped-gemm moe-permute-fusion moe-token-dispatcher-type "
        "moe-token-drop-policy moe-router-dtype moe-router-load-balancing-type moe-aux-loss-coeff "
        "moe-router-bias-update-rate hidden-dropout attention-dropout megatron-to-hf-mode mtp-num-layers"
    ).split()
)
KEYS: Final[Mapping[str, tuple[str, ...]]] = {  # flag: keys of config.json, of which the tiny configuration has one
    "num-layers": ("num_hidden_layers",),
    "hidden-size": ("hidden_size",),
    "ffn-hidden-size": ("intermediate_size",),
    "num-attention-heads": ("num_attention_heads",),
    "num-query-groups": ("num_key_value_heads",),
    "group-query-attention": ("num_key_value_heads",),
    "kv-channels": ("head_dim", "qk_nope_head_dim"),
    "vocab-size": ("vocab_size",),
    "norm-epsilon": ("rms_norm_eps",),
    "untie-embeddings-and-output-weights": ("tie_word_embeddings",),
    "rotary-base": ("rope_parameters",),
    "num-experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "moe-router-topk": ("num_experts_per_tok", "top_k_experts"),
    "moe-ffn-hidden-size": ("moe_intermediate_size", "intermediate_size"),
    "moe-shared-expert-intermediate-size": ("n_shared_experts", "shared_expert_intermediate_size"),
    "moe-router-topk-scaling-factor": ("routed_scaling_factor",),
    "q-lora-rank": ("q_lora_rank",),
    "kv-lora-rank": ("kv_lora_rank",),
    "qk-head-dim": ("qk_nope_head_dim",),
    "qk-pos-emb-head-dim": ("qk_rope_head_dim",),
    "v-head-dim": ("v_head_dim",),
}
YARN: Final = (
    "rotary-scaling-factor mscale mscale-all-dim beta-fast beta-slow original-max-position-embeddings rope-type"
).split()


class Model(NamedTuple):
    """A tiny model of a family."""

    rope_type: str  # that its family reads
    shape: ModelShape

    @property
    def heads(self) -> Iterator[Attention]:
        """Its layers' attention that has heads of its own."""
        return (layer.attention for layer in self.shape.layers if isinstance(layer.attention, Attention))

    def routes(self, name: str) -> object:
        """A value of its experts; None: it has none."""
        experts = self.shape.experts
        return None if experts is None else getattr(experts, name)


BLOCKS: Final[Mapping[str, Callable[[Model, str], object]]] = {  # flag with its value: whether a block has it
    "swiglu": lambda model, _: model.shape.activation == "silu",
    "qk-layernorm": lambda model, _: model.shape.mla or any(own.head_norms or own.joint_norms for own in model.heads),
    "add-qkv-bias": lambda model, _: model.shape.mla or any(own.qkv_bias for own in model.heads),  # MLA ignores it
    "multi-latent-attention": lambda model, _: model.shape.mla,
    "attention-output-gate": lambda model, _: any(own.has_gate for own in model.heads),
    "use-gated-attention": lambda model, _: any(own.has_gate for own in model.heads),
    "apply-layernorm-1p": lambda model, _: model.shape.has_centred_norms,
    "post-self-attn-layernorm": lambda model, _: model.shape.layers[0].norms.after_attention,
    "post-mlp-layernorm": lambda model, _: model.shape.layers[0].norms.after_mlp,
    "rotary-interleaved": lambda model, _: model.shape.ropes[0][0].is_interleaved,
    "rotary-percent": lambda model, share: float(share) == 1 or any(rope.share < 1 for rope, _ in model.shape.ropes),
    "use-rope-scaling": lambda model, _: model.rope_type == "llama3",
    "softmax-type": lambda model, _: any(own.has_sinks for own in model.heads),
    "window-size": lambda model, _: any(own.window for own in model.heads),
    "window-attn-skip-freq": lambda model, _: len({own.window for own in model.heads}) > 1,
    "moe-layer-freq": lambda model, _: model.shape.experts,
    "moe-router-score-function": lambda model, value: model.routes("score") == value,
    "moe-router-pre-softmax": lambda model, _: model.routes("score"),
    "moe-router-enable-expert-bias": lambda model, _: model.routes("has_bias"),
    "moe-router-num-groups": lambda model, _: model.shape.experts,
    "moe-router-group-topk": lambda model, _: model.shape.experts,
    "moe-shared-expert-gate": lambda model, _: model.routes("has_shared_gate"),
    **dict.fromkeys(YARN, lambda model, _: model.rope_type == "yarn"),
    "rotary-scaling-factor": lambda model, _: model.rope_type in ("yarn", "llama3"),
}

HEAD: Final = """# Model scripts of slime and miles, {date}

Which models train here, of the scripts that describe one to Megatron-LM: slime at commit {slime}, miles at commit
{miles}. The model type of a script is named by hand. Each of its flags that describe a model is a key or a block of the
family's tiny configuration, which tests compare with transformers' class; the sizes of the scripts were not trained.
No script ran, and no released checkpoint was read. `--mtp-num-layers` does not count: the weights of MTP layers are
read, or copied into exports, and train for GLM-4.5 alone.

{counts}

Written by `python -m tests.support.model_scripts SLIME COMMIT MILES COMMIT`.

| script | `model_type` | trains, or what is missing |
|---|---|---|
"""


def main() -> None:
    """Write the page to standard output."""
    slime, slime_commit, miles, miles_commit = sys.argv[1:]
    rows = {name: [*rows_of(Path(path))] for name, path in (("slime", slime), ("miles", miles))}
    counts = (
        f"{name}: {sum(lacking == '' for _, _, lacking in own)} of {len(own)} scripts train"
        for name, own in rows.items()
    )
    head = {"date": datetime.now(UTC).date(), "slime": slime_commit, "miles": miles_commit}
    sys.stdout.write(HEAD.format(counts="; ".join(counts) + ".", **head))
    for name, own in rows.items():
        for script, model_type, lacking in own:
            sys.stdout.write(f"| {name} `{script}` | `{model_type}` | {lacking or 'trains'} |\n")


def rows_of(checkout: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each script of a checkout, its model type, and what is missing; empty: nothing.

    Raises:
        SystemExit: there is none, one has no model type, or a flag is unknown here.
    """
    scripts = sorted(path for path in (checkout / FOLDER).iterdir() if path.suffix in (".sh", ".py"))
    for path in scripts:
        known = [beginning for beginning in MODELS if path.stem.startswith(beginning)]
        if not known:
            raise SystemExit(f"{path}: no model type is named for it")
        model_type = MODELS[max(known, key=len)]
        yield path.name, model_type, lacking(model_type, flags_of(path), path)
    if not scripts:
        raise SystemExit(f"{checkout / FOLDER} has no scripts")


def lacking(model_type: str, flags: Mapping[str, str], path: Path) -> str:
    """Return what keeps the model of a script from training; empty: nothing."""
    unknown = flags.keys() - NO_SHAPE - KEYS.keys() - BLOCKS.keys()
    family = next((each for each in families().values() if model_type in each.model_types), None)
    if family is None:
        return WITHOUT.get(model_type, "a declaration")
    if unknown:
        raise SystemExit(f"{path}: what --{min(unknown)} says of a model is unknown here")
    if path.stem.endswith(IMAGES):
        return "its image tower; the text alone is trained"
    config, model = config_of(family.model_type), tiny(family.model_type)
    missing = [flag for flag in flags if flag in KEYS and not {*KEYS[flag]} & config.keys()]
    missing += [
        f"{flag} {flags[flag]}".strip() for flag in flags if flag in BLOCKS and not BLOCKS[flag](model, flags[flag])
    ]
    return (
        "" if not missing else "not in the family's tiny configuration: " + ", ".join(f"`--{each}`" for each in missing)
    )


@cache
def tiny(kind: str) -> Model:
    """Read the tiny configuration of a family."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(msgspec.json.encode(config_of(kind)))
        reader: Any = families()[kind].attention
        return Model(reader.rope_type, read_model(Path(folder)).shape)


def flags_of(path: Path) -> dict[str, str]:
    """Return the flags of a script and of those that it builds on, each with its first value, without running any."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        tree = ast.parse(text)
        words = " ".join(_strings(tree))
        others = [path.with_name(f"{name}.py") for name in _siblings(tree)]
    else:
        words = re.sub(r"^\s*#.*|\s#.*", "", text, flags=re.MULTILINE)
        sourced = re.findall(r"source\s+\"[^\n]*/([\w.-]+\.sh)\"", words)
        others = [path.with_name(name) for name in sourced]
    found = {flag: value.strip("\"')") for flag, value in re.findall(r"--([a-z][a-z0-9-]*)[ \t]*([^\s-]\S*)?", words)}
    flags = {flag: value for other in others for flag, value in flags_of(other).items()} | found
    if not flags:
        raise SystemExit(f"{path}: no flag was found in it")
    return flags


def _strings(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a program in their order; what an f-string computes is left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _siblings(tree: ast.AST) -> Iterator[str]:
    """Yield the names of the scripts whose flags a program takes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "load_sibling_model_args":
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value


if __name__ == "__main__":
    main()
