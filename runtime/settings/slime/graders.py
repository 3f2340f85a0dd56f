"""Hints for an unknown rm_type that is a grader of slime."""

from runtime.settings.slime.flags import from_slime
from runtime.settings.slime.hints import plain_text


def slime_grader_hint(name: str) -> str | None:
    """Return the equivalent of a slime grader; None for other names, and for graders with the same name here."""
    grader = next((grader for grader in from_slime().graders if grader.name == name), None)
    return (
        None
        if grader is None or grader.key == name
        else f"slime's {name} is not built yet: {plain_text(grader.remark)};"
    )
