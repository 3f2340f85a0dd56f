"""Lets a user's function choose the sampling parameters of a prompt, from its text, label and metadata.

It runs in a process of its own. Each sample is then one turn with what it chose, checked and trained as a turn with
settings of its own (docs/train/multi-turn.md, sampling of a turn).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import anyio
import msgspec
from anyio.abc import TaskStatus

from actors.rollout.samples.conversation import Conversation, FunctionFailed
from actors.rollout.samples.generate_function import KeyedFunction
from runtime.functions.child import UserFunctionError, UserProcess, UserProcessError
from runtime.functions.load import load
from runtime.functions.table import SAMPLING, UserFunction
from runtime.settings.derived import limits_of
from runtime.settings.topology import Topology

KEY: Final = "rollout.custom_sampling"
CHOICES: Final = ("temperature", "top_p", "top_k", "stop", "max_new_tokens")  # what it may return


class SampledPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, as the function gets it."""

    prompt: str
    label: Any = None
    metadata: dict[str, Any] = {}


class SamplingFunction:
    """A user's function in its process, if there is one. Each training sample is one turn with what it chose.

    Attributes:
        keyed: generates such a sample; None: without a function.
    """

    def __init__(self, topology: Topology) -> None:
        """Describe the process of `rollout.custom_sampling`; `run` starts it."""
        name = topology.rollout.custom_sampling
        self.keyed = None if name is None else KeyedFunction(KEY, self._generate)
        self._process = UserProcess(SAMPLING, KEY, name or "", limits_of(topology.reward))

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Start the process, if there is a function, keep it until cancelled, and end it.

        Raises:
            ValueError: the function cannot be used.
        """
        try:
            if self.keyed is not None:
                await self._process.start()
            task_status.started()
            await anyio.sleep_forever()
        finally:
            await self._process.kill()

    async def _generate(self, conversation: Conversation) -> None:
        of_prompt = conversation.prompt, conversation.label, dict(conversation.metadata)
        await conversation.generate(**({} if conversation.evaluation else await self.chosen(*of_prompt)))

    async def chosen(self, prompt: str, label: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return what the function chooses for a prompt.

        Raises:
            FunctionFailed: it raised, ended its process, or took too long.
        """
        asked = msgspec.msgpack.encode(SampledPrompt(prompt=prompt, label=label, metadata=metadata))
        try:
            return msgspec.msgpack.decode(await self._process.call(asked, timeout_s=SAMPLING.timeout_s))
        except TimeoutError as error:
            raise FunctionFailed(f"{KEY}: no answer within {SAMPLING.timeout_s:g} s") from error
        except (UserFunctionError, UserProcessError) as error:
            raise FunctionFailed(f"{KEY}: {error}") from error


def check_sampling_function(
    topology: Topology, function: UserFunction, key: str, name: str, base_dirs: Sequence[Path]
) -> None:
    """Find the function at the start.

    Raises:
        ValueError: it cannot be used, or another function generates the samples.
    """
    rollout = topology.rollout
    if rollout.custom_generate is not None or rollout.custom_rollout is not None:
        raise ValueError("custom_generate and custom_rollout choose the sampling of a turn themselves: leave one out")
    load(function, key, name, base_dirs)


def answering(key: str, name: str) -> Callable[[bytes], bytes]:
    """Return the user's function as its process calls it: from a packed SampledPrompt to a packed dictionary.

    Raises:
        PluginError: it cannot be used.
    """
    choose, decoder = load(SAMPLING, key, name).function, msgspec.msgpack.Decoder(SampledPrompt)
    return lambda payload: msgspec.msgpack.encode(chosen_of(choose(decoder.decode(payload))))


def chosen_of(answer: object) -> dict[str, Any]:
    """Check an answer of the function.

    Raises:
        ValueError: it is not a dictionary of sampling parameters.
    """
    if not isinstance(answer, Mapping):
        raise ValueError(f"returned {answer!r:.200}; expected a dictionary of sampling parameters, perhaps empty")
    chosen = dict(cast("Mapping[Any, Any]", answer))
    if unknown := [name for name in chosen if name not in CHOICES]:
        raise ValueError(f"returned {unknown[0]!r:.100}; allowed: {', '.join(CHOICES)}")
    return chosen
