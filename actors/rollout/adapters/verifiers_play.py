"""Plays a task of a verifiers environment (v1): its harness speaks to the model through verifiers' own relay.

The sample's reward is the sum of the trace's rewards by their weights. An episode that verifiers does not call ok is a
failed attempt, and one without a reward fails: neither has a reward of 0.
"""

import argparse
import asyncio
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from actors.rollout.adapters.playing import Session


class NotPlayed(Exception):
    """An episode came to no end; the text says why."""


def main(arguments: Sequence[str]) -> int:
    """Play the task whose number the row's metadata has."""
    parser = argparse.ArgumentParser(prog="verifiers", description=__doc__)
    parser.add_argument("taskset", help="id of an installed task set, or of an environment with one")
    parser.add_argument("--harness", help="id of the harness; by default the task set's own, else verifiers' bash")
    parser.add_argument("--max-turns", type=int, help="after so many turns the episode is truncated")
    parser.add_argument(
        "--config", type=Path, help="TOML file with further settings, as verifiers' table [env] has them"
    )
    options = parser.parse_args(arguments)
    session = Session()
    number = session.row["metadata"].get("task")
    if not isinstance(number, int) or number < 0:
        raise SystemExit(f"metadata.task = {number!r} of the row: the number of a task is needed, from 0")
    try:
        trace = asyncio.run(played(settings_of(options), number, session.url))
    except NotPlayed as error:
        raise SystemExit(str(error)) from None
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not rewards:
        session.fail(f"verifiers gave no reward {', '.join(missing)}".rstrip())
    else:
        session.end((), truncated=trace.is_truncated, total=sum(rewards.values()), named=rewards)
    return 0


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the environment: those of the file, and over them those of the command line."""
    given: dict[str, Any] = {} if options.config is None else tomllib.loads(options.config.read_text(encoding="utf-8"))
    agent: dict[str, Any] = {"runtime": {"type": "subprocess"}, **given.get("agent", {})}
    if options.harness is not None:
        agent["harness"] = {**agent.get("harness", {}), "id": options.harness}
    if options.max_turns is not None:
        agent["max_turns"] = options.max_turns
    return {**given, "taskset": {**given.get("taskset", {}), "id": options.taskset}, "agent": agent}


async def played(settings: Mapping[str, Any], number: int, url: str) -> Any:
    """Play a task and return its trace.

    Args:
        settings: of the environment.
        number: of the task.
        url: of the listener.

    Raises:
        NotPlayed: there is no such task, several agents play it, or the episode did not end well.
    """
    verifiers, loaders = import_module("verifiers.v1"), import_module("verifiers.v1.utils.loaders")
    environment = loaders.load_environment(loaders.resolve_env_config(dict(settings)))
    tasks: Iterator[Any] = islice(environment.taskset, number, None)
    task = next(tasks, None)
    if task is None:
        raise NotPlayed(f"metadata.task = {number}: the task set {settings['taskset']['id']} has fewer tasks")
    client = verifiers.EvalClientConfig(base_url=f"{url}/v1", api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(task, verifiers.ModelContext(model="policy", client=client))
    if len(episode.traces) > 1:
        raise NotPlayed(f"{len(episode.traces)} agents played: only environments with one agent are supported")
    if not episode.ok:
        raise NotPlayed(f"the episode failed: {said_by(episode)}")
    return episode.traces[0]


def said_by(episode: Any) -> str:
    """Return the errors of an episode in a line."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return "; ".join(" ".join(f"{error.type}: {error.message}".split()) for error in errors) or "no error was given"
