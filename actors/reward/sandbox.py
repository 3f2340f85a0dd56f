"""The sandbox of graders, as the topology configures it, and the time of their calls."""

import os
from typing import Final

from actors.reward.graders.code.grader import SECONDS
from actors.reward.graders.code.running import WALL_TIMES
from runtime.functions.hidden_files import dumps_of, files_of, make_dumps, run_dir_of
from runtime.functions.load import file_of, is_plugin
from runtime.functions.sandbox import Sandbox
from runtime.settings.reading.schema import functions_in
from runtime.settings.tables.reward import GraderLimits, RewardConfig
from runtime.settings.topology import Topology

CODE: Final = "code"  # the grader that runs programs


def call_s(reward: RewardConfig, grader: str) -> float:
    """Seconds that one call of a grader may take by the clock: more for `code`, whose programs may wait for a core."""
    limit_s = reward.limits.get(grader, GraderLimits()).timeout_s or reward.timeout_s
    return limit_s + (WALL_TIMES - 1) * _programs_s(reward) if grader == CODE else limit_s


def _programs_s(reward: RewardConfig) -> float:
    """Seconds that the tests of `code` have of their own; the rest of the limit is for starting the sandbox."""
    limit_s = reward.limits.get(CODE, GraderLimits()).timeout_s or reward.timeout_s
    return max(limit_s - 2.0, limit_s / 2)


def _variables(reward: RewardConfig) -> dict[str, str]:
    """Variables that built-in graders read: the data of `ifeval`, and the time that the tests of `code` have."""
    found = {SECONDS: f"{_programs_s(reward):g}"}
    return found if reward.nltk_data is None else {**found, "NLTK_DATA": os.path.realpath(reward.nltk_data)}


def needed_of(topology: Topology) -> tuple[str, ...]:
    """Files of the graders that the topology names."""
    named = [name for _, name, function in functions_in(topology) if function.runs_in == "grader process"]
    plugins = [file_of(name) for name in named if is_plugin(name)]
    return tuple(place for place in plugins if place.endswith(".py"))


def sandbox_of(topology: Topology) -> Sandbox:
    """The sandbox that the topology configures."""
    reward = topology.reward
    if reward.sandbox == "isolated":
        make_dumps(topology)
    return Sandbox(
        kind=reward.sandbox,
        env=reward.env,
        also=_variables(reward),
        memory_bytes=reward.memory_bytes,
        max_files=reward.max_files,
        max_processes=reward.max_processes,
        hidden=(os.path.realpath(run_dir_of(topology)),),
        runs=os.path.realpath(topology.run.dir),
        dumps=dumps_of(topology),
        files=files_of(topology),
        needed=needed_of(topology),
    )
