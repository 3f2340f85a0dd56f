"""A data source: the number of the prompt in six digits, which the clock engine reads again."""

from typing import Any


def prompt(number: int) -> dict[str, Any]:
    return {"input": f"{number:06d}", "label": "none"}
