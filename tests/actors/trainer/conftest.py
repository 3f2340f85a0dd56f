"""What tests of the trainer share: torch on the CPU as the only rank, and a tiny model's directory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.trainer.megatron import groups as ranks
from runtime.settings.tables.trainer import MegatronConfig
from runtime.settings.topology import Topology
from tests.actors.trainer.tiny import TINY
from tests.build.topology import trainer_topology


@pytest.fixture
def actor_joins() -> None:
    """The actor of the test joins as the only rank, on a thread of its own, and leaves at its end."""
    ranks.leave()


@pytest.fixture(autouse=True)
def one_rank(request: pytest.FixtureRequest) -> None:
    """This thread as the only rank, unless an actor is to be it."""
    torch.set_num_threads(1)
    if "actor_joins" not in request.fixturenames:
        ranks.join(ranks.Ranks(), MegatronConfig(), torch.device("cpu"), seed=1)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model directory with a configuration only."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY))
    return directory


@pytest.fixture
def make_topology(model_dir: Path, tmp_path: Path) -> Callable[..., Topology]:
    """A topology of the tiny model; keyword arguments are tables that change the defaults."""

    def make(**tables: dict[str, Any]) -> Topology:
        return trainer_topology(model_dir, tmp_path, **tables)

    return make
