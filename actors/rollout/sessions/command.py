"""Plays samples with a program: the generate function of `rollout.agent`.

Each attempt has a session, a directory and a process group of its own. The program gets the model's key, in its
environment; the control key stays here.
"""

import json
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import structlog

from actors.rollout.samples.conversation import Conversation
from actors.rollout.samples.generate_function import KeyedFunction
from actors.rollout.sessions.left import LeftSessions
from actors.rollout.sessions.notes import About, ControlNote, LeftSession, State, TurnNote, encoded
from actors.rollout.sessions.opened import OpenSession, OpenSessions
from actors.rollout.sessions.rendering import Rendering
from actors.rollout.sglang.served_model import ServedModel
from runtime.data.chat_template import ChatTemplate
from runtime.functions.hidden_files import hidden_of, make_dumps, run_dir_of
from runtime.functions.limits import UserLimits, environment
from runtime.models.config import read_model
from runtime.sessions.actor_end import ActorEnd
from runtime.sessions.keys import KeyPair
from runtime.sessions.programs import Over, Programs, Start
from runtime.settings.tables.agent import AgentConfig
from runtime.settings.topology import Topology
from runtime.util.exit_codes import EXIT_TOO_MANY_PROCESSES
from runtime.util.formatting import signal_name
from runtime.util.import_path import ROOT

log = structlog.get_logger()

KEY: Final = "rollout.agent"
ROW: Final = "PHYSARUM_ROW"  # variable that names the file with the row


class CommandAgent:
    """Runs a program for a sample until it ends.

    Args:
        config: the program.
        sessions: of this actor.
        programs: starts and stops programs.
        left: sessions that an earlier process of this actor left.
        limits: memory and open files of each process, unless sandbox = "none".
        max_processes: of an attempt at a time, unless sandbox = "none".
        trains_turns: whether rewards of single turns train.
        hidden: returns the paths that an isolated program does not see.
    """

    def __init__(
        self,
        config: AgentConfig,
        sessions: OpenSessions,
        programs: Programs,
        left: LeftSessions,
        limits: UserLimits,
        max_processes: int,
        trains_turns: bool,
        hidden: Callable[[], Sequence[str]],
    ) -> None:
        self._config, self._sessions = config, sessions
        self._programs, self._left, self._trains_turns = programs, left, trains_turns
        self._limits, self._max_processes, self._hidden = limits, max_processes, hidden
        self._num_started = 0

    async def __call__(self, conversation: Conversation) -> None:
        """Play a sample. Attempts that fail are aborted: the sample then begins again from its prompt."""
        left = await self._left.take(conversation)
        if isinstance(left, LeftSession):
            pair, keys = None, left.about.keys
        elif left:
            conversation.end("aborted", left)
            return
        else:
            self._num_started += 1
            pair = KeyPair.new(f"s{os.getpid()}.{self._num_started}.{os.urandom(4).hex()}")
            left, keys = None, pair.digests()
        name = keys.session

        async def keep(note: TurnNote | ControlNote) -> None:
            await self._programs.note(name, encoded(note), encoded(State(conversation.stored())))

        async with self._stopped_at_end(name), self._sessions.opened(conversation, keys, keep, left) as opened:
            problem = opened.problem
            if not problem:
                start = None if pair is None else await self._start(conversation, opened, pair)
                problem = await self._attempt(opened, name, start)
            if problem or opened.failure:
                opened.session.cancel_turns()  # nothing of this attempt trains
        self._end(conversation, opened, problem)
        own_s, waited_s = conversation.times_s
        conversation.sample_metadata["agent_s"] = round(own_s, 3)
        conversation.sample_metadata["model_s"] = round(waited_s, 3)

    async def _attempt(self, opened: OpenSession, name: str, start: Start | None) -> str:
        """Wait for the end of the program; return what went wrong, empty if nothing did. Its key ends before it does.

        Args:
            opened: its session.
            name: of the session.
            start: starts it; None: it runs already.
        """
        if start is not None:
            await self._programs.start(start)
        over = Over(name, 0, b"")
        async with self._stopped_at_end(name), anyio.create_task_group() as group:

            async def stop_when_over() -> None:
                await opened.over.wait()
                await self._sessions.revoke(name)
                await self._programs.stop(name)

            group.start_soon(stop_when_over)
            over = await self._programs.ended(name)
            group.cancel_scope.cancel()
        if opened.over.is_set():
            return ""
        if not over.code:
            return "" if opened.num_turns else f"{self._config.command[0]} ended without a turn of the model"
        return f"{self._config.command[0]} {self._ending(over.code)}{_last_line(over.output)}"

    def _ending(self, code: int) -> str:
        if code == EXIT_TOO_MANY_PROCESSES and self._config.sandbox != "none":
            return f"was killed: it started more than {self._max_processes} processes (reward.max_processes)"
        return f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"

    @asynccontextmanager
    async def _stopped_at_end(self, name: str) -> AsyncGenerator[None]:
        """End the key of a session at the end of the block, then kill its program with all that it started."""
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._sessions.revoke(name)
                await self._programs.stop(name)

    async def _start(self, conversation: Conversation, opened: OpenSession, pair: KeyPair) -> Start:
        """Return what starts the program under a keeper."""
        kind, url = self._config.sandbox, urlsplit(opened.url)
        is_isolated = kind == "isolated"
        settings = {
            "program": words_of(self._config),
            "directory": self._config.directory,
            "given": ROW,
            "prefix": "physarum-agent-",
            "sandbox": kind,
            "memory_bytes": self._limits.memory_bytes,
            "max_files": self._limits.max_files,
            "max_processes": None if kind == "none" else self._max_processes,
            "hidden": await anyio.to_thread.run_sync(self._hidden) if is_isolated else (),
            "door": (url.hostname, url.port) if is_isolated else None,
        }
        row = json.dumps(_row_of(conversation))
        if self._config.adapter is not None:  # which gets the key that no child of it may read
            row = f"{row}\n{pair.control.reveal()}"
        return Start(
            session=pair.session,
            settings=settings,
            env=self._environment(opened.url, pair),
            given=row.encode(),
            secrets=(pair.model.reveal(), pair.control.reveal()),
            about=encoded(About(conversation.group_id, conversation.index, opened.keys)),
        )

    def _environment(self, url: str, pair: KeyPair) -> dict[str, str]:
        key, url = pair.model.reveal(), url.rstrip("/")
        of_model = {
            "OPENAI_API_KEY": key,
            "OPENAI_BASE_URL": f"{url}/v1",
            "ANTHROPIC_API_KEY": key,
            "ANTHROPIC_AUTH_TOKEN": key,
            "ANTHROPIC_BASE_URL": url,
        }
        is_marked = self._config.sandbox != "isolated"
        return {**environment(self._config.env, marked=is_marked), **of_model, "PYTHONPATH": str(ROOT)}

    def _end(self, conversation: Conversation, opened: OpenSession, problem: str) -> None:
        if opened.failure:
            conversation.end("failed", f"its environment says: {opened.failure}")
        elif problem:
            log.warning("agent_failed", index=conversation.index, reason=problem)
            conversation.end("aborted", problem)
        elif opened.reward is not None:
            conversation.reward, conversation.rewards = opened.reward, opened.rewards
            if opened.turn_rewards:
                conversation.sample_metadata["turn_rewards"] = list(opened.turn_rewards)
                if self._trains_turns and len(conversation.all) == 1:  # else turns are in several conversations
                    conversation.turn_rewards = opened.turn_rewards
            if opened.is_truncated:
                conversation.end("truncated")
        elif opened.last is not None:
            conversation.text = opened.last.text  # that is graded


class AgentPrograms:
    """What a rollout actor needs for `rollout.agent`: its generate function, and the links to the node's processes."""

    def __init__(self, config: AgentConfig, topology: Topology, actor: str, model: ServedModel) -> None:
        self._sessions = sessions = OpenSessions(Rendering(ChatTemplate(model.directory), model))
        self._programs = Programs(run_dir_of(topology), actor)
        self.left = LeftSessions(self._programs, sessions, limit_s=topology.rollout.generate_timeout_s)
        reward, most = topology.reward, topology.rollout.max_context_len
        limits = UserLimits(memory_bytes=reward.memory_bytes, max_files=reward.max_files)
        if config.sandbox == "isolated":
            make_dumps(topology)
        needed = [place for place in (*config.command, config.directory) if place is not None and "/" in place]
        agent = CommandAgent(
            config,
            sessions,
            self._programs,
            self.left,
            limits,
            reward.max_processes,
            reward.per != "sample",
            lambda: hidden_of(topology, needed),
        )
        self.function = KeyedFunction(KEY, agent, max_starts=config.attempts, own_s=config.episode_timeout_s)
        if most is None:
            most = read_model(model.directory, topology.model.ignore_config_keys).max_context
        self._end = ActorEnd(run_dir_of(topology), actor, model.directory.name, most, sessions)
        sessions.serve_by(self._end)

    async def run(self) -> None:
        """Take over the sessions of an earlier process, then serve the listener of this node. Never returns."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._programs.run)
            await self.left.find()  # before the listener hears which sessions there are
            group.start_soon(self.left.run)
            await self._end.run()

    @classmethod
    def of(cls, topology: Topology, actor: str, model: ServedModel) -> "AgentPrograms | None":
        """Return what the topology asks for; None: no program generates samples."""
        config = topology.rollout.agent
        return cls(config, topology, actor, model) if config.command else None


def words_of(config: AgentConfig) -> Sequence[str]:
    """Return the command line of the program: with an adapter, its interpreter runs that with the other words."""
    if config.adapter is None:
        return config.command
    python, *arguments = config.command
    module = f"actors.rollout.adapters.{config.adapter}_play"
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {module} import main; sys.path.pop(0)"
    return [python, "-P", "-c", f"{start}; sys.exit(main(sys.argv[1:]))", *arguments]


def _row_of(conversation: Conversation) -> Mapping[str, Any]:
    """Return what an agent gets of its row: never the label."""
    return {"prompt": conversation.prompt, "metadata": conversation.metadata, "index": conversation.index}


def _last_line(output: bytes) -> str:
    """Return the last line that a program printed."""
    text = output.decode(errors="replace").strip()
    return f": {text.splitlines()[-1][-300:]}" if text else ""
