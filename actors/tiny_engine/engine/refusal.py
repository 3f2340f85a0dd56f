"""Error of refused engine operations."""


class EngineRefusal(Exception):
    """The engine's state does not allow the operation, or the request is invalid. The text says why."""
