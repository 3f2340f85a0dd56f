"""Updates the weights of engines and verifies them."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

import structlog

from actors.rollout.engines.status import UpdateStage
from actors.rollout.engines.weights.adapters import AdapterUpdates, EngineAdapters, base_announcement
from actors.rollout.engines.weights.files import FileSource, WeightsDamaged
from actors.rollout.engines.weights.sync import MemberShape, SyncMember
from actors.rollout.engines.weights.updater import Progress, SentWeights, Updater
from actors.rollout.engines.weights.updates import UpdateTracker
from actors.rollout.engines.weights.verification import (
    KnownChecksums,
    Layout,
    ServerInfo,
    WeightsMismatch,
    gate_of,
    holds_all_digits,
    is_thorough,
    label_mismatch,
    probe_difference,
    probe_mismatch,
    server_of,
    sums_mismatch,
    why_not_compared,
)
from actors.rollout.sglang.client import SglangClient
from actors.rollout.sglang.control_answers import ChecksumAnswer
from actors.rollout.sglang.errors import RequestRefused
from actors.rollout.sglang.facts import FROM_PEER, UNLABELLED
from messages import EngineChecksum, WeightProbe, WeightsAnnounced
from runtime.settings.tables.engines import StartWeights, Verify, WeightFormat

log = structlog.get_logger()

Done = Callable[[], Awaitable[None]]


async def nothing() -> None:
    """Do nothing."""


class VerifiedWeights(NamedTuple):
    """Weights that at least one engine has verified."""

    version: int
    checksum: str  # of their files, or of the tensors of a weight sync


class Updated(NamedTuple):
    """An update so far."""

    stage: UpdateStage
    label: str  # of the weights on the engine
    # seconds without new requests: from the pause, or from when they were blocked or queued, until it generates again.
    # With `drain`, running requests finish during that time.
    pause_s: float = 0.0


class WeightVerifier:
    """Updates engines to announced weights and verifies them. The setting `verify` selects the checks beyond the label.

    Label and checksum are queried while the engine is paused, before it generates from the new weights. The probe
    follows once it generates again. Tokens sampled before the verification ends wait for it, by their label
    (updates.py).
    """

    def __init__(
        self,
        client: SglangClient,
        updater: Updater,
        tracker: UpdateTracker,
        *,
        verify: Verify | None,
        trainer_dtype: str,
        weight_format: WeightFormat = "as_trained",
        start_weights: StartWeights = "files",
        adapters: AdapterUpdates | None = None,
    ) -> None:
        self.updates = tracker
        self._adapters = adapters
        self._start_weights: StartWeights = start_weights
        self._client = client
        self._updater = updater
        self._verify: Verify | None = verify
        self._trainer_dtype = trainer_dtype
        self._weight_format: WeightFormat = weight_format
        self._known = KnownChecksums()
        self._newest = VerifiedWeights(0, "")
        self._not_compared: dict[str, list[str]] = {}  # engines by reason, since the last `take_not_compared`
        self._noted: set[tuple[str, str]] = set()
        self._checksums_by_layout: dict[Layout, EngineChecksum] = {}  # newest, since the last `take_checksums`

    async def update(
        self,
        engine: str,
        url: str,
        announced: WeightsAnnounced,
        *,
        first: bool,
        check_read: Done = nothing,
        member: SyncMember | None = None,
    ) -> AsyncGenerator[Updated]:
        """Update an engine's weights and verify them, step by step; closing it abandons the update.

        Yields:
            Once the engine holds the weights, and once it generates again. They are verified at the end.

        Args:
            engine: its name.
            url: where it listens.
            announced: the weights.
            first: whether this is its first update since it was last not ready.
            check_read: called after it has read its files, or failed to; raises if they differ from the announcement.
            member: its membership in the weight sync; None: the weights are in files.

        Raises:
            WeightsMismatch: it does not hold the weights.
            EngineError: it refused the update, or does not respond.
        """
        label = self.updates.begin(engine, announced.version)
        self._updater.note(url, "begins")
        server, own = None, None
        try:
            if is_thorough(self._verify, announced, first=first):
                server = server_of(await self._client.server_info(url))  # a hanging engine is found before its update
            if member is not None:
                await member.next()  # WeightSyncPrepared: the engine generates until then
            begin = time.perf_counter()
            is_compared = server is not None
            async with self._updater.loaded(url, announced, label, member, is_compared=is_compared) as sent:
                self._refuse_if(engine, label_mismatch(label, await self._client.weight_version(url)))
                if server is not None:
                    size_bytes = announced.size_bytes if member is None else member.received_bytes
                    found = await self._checksums(url, size_bytes)
                    own = found.per_engine_checksum
                    self._refuse_if(engine, self._sums_mismatch(engine, server, sent, found))
                    self._refuse_if(engine, self._checksum_mismatch(server, sent.checksum, own))
                yield Updated(UpdateStage.LOADED, label)
            pause_s = time.perf_counter() - begin
            if member is not None and announced.transport == "ipc":
                member.finish()  # the rest needs memory that a colocated engine gets only after this
            yield Updated(UpdateStage.RESUMED, label, pause_s)
            self._updater.note(url, "is verified")
            if server is not None and announced.probe is not None:
                await self._check_probe(engine, url, announced.probe, server)
            await check_read()  # before its checksum becomes the reference for other engines
            if server is not None:
                # other engines may have been verified meanwhile
                self._refuse_if(engine, self._checksum_mismatch(server, sent.checksum, own))
                if own:
                    self._known.add(server.layout, engine, sent.checksum, own)
                    found = EngineChecksum(layout=server.layout, engine=engine, files=sent.checksum, tensors=own)
                    self._checksums_by_layout[server.layout] = found
                self._newest = VerifiedWeights(announced.version, sent.checksum)
                log.info("weights_verified", engine=engine, weight_version=announced.version)
            self.updates.accept(label)
        except (RequestRefused, WeightsMismatch) as error:
            if not isinstance(error, WeightsDamaged):
                await check_read()  # raises the actual cause if the files are damaged
            raise
        finally:
            self.updates.refuse(label)
            self._updater.end_note(url)

    async def update_adapter(
        self,
        engine: str,
        url: str,
        announced: WeightsAnnounced,
        adapters: EngineAdapters,
        files: FileSource,
        *,
        first: bool,
    ) -> AsyncGenerator[Updated]:
        """Load the adapter of a version and verify it, while the engine generates; closing it abandons the update.

        The first time, load the base model before, as `update` does.

        Yields:
            As `update` does; the labels are those of the base model.

        Args:
            engine: its name.
            url: where it listens.
            announced: the version, with a base.
            adapters: of the engine.
            files: source of the files.
            first: whether this is its first update since it was last not ready.

        Raises:
            WeightsMismatch: it does not hold the weights.
            EngineError: it refused the update, or does not respond.
        """
        assert self._adapters is not None, "the fleet serves adapters"
        assert announced.base is not None, "an adapter is of a base model"
        if first or adapters.base_checksum != announced.base.checksum:
            base = await files.provide(base_announcement(announced, announced.base), doubted=False)
            adapters.base_checksum = ""
            label, check_read = "", partial(files.check_read, base)
            async with aclosing(self.update(engine, url, base, first=True, check_read=check_read)) as steps:
                async for done in steps:
                    label = done.label
                    yield done
            adapters.base_label, adapters.base_checksum = label, announced.base.checksum
            await self._adapters.inherit(url, adapters)
        label = self.updates.begin(engine, announced.version)
        adapter = self._adapters.named(label, announced.version)
        self._updater.note(url, "loads an adapter", self._updater.limits.load_s(announced.size_bytes))
        is_verified = False
        try:
            await self._adapters.load(url, adapters, announced, adapter)
            yield Updated(UpdateStage.RESUMED, adapters.base_label)
            self._updater.note(url, "is verified")
            self._refuse_if(engine, label_mismatch(adapters.base_label, await self._client.weight_version(url)))
            if announced.probe is not None and is_thorough(self._verify, announced, first=first):
                server = server_of(await self._client.server_info(url))
                await self._check_probe(engine, url, announced.probe, server, adapter.name)
                log.info("weights_verified", engine=engine, weight_version=announced.version)
            await files.check_read(announced)
            self.updates.accept(label)
            is_verified = True
        except (RequestRefused, WeightsMismatch) as error:
            if not isinstance(error, WeightsDamaged):
                await files.check_read(announced)  # raises the actual cause if the files are damaged
            raise
        finally:
            adapters.end(adapter, is_verified=is_verified)
            self.updates.refuse(label)
            self._updater.end_note(url)

    async def tidy(self, url: str, adapters: EngineAdapters) -> None:
        """Unload adapters that no request uses. Never returns."""
        assert self._adapters is not None, "the fleet serves adapters"
        await self._adapters.tidy(url, adapters)

    def progress(self, url: str) -> Progress | None:
        """Return what an engine does in its update; None: it is not being updated."""
        return self._updater.progress(url)

    async def adopt(self, engine: str, url: str, announced: WeightsAnnounced) -> str | None:
        """Verify the weights that a peer gave an engine at its start; None if they are not the announced ones.

        The engine generates nothing yet. Its peer may have been updated while it sent, so the weights may be a mixture.
        If the verification fails here, the engine gets a normal update.

        Returns:
            The label of the weights on the engine.

        Raises:
            EngineError: it does not respond.
        """
        if self._start_weights != "peer" or announced.version != self._newest.version:
            return None
        info = await self._client.server_info(url)
        if info.get("load_format") != FROM_PEER or await self._client.weight_version(url) != UNLABELLED:
            return None
        server = server_of(info)
        tensors = await self._client.checksum(url)
        if not tensors or tensors != self._known.tensors(server, self._newest.checksum):
            log.info("first_weights_not_verified", engine=engine, weight_version=announced.version)
            return None
        label = self.updates.begin(engine, announced.version)
        try:
            await self._client.update_version(url, label)
            self._refuse_if(engine, label_mismatch(label, await self._client.weight_version(url)))
            if announced.probe is not None:
                await self._check_probe(engine, url, announced.probe, server)
            self.updates.accept(label)
        except WeightsMismatch as error:
            log.warning("first_weights_refused", engine=engine, reason=str(error))
            return None
        finally:
            self.updates.refuse(label)
        log.info("first_weights_verified", engine=engine, weight_version=announced.version)
        return label

    def is_paused(self, url: str) -> bool:
        """Whether this or an earlier rollout actor paused an engine and has not been able to continue it."""
        return self._updater.is_paused(url)

    async def forget_pause(self, url: str) -> None:
        """Drop the note of a pause: the engine reports that it generates."""
        await self._updater.forget_pause(url)

    async def proceed(self, url: str) -> None:
        """End an engine's pause, if there is one.

        Raises:
            EngineError: the call failed.
        """
        await self._updater.proceed(url)

    async def clear(self, url: str) -> None:
        """Interrupt the requests of an engine that holds the wrong weights."""
        await self._updater.clear(url)

    async def shape(self, url: str, announced: WeightsAnnounced, *, first: bool) -> MemberShape:
        """Return an engine's ranks and layout for a weight sync; `first` is the argument of `update`.

        Raises:
            EngineError: it does not report its configuration.
        """
        info = await self._client.server_info(url)
        num_ranks = int(info.get("tp_size", 1)) * int(info.get("pp_size", 1))
        return MemberShape(num_ranks, is_compared=is_thorough(self._verify, announced, first=first))

    async def _check_probe(
        self, engine: str, url: str, probe: WeightProbe, server: ServerInfo, adapter: str = ""
    ) -> None:
        log_probs = await self._client.prompt_log_probs(url, probe.token_ids, adapter)
        gate = gate_of(probe, server, self._trainer_dtype, self._weight_format)
        log.info("probe_compared", engine=engine, difference=probe_difference(probe, log_probs), allowed=gate.tolerance)
        self._refuse_if(engine, probe_mismatch(probe, log_probs, gate))

    def take_not_compared(self) -> dict[str, tuple[str, ...]]:
        """Return the engines whose tensors are not compared with the trainer's sums, by reason; each pair once."""
        found = {reason: tuple(engines) for reason, engines in self._not_compared.items()}
        self._not_compared.clear()
        return found

    def take_checksums(self) -> tuple[EngineChecksum, ...]:
        """Return the newest checksums of verified engines, by layout; each once."""
        found = tuple(self._checksums_by_layout.values())
        self._checksums_by_layout.clear()
        return found

    def learn(self, checksums: Iterable[EngineChecksum]) -> None:
        """Compare engines from now on with those that other rollout actors verified."""
        for each in checksums:
            self._known.add(each.layout, each.engine, each.files, each.tensors)

    def _sums_mismatch(self, engine: str, server: ServerInfo, sent: SentWeights, found: ChecksumAnswer) -> str:
        reason = why_not_compared(server, sent.sums, sent.no_sums, found)
        if reason and (reason, engine) not in self._noted:
            self._noted.add((reason, engine))
            self._not_compared.setdefault(reason, []).append(engine)
            log.info("sums_not_compared", engine=engine, reason=reason)
        return "" if reason or sent.sums is None else sums_mismatch(sent.sums, found)

    async def _checksums(self, url: str, size_bytes: int) -> ChecksumAnswer:
        """Return an engine's checksums of its weights."""
        limit_s = self._updater.limits.load_s(size_bytes)
        self._updater.note(url, f"computes the checksum of {size_bytes / 1e9:,.1f} GB", limit_s)
        return await self._client.checksums(url, limit_s)

    def _checksum_mismatch(self, server: ServerInfo, sent: str, tensors: str | None) -> str:
        all_digits = holds_all_digits(server, self._trainer_dtype, self._weight_format)
        return self._known.mismatch(server, sent, tensors, all_digits=all_digits)

    @staticmethod
    def _refuse_if(engine: str, reason: str) -> None:
        if reason:
            raise WeightsMismatch(f"{engine}: {reason}")
