"""The keys of config.json that transformers' classes read, and what becomes of each key of a published config.

The table is written by bin/describe-models for the pinned version of transformers. No code of a model is run here.
"""

import json
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from runtime.models.family import Family
from runtime.models.quantization import QUANTIZATION, quantization_problems

TABLE: Final = Path(__file__).with_name("config_keys.json")
IGNORED: Final = "_ignored_config_keys"  # key of a written config.json: what model.ignore_config_keys took out of it
WITHOUT_EFFECT: Final = frozenset(  # keys that classes read, and that change no output of the models built here
    (
        # names, labels, classifiers of several labels, versions
        "architectures id2label label2id num_labels problem_type name_or_path transformers_version "
        # tokens
        "bos_token_id pad_token_id sep_token_id "
        # which outputs are returned, and how they are computed
        "output_attentions output_hidden_states output_router_logits return_dict use_cache attn_implementation "
        "experts_implementation chunk_size_feed_forward gradient_checkpointing is_encoder_decoder "
        "tie_last_hidden_states "
        # training of others: dropout and the start of new weights
        "attention_dropout classifier_dropout hidden_dropout initializer_factor init_std pretraining_tp"
    ).split()
)
SILENT: Final = ("_",)  # prefixes of keys that tools add and no class reads: not named
CODE: Final = "auto_map"  # the model's own code, which is not run


class ModelKeys(msgspec.Struct, frozen=True):
    """What the classes of one model type read."""

    name: str  # of the model's class
    reads: dict[str, Any]  # by key, what applies if it is absent; None: nothing, or it is computed


class ConfigTable(msgspec.Struct, frozen=True):
    """The keys that transformers' classes read, by model type."""

    transformers: str  # its version
    dropped: tuple[str, ...]  # settings of generation, which the classes drop
    common: dict[str, Any]  # the keys that all classes read, with one default
    models: dict[str, ModelKeys]

    def reads(self, architecture: str) -> Mapping[str, Any]:
        """Return the keys that the classes of an architecture read, with their defaults."""
        return self.common | next(model.reads for model in self.models.values() if model.name == architecture)


def defaults_of(keys: Collection[str]) -> dict[str, Any]:
    """Return the values that keys have in transformers if a config.json has none of them."""
    return {key: config_table().common.get(key) for key in keys}


class SortedKeys(msgspec.Struct, frozen=True):
    """The keys of one config.json that are not built."""

    problems: tuple[str, ...]
    unread: tuple[str, ...]  # keys that have no effect because no class reads them


@cache
def config_table() -> ConfigTable:
    """Return the table of the pinned version of transformers."""
    return msgspec.json.decode(TABLE.read_bytes(), type=ConfigTable)


def without_effect(family: Family) -> frozenset[str]:
    """Return the keys that change no output of a family's models, or that its class drops."""
    return WITHOUT_EFFECT | {*family.without_effect, *config_table().dropped}


def sort_keys(keys: Mapping[str, Any], family: Family) -> SortedKeys:
    """Find the keys that would change what the model computes, and those that no class reads.

    Args:
        keys: config.json, without the keys that the user ignores.
        family: of the model. The values of the keys that it reads are checked where the model is built.
    """
    reads, problems, unread = config_table().reads(family.architecture), list[str](), list[str]()
    silent = family.built_keys | without_effect(family)
    for key, value in keys.items():
        if key == CODE and value and not keys.get("model_type"):
            problems.append(
                f"{CODE} {_short(value)} is not supported without a model_type: the model's own code may compute "
                f"another model than transformers' {family.architecture}, and it is not run"
            )
        elif key == QUANTIZATION:
            problems.extend(quantization_problems(value))
        elif key in silent or key.startswith(SILENT):
            continue
        elif key not in reads:
            unread.append(key)
        elif value != reads[key]:
            problems.append(
                f"{key} {_short(value)} is not supported: transformers' {family.architecture} reads it, and it is not "
                f"built "
                f"here; supported: its default, {_short(reads[key])}"
            )
    return SortedKeys(tuple(problems), tuple(unread))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
