"""Reads the files of a model directory, which may come from a stranger, and copies the known ones.

All files of a model directory are opened through `file_of` or `read`. No link leads out of the directory, except from
Hugging Face's cache to its blobs, so a directory cannot name a private file of the user who reads it.
"""

import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

import msgspec

from runtime.util.files import atomic_file, path_inside
from runtime.util.memory import MemoryLimit

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
CHAT_TEMPLATE: Final = "chat_template.jinja"
TOOL_CHAT_TEMPLATE: Final = "additional_chat_templates/tool_use.jinja"  # for conversations with tools
VOCABULARIES: Final = (TOKENIZER, "tokenizer.model", "vocab.json", "tiktoken.model")  # a tokenizer has one of them
TOKENIZER_FILES: Final = (  # all that transformers, tokenizers and SGLang read to make tokens and texts
    *(TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("tiktoken.model", "qwen.tiktoken", "tekken.json", CHAT_TEMPLATE, TOOL_CHAT_TEMPLATE, "chat_template.json"),
)
COPIED_FILES: Final = (  # the files of an export, except its weights
    *(CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt"),
)
MAX_CONFIG_BYTES: Final = (
    16 << 20
)  # of a JSON file or a template; the largest known one has 0.3 MB without a vocabulary
MAX_TOKENIZER_BYTES: Final = 64 << 20  # the largest that is published has 33 MB
LOADING_BYTES: Final = 768 << 20  # memory that opening tokenizer.json may take; that one takes less than half of it
MAX_ENTRIES: Final = 100_000  # files and folders of a directory
_CODE: Final = re.compile(r"[A-Za-z]\w*")  # name of a module that auto_map may name
T = TypeVar("T")


class ModelError(ValueError):
    """A model directory cannot be used. The text names the file and every error; each of `problems` names one."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))

    @classmethod
    def of(cls, file: Path, problems: Sequence[str]) -> Self:
        """Make an error of the problems of a file."""
        return cls(*(f"{file}: {problem}" for problem in problems))


class _Code(msgspec.Struct, frozen=True):
    auto_map: Any = None


def file_of(directory: Path, name: str) -> Path | None:
    """Return a file of a model directory; None if there is no such file.

    Raises:
        ModelError: its links lead out of the directory, or it is not a regular file.
    """
    path = directory / name
    try:
        path_inside(directory, name)
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error
    if not stat.S_ISREG(mode):
        raise ModelError(f"{path}: is not a regular file")
    return path


def has_file(directory: Path, name: str) -> bool:
    """Whether a model directory has a file. Raises as `file_of` does."""
    return file_of(directory, name) is not None


def read(directory: Path, name: str, max_bytes: int = MAX_CONFIG_BYTES) -> bytes:
    """Read a file of a model directory.

    Raises:
        ModelError: there is no such file, or it cannot be read, or it has more than `max_bytes`.
    """
    path = file_of(directory, name)
    if path is None:
        raise ModelError(f"{directory / name}: No such file or directory")
    try:
        with path.open("rb") as file:
            found = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    if len(found) > max_bytes:
        raise ModelError(f"{path}: has more than {max_bytes:,} bytes, the most that are read of such a file")
    return found


def read_text(directory: Path, name: str) -> str:
    """Read a text of a model directory.

    Raises:
        ModelError: as in `read`, or the file is not UTF-8.
    """
    try:
        return read(directory, name).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{directory / name}: {error}") from error


def read_json(directory: Path, name: str, kind: type[T], max_bytes: int = MAX_CONFIG_BYTES) -> T:
    """Read a JSON file of a model directory.

    Raises:
        ModelError: as in `read`, or the file is not JSON of this type.
    """
    content = read(directory, name, max_bytes)
    try:
        return decoded(content, kind)
    except ValueError as error:
        raise ModelError(f"{directory / name}: {error}") from error


def decoded(content: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Decode JSON from a stranger.

    Raises:
        ValueError: it is not JSON of this type, or it is nested too deeply.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


def open_tokenizer(directory: Path) -> "Tokenizer":
    """Open tokenizer.json of a model directory with the tokenizers library.

    Raises:
        ModelError: there is no such file, or it cannot be used.
    """
    from tokenizers import Tokenizer

    content = read(directory, TOKENIZER, MAX_TOKENIZER_BYTES)
    try:
        with MemoryLimit(LOADING_BYTES):  # the library ends the process beyond: a check then says what it was doing
            return Tokenizer.from_buffer(content)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for any fault of the file
        raise ModelError(f"{directory / TOKENIZER}: {error}") from None


def check_links(directory: Path) -> None:
    """Refuse a model directory with a link that leads out, whatever its name: other programs read all of its files.

    Hidden folders are left out, since no program reads a model there.

    Raises:
        ModelError: names the link and its target.
    """
    for number, (path, is_link) in enumerate(_entries(directory)):
        if number >= MAX_ENTRIES:
            raise ModelError(f"{directory}: has more than {MAX_ENTRIES:,} files; name the directory of the model alone")
        if is_link:
            try:
                path_inside(directory, str(path.relative_to(directory)))
            except OSError as error:
                raise ModelError(f"{path}: {error.strerror or error}") from error
            except ValueError as error:
                raise ModelError(f"{path}: {error}; replace the link by a copy of the file") from error


def _entries(directory: Path) -> Iterator[tuple[Path, bool]]:
    """Yield all entries below a directory, and whether each is a link. Links are not followed."""
    left = [directory]
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    yield Path(entry.path), entry.is_symlink()
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                        left.append(Path(entry.path))
        except OSError as error:
            raise ModelError(f"{error.filename or directory}: {error.strerror or error}") from error


def copy_files(directory: Path, target: Path, names: tuple[str, ...] = COPIED_FILES) -> None:
    """Copy the named files that a model directory has, readable by their owner alone.

    Raises:
        ModelError: a link leads out of the directory. Nothing of that file was copied.
        OSError: a file cannot be read or written.
    """
    for name in names:
        if (source := file_of(directory, name)) is not None:
            (target / name).parent.mkdir(exist_ok=True)
            with source.open("rb") as content, atomic_file(target / name) as file:
                shutil.copyfileobj(content, file)


def code_files(directory: Path) -> tuple[str, ...]:
    """Return the names of the modules with custom code that the configurations of a model directory name.

    Raises:
        ModelError: a configuration cannot be read.
    """
    named: set[str] = set()
    for name in (CONFIG, TOKENIZER_CONFIG):
        if has_file(directory, name):
            named |= set(_modules_in(read_json(directory, name, _Code).auto_map))
    return tuple(f"{module}.py" for module in sorted(named))


def _modules_in(auto_map: Any) -> Iterator[str]:
    """Yield the modules of an auto_map: its values are "module.Class", or lists of a slow and a fast tokenizer."""
    values: list[Any] = list(cast("dict[str, Any]", auto_map).values()) if isinstance(auto_map, dict) else []
    for value in values:
        for text in cast("list[Any]", value) if isinstance(value, list) else [value]:
            module = text.rpartition(".")[0] if isinstance(text, str) else ""
            if _CODE.fullmatch(module):
                yield module
