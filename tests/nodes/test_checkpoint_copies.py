"""Nodes that share nothing train together; a machine that is lost with its disk is replaced, and the run goes on."""

import shutil
from pathlib import Path

import pytest

from tests.nodes.two_machines import RUN_S, check_books, copy_join, ends, start
from tests.support.machines.lan import ROOT, machines

pytestmark = [pytest.mark.nodes, pytest.mark.nightly, pytest.mark.timeout(600)]

MODEL = ROOT / "topologies/demo/models/reverse-digits"
KEEP = "def keep(group):\n    return True\n"
TOPOLOGY = """
include = "laptop.toml"
run = {{ name = "three", dir = "{runs}" }}
model.hf_checkpoint = "{own}/tiny"
rollout.dynamic_filter = "{own}/keep.py:keep"
train = {{ num_steps = 12, save_interval = 3, checkpoint_copies = 2 }}
bus.node = "local"
nodes.local = {{ address = "auto", gpus = 0, wait_s = 240 }}
nodes.n1 = {{ address = "auto", wait_s = 240 }}
nodes.n2 = {{ address = "auto", wait_s = 240 }}
trainer.num_processes = 2
trainer.nodes = {trainers}
engines.policy.num_engines = 2
engines.policy.nodes = ["local", "n1"]
engines.policy.weight_transport = "{transport}"
"""


@pytest.mark.parametrize(
    ("trainers", "transport"),
    [
        pytest.param(("n1", "n2"), "collective", id="the first rank is lost, weights by collective"),
        pytest.param(("local", "n1"), "http", id="the second rank is lost, weights over http"),
    ],
)
def test_a_machine_that_is_lost_with_its_disk_is_replaced(
    tmp_path: Path, trainers: tuple[str, str], transport: str
) -> None:
    (runs := tmp_path / "runs").mkdir()
    (own := tmp_path / "own").mkdir()
    file, run_dir = tmp_path / "three.toml", runs / "three"
    file.write_text(TOPOLOGY.format(runs=runs, own=own, trainers=list(trainers), transport=transport).replace("'", '"'))
    with machines(shared=[tmp_path], own=[runs, own]) as lan:
        n0, n1, n2 = lan.add("n0"), lan.add("n1"), lan.add("n2")
        shutil.copytree(MODEL, n0.path(own / "tiny"))
        n0.path(own / "keep.py").write_text(KEEP)
        home = start(n0, file, "local")
        others = {"n1": start(n1, file, "n1", "--join", copy_join(n0, n1, run_dir))}
        others["n2"] = start(n2, file, "n2", "--join", copy_join(n0, n2, run_dir))
        home.wait_for("step  5/12", RUN_S)
        saved = [path.name for path in n1.path(run_dir).glob("checkpoints/*/step-*")]
        assert "step-00000003" in saved
        n1.unplug()
        spare = lan.add("spare", address_of="n1", hostname="n1")
        assert not spare.path(run_dir).exists()
        others["n1"] = start(spare, file, "n1", "--join", copy_join(n0, spare, run_dir))
        ends(home, within_s=RUN_S, code=0)
        ends(*others.values(), within_s=60, code=0)
        check_books(n0.path(run_dir), 12)
        machine = {"local": n0, "n1": spare, "n2": n2}
        names = [
            sorted(str(p.parent.name) for p in machine[node].path(run_dir).glob("checkpoints/*/step-*/copies.json"))
            for node in trainers
        ]
        assert names[0] == names[1] == ["step-00000009", "step-00000012"]
        log = (spare.path(run_dir) / "logs" / "n1" / "daemon.jsonl").read_text()
        assert '"files_fetched"' in log
        assert '"title":"checkpoint 0001/step-00000003 of ' in log.replace('": "', '":"')
