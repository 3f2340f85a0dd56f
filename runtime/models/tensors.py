"""Tensors of a model: their names in the trainer, and the tensors of the files that they are fused of. No torch."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

Shape = tuple[int, ...]


class Weight(msgspec.Struct, frozen=True):
    """A tensor of the trainer, and the tensors of the files that it is fused of, by name.

    The rows of the parts lie in `groups` groups. Each group has the rows of that group of every part, one below the
    other. With one group the parts are concatenated.
    """

    name: str
    parts: Mapping[str, Shape]
    groups: int = 1
    joined: str = ""  # name of the parts together in engines; empty: that of the only part
    is_stored_joined: bool = False  # the files have one tensor of that name: all rows of each part, part after part
    place: tuple[int, int] | None = None  # the files stack such tensors: its number, and how many there are
    is_transposed: bool = False  # in such a stack; a part has its shape there
    is_alternating: bool = False  # in such a stack the rows of both halves alternate
    is_frozen: bool = False  # never trained: it has no gradient
    start: Literal["", "one", "decay"] = ""  # new values: 1, or logarithms of decays; empty: as the name says

    @property
    def shapes(self) -> Iterator[Shape]:
        """Yield the shape of each part."""
        yield from self.parts.values()

    @property
    def engine_name(self) -> str:
        """Name in SGLang and the tiny engine."""
        return self.joined or next(iter(self.parts))

    @property
    def in_files(self) -> Mapping[str, Shape]:
        """The tensors of the files, by name."""
        parts, shapes = self.parts, [*self.parts.values()]
        if self.is_stored_joined:
            parts = {self.joined: (sum(rows for rows, *_ in shapes), *shapes[0][1:])}
        stack = () if self.place is None else (self.place[1],)
        return {name: (*stack, *shape) for name, shape in parts.items()}

    def rows_of(self, part: str) -> tuple[int, int]:
        """Return where a part begins in the tensor of the files that holds all of them, and its number of rows."""
        rows = {name: shape[0] for name, shape in self.parts.items()}
        before = [*rows][: [*rows].index(part)]
        return sum(rows[name] for name in before), rows[part]

    def within(self, name: str, of_files: str) -> "Weight":
        """Prefix the names with those of the module that has the tensor."""
        parts = {f"{of_files}.{part}": shape for part, shape in self.parts.items()}
        joined = f"{of_files}.{self.joined}" if self.joined else ""
        return msgspec.structs.replace(self, name=f"{name}.{self.name}", parts=parts, joined=joined)

    def renamed(self, names: Mapping[str, str]) -> "Weight":
        """Replace pieces of the names in the files, each a whole number of words between dots."""

        parts = {renamed(part, names): shape for part, shape in self.parts.items()}
        return msgspec.structs.replace(self, parts=parts, joined=renamed(self.joined, names))


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Replace pieces of a name, each a whole number of words between dots."""
    for usual, own in names.items():
        name = f".{name}.".replace(f".{usual}.", f".{own}.").strip(".")
    return name


def within(weights: Iterable[Weight], name: str, of_files: str | None = None) -> Iterator[Weight]:
    """Prefix the names of a module's tensors: in the trainer, and in the files if they have another one there."""
    return (weight.within(name, name if of_files is None else of_files) for weight in weights)


def norm(name: str, size: int, of_files: str | None = None) -> Weight:
    """Return the weight of an RMSNorm."""
    return Weight(f"{name}.weight", {f"{of_files or name}.weight": (size,)})


def linear(name: str, part: str, rows: int, columns: int, *, bias: bool = False) -> Iterator[Weight]:
    """Yield the matrix of a projection, and its bias if it has one."""
    return fused(name, {part: rows}, columns, bias=bias)


def fused(
    name: str,
    rows: Mapping[str, int],
    columns: int,
    *,
    joined: str = "",
    bias: bool = False,
    groups: int = 1,
    is_stored_joined: bool = False,
) -> Iterator[Weight]:
    """Yield the matrix of fused projections, and their bias if they have one."""
    for kind, further in (("weight", (columns,)), ("bias", ()))[: 1 + bias]:
        parts = {f"{part}.{kind}": (size, *further) for part, size in rows.items()}
        yield Weight(f"{name}.{kind}", parts, groups, f"{joined}.{kind}" if joined else "", is_stored_joined)
