"""What the trainer adds to a dump with `observe.tokens`: `trained_<step>.npz`, about each token of the trained samples.

group_id, index, part [n]     key of the sample
left_out [n]                  0; or 1 and more: the sample is left out, for the reason of this number in `reasons`
offsets [n + 1]               tokens of sample i, prompt included: offsets[i] to offsets[i + 1]
trainer_log_probs [t]         under the weights before this train step; NaN where the trainer computed none
rules [t]                     bit i: rule i of `rule_names` masks or limits the token
staleness [t]                 train steps between the weights that sampled the token and those trained; -1: no such
rule_names, reasons           names, as UTF-8 with commas between
"""

import zipfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from runtime.data.columns import DumpError, reading, rows
from runtime.util.disk import writing
from runtime.util.files import atomic_file
from runtime.util.secrets import make_private

log = structlog.get_logger()

MAX_NAMES_BYTES: Final = 4096
MAX_RULES: Final = 32  # bits of `rules`


@dataclass(frozen=True, kw_only=True)
class TrainedTokens:
    """The samples of one train step."""

    group_id: NDArray[np.int64]
    index: NDArray[np.int64]
    part: NDArray[np.int64]
    left_out: NDArray[np.uint8]
    lengths: NDArray[np.int64]  # tokens of each sample
    trainer_log_probs: NDArray[np.float32]
    rules: NDArray[np.uint32]
    staleness: NDArray[np.int32]
    rule_names: Sequence[str]
    reasons: Sequence[str]  # of `left_out`, from 1 on


class TrainedSample(NamedTuple):
    """What the trainer made of one sample."""

    left_out: str  # why the sample trained no token; empty: it is not left out
    trainer_log_probs: NDArray[np.float32]  # of all its tokens, or of none if it is left out
    rules: NDArray[np.uint32]
    staleness: NDArray[np.int32]
    rule_names: tuple[str, ...]


def trained_path(directory: Path, step: int) -> Path:
    """Return the path of a step's file."""
    return directory / f"trained_{step}.npz"


def write_trained(directory: Path, step: int, tokens: TrainedTokens) -> None:
    """Write or replace the file of a step.

    Raises:
        OSError: the disk failed; NoSpace if it is full.
    """
    columns: dict[str, Any] = {
        **{name: getattr(tokens, name) for name in ("group_id", "index", "part", "left_out")},
        "offsets": np.concatenate([[0], np.cumsum(tokens.lengths)]).astype(np.int64),
        **{name: getattr(tokens, name) for name in ("trainer_log_probs", "rules", "staleness")},
        **{
            name: np.frombuffer(",".join(getattr(tokens, name)).encode(), np.uint8)
            for name in ("rule_names", "reasons")
        },
    }
    path = trained_path(directory, step)
    with writing(path, sum(column.nbytes for column in columns.values())), atomic_file(path) as file:
        np.savez(file, **columns)


def read_trained(directory: Path, step: int, key: tuple[int, int, int], num_tokens: int) -> TrainedSample | None:
    """Read what the trainer made of a sample; None: its train step has no such file, or the sample is not in it.

    Args:
        directory: directory of the dump.
        step: train step.
        key: group, index and part of the sample.
        num_tokens: its tokens, prompt included.

    Raises:
        DumpError: the file cannot be used; the text names it.
    """
    path = trained_path(directory, step)
    if not path.exists():
        return None
    with reading(path) as opened, zipfile.ZipFile(opened) as file:
        keys = np.stack([rows(file, name, 0, None) for name in ("group_id", "index", "part")])
        found = np.flatnonzero((keys == np.array(key)[:, None]).all(axis=0))
        if not len(found):
            return None
        row = int(found[0])
        names, reasons = (_names(file, name) for name in ("rule_names", "reasons"))
        left_out = int(rows(file, "left_out", row, row + 1)[0])
        if left_out > len(reasons) or len(names) > MAX_RULES:
            raise ValueError(f"sample {row} is left out for reason {left_out}, of {len(reasons)}")
        begin, end = (0, 0) if left_out else (int(bound) for bound in rows(file, "offsets", row, row + 2))
        if not left_out and end - begin != num_tokens:
            raise DumpError(f"{path}: sample {key} has {end - begin} tokens; its dump has {num_tokens}")
        return TrainedSample(
            left_out=reasons[left_out - 1] if left_out else "",
            trainer_log_probs=rows(file, "trainer_log_probs", begin, end).astype(np.float32),
            rules=rows(file, "rules", begin, end).astype(np.uint32),
            staleness=rows(file, "staleness", begin, end).astype(np.int32),
            rule_names=names,
        )


def _names(file: zipfile.ZipFile, column: str) -> tuple[str, ...]:
    content = rows(file, column, 0, None)
    if len(content) > MAX_NAMES_BYTES:
        raise ValueError(f"column {column} has {len(content)} bytes; allowed: up to {MAX_NAMES_BYTES}")
    text = content.astype(np.uint8).tobytes().decode()
    return tuple(text.split(",")) if text else ()


class TokenWriter:
    """Writes these files in the background, one at a time. Training never waits for it.

    Args:
        directory: directory of the dump; None: nothing is written.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = None if directory is None else Path(directory)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="token-dump")
        self._writing: Future[None] | None = None

    def begin(self, step: int, tokens: TrainedTokens) -> None:
        """Begin to write a step's file. It is left out while an earlier one is being written."""
        if self._directory is None:
            return
        if self._writing is not None and not self._writing.done():
            log.warning("tokens_not_dumped", step=step, reason="the file of an earlier step is still being written")
            return
        self._writing = self._executor.submit(self._write, self._directory, step, tokens)

    @staticmethod
    def _write(directory: Path, step: int, tokens: TrainedTokens) -> None:
        try:
            make_private(directory)
            write_trained(directory, step, tokens)
        except OSError as error:
            log.warning("tokens_not_dumped", step=step, reason=str(error))

    def close(self) -> None:
        """Finish the file that is being written."""
        self._executor.shutdown(wait=False)
