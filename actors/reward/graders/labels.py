"""Labels of data files as text, for graders that compare text."""

from collections.abc import Iterable
from typing import Any, cast

Label = str | int | float | None  # a column of a data file; True and False are not labels


def text_of(label: object) -> str:
    """Text of a label: "" for None, True, False and anything that is neither text nor a number."""
    return str(label) if isinstance(label, str | int | float) and not isinstance(label, bool) else ""


def required_text(label: object) -> str:
    """Text of a label that a grader needs.

    Raises:
        ValueError: there is none, or it is neither text nor a number.
    """
    if label is None:
        raise ValueError("the sample has no label; set label_key of its data source")
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise ValueError(f"the label must be text or a number, not {type(label).__name__}")
    return str(label)


def required_texts(label: Any) -> tuple[str, ...]:
    """Texts of one label, or of several of which one right is enough; raises as `required_text`."""
    several = cast("Iterable[Any]", label) if isinstance(label, list | tuple) and label else (cast("Any", label),)
    return tuple(map(required_text, several))
