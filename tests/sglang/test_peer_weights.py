"""What SGLang's own server asks of its seed when it is started as a run starts it. Without a GPU it loads nothing."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from actors.processes import process_specs
from actors.rollout.sglang.peer_weights import GROUP, PEERS_VARIABLE
from runtime.bus.addresses import ENGINE_KEY_VARIABLE
from runtime.node.supervisor.ports import free_port
from runtime.settings.load import load_topology
from runtime.settings.processes import with_address
from tests.sglang.server import ROOT, SGLANG_START_S, sglang_python
from tests.sglang.test_launch import CPU, ENV, KEY, TYPED, toml
from tests.support.stand_in_seed import Seed, standing_in

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2 * SGLANG_START_S)]


def start_from(seed: Seed, directory: Path) -> tuple[int, str]:
    """Start an engine that has a peer; its exit code, and what it said."""
    pool: dict[str, Any] = {"kind": "sglang", "concurrency": 4, "max_total_tokens": 4096}
    pool |= {"python": sglang_python(), "env": ENV, "sglang": CPU | TYPED}
    topology = load_topology(ROOT / "topologies" / "laptop.toml", [f"engines.policy={toml(pool)}"]).topology
    (spec,) = [spec for spec in process_specs(topology, "local", directory) if spec.name == "engine.policy.0"]
    words = [with_address(word, "127.0.0.1", free_port()) for word in spec.command]
    environment = {**os.environ, **spec.env, ENGINE_KEY_VARIABLE: KEY, PEERS_VARIABLE: seed.address}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=SGLANG_START_S, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_starting_server_asks_its_seed_for_a_group_and_ends_where_the_seed_makes_none(tmp_path: Path) -> None:
    with standing_in(Seed(refuses=GROUP)) as seed:
        code, said = start_from(seed, tmp_path)
    assert code != 0
    assert "no first weights from a peer" in said or "only supports cuda" in said, said[-3000:]
    ((_, key, body),) = [call for call in seed.calls if call[0] == GROUP]
    assert key == f"Bearer {KEY}"
    assert (body["master_address"], body["group_rank"], body["world_size"]) == ("127.0.0.1", 0, 2)
    assert (body["backend"], len(body["ports"].split(","))) == ("nccl", 1)
    assert body["group_name"].startswith("send_weights_")
