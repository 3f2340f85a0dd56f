"""A run through smg, the successor of sglang-router, which is installed apart and named by `router_url`."""

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.node.supervisor.ports import free_port
from tests.support.tiny_engine import wait_until_200
from tests.support.whole_runs import run_topology

SMG = "smg==1.13.0"
LIMIT_S = 900


@pytest.mark.nightly
@pytest.mark.timeout(LIMIT_S + 300)
def test_every_group_of_a_run_goes_through_smg(tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    subprocess.run([python, "-m", "pip", "install", "-q", SMG], check=True, timeout=LIMIT_S)
    port, metrics = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    command = [python.with_name("smg"), "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    command += ["--disable-retries", "--disable-circuit-breaker"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    with (tmp_path / "smg.log").open("wb") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log, text=True)
    try:
        wait_until_200(f"{url}/workers", router)
        settings = ("engines.policy.router=sglang-router", f"engines.policy.router_url={url}", "train.num_steps=10")
        finished = run_topology(tmp_path, "topologies/laptop.toml", *settings, limit_s=LIMIT_S)
    finally:
        router.terminate()
        router.wait(60)
    assert finished.result["groups"]["issued"] == finished.result["groups"]["trained"] == 640
