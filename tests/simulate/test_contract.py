"""The tests of the bus on a real server, run on the simulated server: one contract, two servers."""

from collections.abc import AsyncGenerator, Generator
from random import Random
from typing import Any

import pytest

from runtime.bus.bus import Bus
from tests.fixtures.nats import TEST_LIMITS, TEST_STREAMS
from tests.runtime.bus.test_append import *  # noqa: F403 - the contract
from tests.runtime.bus.test_calls import *  # noqa: F403
from tests.runtime.bus.test_consumer import *  # noqa: F403
from tests.runtime.bus.test_data import *  # noqa: F403
from tests.runtime.bus.test_dead import *  # noqa: F403
from tests.runtime.bus.test_flush import *  # noqa: F403
from tests.runtime.bus.test_inboxes import *  # noqa: F403
from tests.runtime.bus.test_kv import *  # noqa: F403
from tests.runtime.bus.test_publish import *  # noqa: F403
from tests.runtime.bus.test_reader import *  # noqa: F403
from tests.runtime.bus.test_roster import *  # noqa: F403
from tests.runtime.bus.test_scoring import *  # noqa: F403
from tests.simulate.environment import simulated
from tests.simulate.loop import Process, VirtualLoop
from tests.simulate.server import SimulatedServer

# of a real server alone: raw sockets, what its own buffers hold, thousands of messages
del test_what_a_message_holds_never_keeps_it_from_being_set_aside  # noqa: F821
del test_a_task_under_a_hostile_header_is_taken_from_the_queue  # noqa: F821
del test_a_subject_that_is_no_text_leaves_the_connection_able_to_hear  # noqa: F821
del test_a_socket_that_was_closed_this_moment_costs_another_attempt  # noqa: F821
del test_more_payloads_at_once_than_the_server_holds_are_all_stored  # noqa: F821
del test_two_thousand_events_over_a_killed_server  # noqa: F821

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
URL = "nats://simulated:4222"


class Machine:
    """A simulated server, with what tests do to a real one."""

    url = URL
    faults = None
    listens = True

    def __init__(self, loop: VirtualLoop) -> None:
        self.server = SimulatedServer(loop, Random(0))
        self.process = Process(loop, "test")

    def kill(self) -> None:
        self.server.kill()

    def stop(self) -> None:
        self.server.kill()

    def spawn(self, *, stopped: bool = False) -> None:
        self.server.start()
        if stopped:
            self.pause()

    async def wait_ready(self) -> None:
        """It is ready at once."""

    async def restart(self) -> None:
        self.server.kill()
        self.server.start()

    def pause(self) -> None:
        self.server.process.freeze(float("inf"))

    def resume(self) -> None:
        self.server.process.thaw()


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop()


@pytest.fixture
def anyio_backend(loop: VirtualLoop) -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": lambda: loop}


@pytest.fixture
def nats_server(loop: VirtualLoop) -> Generator[Machine]:
    machine = Machine(loop)
    with simulated(loop, Random(0), machine):
        yield machine


@pytest.fixture
def own_nats_server(nats_server: Machine) -> Machine:
    return nats_server


@pytest.fixture
async def bus(nats_server: Machine, run_name: str) -> AsyncGenerator[Bus, None]:
    async with Bus.connect(nats_server.url, run_name, name="test", limits=TEST_LIMITS) as bus:
        await bus.ensure_streams(TEST_STREAMS)
        yield bus


@pytest.fixture
async def own_bus(bus: Bus) -> Bus:
    return bus


@pytest.fixture
def url(nats_server: Machine) -> str:
    return nats_server.url
