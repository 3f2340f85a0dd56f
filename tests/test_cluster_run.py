"""A whole run on a cluster of three servers, with the accounts of docs/run/nats/accounts.conf."""

import asyncio
import datetime
import os
import sys
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from messages import Plane
from messages.subjects import stream_of
from runtime.bus.limits import BusLimits
from runtime.bus.nats.accounts import Accounts, ClientKind, ExternalClient, render_accounts
from runtime.bus.nats.connection import open_connection
from runtime.util.secrets import Login, Secret, with_login
from tests.chaos.pace import Pace
from tests.fixtures.nats import eventually
from tests.support.cluster import Cluster, running_cluster

ROOT = Path(__file__).parent.parent
ACCOUNTS = ROOT / "docs" / "run" / "nats" / "accounts.conf"
RUN = "try"
LOG = stream_of(RUN, Plane.EVENT)
PASSWORD = Secret("swordfish")
START_S = 300.0
GROUPS = 16  # of a train step


def accounts_of_the_page() -> str:
    return ACCOUNTS.read_text(encoding="utf-8")


def words(text: str) -> list[str]:
    return text.replace("[", " [ ").replace("]", " ] ").replace("{", " { ").replace("}", " } ").split()


def test_the_accounts_of_the_page_are_those_of_a_runs_own_server() -> None:
    expires = datetime.datetime.now(datetime.UTC)
    clients = (
        ExternalClient(name="alice", kind=ClientKind.GRADER, grader="math", password="...", expires=expires),
        ExternalClient(name="bob", kind=ClientKind.VIEWER, password="...", expires=expires),
        ExternalClient(name="dave", kind=ClientKind.AUDITOR, password="...", expires=expires),
    )
    rendered = render_accounts(
        Accounts(run=RUN, graders=("math",), clients=clients), Login(user=RUN, password=Secret("..."))
    )
    assert words(accounts_of_the_page()) == words(rendered)


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.timeout(2 * START_S)
async def test_a_run_goes_on_over_the_death_of_the_leader_and_resumes(tmp_path: Path) -> None:
    credentials = tmp_path / "bus.toml"
    credentials.touch(0o600)
    credentials.write_text(f'user = "{RUN}"\npassword = "{PASSWORD.reveal()}"\n')
    accounts = accounts_of_the_page().replace("...", PASSWORD.reveal())
    async with running_cluster(tmp_path / "cluster", accounts, login=Login(user=RUN, password=PASSWORD)) as cluster:
        async with anyio.create_task_group() as tasks:
            pace = Pace(tmp_path / "pace")
            tasks.start_soon(kill_leader, cluster, tmp_path / "runs" / RUN / "metrics.jsonl", pace)
            result = await run(cluster, tmp_path, num_steps=6, **pace.environment())
        assert result["groups"]["issued"] == result["groups"]["trained"] == 6 * GROUPS
        assert (await run(cluster, tmp_path, num_steps=7))["groups"]["trained"] == 7 * GROUPS
        url = with_login(cluster.url, Login(user="bob", password=PASSWORD))
        async with open_connection(url, name="bob", limits=BusLimits(), inboxes=f"_INBOX.{RUN}.bob") as viewer:
            event = await viewer.retry(f"$JS.API.DIRECT.GET.{LOG}", b'{"seq":1}', None, 10.0)
            assert event.headers is not None
            assert event.headers["Nats-Subject"].startswith(f"phy.{RUN}.event.")


async def kill_leader(cluster: Cluster, metrics: Path, pace: Pace) -> None:
    """Kill the leader of the log after the first step, and start it again once there is another.

    The run trains at most three steps before that, and the others after it.
    """
    pace.allow(2)
    await eventually(lambda: metrics.exists() and metrics.stat().st_size > 0, timeout_s=START_S)
    leader = await cluster.leader_of(LOG)
    leader.kill()
    await cluster.leader_of(LOG)
    leader.start()
    pace.free()


async def run(cluster: Cluster, directory: Path, *, num_steps: int, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "bin/physarum.py", "start-topology", "topologies/laptop.toml", "--json"]
    settings = (
        f"run.name={RUN}",
        f"run.dir={directory / 'runs'}",
        f"train.num_steps={num_steps}",
        f"rollout.rollout_batch_size={GROUPS}",
        "eval=[]",
        f"bus.url={cluster.url}",
        f"bus.credentials={directory / 'bus.toml'}",
        "bus.replicas=3",
    )
    for setting in settings:
        command += ["--set", setting]
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    with anyio.fail_after(START_S):
        out, told = await process.communicate()
    assert process.returncode == 0, told.decode()[-4000:]
    return msgspec.json.decode(out)
