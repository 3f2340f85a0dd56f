"""Weight labels on engines: VERSION@UPDATE, set with every weight update. Pure.

SGLang stores the label as text and reports it per token. So each token identifies the weight update and the engine that
sampled it, whichever router handled the request. People see plain versions.
"""

SEPARATOR = "@"


def label_of(version: int, load: str) -> str:
    """Return the label of a weight update. With an empty update id it names the version alone, on any engine."""
    return f"{version}{SEPARATOR}{load}"


def version_of(label: str) -> int:
    """Return the weight version of a label; 0: the weights were not published by the run."""
    version = label.partition(SEPARATOR)[0]
    return int(version) if version.isdecimal() else 0
