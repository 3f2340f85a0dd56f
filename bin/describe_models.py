"""Write the table of the keys of config.json that transformers reads, and its page, or check that they are current.

Keys are found in transformers' source: the fields and settable properties of a model type's configuration class, what
that class takes of further keys, and the attributes of configurations that the code of its model reads.
"""

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from bin.entry import docs_folder, parser_of
from runtime.models.config import not_in_tiny_engine
from runtime.models.config_keys import CODE, TABLE, ConfigTable, ModelKeys, without_effect
from runtime.models.family import Family, families
from runtime.models.quantization import METHODS, QUANTIZATION

PAGE: Final = "model-keys.md"
HEAD_DIM: Final = 64  # where a class has no default
CONFIGS: Final = ("config", "text_config", "decoder_config")  # what transformers calls a model's configuration
GENERATION: Final = "transformers.generation."  # reads settings of sampling, and takes no part in a forward pass
LOADING: Final = ("from_pretrained", "from_dict", "get_config_dict", "_get_config_dict", "save_pretrained", "__init__")
HEAD: Final = """# Model families and keys of config.json

Written by `bin/describe-models` from the declarations of `runtime/models/families` and the source of transformers
{version}; do not edit.

| `model_type` | models | class of transformers | tiny engine | SGLang 0.5.23 (CPU) |
|---|---|---|---|---|
{families}

The trainer computes all of them.
How to add one: [families](../develop/model-families.md). A key of a model's `config.json` is one of these:

- **built**: trainer and tiny engine compute what it says. Values that they cannot compute are refused.
- **no effect** on what the models here compute. Settings of generation are also of this kind.
- **refused** unless it has the value in the table: transformers' class reads it, and trainer and tiny engine do not.
- in no row of its model type: transformers' class does not read it. It is ignored, and a start names it.

`{code}` has no effect: no code of a model is run to read its configuration or to train it. Without a `model_type` it is
refused.
`{quantization}` may have the methods {methods} ([which](../train/models.md#quantized-weights)).
`model.ignore_config_keys` trains a model without keys that are refused: [models](../train/models.md#configurations).

| key | model types whose class reads it | a start |
|---|---|---|
"""
Keys = dict[str, Any]  # by key, what the class takes if it is absent; None: nothing, or it is computed


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 0, or 1 if --check finds a stale file."""
    parser = parser_of("describe-models", __doc__)
    parser.add_argument("--check", action="store_true", help="Write nothing, and exit with 1 if a file is not current.")
    parser.add_argument("--docs", type=Path, default=docs_folder(), help="Directory to write the page to.")
    args = parser.parse_args(argv)
    table = describe()
    texts = {TABLE: encoded(table), args.docs / PAGE: page(table)}
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if args.check:
            print(f"{path}: not current: run bin/describe-models", file=sys.stderr)
        else:
            path.write_text(texts[path], encoding="utf-8")
    return 1 if args.check and stale else 0


def describe() -> ConfigTable:
    """Find the keys that transformers reads for each supported model type."""
    import transformers
    from transformers.generation.configuration_utils import GenerationConfig

    dropped: Keys = GenerationConfig._get_default_generation_params()  # pyright: ignore[reportPrivateUsage] - the list by which the classes drop them
    reads = {model_type: _keys(model_type) for model_type in families()}
    first = next(iter(reads.values()))
    common = {
        key: value for key, value in first.items() if all(key in each and each[key] == value for each in reads.values())
    }
    own = {model_type: {key: keys[key] for key in keys if key not in common} for model_type, keys in reads.items()}
    return ConfigTable(
        transformers=transformers.__version__,
        dropped=tuple(sorted(dropped)),
        common=common,
        models={each: ModelKeys(name=families()[each].architecture, reads=own[each]) for each in reads},
    )


def encoded(table: ConfigTable) -> str:
    """Encode the table with a key a line."""
    values = {"transformers": table.transformers, "dropped": table.dropped, "common": table.common}
    models = {each: {"name": keys.name, "reads": keys.reads} for each, keys in table.models.items()}
    return json.dumps(values | {"models": models}, indent=1) + "\n"


def page(table: ConfigTable) -> str:
    """Return the reference page of a table."""
    reads = {model_type: table.reads(keys.name) for model_type, keys in table.models.items()}
    rows = "\n".join(_family_row(family) for family in families().values())
    methods = ", ".join(f"`{name}`" for name in METHODS)
    named = {"code": CODE, "quantization": QUANTIZATION, "methods": methods}
    head = HEAD.format(version=table.transformers, families=rows, **named)
    rows = [_row(key, reads) for key in sorted({key for keys in reads.values() for key in keys})]
    return head + "\n".join(rows) + "\n"


def _family_row(family: Family) -> str:
    names = ", ".join(f"`{name}`" for name in family.model_types)
    return f"| {names} | {family.title} | `{family.architecture}` | {_on_tiny_engine(family)} | {family.on_sglang} |"


def _on_tiny_engine(family: Family) -> str:
    """Return whether the tiny engine serves a family, given the blocks of the defaults of its class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config: Any = CONFIG_MAPPING[family.model_type]
    keys = {"head_dim": HEAD_DIM} | config().to_dict()
    own = {key: keys[key] for key in family.attention.__struct_fields__ if key in keys}
    lacking = not_in_tiny_engine(msgspec.convert(own, family.attention).layers())
    return f"no: {', '.join(lacking)}" if lacking else "yes"


def _row(key: str, reads: dict[str, Mapping[str, Any]]) -> str:
    readers = [model_type for model_type, keys in reads.items() if key in keys]
    named = "all" if len(readers) == len(reads) else ", ".join(f"`{each}`" for each in readers)
    does = dict.fromkeys(_does(key, reads[each], families()[each]) for each in readers)
    return f"| `{key}` | {named} | {', '.join(does)} |"


def _does(key: str, reads: Mapping[str, Any], family: Family) -> str:
    if key == QUANTIZATION:
        return "dequantized, or refused"
    if key in family.built_keys:
        return "built"
    return "no effect" if key in without_effect(family) else f"refused unless `{json.dumps(reads[key])}`"


def _keys(model_type: str) -> Keys:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config: Any = CONFIG_MAPPING[model_type]
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config]
    keys: Keys = {}
    for module in _modules(model):
        for key, value in _of_model(module):
            keys[key] = keys.get(key) if value is None else value
    classes: list[type] = [*config.__mro__]
    not_keys = {name for kind in classes for name in vars(kind)}
    keys = {key: value for key, value in keys.items() if key not in not_keys}
    for kind in reversed(classes):
        if kind.__module__.startswith("transformers."):
            keys |= dict(_of_class(kind, not_keys))
    keys |= {field.name: _default(field.default) for field in dataclasses.fields(config)}
    for alias, name in config.attribute_map.items():
        keys[alias] = keys[name] = keys.get(name) if keys.get(alias) is None else keys[alias]
    return {key: keys[key] for key in sorted(keys) if not key.startswith("_")}


def _modules(model: Any) -> list[str]:
    """Return the modules of transformers that a model's own module uses, itself included."""
    own = sys.modules[model.__module__]
    names = {getattr(value, "__module__", None) or "" for value in vars(own).values()}
    names |= {kind.__module__ for kind in model.__mro__}
    return [name for name in sorted(names) if name.startswith("transformers.") and not name.startswith(GENERATION)]


@cache
def _of_model(module: str) -> tuple[tuple[str, Any], ...]:
    """Return the attributes that a module reads of configurations, and does not call."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found: list[tuple[str, Any]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_config(node.value):
            if id(node) not in called:
                found.append((node.attr, None))
    return (*found, *_asked(tree))


def _of_class(kind: type, not_keys: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the keys that a configuration class reads besides its fields."""
    for name, value in vars(kind).items():
        if isinstance(value, property) and value.fset is not None:
            yield name, None
    for method in ast.walk(_tree_of(kind)):
        if isinstance(method, ast.FunctionDef) and method.name not in LOADING:
            yield from _taken(method)
            yield from ((key, value) for key, value in _asked(method, "self") if key not in not_keys)


@cache
def _tree_of(kind: type) -> ast.Module:
    """Parse a class, which `inspect` finds by parsing its whole module."""
    return ast.parse(textwrap.dedent(inspect.getsource(kind)))


def _taken(method: ast.FunctionDef) -> Iterator[tuple[str, Any]]:
    """Yield the keys that a method takes out of `kwargs`, in which a class gets those that are no fields."""
    for node in ast.walk(method):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="kwargs"), attr="pop" | "get"), args=[key, *_]):
                yield from ((text, None) for text in _texts(key))
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[ast.Name(id="kwargs")]):
                yield from ((text, None) for text in _texts(key))
            case _:
                pass


def _asked(tree: ast.AST, *others: str) -> Iterator[tuple[str, Any]]:
    """Yield what `getattr` and `hasattr` ask of a configuration, with the default."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[asked, key, *rest]) if _is_config(
                asked, *others
            ):
                default = rest[0].value if rest and isinstance(rest[0], ast.Constant) else None
                yield from ((text, default) for text in _texts(key))
            case _:
                pass


def _is_config(node: ast.expr, *others: str) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in (*CONFIGS, *others)


def _texts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def _default(value: Any) -> Any:
    """Return a field's default as JSON; None if it has none, or one that JSON has no value for."""
    return value if isinstance(value, bool | int | float | str) else None
