"""Models, user functions and data files that the processes of a node open, and that home gives to a node without them.

A node asks home by the keys of settings, in the run's bucket. Home answers with the digest of a manifest for each, and
serves the files by their digests. So a node runs no code but what home named.
"""

import hashlib
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import anyio
import anyio.to_thread
import msgspec
import structlog

from runtime.bus.bus import Bus
from runtime.bus.errors import BusError
from runtime.functions.load import file_of, is_plugin, placed
from runtime.models.directory import check_links
from runtime.models.manifest import MANIFEST, MAX_DEPTH, FetchFailed, Manifest, files_of
from runtime.node.checks.context import MODEL
from runtime.node.checks.hub import is_hub_name, patterns_of
from runtime.settings.derived import eval_data
from runtime.settings.load import LoadedTopology, with_topology
from runtime.settings.placement import home_node, roles_of
from runtime.settings.reading.config import Problem
from runtime.settings.reading.schema import Declaration, functions_in, with_values
from runtime.settings.sizes import show_bytes
from runtime.settings.slices import split_slice
from runtime.settings.topology import Topology, named_models
from runtime.util.errors import flatten
from runtime.util.files import write_atomically
from runtime.util.formatting import count_of

if TYPE_CHECKING:
    from runtime.node.sharing import Sharing

log = structlog.get_logger()

OFFERED: Final = "offered"  # in home's run directory: manifests of what it gave, to hash no file twice
FILES: Final = "files"  # in the directory of what a node has fetched
LOOK_EVERY_S: Final = 0.1
AGAIN_S: Final = 1.0
MIN_HASH_BYTES_PER_S: Final = 20e6  # of home, which sums up what it has not served before
NAME_CHARS: Final = 40  # of a directory


class RunFile(msgspec.Struct, frozen=True):
    """What a setting names: a file, or some files of a directory."""

    key: str
    path: str
    patterns: tuple[str, ...] = ()  # names of the files that are taken from the directory; none: it is a file

    def contents(self) -> dict[str, Path]:
        """Return the files by the names that they get elsewhere, without following links out of the directory.

        Raises:
            ValueError: it has none, or links that lead out.
            OSError: it cannot be read.
        """
        place = Path(self.path)
        if not self.patterns:
            return {place.name: place.resolve(strict=True)}
        check_links(place)
        found: dict[str, Path] = {}
        for path in place.rglob("*"):
            parts = path.relative_to(place).parts
            is_wanted = any(fnmatch(path.name, pattern) for pattern in self.patterns) and path.name != MANIFEST
            if is_wanted and len(parts) <= MAX_DEPTH and not any(part[0] == "." for part in parts) and path.is_file():
                found["/".join(parts)] = path.resolve(strict=True)
        if not found:
            raise ValueError(f"{place} has none of {', '.join(self.patterns)}")
        return found


class FileSet(msgspec.Struct, frozen=True, kw_only=True):
    """What home gives for a setting."""

    num_files: int
    size_bytes: int
    digest: str = ""  # of its manifest; "": not known yet

    def __str__(self) -> str:
        return f"{count_of(self.num_files, 'file')}, {show_bytes(self.size_bytes)}"


class FilesWanted(msgspec.Struct, frozen=True, kw_only=True):
    """The settings whose files a node lacks, in the run's bucket."""

    id: str
    keys: tuple[str, ...]


class FilesGiven(msgspec.Struct, frozen=True, kw_only=True):
    """Home's answer."""

    id: str
    sets: dict[str, FileSet] = {}  # by key
    refused: dict[str, str] = {}  # reasons by key
    is_last: bool = True  # otherwise home still sums up the files


class Brought(NamedTuple):
    """What a node got from home."""

    paths: dict[str, Path]  # by key
    missing: dict[str, str]  # reasons by key


def needed_on(topology: Topology, node: str) -> Iterator[RunFile]:
    """Yield the files that processes and checks of a node open and home can give. Those of home are its own."""
    roles = roles_of(topology, node)
    for model in named_models(topology):
        opens = roles.trains if model.pool is None else model.pool in roles.pools
        if roles.needs_model if model.key == MODEL else opens:
            yield RunFile(model.key, model.name, patterns_of(model))
    for key, value, _ in functions_in(topology):
        if is_plugin(value) and file_of(value).endswith(".py"):
            yield RunFile(key, file_of(value))
    if topology.train.num_epoch is not None:  # epochs are counted on every node
        sets = [*topology.data, *(eval_data(topology, item) for item in topology.eval)]
        keys = [*(f"data.{index}" for index in range(len(topology.data)))]
        keys += [f"eval.{index}" for index in range(len(topology.eval))]
        for key, data in zip(keys, sets, strict=True):
            named = {f"{key}.path": data.path, **{f"{key}.files.{name}": path for name, path in data.files.items()}}
            yield from (RunFile(each, split_slice(path)[0]) for each, path in named.items() if path is not None)
    folder = topology.reward.nltk_data
    if folder is not None and node in (topology.reward.nodes or (home_node(topology),)):
        yield RunFile("reward.nltk_data", folder, ("*",))


def given_by_home(topology: Topology) -> tuple[RunFile, ...]:
    """Return all that other nodes may ask for."""
    home = home_node(topology)
    others = (each for node in topology.nodes if node != home for each in needed_on(topology, node))
    return tuple({each.key: each for each in others}.values())


def lacking(loaded: LoadedTopology, node: str) -> tuple[RunFile, ...]:
    """Return the files that a node needs from home: those that are not here. Models of the hub come from there."""
    absent = (each for each in needed_on(loaded.topology, node) if not Path(each.path).exists())
    return tuple(each for each in absent if not (each.patterns and is_hub_name(loaded, each.key, each.path)))


def sizes_of(files: Iterable[RunFile]) -> dict[str, FileSet]:
    """Return what would travel, by key, of the files that are here."""
    found: dict[str, FileSet] = {}
    for each in files:
        try:
            sizes = [path.stat().st_size for path in each.contents().values()]
        except (OSError, ValueError):  # a check reports it
            continue
        found[each.key] = FileSet(num_files=len(sizes), size_bytes=sum(sizes))
    return found


def with_files(loaded: LoadedTopology, paths: Mapping[str, str]) -> LoadedTopology:
    """Replace the paths of settings by others, in lists and tables too. Row slices and names of functions stay."""

    def changed(key: str, value: Any, declaration: Declaration) -> Any:
        if isinstance(value, dict):
            return {name: changed(f"{key}.{name}", each, declaration) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType]
        if isinstance(value, tuple):
            return tuple(changed(f"{key}.{at}", each, declaration) for at, each in enumerate(value))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        path = paths.get(key)
        if path is None or not isinstance(value, str):
            return value
        if declaration.function is not None:
            return placed(value, lambda _: path)
        return f"{path}{split_slice(value)[1]}"

    return with_topology(loaded, with_values(loaded.topology, changed))


class FilesAtHome:
    """Home's side: answers the nodes that lack files, and offers these in home's room.

    Args:
        files: all that is given.
        directory: of the manifests.
        room: opens home's room, at the first call.
        refuses: the run does not start: give nothing.
    """

    def __init__(
        self, files: Sequence[RunFile], directory: Path, room: Callable[[], "Sharing"], *, refuses: bool = False
    ) -> None:
        self._files = {each.key: each for each in files}
        self._directory = directory
        self._room = room
        self._refuses = refuses
        self._given: dict[str, FileSet] = {}
        self._summing = anyio.Lock()

    async def run(self, bus: Bus) -> None:
        """Answer until cancelled."""
        while True:
            try:
                async with bus.kv.watch(_wanted_key("*"), FilesWanted) as wishes, anyio.create_task_group() as tasks:
                    async for entry in wishes:
                        if entry.value is not None:
                            node = entry.key.removeprefix(_wanted_key(""))
                            tasks.start_soon(self._answer, bus, node, entry.value)
            except* BusError as errors:
                log.warning("files_not_given", error=str(flatten(errors)[0]))
                await anyio.sleep(AGAIN_S)

    async def _answer(self, bus: Bus, node: str, wanted: FilesWanted) -> None:
        sets, refused = dict[str, FileSet](), dict[str, str]()
        sharing = None if self._refuses else self._room()
        known = await anyio.to_thread.run_sync(
            sizes_of, [self._files[key] for key in wanted.keys if key in self._files]
        )
        if sharing is not None:
            await bus.kv.put(_given_key(node), FilesGiven(id=wanted.id, sets=known, is_last=False))
        for key in wanted.keys:
            if sharing is None or key not in self._files:
                refused[key] = "the run does not start" if sharing is None else "home's topology names no such file"
                continue
            async with self._summing:
                try:
                    sets[key] = self._given.get(key) or await anyio.to_thread.run_sync(
                        self._offered, self._files[key], sharing
                    )
                    self._given[key] = sets[key]
                except (OSError, ValueError) as error:
                    refused[key] = str(error)
        log.info("files_given", node=node, keys=list(sets), refused=refused)
        await bus.kv.put(_given_key(node), FilesGiven(id=wanted.id, sets=sets, refused=refused))

    def _offered(self, file: RunFile, sharing: "Sharing") -> FileSet:
        from runtime.http.room import Offered  # with aiohttp, which runs whose nodes have all files need not load

        content, paths = _manifest(file, self._directory)
        manifest, digest = msgspec.json.decode(content, type=Manifest), hashlib.sha256(content).hexdigest()
        offers = {each.digest: Offered(paths[each.name], each.size_bytes) for each in manifest.files}
        offers[digest] = Offered(_manifest_path(self._directory, file), len(content))
        sharing.offer(offers)
        return FileSet(num_files=len(manifest.files), size_bytes=manifest.size_bytes, digest=digest)


async def bring(
    bus: Bus, sharing: "Sharing", node: str, keys: Sequence[str], *, wait_s: float, show: Callable[[str], None]
) -> Brought:
    """Get files from home, or from nodes that have fetched them.

    Args:
        bus: of the run.
        sharing: of this node, which runs.
        node: its name.
        keys: settings that name the files.
        wait_s: seconds to wait for home's answer, and more for what it has to sum up.
        show: prints a line for the user.

    Raises:
        BusError: the bucket cannot be used.
    """
    wanted = FilesWanted(id=uuid.uuid4().hex, keys=tuple(keys))
    await bus.kv.put(_wanted_key(node), wanted)
    paths, missing = dict[str, Path](), dict[str, str]()
    try:
        given = await _given(bus, node, wanted.id, wait_s)
        missing |= dict.fromkeys(keys, f"home did not answer within {wait_s:g} s") if given is None else given.refused
        for key, each in () if given is None else given.sets.items():
            show(f"fetching {key} from the nodes of the run: {each}")
            place = f"{FILES}/{_directory_name(key)}-{each.digest[:12]}"
            fetch = partial(sharing.fetch_files, each.digest, place)
            try:
                paths[key] = await anyio.to_thread.run_sync(fetch, abandon_on_cancel=True)
            except (FetchFailed, OSError) as error:
                missing[key] = str(error)
    finally:
        sharing.stop()
        with anyio.move_on_after(AGAIN_S, shield=True):
            await bus.kv.delete(_wanted_key(node))
    return Brought(paths, missing)


def problems_of(files: Iterable[RunFile], missing: Mapping[str, str]) -> tuple[Problem, ...]:
    """Return a problem for each file that did not come."""
    lacks = "is not here, and did not come from home"
    return tuple(
        Problem.of(each.key, each.path, f"{lacks}: {missing[each.key]}") for each in files if each.key in missing
    )


def path_of(directory: Path, files: RunFile) -> str:
    """Return what a setting names in a directory that was fetched."""
    return str(directory if files.patterns else directory / Path(files.path).name)


async def _given(bus: Bus, node: str, wanted: str, wait_s: float) -> FilesGiven | None:
    until = anyio.current_time() + wait_s
    while anyio.current_time() < until:
        try:
            entry = await bus.kv.get(_given_key(node), FilesGiven)
        except BusError as error:  # home starts again
            log.warning("files_not_answered", error=str(error))
            entry = None
        given = None if entry is None else entry.value
        if given is not None and given.id == wanted:
            if given.is_last:
                return given
            size_bytes = sum(each.size_bytes for each in given.sets.values())
            until = max(until, anyio.current_time() + wait_s + size_bytes / MIN_HASH_BYTES_PER_S)
        await anyio.sleep(LOOK_EVERY_S)
    return None


def _manifest(file: RunFile, directory: Path) -> tuple[bytes, dict[str, Path]]:
    """Return a manifest, made anew if a file has changed, and the files by name."""
    paths = file.contents()
    kept, note = _manifest_path(directory, file), _manifest_path(directory, file).with_suffix(".seen")
    seen = msgspec.json.encode({name: [str(path), *_state_of(path)] for name, path in sorted(paths.items())})
    try:
        if note.read_bytes() == seen:
            return kept.read_bytes(), paths
    except OSError:
        pass
    content = msgspec.json.encode(Manifest(title=file.key, files=files_of(paths)))
    directory.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)
    write_atomically(kept, content)
    write_atomically(note, seen)
    return content, paths


def _state_of(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _manifest_path(directory: Path, file: RunFile) -> Path:
    return directory / f"{hashlib.sha256(file.key.encode()).hexdigest()[:16]}.json"


def _directory_name(key: str) -> str:
    return "".join(char if char.isalnum() else "-" for char in key)[:NAME_CHARS]


def _wanted_key(node: str) -> str:
    return f"wanted-files.{node}"


def _given_key(node: str) -> str:
    return f"given-files.{node}"
