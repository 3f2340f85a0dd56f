"""One simulated run: the actors' own code on a simulated bus, with scripted engines and a scripted train step."""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, Final

import anyio
import msgspec

import actors.reward.actor
import actors.rollout.actor
import actors.trainer.actor
from actors.registry import Role, hosted
from actors.reward.grades import Graded
from actors.reward.samples import GradedSample
from actors.rollout.engines import ownership
from messages import Message, Plane, RunFailed, RunFinished, decode
from messages.subjects import stream_of
from runtime.bus.addresses import Address, address_key
from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.process.hosting import host
from runtime.process.logs import silenced
from runtime.process.main import exit_code_of
from runtime.settings.sizes import stream_limits
from runtime.settings.topology import Topology
from runtime.util.errors import flatten
from runtime.util.exit_codes import EXIT_INPUT_ERROR
from tests.build.topology import topology_with
from tests.simulate.engine import Session, SimulatedEngine
from tests.simulate.environment import replaced, simulated
from tests.simulate.faults import LOSES_PAYLOADS, SERVER, CallFaults, Fault, drawn
from tests.simulate.loop import Process, Stuck, VirtualLoop, current
from tests.simulate.server import EPOCH_S, SimulatedServer
from tests.simulate.trainer import Disk, ScriptedRank, ScriptedThread

MODEL: Final = Path(__file__).parents[2] / "topologies/demo/models/reverse-digits"
URL: Final = "nats://simulated:4222"
RUN: Final = "simulated"
RESTART_S: Final = (0.1, 1.5)
LIMIT_S: Final = 3600.0  # virtual seconds of a run
STOP_S: Final = 60.0
CLOSES: Final = 8  # of a coroutine that waits in its `finally` blocks
MAX_FAILURES: Final = 40  # ends of a process that no fault asked for


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What a run trains, and with what."""

    num_steps: int = 5
    batch: int = 2
    surplus: int = 0
    samples: int = 2
    max_staleness: int = 0
    has_filter: bool = False
    on_halt: str = "resume"
    on_weight_update: str = "drain"
    evaluates: bool = False
    save_interval: int = 2
    num_rollout: int = 1
    num_engines: int = 2


def drawn_recipe(random: Random) -> Recipe:
    """Draw a recipe."""
    has_filter = random.random() < 0.4
    return Recipe(
        batch=random.randint(1, 3),
        surplus=random.choice([0, 0, 1, 2]),
        samples=random.randint(2 if has_filter else 1, 3),
        max_staleness=random.choice([0, 0, 1, 2, 3]),
        has_filter=has_filter,
        on_halt=random.choice(["resume", "restart", "drop"]),
        on_weight_update=random.choice(["drain", "abort", "retract", "in_place"]),
        evaluates=random.random() < 0.3,
        save_interval=random.choice([1, 2, 100]),
    )


class Broken(AssertionError):
    """A run did what none may do."""


class World:
    """One run.

    Args:
        seed: from which everything follows.
        faults: in place of those that the seed draws; None: these.
        recipe: in place of the drawn one.
    """

    def __init__(
        self, seed: int, *, faults: list[Fault] | None = None, recipe: Recipe | None = None, has_faults: bool = True
    ) -> None:
        self.seed = seed
        choices = Random(f"{seed} choices")
        self.recipe = drawn_recipe(choices) if recipe is None else recipe
        self.engine_names = [f"engine.policy.{index}" for index in range(self.recipe.num_engines)]
        several = self.recipe.num_rollout > 1
        self.roles: dict[str, Role] = {"buffer": "buffer", "reward": "reward", "trainer": "trainer"}
        for index in range(self.recipe.num_rollout):
            self.roles[f"rollout.{index}" if several else "rollout"] = "rollout"
        if self.recipe.has_filter:
            self.roles["filter"] = "filter"
        if faults is None:
            faults = drawn(choices, sorted(self.roles), self.engine_names) if has_faults else []
        self.all_faults = faults
        self.notes: list[str] = []  # what happened, for people
        self.loop = VirtualLoop()
        self.chance = Random(f"{seed} chance")
        self.process = Process(self.loop, "daemon")
        self.server = SimulatedServer(self.loop, Random(f"{seed} network"))
        self.faults = CallFaults(faults, self.note)
        self.disk = Disk()
        self.engines: dict[str, SimulatedEngine] = {}  # by URL
        self.processes: dict[str, Process] = {}
        self.finished: Message | None = None
        self.num_failures = 0
        self._begin_s = self.loop.time()
        self._over, self._made = asyncio.Event(), asyncio.Event()
        self.server.on_stored = self.stored
        self.lost_payloads: set[int] = set()
        self.harm = ""  # that a replaced process did
        self.ended: set[str] = set()  # identities of processes

    def note(self, text: str) -> None:
        """Keep something for the log of this run."""
        self.notes.append(f"{self.loop.time() - self._begin_s:9.3f}  {text}")

    # the run

    def play(self) -> "World":
        """Play the run to its end.

        Raises:
            Broken: it fails, or does not end.
        """
        asyncio.events.set_event_loop(None)
        with tempfile.TemporaryDirectory(prefix="simulated-") as place, contextlib.chdir(place), silenced():
            self.topology = self._topology(Path())  # no path of this machine is in a message
            self.run_dir = Path("runs", RUN)
            self.run_dir.mkdir(parents=True)
            with simulated(self.loop, self.chance, self), self._scripted():
                try:
                    self.loop.run_until_complete(self._main())
                except Stuck as stuck:
                    raise Broken(f"{stuck}; {self._where()}") from stuck
                finally:
                    self._dispose()
        return self

    def _topology(self, place: Path) -> Topology:
        recipe = self.recipe
        rows = "".join(json.dumps({"input": str(number), "label": "1"}) + "\n" for number in range(40))
        (place / "prompts.jsonl").write_text(rows)
        (place / "held_out.jsonl").write_text("".join(rows.splitlines(keepends=True)[:3]))
        data = {"name": "d", "path": str(place / "prompts.jsonl"), "rm_type": "exact_match"}
        rollout: dict[str, Any] = {
            "rollout_batch_size": recipe.batch,
            "over_sampling_batch_size": recipe.batch + recipe.surplus,
            "n_samples_per_prompt": recipe.samples,
            "max_response_len": 8,
            "max_staleness": recipe.max_staleness,
            "on_halt": recipe.on_halt,
            "on_weight_update": recipe.on_weight_update,
        }
        if recipe.has_filter:
            rollout["dynamic_filter"] = "nonzero_std"
        tables: dict[str, Any] = {
            "model": {"hf_checkpoint": str(MODEL)},
            "run": {"name": RUN, "dir": str(place / "runs")},
            "data": [data],
            "rollout": rollout,
            "train": {"num_steps": recipe.num_steps, "save_interval": recipe.save_interval},
            "engines": {"policy": {"kind": "tiny", "concurrency": 4, "num_engines": recipe.num_engines}},
        }
        if recipe.evaluates:
            tables["eval"] = [data | {"name": "e", "interval": 2, "path": str(place / "held_out.jsonl")}]
        return topology_with(**tables)

    @asynccontextmanager
    async def _bus(self, name: str) -> AsyncGenerator[Bus]:
        async with Bus.connect(URL, RUN, name=name) as bus:
            yield bus

    def _scripted(self) -> Any:
        """Replace engines, torch and grader processes."""
        world = self

        @asynccontextmanager
        async def open_pool(_settings: Any) -> AsyncGenerator["ScriptedPool"]:
            yield ScriptedPool(world.chance)

        def build_rank(_actor: Any, _store: Any, _ask_of: Any) -> ScriptedRank:
            return ScriptedRank(world.disk, world.run_dir, world.chance, world.loop)

        def thread(*_: Any, **__: Any) -> ScriptedThread:
            return ScriptedThread(world.chance)

        def session(**_: Any) -> Session:
            return Session(world.engines)

        return replaced(
            [
                (actors.rollout.actor.aiohttp, "TCPConnector", dict),
                (actors.rollout.actor.aiohttp, "ClientSession", session),
                (ownership, "own_identity", lambda: current().identity),
                (ownership, "has_certainly_ended", lambda identity: identity in world.ended),
                (actors.reward.actor, "open_pool", open_pool),
                (actors.trainer.actor, "TorchThread", thread),
                (actors.trainer.actor.TrainerActor, "_build_rank", build_rank),
            ]
        )

    async def _main(self) -> None:
        daemon = self.process.start(self._daemon())
        keepers = [asyncio.ensure_future(self._keep(name)) for name in self.roles]
        for index, name in enumerate(self.engine_names):
            keepers.append(asyncio.ensure_future(self._keep_engine(index, name)))
        for fault in self.all_faults:
            if not fault.call:
                self.loop.call_outside(fault.at_s, self._strike, fault)
        try:
            async with asyncio.timeout(LIMIT_S):
                waiter = asyncio.ensure_future(self._over.wait())
                await asyncio.wait([waiter, daemon, *keepers], return_when=asyncio.FIRST_COMPLETED)
                for task in (daemon, *keepers):
                    if task.done():
                        task.result()
        except TimeoutError:
            raise Broken(f"not over after {LIMIT_S:g} s; {self._where()}") from None
        if isinstance(self.finished, RunFailed):
            raise Broken(f"the run failed: {self.finished.reason}")
        if self.harm:
            raise Broken(self.harm)
        self.faults.is_over = True
        for keeper in keepers:
            keeper.cancel()
        await asyncio.wait(keepers)

    async def _daemon(self) -> None:
        """Make the streams, and notice the end of the run."""
        while True:
            try:
                async with self._bus("daemon") as bus:
                    await bus.ensure_streams(stream_limits(self.topology))
                    await bus.ensure_score_queues(())
                    self._made.set()
                    await anyio.sleep_forever()
            except BusError as error:
                self.note(f"the daemon tries again: {error!r}")

    async def _keep(self, name: str) -> None:
        """Keep an actor's process running, as a node daemon does."""
        await self._made.wait()
        while True:
            process = self.processes[name] = Process(self.loop, name)
            ended = asyncio.Event()
            process.on_death.append(ended.set)
            process.on_replaced.append(ended.set)
            task = process.start(self._process(name))
            task.add_done_callback(lambda _, ended=ended: ended.set())
            try:
                await ended.wait()
            except asyncio.CancelledError:
                if not process.is_dead:
                    await self._stop(process, task)
                raise
            if process.is_replaced and not process.is_dead and not task.done():
                task.add_done_callback(self._note_replaced)
            else:
                self.ended.add(process.identity)
                if not process.is_dead:
                    self._judge(name, task)
            low, high = RESTART_S
            await asyncio.sleep(low + (high - low) * self.chance.random())

    async def _process(self, name: str) -> None:
        """The main function of an actor's process."""
        async with self._bus(name) as bus:
            await host(bus, [hosted(self.roles[name], self.topology, self.run_dir, name=name)])

    def _note_replaced(self, task: "asyncio.Task[None]") -> None:
        """Note how a process ended that has a successor: it may be fenced, and must have done no harm."""
        error = None if task.cancelled() else task.exception()
        self.note(f"a replaced process ends: {flatten(error) if error is not None else 'it is done'}"[:600])
        if error is not None and any(isinstance(cause, AssertionError) for cause in flatten(error)):
            self.harm = f"a replaced process: {flatten(error)}"

    def _judge(self, name: str, task: "asyncio.Task[None]") -> None:
        """Note why a process ended by itself.

        Raises:
            Broken: it would not be started again, or ends too often.
        """
        error = task.exception()
        causes = [] if error is None else flatten(error)
        self.note(f"{name} ends: {'; '.join(map(repr, causes)) or 'it is done'}"[:600])
        self.num_failures += 1
        if error is None or exit_code_of(error) == EXIT_INPUT_ERROR:
            raise Broken(f"{name} ended for good: {causes}")
        if any(isinstance(cause, AssertionError) for cause in causes):
            raise Broken(f"{name}: {causes}") from error
        if self.num_failures > MAX_FAILURES:
            raise Broken(f"processes ended {self.num_failures} times without a fault; the last one: {name}: {causes}")

    async def _stop(self, process: Process, task: "asyncio.Task[None]") -> None:
        """Stop a process as SIGTERM does."""
        process.thaw()
        self.loop.call_soon(task.cancel, context=process.context)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await asyncio.wait([task])
        if not task.done():
            raise Broken(f"{process.name} does not stop")
        if not task.cancelled() and (error := task.exception()) is not None:
            self.note(f"{process.name} stops with {flatten(error)}")

    async def _keep_engine(self, index: int, name: str) -> None:
        await self._made.wait()
        number = 0
        while True:
            number += 1
            url = f"http://{name}:{number}"
            engine = SimulatedEngine(self.loop, name, url, self.chance, self.disk.weights)
            self.engines[url], self.processes[name] = engine, engine.process
            ended = asyncio.Event()
            engine.process.on_death.append(ended.set)
            engine.process.on_death.append(engine.broken)
            where = Address(url=url, pid=number, start=str(number))
            announcing = self.process.start(self._announce(index, where))
            try:
                await ended.wait()
            finally:
                announcing.cancel()
            await asyncio.sleep(self.chance.random())

    async def _announce(self, index: int, where: Address) -> None:
        while True:
            try:
                async with self._bus("daemon") as bus:
                    await bus.kv.put(address_key("engine", "policy", index), where)
                    return
            except BusError as error:
                self.note(f"the daemon tries again: {error!r}")

    def _strike(self, fault: Fault) -> None:
        """Carry out a fault that comes at a time."""
        if self.faults.is_over:
            return
        self.note(str(fault))
        if fault.target != SERVER:
            process = self.processes.get(fault.target)
            if process is not None:
                match fault.kind:
                    case "dies":
                        process.kill()
                    case "is replaced":
                        process.replace(fault.seconds)
                    case _:
                        process.freeze(fault.seconds)
        elif fault.kind == "freezes":
            self.server.process.freeze(fault.seconds)
        elif fault.kind == LOSES_PAYLOADS:
            stream = self.server.streams.get(stream_of(RUN, Plane.DATA))
            for seq in list(stream.messages) if stream is not None else ():
                if stream is not None and self.chance.random() < 0.3:
                    stream.remove(seq)
                    self.lost_payloads.add(seq)
        elif fault.kind == "is full":
            stream = self.server.streams.get(stream_of(RUN, self.chance.choice([Plane.EVENT, Plane.WORK, Plane.DATA])))
            if stream is not None:
                stream.is_full = True
                self.loop.call_outside(fault.seconds, setattr, stream, "is_full", False)
        elif self.server.is_up:
            self.server.kill()
            self.loop.call_outside(fault.seconds, self.server.start)

    def stored(self, name: str, payload: bytes, headers: dict[str, str]) -> None:
        """Notice the end of the run in its log."""
        if name != stream_of(RUN, Plane.EVENT) or self.finished is not None:
            return
        if b"run_finished" in payload[:40] or b"run_failed" in payload[:40]:
            message = decode(payload, headers)
            if isinstance(message, RunFinished | RunFailed):
                self.finished = message
                self.note(f"{type(message).__name__}")
                self.loop.call_outside(0.5, self._over.set)

    def _where(self) -> str:
        """What each process waits for."""
        return f"{len(self.log())} events, {self.loop.num_callbacks} callbacks"

    def _dispose(self) -> None:
        """Free what the processes hold that were killed or are left. None of it runs in virtual time any more."""
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine: Any = task.get_coro()
            for _ in range(CLOSES):
                with suppress(BaseException):  # whatever its `finally` blocks do without a loop
                    coroutine.close()
                    break
        self.loop.close()

    def log(self) -> list[tuple[int, Message]]:
        """The whole event log, trimmed events included."""
        return [(seq, event) for seq, _, event in self.timed_log()]

    def timed_log(self) -> list[tuple[int, float, Message]]:
        """The event log with the seconds since the start of the run."""
        name, begin_s = stream_of(RUN, Plane.EVENT), EPOCH_S + self._begin_s
        return [
            (message.seq, message.time_s - begin_s, decode(message.data, message.headers))
            for stream, message in self.server.history
            if stream == name
        ]


class ScriptedPool:
    """Grades in the process of the reward actor."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def calls_at_once(self, _grader: Any) -> int:
        return 4

    async def grade(self, _grader: Any, samples: list[GradedSample], _limits: Any = None) -> list[Graded]:
        await asyncio.sleep(self._random.random() * 0.05)
        return [Graded(reward=float(sum(map(ord, sample.response)) % 2)) for sample in samples]

    def stats(self) -> dict[str, float]:
        return {}
