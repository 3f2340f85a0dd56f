"""The error of an engine that does not do what it is asked."""


class EngineRefusal(Exception):
    """The engine is in no state to do what it was asked, or the question is wrong. The text says why."""
