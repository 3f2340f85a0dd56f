"""What goes wrong when engines and routers are asked."""


class EngineError(Exception):
    """Base of what an engine or the router answers, or does not.

    Args:
        message: what happened.
        label: of the weights that the failed answer names, which tells the engine; empty where it names none.
    """

    def __init__(self, message: str = "", *, label: str = "") -> None:
        super().__init__(message)
        self.label = label


class EngineUnavailable(EngineError):
    """The engine or the router did not answer, or answered that it cannot now. The request may be sent again."""


class EngineBusy(EngineUnavailable):
    """It answered that it cannot now."""


class EngineSilent(EngineUnavailable):
    """It did not answer in time."""


class EngineFailed(EngineUnavailable):
    """It answered with an error or with nonsense. Sent again the request may fare better, but it may be the cause."""


class BadAnswer(EngineFailed):
    """Its answer to /generate cannot be true, or cannot be read.

    Attributes:
        by: the engine and its URL, or the router's URL while the engine is not known.
        problem: what is wrong.
        label: of the weights that the answer names, which tells the engine; empty: it names none.
    """

    def __init__(self, by: str, problem: str, label: str = "") -> None:
        super().__init__(f"{by}: {problem}", label=label)
        self.by = by
        self.problem = problem


class TokensUnproven(EngineUnavailable):
    """Its tokens come from weights that the engine did not prove to hold. Sent again, the request goes elsewhere."""


class EnginesUnwilling(EngineError):
    """Engines that are up answered nothing that can be used for so long that the run ends."""


class RequestRefused(EngineError):
    """The engine says that the request itself is wrong; sending it again cannot help."""


def is_away(error: EngineError) -> bool:
    """Whether an engine that takes weights may be gone or starting; one that answers an error or nonsense is there."""
    return isinstance(error, EngineUnavailable) and not isinstance(error, EngineFailed)
