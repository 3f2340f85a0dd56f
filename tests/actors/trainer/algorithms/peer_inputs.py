"""What the functions of all peers get: the same inputs, and what takes a function out of a source text."""

import ast
import subprocess
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

SLIME: Final = "624b824a"
PRIME_RL: Final = "559b4477"
AREAL: Final = "cbff54d6"
NEMO_RL: Final = "7ea279ab"
LENGTHS: Final = (5, 3, 7, 1, 4, 6)
GROUPS: Final = (0, 1, 0, 1, 0, 1)
REWARDS: Final = (1.0, 0.25, 0.0, 0.75, 0.5, 0.25)
SECOND: Final = (0.5, 1.0, 0.5, 0.0, 0.25, 1.0)  # another reward of the same samples
WEIGHTS: Final = (1.0, 0.5)  # of the two
TURNS: Final = (2, 1, 3, 1, 2, 2)  # of each sample, with an input token each
SCORES: Final = (0.5, -1.25, -2.0, 0.75, 3.0, 2.5)  # of chosen and rejected responses in turn
TRAINS: Final = "11011 111 1001110 1 1011 111101"  # tokens of each response; 0: the output of a tool
GAMMA, LAMBD, KL_COEF = 0.9, 0.8, 0.25
OF_RETURNS, BY_LENGTH = 0.95, 0.5  # lambda of the returns, and its factor by length
BASELINES: Final = (0.5, 0.75, 0.5, 0.75, 0.5, 0.75)  # of the greedy sample of each sample's group


class Options(SimpleNamespace):
    """Settings of a peer: attributes, and `get` as a dictionary has it."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def functions(source: str, names: tuple[str, ...], **known: Any) -> SimpleNamespace:
    """Take functions and classes out of a source text, without their decorators."""
    tree = ast.parse(source)
    body = [node for node in tree.body if getattr(node, "name", None) in names]
    for node in body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    scope: dict[str, Any] = {"torch": torch, "np": np, "defaultdict": defaultdict, **known}
    exec(compile(ast.Module([*future, *body], []), "peer", "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in names})


def drawn() -> dict[str, list[float]]:
    """Log-probs and a divergence that is often beyond clips and bounds. All tokens of a sequence share an advantage."""
    draw, total = np.random.default_rng(11), sum(LENGTHS)
    new = -np.abs(draw.normal(0, 1.2, total))
    columns = {
        "new": new,
        "old": np.minimum(new + draw.normal(0, 0.3, total), -1e-3),
        "rollout": np.minimum(new + draw.normal(0, 0.6, total), -1e-3),
        "ref": np.minimum(new + draw.normal(0, 0.8, total), -1e-3),
        "advantages": np.repeat([0.9, -0.4, -1.1, 0.6, 0.3, -0.7], LENGTHS),
    }
    return {name: [float(np.float32(value)) for value in values] for name, values in columns.items()}


def padded(values: list[float] | torch.Tensor) -> torch.Tensor:
    """Lay tokens out as rows of the longest length."""
    rows = torch.tensor(values).split(LENGTHS) if isinstance(values, list) else values.split(LENGTHS)
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


MASK: Final = padded([1.0] * sum(LENGTHS))


def trained() -> list[float]:
    """The loss mask of all responses."""
    return [float(flag) for flag in TRAINS.replace(" ", "")]


def divergence(columns: dict[str, list[float]]) -> list[float]:
    """k1 of the old policy and the reference, 0 where the token does not train."""
    found = (torch.tensor(columns["old"]) - torch.tensor(columns["ref"])) * torch.tensor(trained())
    return found.tolist()


def with_gradient(loss: torch.Tensor, new: torch.Tensor) -> dict[str, Any]:
    """The loss, and its gradient by token."""
    (gradient,) = torch.autograd.grad(loss, new)
    return {"loss": loss.item(), "gradient": gradient.tolist()}


def shown(git: Path, commit: str, path: str) -> str:
    """Read a file of a commit."""
    return subprocess.run(
        ["git", "show", f"{commit}:{path}"], cwd=git, check=True, capture_output=True, text=True
    ).stdout


def rounded(value: Any) -> Any:
    """Keep nine digits of each number, which are all that float32 has."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value
