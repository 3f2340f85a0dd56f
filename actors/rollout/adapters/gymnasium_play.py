"""Plays an environment of Gymnasium: an observation is a message of the user, an answer of the model is an action.

The sample's reward is the sum of the rewards of its steps. A step after the end would reset the environment, or do
nothing: none is made, so no such step trains. An episode that is truncated is not over.
"""

import argparse
import json
import re
import zlib
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from actors.rollout.adapters.playing import ContextFull, Session, loaded

NUMBER: Final = re.compile(r"-?\d+")
SEEDS: Final = 1 << 31


def main(arguments: Sequence[str]) -> int:
    """Play the episode of a row."""
    parser = argparse.ArgumentParser(prog="gymnasium", description=__doc__)
    parser.add_argument("environment", help="id of an environment, or FILE.py:FUNCTION that makes one of a row")
    parser.add_argument("--max-turns", type=int, default=64, help="after so many turns the episode is truncated")
    options = parser.parse_args(arguments)
    session, gymnasium = Session(), import_module("gymnasium")
    environment = made(gymnasium, options.environment, session.row)
    if isinstance(environment, gymnasium.vector.VectorEnv):
        raise SystemExit(f"{options.environment} is a vector of environments: a sample plays one")
    try:
        play(session, environment, options.max_turns)
    finally:
        environment.close()
    return 0


def made(gymnasium: Any, name: str, row: Any) -> Any:
    """Return the environment of a row; `make` of its metadata has further arguments of `gymnasium.make`."""
    if ".py:" in name:
        return loaded(name)(row)
    return gymnasium.make(name, **row["metadata"].get("make", {}))


def seed_of(row: Any) -> int:
    """Return the seed of a row, the same for all samples of its group: that of its metadata, or one from its words."""
    if (given := row["metadata"].get("seed")) is not None:
        return int(given)
    return zlib.crc32(json.dumps([row["prompt"], row["metadata"]], sort_keys=True).encode()) % SEEDS


def play(session: Session, environment: Any, max_turns: int) -> None:
    """Play an episode, and end the sample with its reward. A message without an action is no step: no reward."""
    observation, _ = environment.reset(seed=seed_of(session.row))
    session.say(shown(environment, observation))
    rewards: list[float | None] = []
    is_over = False
    while not is_over and len(rewards) < max_turns:
        try:
            text = session.ask()
        except ContextFull:
            break
        action = action_in(text, environment.action_space)
        if action is None:
            rewards.append(None)
            session.say(f"There is no action in this message. An action is {allowed(environment.action_space)}.")
            continue
        observation, reward, is_over, is_truncated, _ = environment.step(action)
        rewards.append(float(reward))
        if is_truncated:
            break
        session.say(shown(environment, observation))
    session.end(rewards, truncated=not is_over)


def shown(environment: Any, observation: Any) -> str:
    """Return an observation as text: as the environment draws it with `render_mode = "ansi"`, else its value."""
    if environment.render_mode == "ansi":
        return str(environment.render())
    return observation if isinstance(observation, str) else json.dumps(observation, default=_plain)


def action_in(text: str, space: Any) -> Any:
    """Return the action of a message, None if there is none: a text, the last whole number, or JSON."""
    match type(space).__name__:
        case "Text":
            action = text
        case "Discrete":
            numbers = NUMBER.findall(text)
            action = int(numbers[-1]) if numbers else None
        case _:
            try:
                action = _cast(json.loads(text), space)
            except (ValueError, TypeError):
                action = None
    return action if action is not None and space.contains(action) else None


def allowed(space: Any) -> str:
    """Return in words what an action of a space is."""
    match type(space).__name__:
        case "Text":
            return f"a text of {space.min_length} to {space.max_length} of its characters"
        case "Discrete":
            return f"a whole number from {space.start} to {space.start + space.n - 1}"
        case _:
            return f"JSON of {space}"


def _cast(value: Any, space: Any) -> Any:
    """Return a value of JSON as its space has it: numbers and lists of numbers as arrays."""
    if type(space).__name__ == "Dict":
        return {name: _cast(value[name], inner) for name, inner in space.spaces.items()}
    if type(space).__name__ == "Tuple":
        return tuple(_cast(each, inner) for each, inner in zip(value, space.spaces, strict=True))
    if type(space).__name__ in ("Discrete", "Text"):
        return value
    return import_module("numpy").asarray(value, dtype=space.dtype)


def _plain(value: Any) -> Any:
    """Return numpy's values, and others, as JSON has them."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
