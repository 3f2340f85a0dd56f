"""The actor base class, and the errors that mean wrong input."""

from abc import ABC, abstractmethod
from typing import ClassVar, Final

import anyio
from anyio.abc import TaskStatus

from messages import Message
from runtime.functions.child import UserProcessError
from runtime.settings.reading.config import TopologyError


class InputError(Exception):
    """The user's input cannot be used, so a restart would not help (exit code 2)."""


# these mean wrong input if an actor raises them before it reports that it started
INPUT_ERRORS: Final = (
    InputError,
    TopologyError,
    ValueError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
    UserProcessError,  # a user's function ends its process while it is imported, or is never ready
)


class Actor(ABC):
    """Base class of actors. `reads` and `writes` are its whole interface; its docstring says what a crash loses."""

    reads: ClassVar[tuple[type[Message], ...]] = ()
    writes: ClassVar[tuple[type[Message], ...]] = ()

    @abstractmethod
    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Work until done or cancelled; report task_status.started() once subscribed."""

    @classmethod  # noqa: B027 - most actors import all with their module
    def preload(cls) -> None:
        """Import what the actor imports later than its module, in the template that forks its process."""

    def stats(self) -> dict[str, float]:
        """Return the actor's counters since its start, for stats calls."""
        return {}

    def waits_for(self) -> str:
        """Describe what the actor waits for now, for stall reports; empty while it works."""
        return ""
