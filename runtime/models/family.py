"""Model families: what a declaration has, and the declarations by name.

Each module of `runtime/models/families` has one `FAMILY`. It alone names the family's model types and classes.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import msgspec

from runtime.models import families as declarations
from runtime.models.blocks import Norms
from runtime.models.readers import AttentionKeys, DecoderKeys, MlpKeys

_NONE: Mapping[str, str] = {}


class Composite(msgspec.Struct, frozen=True, kw_only=True):
    """How a text model is published inside of one with further parts, whose weights exports have unchanged."""

    model_type: str  # of the whole
    architectures: tuple[str, ...]  # class of the whole: in transformers, and as published
    names: Mapping[str, str]  # pieces of names that its files spell otherwise than those of the text model alone
    copied: tuple[str, ...] = ()  # its other modules
    without_effect: tuple[str, ...] = ()  # its keys beside those of the text model
    has_stacked_experts: bool = False  # its files have a tensor of all experts in the place of one of each
    takes_any_text: bool = False  # its text model may be of another declared family; text_config names it


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """A declaration of a family: its names, the readers of its keys, and what is known of engines that serve it.

    The blocks that the readers make are the model. Keys of config.json that no reader has are refused if transformers'
    class reads them, unless they have its default.
    """

    model_type: str  # of transformers
    title: str  # models of it, for people
    architecture: str  # class of transformers
    decoder: type[DecoderKeys] = DecoderKeys
    attention: type[AttentionKeys]
    mlp: type[MlpKeys]
    norms: Norms = Norms()  # of each layer
    names: Mapping[str, str] = _NONE  # pieces of names that the files spell otherwise than the blocks
    same: tuple[str, ...] = ()  # further model types that are published with this architecture
    without_effect: tuple[str, ...] = ()  # keys that its class reads, and that change no output of what is built here
    on_sglang: str = "not tested"  # whether SGLang 0.5.23 serves it on the CPU
    ignored_by_sglang: Mapping[str, Any] = {}  # keys that SGLang ignores, with the value that it assumes
    copied: tuple[str, ...] = ()  # modules of the files that are not built, and that exports have unchanged
    composite: Composite | None = None  # how it is published inside of a model with further parts
    predicts_sums: bool = False  # whether checksums of SGLang's tensors are predicted

    @property
    def readers(self) -> tuple[type[msgspec.Struct], ...]:
        """The structs that read config.json."""
        return self.decoder, self.attention, self.mlp

    def composite_of(self, model_type: str | None) -> Composite | None:
        """Return how a directory of a model type has the text model inside of one with further parts; None: alone."""
        return self.composite if self.composite is not None and self.composite.model_type == model_type else None

    @property
    def model_types(self) -> tuple[str, ...]:
        """The model types of config.json that it has."""
        return (self.model_type, *self.same, *(() if self.composite is None else (self.composite.model_type,)))

    @property
    def architectures(self) -> tuple[str, ...]:
        """The classes of transformers that it has."""
        return (self.architecture, *(() if self.composite is None else self.composite.architectures))

    @property
    def built_keys(self) -> frozenset[str]:
        """Keys of config.json that a model is built from, or that are checked for it."""
        return frozenset(key for reader in self.readers for key in reader.__struct_fields__)


@cache
def families() -> Mapping[str, Family]:
    """Return the declared families by model type."""
    names = sorted(module.name for module in iter_modules(declarations.__path__))
    found: list[Family] = [import_module(f"{declarations.__name__}.{name}").FAMILY for name in names]
    return {family.model_type: family for family in found}


def family_of(kind: str | None, architecture: str | None, text: str | None = None) -> Family:
    """Return the family of a model.

    Args:
        kind: model_type of config.json; None: it names none.
        architecture: class of transformers for a causal model; None: the model type says it.
        text: model_type of the text model inside of one with further parts; None: none is named.

    Raises:
        ValueError: no family is declared for it, or the names do not match.
    """
    every = families().values()
    by_type = [family for family in every if kind in family.model_types]
    if architecture is None:
        if not by_type:
            names = dict.fromkeys(name for family in every for name in family.model_types)
            raise ValueError(f"model_type {kind!r} is not supported; supported: {', '.join(names)}")
        return _with_text(by_type[0], kind, text)
    by_class = [family for family in every if architecture in family.architectures]
    if not by_class:
        names = sorted({name for family in every for name in family.architectures})
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {', '.join(names)}")
    both = [family for family in by_class if not kind or family in by_type]
    if not both:
        raise ValueError(f"model_type {kind!r} does not match architecture {architecture}")
    whole = both[0].composite
    if whole is not None and architecture in whole.architectures:
        kind = whole.model_type
    return _with_text(both[0], kind, text)


def _with_text(found: Family, kind: str | None, text: str | None) -> Family:
    """Return the family of the text model that a directory has inside, published as the found one is."""
    composite = found.composite_of(kind)
    if composite is None or (text is None and not composite.takes_any_text):
        return found
    allowed = {name: each for each in families().values() for name in (each.model_type, *each.same)}
    if not composite.takes_any_text:
        allowed = dict.fromkeys((found.model_type, *found.same), found)
    if text not in allowed:
        names = ", ".join(map(repr, allowed))
        raise ValueError(f"text_config.model_type {text!r} is not supported; supported: {names}")
    return msgspec.structs.replace(allowed[text], composite=composite)
