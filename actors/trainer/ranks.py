"""Calls of rank 0 that all ranks carry out together, on their torch threads.

A method that `on_all_ranks` decorates is such a call: rank 0 tells the other ranks its name and arguments, and then
every rank carries it out. The other ranks `follow`. Calls go through the TCP store, where a wait may time out without
being a failure: no rank waits for a call inside of a collective. A batch is too large for that, and is broadcast: its
large columns one by one from the memory where they are into the memory where they stay, so that no rank holds them
twice.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from datetime import timedelta
from threading import Event
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Protocol, TypeVar, get_type_hints

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from actors.trainer.data.batch import TrainBatch
from actors.trainer.megatron.groups import Ranks

POLL: Final = timedelta(seconds=2)  # longest wait for a call before the stop flag is checked
STOP: Final = "stop"
SHARED: Final = "shared"
LARGE_BYTES: Final = 1 << 20  # a column of at least this size is broadcast on its own

P = ParamSpec("P")
T = TypeVar("T")


class UnknownCall(RuntimeError):
    """Rank 0 made a call that this rank does not have. The rank ends: it cannot take part in what follows."""


class BatchParts(msgspec.Struct, frozen=True):
    """A batch among the arguments of a call: what is broadcast of it."""

    small_bytes: int  # size of the small columns, encoded together
    large: dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape of each large column, by name


class Owner(Protocol):
    """An object whose methods are called on all ranks."""

    calls: "RankCalls"


S = TypeVar("S", bound=Owner)


class Method(NamedTuple):
    """A method that all ranks carry out."""

    function: Callable[..., Any]
    signature: inspect.Signature  # without self
    arguments: type[Any]  # struct of the arguments, by name; `BatchParts` for a batch
    batch: str  # name of the argument that is a batch; empty: none


def on_all_ranks(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a method a call that all ranks carry out. Its arguments need types that msgspec knows, or are a batch.

    Rank 0 alone calls it, and gets its own result. What is carried out must not make further calls.
    """

    @functools.wraps(function)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self.calls.call(name_of(function), *args, **kwargs)
        return result

    vars(call)["on_all_ranks"] = function
    return call


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a call."""
    return function.__name__.lstrip("_")


def methods_of(owner: type) -> dict[str, Method]:
    """Return the table of a class: its methods that all ranks carry out, by name."""
    functions = [
        vars(each)["on_all_ranks"] for each in vars(owner).values() if "on_all_ranks" in getattr(each, "__dict__", {})
    ]
    return {name_of(function): _method(function) for function in functions}


def _method(function: Callable[..., Any]) -> Method:
    hints = get_type_hints(function)
    signature = inspect.signature(function)
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    batch = next((name for name in signature.parameters if hints[name] is TrainBatch), "")
    arguments = [(name, BatchParts if name == batch else hints[name]) for name in signature.parameters]
    return Method(function, signature, msgspec.defstruct(function.__name__, arguments), batch)


class RankCalls:
    """The calls of one rank."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        """Start before the first call.

        Args:
            ranks: identity of this rank.
            device: device of this rank, for broadcasts of batches.
        """
        self._ranks = ranks
        self._device = device
        self._methods: dict[str, tuple[object, Method]] = {}
        self._num_calls = 0
        self._is_busy = False
        self._stopping = Event()

    def serve(self, owner: object) -> None:
        """Add an object's methods, in the same order on all ranks."""
        for name, method in methods_of(type(owner)).items():
            assert name not in self._methods, f"two methods are named {name}"
            self._methods[name] = owner, method

    @property
    def names(self) -> frozenset[str]:
        """Names of all calls that this rank carries out."""
        return frozenset(self._methods)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Have all ranks carry out a call, including this one, which is rank 0.

        Returns:
            This rank's result.
        """
        assert not self._is_busy, f"{name} is called inside of another call"
        owner, method = self._methods[name]
        bound = method.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if self._ranks.world_size > 1:
            self._tell(name, method, bound.arguments)
        return self._carry_out(owner, method, bound.arguments)

    def tell(self, name: str, **arguments: Any) -> None:
        """Have other ranks carry out a method that this rank does not have: those of a critic on ranks of its own."""
        self._send(name, msgspec.msgpack.encode(arguments))

    def share(self, payload: bytes | None) -> bytes | None:
        """Give rank 0's bytes to the other ranks, inside of a call. They wait in the store, not in a collective.

        Args:
            payload: the bytes, on rank 0; None on other ranks.

        Returns:
            The bytes. None: this rank was stopped while it waited.
        """
        if self._ranks.world_size == 1 or payload is not None:
            assert payload is not None
            if self._ranks.world_size > 1:
                self._send(SHARED, msgspec.msgpack.encode(len(payload)))
            return self.broadcast(payload, len(payload))
        told = self._next()
        if told is None:
            return None
        name, size_bytes = told
        assert name == SHARED, f"{name} was called inside of another call"
        return self.broadcast(b"", msgspec.msgpack.decode(size_bytes, type=int))

    def stop_others(self) -> None:
        """Have the other ranks end `follow`."""
        if self._ranks.world_size > 1:
            self._send(STOP, b"")

    def follow(self) -> None:
        """Carry out rank 0's calls until it stops this rank, or until a call of `stop`.

        Raises:
            UnknownCall: this rank does not have a call.
        """
        while (told := self._next()) is not None:
            self._follow_call(*told)

    def _follow_call(self, name: str, encoded: bytes) -> None:
        """Carry out one call of rank 0. Its batch is freed when it returns, before the next one comes."""
        if name not in self._methods:
            raise UnknownCall(f"rank {self._ranks.rank} has no call {name!r}; it has {', '.join(sorted(self.names))}")
        owner, method = self._methods[name]
        arguments = msgspec.structs.asdict(msgspec.msgpack.decode(encoded, type=method.arguments))
        if method.batch:
            arguments[method.batch] = self._receive_batch(arguments[method.batch])
        self._carry_out(owner, method, arguments)

    def stop(self) -> None:
        """End the wait in `follow` at its next poll. Called from another thread."""
        self._stopping.set()

    def broadcast(self, payload: bytes, size_bytes: int) -> bytes:
        """Broadcast rank 0's bytes to every rank and return them."""
        return payload if self._ranks.world_size == 1 else self._broadcast(payload, size_bytes)

    def _tell(self, name: str, method: Method, arguments: dict[str, Any]) -> None:
        if not method.batch:
            self._send(name, msgspec.msgpack.encode(method.arguments(**arguments)))
            return
        batch: TrainBatch = arguments[method.batch]
        columns = _columns_of(replace(batch, routed_experts_N=None))  # each replica gets its share of these later
        large = {name: array for name, array in columns.items() if array.nbytes >= LARGE_BYTES}
        small = _encoded(batch.step, {name: array for name, array in columns.items() if name not in large})
        parts = BatchParts(len(small), {name: (array.dtype.str, array.shape) for name, array in large.items()})
        self._send(name, msgspec.msgpack.encode(method.arguments(**{**arguments, method.batch: parts})))
        self._broadcast(small, len(small))
        for array in large.values():
            self._broadcast_column(array)

    def _receive_batch(self, parts: BatchParts) -> TrainBatch:
        step, columns = _decoded(self._broadcast(b"", parts.small_bytes))
        for name, (dtype, shape) in parts.large.items():
            columns[name] = np.empty(shape, dtype=dtype)
            self._broadcast_column(columns[name])
        return TrainBatch(step=step, **columns)

    def _carry_out(self, owner: object, method: Method, arguments: dict[str, Any]) -> Any:
        self._is_busy = True
        try:
            bound = inspect.BoundArguments(method.signature, arguments)  # pyright: ignore[reportArgumentType]
            return method.function(owner, *bound.args, **bound.kwargs)
        finally:
            self._is_busy = False

    def _send(self, name: str, arguments: bytes) -> None:
        self._ranks.store.set(self._next_key(), msgspec.msgpack.encode((name, arguments)))

    def _next(self) -> tuple[str, bytes] | None:
        """Wait for the next call. None: this rank is to stop."""
        key, store = self._next_key(), self._ranks.store
        while not self._stopping.is_set():
            try:
                store.wait([key], POLL)
            except dist.DistStoreError:  # timed out; a lost rank 0 is a DistNetworkError
                continue
            name, arguments = msgspec.msgpack.decode(store.get(key), type=tuple[str, bytes])
            return None if name == STOP else (name, arguments)
        return None

    def _next_key(self) -> str:
        self._num_calls += 1
        return f"call/{self._num_calls}"

    def _broadcast_column(self, array: NDArray[Any]) -> None:
        """Broadcast rank 0's column into the arrays of the other ranks."""
        is_first = self._ranks.rank == 0
        if is_first:  # torch wants memory that may be written, though it reads this
            array = np.require(array, requirements=("C", "W"))
        host = torch.from_numpy(array.reshape(-1).view(np.uint8))
        if self._device.type == "cpu":
            dist.broadcast(host, src=0)
            return
        shared = host.to(self._device) if is_first else torch.empty_like(host, device=self._device)
        dist.broadcast(shared, src=0)
        if not is_first:
            host.copy_(shared)

    def _broadcast(self, payload: bytes, size_bytes: int) -> bytes:
        shared = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        if self._ranks.rank == 0:
            shared.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        dist.broadcast(shared, src=0)
        return shared.cpu().numpy().tobytes()


def encode_batch(batch: TrainBatch) -> bytes:
    """Encode a batch for a critic on ranks of its own."""
    return _encoded(batch.step, _columns_of(batch))


def decode_batch(data: bytes) -> TrainBatch:
    """Decode a batch that was encoded."""
    step, columns = _decoded(data)
    return TrainBatch(step=step, **columns)


def _columns_of(batch: TrainBatch) -> dict[str, NDArray[Any]]:
    """Return the columns that a batch has, by name."""
    columns = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "step"}
    return {name: array for name, array in columns.items() if array is not None}


def _encoded(step: int, columns: Mapping[str, NDArray[Any]]) -> bytes:
    arrays = {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in columns.items()}
    return msgspec.msgpack.encode((step, arrays))


def _decoded(data: bytes) -> tuple[int, dict[str, Any]]:
    step, arrays = msgspec.msgpack.decode(data, type=tuple[int, dict[str, tuple[str, tuple[int, ...], bytes]]])
    return step, {name: np.frombuffer(raw, dtype=dtype).reshape(shape) for name, (dtype, shape, raw) in arrays.items()}
