"""Errors of calls to engines and routers."""


class EngineError(Exception):
    """Base class of errors of an engine or the router.

    Args:
        message: what happened.
        label: weight label in the failed response, which identifies the engine; empty if there is none.
    """

    def __init__(self, message: str = "", *, label: str = "") -> None:
        super().__init__(message)
        self.label = label


class EngineUnavailable(EngineError):
    """The engine or the router did not respond, or is temporarily unable to. The request may be resent."""


class EngineBusy(EngineUnavailable):
    """The server responded that it is temporarily unable to handle the request."""


class EngineSilent(EngineUnavailable):
    """The server did not respond in time."""


class EngineFailed(EngineUnavailable):
    """The server responded with an error or an invalid response.

    Resending may help, but the request may also be the cause.
    """


class BadAnswer(EngineFailed):
    """The response to /generate is unreadable or cannot be true.

    Attributes:
        by: the engine and its URL, or the router's URL while the engine is unknown.
        problem: what is wrong.
        label: weight label in the response, which identifies the engine; empty if there is none.
    """

    def __init__(self, by: str, problem: str, label: str = "") -> None:
        super().__init__(f"{by}: {problem}", label=label)
        self.by = by
        self.problem = problem


class AbortedUnasked(EngineFailed):
    """The engine aborted a request without tokens, and without a call to abort it."""


class TokensUnverified(EngineUnavailable):
    """The tokens were sampled from unverified weights. The request is resent to another engine."""


class PrefixOutdated(EngineUnavailable):
    """Newer weights sampled the first token than those that may have computed the request's cached prefix.

    `label` is the first token's, as far as it is known.
    """


class EnginesUnwilling(EngineError):
    """Running engines returned no usable answer for so long that the run ends."""


class RequestRefused(EngineError):
    """The engine reports that the request is invalid; resending cannot help."""


def is_away(error: EngineError) -> bool:
    """Whether an engine may be down or starting; one that returns errors or invalid responses is up."""
    return isinstance(error, EngineUnavailable) and not isinstance(error, EngineFailed)
