"""Has engines load weights, and asks them what they hold until that is proven or refused."""

import time
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import structlog

from actors.rollout.engines.weights.files import WeightsDamaged
from actors.rollout.engines.weights.loads import Loads
from actors.rollout.engines.weights.proof import (
    KnownChecksums,
    ServerInfo,
    WeightsMismatch,
    holds_all_digits,
    is_thorough,
    label_mismatch,
    probe_mismatch,
    server_of,
    tolerance_of,
)
from actors.rollout.engines.weights.session import Part, Place
from actors.rollout.engines.weights.tensors import layout_of, tensors_mismatch
from actors.rollout.engines.weights.updater import Expected, Updater
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.errors import RequestRefused
from messages import WeightProbe, WeightsAnnounced
from runtime.settings.topology import StartWeights, Verify, WeightFormat

log = structlog.get_logger()

FROM_PEER: Final = "remote_instance"  # SGLang's load format
UNTOLD: Final = "default"  # what SGLang calls weights until it is told

Done = Callable[[], Awaitable[None]]


async def nothing() -> None:
    """There is nothing to be done."""


class Sent(NamedTuple):
    """Weights that an engine has proven."""

    version: int
    checksum: str  # of their files, or of what a session sent


class Brought(NamedTuple):
    """What became of a load."""

    label: str  # under which the engine holds the weights, proven
    pause_s: float  # that it began no request, as `Updater.update` says


class Prover:
    """Brings engines to announced weights. What they are asked beside their label, `verify` says.

    The checksum is asked while the engine stands still, before it generates from the new weights; the log-probs of the
    probe right after it goes on. What requests make until then waits for the proof, by its label (loads.py).
    """

    def __init__(
        self,
        client: SglangClient,
        updater: Updater,
        loads: Loads,
        *,
        verify: Verify | None,
        trainer_dtype: str,
        weight_format: WeightFormat = "as_trained",
        start_weights: StartWeights = "files",
    ) -> None:
        self.loads = loads
        self._start_weights: StartWeights = start_weights
        self._client = client
        self._updater = updater
        self._verify: Verify | None = verify
        self._trainer_dtype = trainer_dtype
        self._weight_format: WeightFormat = weight_format
        self._known = KnownChecksums()
        self._newest = Sent(0, "")

    async def bring(
        self,
        engine: str,
        url: str,
        announced: WeightsAnnounced,
        *,
        first: bool,
        loaded: Done = nothing,
        check_read: Done = nothing,
        part: Part | None = None,
    ) -> Brought:
        """Have an engine load weights, and prove that it holds them.

        Args:
            engine: its name.
            url: where it listens.
            announced: what it is to load.
            first: whether it has not proven any weights since it was last not admitted.
            loaded: done once it holds them, before it is to generate.
            check_read: done once it has read its files, or failed to; raises where these are not what was announced.
            part: in the session that brings them; none: they are in files.

        Raises:
            WeightsMismatch: it does not hold them.
            EngineError: it did not take them, or does not answer.
        """
        label = self.loads.begin(engine, announced.version)
        try:
            if is_thorough(self._verify, announced, first=first):
                pause_s = await self._load_and_prove(engine, url, announced, label, loaded, check_read, part)
            else:
                pause_s = await self._updater.update(url, announced, label, part=part)
                await self._check_label(engine, url, label)
                if part is not None and announced.transport == "ipc":
                    part.finish()
                await loaded()
                await check_read()
            self.loads.prove(label)
        except (RequestRefused, WeightsMismatch) as error:
            if not isinstance(error, WeightsDamaged):
                await check_read()  # which tells why
            raise
        finally:
            self.loads.refuse(label)
        return Brought(label, pause_s)

    async def adopt(self, engine: str, url: str, announced: WeightsAnnounced) -> str | None:
        """Prove the weights that a peer gave an engine at its start; none: they are not the announced ones.

        The engine generates nothing yet. Its peer may have taken newer weights while it sent, so that they may be a
        mixture. What is not proven here, the engine is brought by the usual way.

        Returns:
            The label under which the engine holds them.

        Raises:
            EngineError: it does not answer.
        """
        if self._start_weights != "peer" or announced.version != self._newest.version:
            return None
        info = await self._client.server_info(url)
        if info.get("load_format") != FROM_PEER or await self._client.weight_version(url) != UNTOLD:
            return None
        server = server_of(info)
        tensors = (await self._client.checksums(url)).per_engine_checksum
        if not tensors or tensors != self._known.tensors(server, self._newest.checksum):
            log.info("first_weights_not_proven", engine=engine, weight_version=announced.version)
            return None
        label = self.loads.begin(engine, announced.version)
        try:
            await self._client.update_version(url, label)
            await self._check_label(engine, url, label)
            if announced.probe is not None:
                await self._check_probe(engine, url, announced.probe, server)
            self.loads.prove(label)
        except WeightsMismatch as error:
            log.warning("first_weights_refused", engine=engine, reason=str(error))
            return None
        finally:
            self.loads.refuse(label)
        log.info("first_weights_proven", engine=engine, weight_version=announced.version)
        return label

    def is_paused(self, url: str) -> bool:
        """Whether we paused an engine, or our predecessor did, and it could not be told to go on."""
        return self._updater.is_paused(url)

    async def forget_pause(self, url: str) -> None:
        """An engine says that it generates."""
        await self._updater.forget_pause(url)

    async def proceed(self, url: str) -> None:
        """End a pause of an engine, if there is one.

        Raises:
            EngineError: it could not be told.
        """
        await self._updater.proceed(url)

    async def clear(self, url: str) -> None:
        """Interrupt the requests of an engine that holds the wrong weights."""
        await self._updater.clear(url)

    async def place(self, url: str, announced: WeightsAnnounced, *, first: bool) -> Place:
        """How an engine takes part in a session; `first` as for `bring`.

        Raises:
            EngineError: it does not say.
        """
        info = await self._client.server_info(url)
        num_ranks = int(info.get("tp_size", 1)) * int(info.get("pp_size", 1))
        is_compared = is_thorough(self._verify, announced, first=first)
        return Place(num_ranks, is_compared, layout_of(info) if is_compared else None)

    async def _load_and_prove(
        self,
        engine: str,
        url: str,
        announced: WeightsAnnounced,
        label: str,
        loaded: Done,
        check_read: Done,
        part: Part | None,
    ) -> float:
        server = server_of(await self._client.server_info(url))
        sent, tensors, by_tensor = "", None, False
        took_s = 0.0

        async def look(checksum: str, expected: Expected) -> None:
            nonlocal sent, tensors, by_tensor, took_s
            begin = time.perf_counter()
            await self._check_label(engine, url, label)
            said = await self._client.checksums(url)
            if part is not None and part.place.wants is not None and part.place.wants.key in expected:
                by_tensor = True
                ranks = [rank.checksums for rank in said.ranks]
                self._refuse_if(engine, tensors_mismatch(expected[part.place.wants.key], ranks, part.came))
            sent, tensors = checksum, said.per_engine_checksum
            self._refuse_if(engine, self._checksum_mismatch(server, sent, tensors))
            took_s += time.perf_counter() - begin

        pause_s = await self._updater.update(url, announced, label, look, part)
        if part is not None and announced.transport == "ipc":
            part.finish()  # the probe wants memory that an engine of the trainer's gets only then
        await loaded()
        begin = time.perf_counter()
        if announced.probe is not None:
            await self._check_probe(engine, url, announced.probe, server)
        await check_read()  # before its checksum is what others are compared with
        self._refuse_if(engine, self._checksum_mismatch(server, sent, tensors))  # others may have proven theirs
        assert tensors is not None
        self._known.add(server, engine, sent, tensors)
        self._newest = Sent(announced.version, sent)
        took_s += time.perf_counter() - begin
        version = announced.version
        log.info("weights_proven", engine=engine, weight_version=version, by_tensor=by_tensor, took_s=took_s)
        return pause_s

    async def _check_probe(self, engine: str, url: str, probe: WeightProbe, server: ServerInfo) -> None:
        log_probs = await self._client.prompt_log_probs(url, probe.token_ids)
        tolerance = tolerance_of(server, self._trainer_dtype, self._weight_format)
        self._refuse_if(engine, probe_mismatch(probe, log_probs, tolerance=tolerance))

    async def _check_label(self, engine: str, url: str, label: str) -> None:
        self._refuse_if(engine, label_mismatch(label, await self._client.weight_version(url)))

    def _checksum_mismatch(self, server: ServerInfo, sent: str, tensors: str | None) -> str:
        all_digits = holds_all_digits(server, self._trainer_dtype, self._weight_format)
        return self._known.mismatch(server, sent, tensors, all_digits=all_digits)

    @staticmethod
    def _refuse_if(engine: str, reason: str) -> None:
        if reason:
            raise WeightsMismatch(f"{engine}: {reason}")
