"""What an engine calls its weights: VERSION@LOAD, as we tell it with every load. Pure.

SGLang keeps the label as text and names it for each token. So a token tells by itself which load of which engine
sampled it, whoever passed its request on. What people see are plain versions.
"""

SEPARATOR = "@"


def label_of(version: int, load: str) -> str:
    """The label of a load; of no load: weights of that version, wherever."""
    return f"{version}{SEPARATOR}{load}"


def version_of(label: str) -> int:
    """The weight version of a label; 0: nobody announced these weights."""
    version = label.partition(SEPARATOR)[0]
    return int(version) if version.isdecimal() else 0
