"""One grader process: what it is sent, and the grades that come back.

A batch is answered sample by sample, unlike a call of another function: a process that ends names the sample to blame.
"""

from collections import deque
from typing import Any, ClassVar, Final, Self

import msgspec

from actors.reward.grades import GRADES, MAX_FRAME_BYTES, Graded, GraderSpec, Hello
from runtime.functions.child import START_S, Child, UserFunctionError, UserProcessError
from runtime.functions.sandbox import Sandbox

WORDS: Final = ("actors.reward.worker:answering",)
ASYNCHRONOUS: Final = msgspec.msgpack.Decoder(tuple[GraderSpec, ...])


class GraderProcessError(Exception):
    """Base class of grader process errors."""


class GraderStartError(GraderProcessError):
    """A grader process did not start."""


class GraderUnusableError(GraderProcessError, ValueError):
    """A grader cannot be used because of a user's mistake; a restart does not help."""


class GraderProcess(Child):
    """A running grader process, behind a keeper."""

    user, called = "the grader", "the grader process"
    period_s: ClassVar[float] = 10.0

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._grades: deque[Graded] = deque()  # received, not taken yet

    @classmethod
    async def start(cls, hello: Hello, sandbox: Sandbox | None = None, *, timeout_s: float = START_S) -> Self:
        """Start a process and wait until its graders are loaded.

        Raises:
            GraderUnusableError: a grader or the sandbox cannot be used; says which and why.
            GraderStartError: the process ended, or did not answer in time.
        """
        given = msgspec.msgpack.encode(hello)
        try:
            return await cls.open(
                WORDS, sandbox or Sandbox(), hello=given, timeout_s=timeout_s, max_bytes=MAX_FRAME_BYTES
            )
        except TimeoutError as error:
            raise GraderStartError(f"a grader process was not ready after {timeout_s:g} s") from error
        except UserProcessError as error:
            raise GraderStartError(f"a grader process did not start: {error}") from error
        except ValueError as error:
            raise GraderUnusableError(str(error)) from None

    @property
    def asynchronous(self) -> tuple[GraderSpec, ...]:
        """Its graders that are async functions."""
        return ASYNCHRONOUS.decode(self.greeting)

    @property
    def num_received(self) -> int:
        """Number of grades that can be taken."""
        return len(self._grades)

    async def receive(self, number: int) -> None:
        """Wait until `number` grades can be taken.

        Raises:
            UserProcessError: the process has ended, or violates the protocol.
        """
        while self.num_received < number:
            frame: bytes | None = await self.receive_frame()
            while frame is not None:  # frames that arrived in the same read
                try:
                    self._grades += GRADES.decode(self.content_of(frame))
                except (RecursionError, OverflowError, ValueError) as error:
                    raise self.broken(error) from error
                except UserFunctionError as error:  # outside of a grader: such as without memory for its grade
                    raise UserProcessError(f"{self.called} raised {error}") from error
                frame = self.next_frame()

    def take(self, number: int) -> list[Graded]:
        """Take the grades of the next samples, in the order in which they were sent."""
        return [self._grades.popleft() for _ in range(number)]
