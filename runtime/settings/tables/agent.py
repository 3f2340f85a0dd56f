"""The table `rollout.agent`: a program that generates the samples, by requests over HTTP."""

from typing import Annotated, Literal

import msgspec

from runtime.settings.reading.access import Code, Harmless, Program, Reads
from runtime.settings.reading.config import Config
from runtime.settings.tables.values import Positive, Text, Variable


class AgentConfig(Config, frozen=True, kw_only=True):
    """A program that plays an episode for each sample. It asks the model over HTTP, as it would ask OpenAI's."""

    harmless = True

    # Program and arguments. It starts in a directory of its own, with the address and the key of the model in its
    # environment ([agents](../train/agents.md)). An exit code other than 0 is a failed attempt. Default: no program.
    command: Program[tuple[Text, ...]] = ()
    # Kind of environment that a program of Physarum plays ([environments](../train/agents.md#environments)). `command`
    # is then a Python interpreter that has its package, and arguments of that program.
    adapter: Code[Literal["gymnasium", "verifiers"] | None] = None
    # What guards the machine and the run. "isolated" (Linux) hides the run's files and all other processes, and leaves
    # no network but the way to the model. "process" sets the limits that graders have, and "none" sets none; neither
    # hides anything.
    sandbox: Code[Literal["none", "process", "isolated"]] = "isolated"
    # Directory whose copy the program starts in. By default that is empty.
    directory: Reads[Text | None] = None
    # Environment variables of the rollout actor that the program gets, in addition to those that graders get.
    env: Code[tuple[Variable, ...]] = ()
    # Seconds that an episode may take, without those in which it waits for the model. A longer one fails its sample.
    episode_timeout_s: Harmless[Annotated[float, msgspec.Meta(gt=0)]] = 3600.0
    # Number of times that a program may start for a sample. One that exits with another code than 0, dies or never asks
    # the model is started anew; after the last attempt its sample fails, and does not train.
    attempts: Positive = 3
