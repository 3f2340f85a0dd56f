"""Models with Hugging Face hub names: taken from the local cache, or downloaded at a start.

The cache comes first and is sufficient: a name means the same files at each start, with or without a network.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from runtime.models.directory import CONFIG, has_file
from runtime.models.safetensors import safetensors_files
from runtime.settings.load import LoadedTopology, places, with_topology
from runtime.settings.reading.schema import with_values
from runtime.settings.sizes import show_bytes
from runtime.settings.topology import NamedModel, named_models
from runtime.util.formatting import show

HUB_NAME: Final = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")  # organisation/model
PLAIN: Final = ("*.json", "*.jinja", "*.model", "*.txt")  # config, tokenizer, chat template
WEIGHTS: Final = "*.safetensors"
CODE: Final = "*.py"
ASK_TIMEOUT_S: Final = 10.0
T = TypeVar("T")


class NotOnHub(Exception):
    """A model is neither in the cache nor available from the hub."""


def hub_models(loaded: LoadedTopology) -> Iterator[NamedModel]:
    """Yield the hub models of a topology: names that are not directories."""
    for model in named_models(loaded.topology):
        if not Path(model.name).is_dir() and is_hub_name(loaded, model.key, model.name):
            yield model


def is_hub_name(loaded: LoadedTopology, key: str, value: str) -> bool:
    """Return whether a value is a hub name, not a mistyped path: its parent directory does not exist."""
    parents = [place / Path(value).parent for place in places(loaded.loaded, key)]
    return HUB_NAME.match(value) is not None and not any(parent.is_dir() for parent in parents)


def cached(model: NamedModel) -> Path | None:
    """Return the model's directory in the local cache; None if it is missing or incomplete."""
    from huggingface_hub import errors  # takes a second to import; plain paths do not need it

    try:
        found = _snapshot(model.name, local_files_only=True)
    except (errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError):
        return None
    return found if _is_whole(found, weights=model.weights) else None


def offer(model: NamedModel) -> str:
    """Describe what a start would download.

    Raises:
        NotOnHub: the model is not available; the message is the reason.
    """
    from huggingface_hub import HfApi, constants

    about = _query_hub(
        lambda: HfApi(endpoint=constants.ENDPOINT).model_info(model.name, files_metadata=True, timeout=ASK_TIMEOUT_S)
    )
    files = [file for file in about.siblings or [] if any(Path(file.rfilename).match(p) for p in patterns_of(model))]
    size = show_bytes(sum(file.size or 0 for file in files))
    return f"a start downloads {len(files)} files of {size} from {constants.ENDPOINT} to {constants.HF_HUB_CACHE}"


def download(model: NamedModel) -> Path:
    """Download the model to the local cache and return its directory.

    Raises:
        NotOnHub: the model is not available.
    """
    from huggingface_hub import constants

    wishes = {"endpoint": constants.ENDPOINT, "allow_patterns": [*patterns_of(model)]}
    return _query_hub(lambda: _snapshot(model.name, **wishes))


def with_cached(loaded: LoadedTopology, report: Callable[[str], None]) -> LoadedTopology:
    """Replace the hub names of cached models by their paths, and report each path."""
    return _with_paths(loaded, cached, "found in the hub's cache", report)


def with_downloaded(loaded: LoadedTopology, report: Callable[[str], None]) -> LoadedTopology:
    """Replace all hub names by paths, downloading if needed.

    Raises:
        NotOnHub: a model is not available.
    """
    return _with_paths(loaded, download, "downloaded", report)


def _with_paths(
    loaded: LoadedTopology, find: Callable[[NamedModel], Path | None], how: str, report: Callable[[str], None]
) -> LoadedTopology:
    paths: dict[str, str] = {}
    for model in hub_models(loaded):
        if (path := find(model)) is not None:
            paths[model.key] = str(path)
            report(f"{model.key} = {show(model.name)}: {how}, {path}")
    return with_topology(loaded, with_values(loaded.topology, lambda key, value, _: paths.get(key, value)))


def patterns_of(model: NamedModel) -> tuple[str, ...]:
    """Return the names of the files of a model that a run reads, as patterns."""
    return (*PLAIN, *([WEIGHTS] if model.weights else []), *([CODE] if model.code else []))


def _snapshot(name: str, **wishes: Any) -> Path:
    from huggingface_hub import constants, snapshot_download  # pyright: ignore[reportUnknownVariableType]

    fetch = cast("Callable[..., str]", snapshot_download)
    return Path(fetch(name, cache_dir=constants.HF_HUB_CACHE, **wishes))


def _query_hub(query: Callable[[], T]) -> T:
    """Call the hub and translate its errors."""
    from huggingface_hub import constants
    from huggingface_hub.errors import RepositoryNotFoundError

    absent = f"not in the hub's cache ({constants.HF_HUB_CACHE})"
    if constants.HF_HUB_OFFLINE:
        raise NotOnHub(f"no such directory, {absent}, and HF_HUB_OFFLINE forbids a download")
    try:
        return query()
    except RepositoryNotFoundError as error:
        message = f"no such directory, {absent}, and {constants.ENDPOINT} has no such model"
        raise NotOnHub(f"{message}; a private one needs HF_TOKEN") from error
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise NotOnHub(f"no such directory, {absent}, and {constants.ENDPOINT} did not answer: {reason}") from error


def _is_whole(directory: Path, *, weights: bool) -> bool:
    """Return whether the needed files are there: other programs may have cached parts of the model."""
    try:
        return has_file(directory, CONFIG) and bool(not weights or safetensors_files(directory))
    except FileNotFoundError:
        return False
    except ValueError:  # its check reports it
        return True
