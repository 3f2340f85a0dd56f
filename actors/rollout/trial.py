"""Runs a user's generate function without a run, against a tiny engine of its own. For bin/try."""

import asyncio
import os
import resource
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import aiohttp
import anyio
import anyio.lowlevel
import msgspec

from actors.rollout.requests.request import SampleInput
from actors.rollout.samples.context import Context
from actors.rollout.samples.conversation import Conversation, GenerateFunction, Grade, grade_nothing
from actors.rollout.samples.generate_function import KEY
from actors.rollout.samples.generating import sampling_seed
from actors.rollout.samples.sample import OpenSample
from actors.rollout.sglang.body import generate_body
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import EngineError
from actors.rollout.sglang.processes import ignoring
from actors.rollout.sglang.reading import AnswerReader
from actors.rollout.sglang.served_model import ServedModel
from messages import Int32Array, Prompt, SampleKey, SamplingParams
from runtime.bus.background import in_background
from runtime.functions.load import load
from runtime.functions.table import GENERATE
from runtime.node.supervisor.ports import free_port
from runtime.node.supervisor.spawn import dying_with
from runtime.settings.derived import FilledSampling, rollout_sampling, sampling_params
from runtime.settings.topology import Topology
from runtime.util.tracebacks import user_frames, user_traceback

START_S: Final = 60.0  # until the engine serves
STOP_S: Final = 10.0
POLL_S: Final = 0.1
BEAT_S: Final = 0.05  # between looks at the event loop


class EngineNotStartedError(ValueError):
    """The tiny engine does not serve the model of the topology."""


class GenerateRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt to try the function on."""

    prompt: str  # as the model reads it, with the chat template
    label: Any = None
    metadata: dict[str, Any] = {}


@dataclass(frozen=True)
class GenerateTrial:
    """What one call of the function did."""

    conversations: Sequence[Context]
    samples: Sequence[OpenSample]
    status: str
    reason: str = ""  # that the function gave for it
    error: str | None = None
    trace: str | None = None  # of the function's own exception
    took_s: float = 0.0  # all of it
    engine_s: float = 0.0  # of that, in requests to the engine
    blocked_s: float = 0.0  # longest time in which nothing else could run
    peak_bytes: int = 0  # of this process


async def try_generate(
    name: str, rows: Sequence[GenerateRow | Prompt], topology: Topology
) -> AsyncGenerator[GenerateTrial]:
    """Call the function for one sample of each row, with the sampling settings of the topology.

    Raises:
        PluginError: the function cannot be used.
        EngineNotStartedError: the engine does not serve.
        OSError, ValueError: the model cannot be read.
    """
    function = load(GENERATE, KEY, name).function
    model = ServedModel.read(Path(topology.model.hf_checkpoint))
    async with aiohttp.ClientSession() as session, tiny_engine(topology, SglangClient(session)) as (client, url):
        for number, row in enumerate(rows):
            yield await Trial(topology, model, client, url).of(function, number, row)


def prompt_of(row: GenerateRow | Prompt, number: int, model: ServedModel) -> Prompt:
    """Return the prompt of a row of the file; one of the topology's data as it is."""
    if isinstance(row, Prompt):
        return row
    ids = Int32Array(model.encode(row.prompt))
    return Prompt(data="try", row=number, text=row.prompt, prompt_ids=ids, label=row.label, metadata=row.metadata)


class Trial:
    """The samples of one prompt, against a tiny engine."""

    def __init__(self, topology: Topology, model: ServedModel, client: SglangClient, url: str) -> None:
        self._model = model
        self._client = client
        self._url = url
        self._seed = topology.run.seed
        self._limit_s = topology.rollout.custom_generate_timeout_s
        self._topology = topology
        self._prompt_ids, self._row = Int32Array(), 0
        self._engine_s = self.blocked_s = 0.0

    async def of(self, function: GenerateFunction, number: int, row: GenerateRow | Prompt) -> GenerateTrial:
        """Call a generate function for one sample."""
        prompt = prompt_of(row, number, self._model)
        sample = OpenSample(index=number, prompt_len=len(prompt.prompt_ids))
        talk = self.open(prompt, sample, rollout_sampling(self._topology))
        started, error, trace, status = time.monotonic(), None, None, "failed"
        async with in_background(self.watch_loop):
            await anyio.lowlevel.checkpoint()  # so that the loop is watched from the function's first line on
            try:
                status = str(await talk.run(function))
            except (ValueError, EngineError) as raised:
                error, cause = str(raised), raised.__cause__
                trace = None if cause is None or user_frames(cause) is None else user_traceback(cause)
        return GenerateTrial(
            conversations=talk.all,
            samples=sample.parts,
            status=status,
            reason=talk.reason,
            error=error,
            trace=trace,
            took_s=time.monotonic() - started,
            engine_s=self._engine_s,
            blocked_s=self.blocked_s,
            peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        )

    def open(
        self,
        prompt: Prompt,
        sample: OpenSample,
        sampling: FilledSampling,
        *,
        evaluation: bool = False,
        grade: Grade = grade_nothing,
        key: str = KEY,
    ) -> Conversation:
        """Open the conversation of a sample of the prompt."""
        ids, self._row = prompt.prompt_ids, prompt.row
        self._prompt_ids = ids
        return Conversation(
            prompt,
            sample,
            params=sampling_params(self._topology.rollout, sampling, len(ids), trains=False),
            ask=self._ask,
            model=self._model,
            keep=self._keep,
            limit_s=self._limit_s,
            evaluation=evaluation,
            grade=grade,
            key=key,
        )

    async def _ask(self, sample: OpenSample, params: SamplingParams, limit: int) -> bool:
        ids = SampleInput(sample.prompt_of(self._prompt_ids), sample.buffer, sample.pending).ids()
        seed = sampling_seed(self._seed, ("try", self._row), sample.index, sample.part)
        body = generate_body(f"try-{uuid.uuid4().hex}", [ids], params, max_new_tokens=limit, seeds=[seed])
        reader, started = AnswerReader(sample.buffer, new_input=sample.pending), time.monotonic()
        await self._client.generate(self._url, body, [reader])
        self._engine_s += time.monotonic() - started
        sample.turn_status = reader.status
        await self._keep(sample)
        return False

    async def _keep(self, sample: OpenSample) -> None:
        key = SampleKey(group_id=0, attempt=0, index=sample.index, part=sample.part)
        sample.take(key, sample.prompt_of(self._prompt_ids))
        sample.end_turn()

    async def watch_loop(self) -> None:
        """Measure how late this task wakes up: while the function blocks, nothing else runs. Never returns."""
        while True:
            before = time.monotonic()
            try:
                await anyio.sleep(BEAT_S)
            finally:
                self.blocked_s = max(self.blocked_s, time.monotonic() - before - BEAT_S)


@asynccontextmanager
async def tiny_engine(topology: Topology, client: SglangClient) -> AsyncGenerator[tuple[SglangClient, str]]:
    """Run a tiny engine with the model of the topology."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "actors.tiny_engine", "--model-path", topology.model.hf_checkpoint]
    command += ignoring(topology)
    command += ["--port", str(port), "--random-seed", str(topology.run.seed)]
    command += ["--load-format", "dummy" if topology.model.random_init else "auto"]
    url = f"http://127.0.0.1:{port}"
    with TemporaryFile() as printed:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            preexec_fn=dying_with(os.getpid()),  # also if a function ends this process
        )
        try:
            with anyio.move_on_after(START_S):
                while process.returncode is None and not await client.ready(url):  # noqa: ASYNC110 - no event tells
                    await anyio.sleep(POLL_S)
            if process.returncode is not None or not await client.ready(url):
                printed.seek(0)
                last = printed.read().decode(errors="replace").strip().splitlines()[-1:]
                raise EngineNotStartedError(f"the tiny engine did not start: {' '.join(last) or 'no message'}")
            yield client, url
        finally:
            with suppress(ProcessLookupError), anyio.CancelScope(shield=True):
                process.terminate()
                with anyio.move_on_after(STOP_S):
                    await process.wait()
                process.kill()
