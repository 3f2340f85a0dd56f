"""Which errors of several explain an end."""

import anyio

from runtime.process.actor import InputError
from runtime.process.main import _explains, exit_code_of  # pyright: ignore[reportPrivateUsage]
from runtime.util.errors import causes_in, flatten
from runtime.util.exit_codes import EXIT_INPUT_ERROR


def test_a_stream_that_another_task_closed_is_no_cause() -> None:
    closed, cause = anyio.ClosedResourceError(), InputError("the key is missing")
    group = ExceptionGroup("", [cause, ExceptionGroup("", [closed, anyio.EndOfStream()])])
    assert causes_in(group) == [cause]
    assert causes_in(closed) == [closed]


def test_the_error_that_explains_the_exit_code_is_logged_last() -> None:
    other, cause = KeyError("x"), InputError("the key is missing")
    group = ExceptionGroup("", [cause, other, anyio.BrokenResourceError()])
    code = exit_code_of(group)
    assert code == EXIT_INPUT_ERROR
    ordered = sorted(flatten(group), key=lambda leaf: _explains(leaf, code))
    assert ordered[-1] is cause
    assert isinstance(ordered[0], anyio.BrokenResourceError)
