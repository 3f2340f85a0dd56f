"""Grades one row of each data source with an empty answer before a start, in the sandbox that the run would use."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import anyio

from actors.reward.frames import FrameError, Grade, GraderSpec, Hello, encode_frame
from actors.reward.process import START_TIMEOUT_S, GraderProcess, GraderProcessError
from actors.reward.recipe import graders_of, names_of
from actors.reward.samples import GradedSample
from actors.reward.sandbox import sandbox_of
from messages import Prompt
from runtime.agent.preflight.apart import Doing
from runtime.bus.background import beside
from runtime.settings.plugins import is_plugin
from runtime.settings.reading.config import Problem
from runtime.settings.topology import Topology

SLACK_S = 10.0  # for a process to end


class Trial(NamedTuple):
    """One row to grade."""

    prompt: Prompt
    group: bool  # its grader gets whole groups


def trial_notes(topology: Topology, trials: Mapping[str, Trial], doing: Doing, notes: list[str]) -> Iterator[Problem]:
    """Call users' graders once per data source. One that fails is noted: an answer that is not empty may be graded.

    Args:
        topology: says which graders there are, and their sandbox.
        trials: by the key of their data source, "data.0". Built-in graders are left out: every row is tried on those.
        doing: is told what is done next.
        notes: is added to.
    """
    names = names_of(topology)
    for key, trial in trials.items():
        name = names.get(trial.prompt.rm_type or "", "")
        if not is_plugin(name):
            continue
        limit_s = START_TIMEOUT_S + topology.reward.timeout_s + SLACK_S
        doing(f"{key}.rm_type", name, "grading an empty answer", limit_s=limit_s)
        try:
            error = anyio.run(_graded, topology, GraderSpec(name=name, group=trial.group), trial)
        except GraderProcessError as refusal:
            yield Problem.of(f"{key}.rm_type", name, f"a grader process cannot begin with it: {refusal}")
            return
        if error is not None:
            notes.append(
                f"{key}.rm_type: the grader {name} failed on row {trial.prompt.row} with an empty answer: {error}"
            )


async def _graded(topology: Topology, spec: GraderSpec, trial: Trial) -> str | None:
    """Why there is no grade; None if there is one.

    Raises:
        GraderProcessError: the process of the grader does not come up.
    """
    config, prompt = topology.reward, trial.prompt
    hello = Hello(
        graders=graders_of(topology), reward_key=config.reward_key, cpu_s=config.cpu_s or 2 * config.timeout_s
    )
    number = topology.rollout.n_samples_per_prompt if spec.group else 1
    samples = tuple(
        GradedSample(index=index, prompt=prompt.text, label=prompt.label, metadata=prompt.metadata)
        for index in range(number)
    )
    process = await GraderProcess.start(hello, sandbox_of(topology))
    try:
        with anyio.move_on_after(config.timeout_s):
            async with beside(process.show_printed):
                await process.send(encode_frame(Grade(grader=spec, samples=samples)))
                await process.receive(number)
        grades = process.take(process.num_received)
    except (GraderProcessError, FrameError) as error:
        return str(error)
    finally:
        await process.kill()
    if len(grades) < number:
        return f"no grade within {config.timeout_s:g} s (reward.timeout_s)"
    return next((graded.error for graded in grades if graded.error is not None), None)
