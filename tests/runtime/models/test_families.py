"""Declarations of families: each name in one place, short functions, and a model of each that the blocks describe."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from runtime.models import family as finding
from runtime.models.config import ModelError, read_model
from runtime.models.family import Family, families
from runtime.models.tensors import Weight
from tests.test_layers import ROOT, code_lines, sources_of

DECLARATIONS = "runtime.models.families"
OF_OTHERS = ("runtime.compat",)  # converters of other projects' flags
MAX_LINES, MAX_FUNCTION_LINES = 150, 15
TENSORS = ("torch", "numpy")


def names_of(family: Family) -> Iterator[str]:
    """Its model types, class and configuration, and the first model of it."""
    yield from (*family.model_types, *family.architectures, family.architecture.removesuffix("ForCausalLM"))
    yield family.title.partition(", ")[0]


@cache
def texts() -> dict[str, str]:
    """The sources by module, in lower case, without those that may name families."""
    sources = sources_of(ROOT).values()
    return {source.module: source.text.lower() for source in sources if not source.module.startswith(OF_OTHERS)}


@pytest.mark.parametrize("kind", families())
def test_a_family_is_named_in_its_declaration_alone(kind: str) -> None:
    names = {name.lower() for name in names_of(families()[kind])}
    searched = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-]|\.\d)" for name in names))
    named = {
        module
        for module, text in texts().items()
        if any(name in text for name in names) and searched.search(text)  # a plain search first: it is faster
    }
    assert named == {f"{DECLARATIONS}.{kind}"}


def test_a_declaration_is_short_and_computes_nothing() -> None:
    own = [source for name, source in sources_of(ROOT).items() if name.startswith(f"{DECLARATIONS}.")]
    assert len(own) == len(families())
    for source in own:
        assert source.text.count("\n") <= MAX_LINES
        functions = [node for node in source.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        assert all(code_lines(function) <= MAX_FUNCTION_LINES for function in functions)
        assert not re.search(rf"^\s*(import|from) ({'|'.join(TENSORS)})\b", source.text, re.MULTILINE)


def test_without_a_declaration_its_models_are_refused_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {kind: family for kind, family in families().items() if kind != "glm4_moe"}
    monkeypatch.setattr(finding, "families", lambda: left)
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = tmp_path / "config.json"
    for kind in families():
        config.write_text(json.dumps(sizes | {"num_attention_heads": 2, "num_key_value_heads": 2, "model_type": kind}))
        with pytest.raises(ModelError) as refused:
            read_model(tmp_path, ["hidden_size"])  # refused only where the family is found
        found = "is not supported" if kind == "glm4_moe" else "hidden_size cannot be ignored"
        assert found in str(refused.value)


def test_a_fused_tensor_has_one_name_in_engines_and_its_parts_have_the_module_s() -> None:
    weight = Weight("fc1.weight", {"gate.weight": (2, 3), "up.weight": (2, 3)}, joined="gate_up.weight")
    inside = weight.within("decoder.0", "model.0")
    assert (inside.name, inside.engine_name) == ("decoder.0.fc1.weight", "model.0.gate_up.weight")
    assert [*inside.parts] == ["model.0.gate.weight", "model.0.up.weight"]
