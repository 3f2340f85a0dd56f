"""What an actor is to its host, and which of its errors mean wrong input."""

from abc import ABC, abstractmethod
from typing import ClassVar, Final

import anyio
from anyio.abc import TaskStatus

from messages import Message
from runtime.settings.reading.config import TopologyError


class InputError(Exception):
    """What the user gave cannot be used; starting again would not help (exit code 2)."""


# raised by an actor before it says that it has started, these mean wrong input
INPUT_ERRORS: Final = (
    InputError,
    TopologyError,
    ValueError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)


class Actor(ABC):
    """Reads messages, writes messages: what it declares is its whole surface. Its docstring says what a crash loses."""

    reads: ClassVar[tuple[type[Message], ...]] = ()
    writes: ClassVar[tuple[type[Message], ...]] = ()

    @abstractmethod
    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Work until done or cancelled; report task_status.started() once subscribed."""

    def stats(self) -> dict[str, float]:
        """Numbers since the start."""
        return {}

    def waits_for(self) -> str:
        """What it waits for now, for people who wonder why nothing happens; empty when it is at work."""
        return ""
