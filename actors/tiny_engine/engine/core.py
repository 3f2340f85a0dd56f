"""Weights, pauses and memory of the engine: the operations of the torch thread between two steps."""

import ctypes
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

import torch

from actors.bfloat16 import multiply_in_float32
from actors.tiny_engine.engine.requests import EngineRefusal
from actors.tiny_engine.engine.scheduler import Detokenize, Scheduler
from actors.tiny_engine.engine.updating import Updating
from actors.tiny_engine.model import forward as model
from actors.tiny_engine.model.forward import DTYPES, SAFETENSORS_DTYPE, Weights
from actors.tiny_engine.model.kv_slots import KvSlots
from runtime.models.config import ModelDescription, ModelError, read_model
from runtime.models.directory import CONFIG, has_file

TAGS: Final = frozenset({"kv_cache", "weights", "cuda_graph"})
LARGE_BYTES: Final = 1 << 26  # of weights whose memory is given back after an update


class Settings(NamedTuple):
    """Engine settings from the server's flags."""

    max_running_requests: int
    context_length: int
    max_total_tokens: int | None
    random_seed: int
    dummy: bool  # initialize weights at random instead of loading them
    weight_version: str
    dtype: str = "float32"  # of weights and activations
    max_loras_per_batch: int | None = None  # adapters of running requests, the base model among them; None: no limit


class Updated(NamedTuple):
    """Result of a weight update: paused requests, and whether the cache was flushed."""

    num_paused_requests: int
    flushed: bool  # False if a requested flush failed because the cache is in use


class Core:
    """Scheduler, weights and memory of one engine. Runs only on the torch thread."""

    def __init__(self, directory: Path, model_description: ModelDescription, settings: Settings) -> None:
        """Load the weights, or initialize them at random.

        Raises:
            ModelError: the checkpoint does not match the model.
        """
        self._model = model_description
        self._dtype = DTYPES[SAFETENSORS_DTYPE[settings.dtype]]
        if self._dtype is torch.bfloat16:
            multiply_in_float32()
        self._weights = self._first_weights(directory, settings)
        self._released: set[str] = set()
        self.updating = Updating(self._held)
        slots = KvSlots(self._weights, num_slots=settings.max_running_requests, context_length=settings.context_length)
        self.scheduler = Scheduler(
            slots,
            version=settings.weight_version,
            max_total_tokens=settings.max_total_tokens,
            max_loras=settings.max_loras_per_batch,
        )

    def _first_weights(self, directory: Path, settings: Settings) -> Weights:
        described = self._model
        if not settings.dummy:
            return model.load(described.shape, directory, self._dtype, num_mtp_layers=described.num_mtp_layers)
        std, seed = described.initializer_range, settings.random_seed
        return model.draw(described.shape, seed=seed, std=std, dtype=described.dtype, computed_in=self._dtype)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing, or is impossible because memory is released."""
        return self.scheduler.idle or bool(self._released - {"cuda_graph"})

    def use_detokenizer(self, detokenize: Detokenize) -> None:
        """Set the function that turns the last tokens into text, to find stop texts."""
        self.scheduler.detokenize = detokenize

    def pause(self, mode: str) -> None:
        """Pause generation. `retract` requeues running requests, `in_place` keeps them in their slots.

        `abort` ends all requests. Running ones need one more step to end, so the scheduler is not paused; the frontend
        holds new requests back.
        """
        if mode == "abort":
            self.scheduler.abort(None)
            return
        if mode == "retract":
            self.scheduler.retract()
        self.scheduler.paused = True

    def resume(self) -> None:
        """Resume generation."""
        self.scheduler.paused = False

    def update_weights(self, directory: Path, *, version: str | None, flush: bool) -> Updated:
        """Load a checkpoint; the next tokens are sampled from it. After a failure the state is unchanged.

        Raises:
            ModelError: the checkpoint does not match the model.
            EngineRefusal: the weights are released.
        """
        self._held()
        self._check_same_model(directory)
        self._weights = model.load(self._model.shape, directory, self._dtype, num_mtp_layers=self._model.num_mtp_layers)
        self.scheduler.use_weights(self._weights)
        if sum(tensor.nbytes for tensor in self._weights.fused.values()) >= LARGE_BYTES:
            _trim()  # of the weights before
        return self.updated(version=version, flush=flush)

    def updated(self, *, version: str | None, flush: bool) -> Updated:
        """Flush the cache and set the version after a weight update.

        The version is not set if a requested flush fails, as in SGLang.
        """
        flushed = not flush or self.scheduler.flush()
        if flushed and version is not None:
            self.scheduler.use_version(version)
        num_live = len(self.scheduler.waiting) + len(self.scheduler.slots.requests)
        return Updated(num_paused_requests=num_live if self.scheduler.paused else 0, flushed=flushed)

    def _held(self) -> Weights:
        """The current weights.

        Raises:
            EngineRefusal: the weights are released.
        """
        if "weights" in self._released:
            raise EngineRefusal("the weights are released; resume them first")
        return self._weights

    def _check_same_model(self, directory: Path) -> None:
        """Compare the config.json of new weights, if there is one, with this engine's model."""
        if has_file(directory, CONFIG) and read_model(directory, self._model.ignored_keys).shape != self._model.shape:
            raise ModelError(f"{directory / CONFIG}: describes another model than the engine was started with")

    def checksums(self, skip: Collection[str]) -> dict[str, str]:
        """Hash the fused tensors by name, except names that contain one of the texts in `skip`.

        Raises:
            EngineRefusal: the weights are released.
        """
        every = self._held().checksums()
        return {name: checksum for name, checksum in every.items() if not any(text in name for text in skip)}

    def release(self, tags: Collection[str]) -> None:
        """Release memory. Queued and new requests wait until it is resumed.

        Raises:
            EngineRefusal: requests are running, or a tag is already released.
        """
        wanted = set(tags) or set(TAGS)
        if self.scheduler.slots.requests or (self.scheduler.waiting and not self.scheduler.paused):
            raise EngineRefusal("requests are running; abort them or pause the engine first")
        if wanted & self._released:
            raise EngineRefusal(f"already released: {', '.join(sorted(wanted & self._released))}")
        self._released |= wanted
        if "kv_cache" in wanted:
            self.scheduler.slots.free()
        if "weights" in wanted:
            self._weights = model.released(self._weights)
            self.scheduler.use_weights(self._weights)
        _trim()

    def restore(self, tags: Collection[str]) -> None:
        """Resume memory. Weights are zeros after it: update them before generating.

        Raises:
            EngineRefusal: a tag is not released.
        """
        wanted = set(tags) or set(self._released)
        if wanted - self._released:
            raise EngineRefusal(f"not released: {', '.join(sorted(wanted - self._released))}")
        self._released -= wanted
        if "weights" in wanted:
            self._weights = model.zeros(self._weights)
            self.scheduler.use_weights(self._weights)


def _trim() -> None:
    """Return freed memory to the system; glibc keeps blocks of up to 32 MB for reuse."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
