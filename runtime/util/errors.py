"""Flattening of exception groups."""

from typing import cast

import anyio


def flatten(error: BaseException) -> list[BaseException]:
    """Return all errors in nested exception groups, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return [leaf for inner in group.exceptions for leaf in flatten(inner)]
    return [error]


def causes_in(error: BaseException) -> list[BaseException]:
    """Return the flattened errors without those that follow from others: tasks that find their streams closed."""
    found = flatten(error)
    return [leaf for leaf in found if not follows(leaf)] or found


def follows(error: BaseException) -> bool:
    """Whether an error only says that another task has closed a stream."""
    return isinstance(error, anyio.ClosedResourceError | anyio.BrokenResourceError | anyio.EndOfStream)
