"""What each setting gives access to: every field of a settings table declares it in its type.

A file of another user may set a key that declares `Harmless`, in a table that declares itself `harmless`: there it says
what is trained. `runtime/settings/reading/foreign.py` leaves all others out, also those that declare nothing.
"""

from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin

from runtime.functions.table import UserFunction

T = TypeVar("T")


class Access(Enum):
    """What the value of a setting names or opens."""

    HARMLESS = "nothing outside of the run"
    RUNNING = "how the run runs"  # its processes, memory and time: also what is harmless in a table that is not
    FUNCTION = "functions"  # or classes, by a kind of runtime/functions/table.py; without a colon a built-in
    PROGRAM = "programs"  # an interpreter: a path, or a name on PATH
    CODE = "what code gets or may do"  # arguments and environment of a program, or a guard of code
    ADDRESS = "addresses"  # to connect to, to listen on, or where data is sent
    SECRET = "secrets"  # an environment variable with one
    SECRET_FILE = "files with secrets"
    READ = "places to read"
    WRITE = "places to write"


# The declarations, around the type of a field or of its items: `Reads[Text | None]`. A function's is its kind.
Harmless = Annotated[T, Access.HARMLESS]
Running = Annotated[T, Access.RUNNING]
Program = Annotated[T, Access.PROGRAM]
Code = Annotated[T, Access.CODE]
Address = Annotated[T, Access.ADDRESS]
NamesSecret = Annotated[T, Access.SECRET]
SecretFile = Annotated[T, Access.SECRET_FILE]
Reads = Annotated[T, Access.READ]
Writes = Annotated[T, Access.WRITE]

CONTAINERS: Final = (Union, UnionType, tuple, dict)


def access_of(kind: Any) -> Access | None:
    """Return what the type of a field declares; None if it declares nothing, or its parts declare different things."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        own = [mark for mark in parts[1:] if isinstance(mark, Access | UserFunction)]
        if not own:
            return access_of(parts[0])
        return Access.FUNCTION if isinstance(own[-1], UserFunction) else own[-1]  # the outermost one is last
    if origin not in CONTAINERS:
        return None
    found = {access_of(part) for part in parts if part not in (NoneType, ...)}
    return found.pop() if len(found) == 1 else None


def function_of(kind: Any) -> UserFunction | None:
    """Return the kind of user function that a field's type declares."""
    return next((mark for mark in get_args(kind)[1:] if isinstance(mark, UserFunction)), None)


def undeclared(kind: Any) -> Any:
    """Return the type of a field without its outermost declarations."""
    if get_origin(kind) is not Annotated:
        return kind
    plain, *marks = get_args(kind)
    kept = [mark for mark in marks if not isinstance(mark, Access | UserFunction)]
    return Annotated[(plain, *kept)] if kept else plain
