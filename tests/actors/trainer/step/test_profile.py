"""A profile is written of the steps that are named, and training does not change by it."""

import json
from pathlib import Path

from actors.trainer.commands import TrainerRank
from tests.actors.trainer.tiny import random_batch
from tests.build.topology import MakeTopology


def test_named_steps_are_profiled(make_topology: MakeTopology, tmp_path: Path) -> None:
    topology = make_topology(trainer={"profile": {"steps": [1], "memory_snapshot": True}})
    losses = [
        [TrainerRank(chosen, folder).train(random_batch(step)).metrics["train/loss"] for step in range(2)]
        for chosen, folder in ((topology, tmp_path / "one"), (make_topology(), tmp_path / "other"))
    ]
    assert losses[0] == losses[1]
    assert not (tmp_path / "other").exists()
    (file,) = (tmp_path / "one" / "profiles").iterdir()  # the snapshot of memory is a GPU's
    assert file.name == "step-00000001-rank-0.json"
    names = {event.get("name") for event in json.loads(file.read_bytes())["traceEvents"]}
    assert {"aten::mm", "aten::_fused_adamw_"} <= names
