"""Model directories in Hugging Face's format from a GGUF file, whose reader is the package `gguf` (extra `gguf`)."""

import os
import warnings
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from runtime.models.config import read_tiny_engine_model
from runtime.models.directory import ModelError
from runtime.util.files import atomic_directory

NUMBERS: Final = ("F32", "F16", "BF16", "Q8_0", "Q4_1")  # types of tensors that are read; a test compares each
PACKAGES: Final = ("gguf", "accelerate", "torch", "transformers")  # what reads a file
EXTRA: Final = 'pip install "physarum[run,trainer,gguf]"'


class CannotImport(Exception):
    """The file cannot be read, or the directory cannot be used. The message says why."""


class Imported(NamedTuple):
    """What a file had."""

    architecture: str  # class of transformers
    num_parameters: int
    types: dict[str, int]  # numbers of tensors by their type in the file

    @property
    def description(self) -> str:
        """Text for people."""
        types = ", ".join(f"{count} of type {name}" for name, count in self.types.items())
        return f"{self.architecture} with {self.num_parameters:,} parameters; tensors: {types}"


def import_gguf(file: Path, out: Path, dtype: str) -> Imported:
    """Write a GGUF file's model, config, tokenizer and chat template to a directory, which appears once it is complete.

    Args:
        file: the GGUF file.
        out: output directory; must not exist, or be empty.
        dtype: of the weights that are written: "bfloat16", "float16" or "float32".

    Raises:
        CannotImport: the file is no GGUF file, has tensors of a type that is not read or an architecture that
            transformers does not read or that is not trained here; `out` cannot be used; the package is missing.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CannotImport(f"{out} already exists: name a new or an empty directory")
    types = _types(file)
    try:
        with atomic_directory(out) as unfinished:
            architecture, num_parameters = _write(file, unfinished, dtype)
            read_tiny_engine_model(unfinished)
    except ModelError as error:
        raise CannotImport(f"{file}: its model is not trained here: {error}") from error
    return Imported(architecture, num_parameters, types)


def _types(file: Path) -> dict[str, int]:
    """Count the types of a file's tensors."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise CannotImport(f"{' and '.join(missing)} must be installed to read {file.name}: {EXTRA}")
    if not file.is_file():
        raise CannotImport(f"{file}: there is no such file")
    try:
        reader = import_module("gguf").GGUFReader(file)
        found = Counter(str(tensor.tensor_type.name) for tensor in reader.tensors)
    except (ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
        raise CannotImport(f"{file} is no GGUF file, or it is damaged: {error!r}") from error
    if refused := sorted(found.keys() - set(NUMBERS)):
        raise CannotImport(f"{file}: tensors of type {', '.join(refused)}; {', '.join(NUMBERS)} are read")
    return dict(found.most_common())


def _write(file: Path, directory: Path, dtype: str) -> tuple[str, int]:
    """Write a model directory; return the name of the class of transformers, and the number of parameters."""
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")  # all is in the file; its reader draws a bar of its own
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about its own code
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(dtype=torch.float32, **where)
            tokenizer: Any = AutoTokenizer.from_pretrained(**where)
        except (ValueError, KeyError, OSError, RuntimeError, NotImplementedError) as error:
            raise CannotImport(f"{file}: transformers does not read it: {error}") from error
        kind, number = type(model), getattr(torch, dtype)
        keys = {key: _shortest(value) for key, value in model.config.to_dict().items() if key != "quantization_config"}
        plain: Any = kind(type(model.config)(**keys)).to(number)  # transformers saves no model that was quantized
        plain.load_state_dict(model.state_dict())
        plain.config.dtype = number
        plain.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    return kind.__name__, sum(parameter.numel() for parameter in plain.parameters())


def _shortest(value: Any) -> Any:
    """Return a number with the fewest digits that mean the same in float32, in which GGUF stores it."""
    if isinstance(value, dict):
        return {key: _shortest(each) for key, each in value.items()}
    return float(str(np.float32(value))) if isinstance(value, float) else value
