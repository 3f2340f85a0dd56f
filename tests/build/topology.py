"""Small topologies, with defaults for the tables that a test does not name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from runtime.settings.tables.algorithm import AlgorithmConfig
from runtime.settings.topology import Topology

MakeTopology = Callable[..., Topology]
SCRIPTED_MODEL = Path(__file__).parents[1] / "support" / "scripted_model"  # only a config and a tokenizer
RECIPE: dict[str, Any] = {
    "run": {"name": "t"},
    "model": {"hf_checkpoint": str(SCRIPTED_MODEL)},
    "data": [{"name": "d", "path": "none", "rm_type": "exact_match"}],
    "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "max_response_len": 8},
    "train": {"num_steps": 3},
    "engines": {"policy": {"kind": "tiny", "concurrency": 8}},
}


def algorithm_of(**tables: Any) -> AlgorithmConfig:
    """The table `algorithm` with these keys and tables."""
    return msgspec.convert(tables, AlgorithmConfig)


def joined(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with the keys of later ones, in the tables in them too."""
    found: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            both = isinstance(value, dict) and isinstance(found.get(name), dict)
            found[name] = joined(found[name], value) if both else value
    return found


def topology_with(**tables: Any) -> Topology:
    """A run with one tiny engine. Each argument replaces or extends a table."""
    merged: dict[str, Any] = {**RECIPE, **tables}
    for name, table in RECIPE.items():
        if isinstance(table, dict) and name != "engines":
            merged[name] = {**table, **tables.get(name, {})}
    return msgspec.convert(merged, Topology)


def trainer_topology(model_dir: Path, run_root: Path, **tables: dict[str, Any]) -> Topology:
    """A run for a trainer alone, without engines or data. Each argument extends a table."""
    base: dict[str, Any] = {
        "run": {"name": "test", "dir": str(run_root)},
        "engines": {},
        "data": [],
        "trainer": {"device": "cpu"},
        "model": {"hf_checkpoint": str(model_dir), "random_init": True},
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "max_response_len": 8},
        "algorithm": {"num_steps_per_rollout": 2},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
        "train": {"num_steps": 8},
    }
    for name, table in tables.items():
        base[name] = base.get(name, {}) | table
    return msgspec.convert(base, Topology)
