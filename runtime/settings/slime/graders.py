"""What became of slime's graders, for an rm_type that does not exist."""

from runtime.settings.slime.flags import from_slime
from runtime.settings.slime.hints import plain_text


def slime_grader_hint(name: str) -> str | None:
    """Say what became of one of slime's graders; none of another name, or where it is built under its own."""
    grader = next((grader for grader in from_slime().graders if grader.name == name), None)
    return (
        None
        if grader is None or grader.key == name
        else f"slime's {name} is not built yet: {plain_text(grader.remark)};"
    )
