"""Servers of the engine contract, each layout started once and kept; matrix of tested behaviours."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.served_model import ServedModel
from tests.conftest import END_S, descendants, describe
from tests.sglang.matrix import Matrix
from tests.sglang.model import write_contract_model, write_versions
from tests.sglang.rig import ADMIN_S, Rig, learn_checksums, left_as_found, rig_of
from tests.sglang.router import Router, running_router
from tests.sglang.server import TINY, TP1, TWO_PROCESSES, Server, Servers, kept_servers
from tests.sglang.stack import UPSTREAM, stack

LAYOUTS = [
    pytest.param(TINY, marks=pytest.mark.sglang, id="tiny"),
    pytest.param(TP1, marks=pytest.mark.sglang, id="sglang"),
    pytest.param(TWO_PROCESSES, marks=pytest.mark.nightly, id="two-processes"),
]
MATRIX = pytest.StashKey[Matrix]()
ROW = "row of the matrix"
KEEPERS = ("servers", "case")  # fixtures with servers that are kept over several tests
HERE = Path(__file__).parent
OF_TWO_PROCESSES = ("two-processes", TWO_PROCESSES, "engine_of_two")  # in the names of tests


def pytest_configure(config: pytest.Config) -> None:
    config.stash[MATRIX] = matrix = Matrix()
    config.pluginmanager.register(Noting(matrix), "sglang-matrix")


@pytest.fixture(scope="session")
def contract_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_contract_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory, contract_model: Path) -> dict[int, Path]:
    return write_versions(tmp_path_factory.mktemp("weights"), contract_model)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory, contract_model: Path) -> Iterator[Servers]:
    with kept_servers(contract_model, tmp_path_factory.mktemp("servers")) as servers:
        yield servers


@pytest.fixture(autouse=True)
def leaves_no_child_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Replace the fixture of all tests: servers that are kept over tests may stay."""
    before = {process.pid for process in descendants()}
    yield
    keepers = [name for name in KEEPERS if name in request.fixturenames]
    kept: set[int] = {pid for name in keepers for pid in request.getfixturevalue(name).pids()}
    left = [process for process in descendants() if process.pid not in before | kept]
    _, alive = psutil.wait_procs(left, timeout=END_S)
    lines = [describe(process) for process in alive]
    for process in alive:
        process.kill()
    assert not lines, f"processes left behind: {lines}"


@pytest.fixture(scope="session", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    """Engine layout of a contract test."""
    return str(request.param)


@pytest.fixture
def server(servers: Servers, layout: str) -> Server:
    """The running server of the layout, kept over tests."""
    return servers.get(layout)


@pytest.fixture(scope="session")
def checksums_by_layout() -> dict[str, dict[int, str]]:
    return {}


@pytest.fixture
async def client(server: Server) -> AsyncGenerator[SglangClient]:
    """A client like that of a rollout actor. Afterwards the server is idle, not paused and at full speed."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = SglangClient(session, admin_timeout_s=ADMIN_S)
        yield client
        if server.alive:
            server.slow_down(0)
            await left_as_found(client, server)


@pytest.fixture
async def checksums(
    client: SglangClient,
    server: Server,
    weights: dict[int, Path],
    checksums_by_layout: dict[str, dict[int, str]],
) -> dict[int, str]:
    """This layout's checksum of each version of the weights."""
    if server.layout not in checksums_by_layout:
        checksums_by_layout[server.layout] = await learn_checksums(client, server, weights)
    return checksums_by_layout[server.layout]


@pytest.fixture(scope="session")
def session_router() -> Iterator[Router]:
    with running_router() as router:
        yield router


@pytest.fixture
def make_rig(
    server: Server,
    client: SglangClient,
    weights: dict[int, Path],
    checksums: dict[int, str],
    contract_model: Path,
) -> Any:
    """Factory of a rollout actor's fleet and generator, for a router and an update mode."""

    @asynccontextmanager
    async def make(router: Router, mode: Any = "drain") -> AsyncGenerator[Rig]:
        async with rig_of(server, router.url, weights, checksums, ServedModel.read(contract_model), mode) as rig:
            yield rig

    return make


@pytest.fixture
async def rig(make_rig: Any, session_router: Router) -> AsyncGenerator[Rig]:
    """A rig with the session's router. Its weight updates wait for running requests."""
    async with make_rig(session_router) as rig:
        yield rig


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`, run the contract tests of a layout in one process, which keeps its server.

    The rest is in another.
    """
    if stack() is UPSTREAM:  # which starts no engine of two processes without a GPU
        left_out = [item for item in items if any(name in item.nodeid for name in OF_TWO_PROCESSES)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.path.parent == HERE:
            kept = "servers" in getattr(item, "fixturenames", ())
            params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
            item.add_marker(pytest.mark.xdist_group(f"contract {params.get('layout')}" if kept else "runs"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    report: pytest.TestReport = outcome.get_result()
    marker = item.get_closest_marker("behaviour")
    callspec = getattr(item, "callspec", None)
    if marker is not None and callspec is not None and (report.when == "call" or report.failed):
        server: Server | None = getattr(item, "funcargs", {}).get("server")
        version = server.version if server is not None and server.alive and report.passed else ""
        report.user_properties.append((ROW, [marker.args[0], callspec.params["layout"], version]))


class Noting:
    """Collects outcomes from test reports, including those of other xdist processes."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == ROW and isinstance(value, list) and (report.when == "call" or report.failed):
                behaviour, layout, version = value
                self._matrix.note(behaviour, layout, report.outcome, version)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    config.stash[MATRIX].report(terminalreporter.write_line, config.getoption("--results"))
