"""Leaves out what a model thought before its answer."""


def after_thought(response: str) -> str:
    """Return what follows the last `</think>`; "" if a thought begins the response and does not end."""
    _, end, said = response.rpartition("</think>")
    return "" if not end and said.lstrip().startswith("<think>") else said
