"""Flattening of exception groups."""

from typing import cast


def flatten(error: BaseException) -> list[BaseException]:
    """Return all errors in nested exception groups, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return [leaf for inner in group.exceptions for leaf in flatten(inner)]
    return [error]
