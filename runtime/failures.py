"""The errors in a group of errors."""

from typing import cast


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group of groups, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return [leaf for inner in group.exceptions for leaf in leaves(inner)]
    return [error]
