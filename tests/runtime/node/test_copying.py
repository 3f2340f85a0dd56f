"""A node daemon's local copies of weights: each is made once for all requests, and no request waits for ever."""

import threading
from collections.abc import Mapping
from pathlib import Path
from threading import Event

import anyio
import msgspec
import pytest

import runtime.node.copying as copying
from actors.trainer.weights.publish import Published, Versions
from messages import FileSum, LocalCopyGiven, LocalCopyRequested
from runtime.models.checksums import checksums_of
from runtime.models.copies import make_copy
from runtime.models.delta import Version
from runtime.node.copying import MAX_JOBS, LocalCopies
from tests.support.published import changed, drawn, flip, publish

pytestmark = pytest.mark.anyio


@pytest.fixture
def published(tmp_path: Path) -> list[Published]:
    """A whole version and changes to it."""
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")
    versions = Versions(tmp_path / "weights", model, every=4)
    return [publish(versions, 1, drawn()), publish(versions, 2, changed(drawn(), 1))]


def request(published: list[Published], number: int, *, timeout_s: float = 20.0) -> LocalCopyRequested:
    each = published[number - 1]
    return LocalCopyRequested(version=number, checksum=each.checksum, path=str(each.path), timeout_s=timeout_s)


class Gate:
    """Holds the making of copies, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = Event()
        self.made: list[int] = []
        monkeypatch.setattr(copying, "make_copy", self._make)

    def _make(
        self,
        wanted: Version,
        published: Path,
        copies: Path,
        *,
        doubted: bool,
        files: Mapping[str, FileSum],
        links: bool,
    ) -> Path:
        assert self.open.wait(20)
        self.made.append(wanted.number)
        return make_copy(wanted, published, copies, doubted=doubted, files=files, links=links)


async def test_many_ask_and_a_copy_is_made_once(
    published: list[Published], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, copies = Gate(monkeypatch), LocalCopies(tmp_path / "copies")
    answers: list[LocalCopyGiven] = []

    async def ask(number: int) -> None:
        answers.append(await copies.answer(request(published, number)))

    async with anyio.create_task_group() as group:
        for number in (1, 1, 2, 1, 2):
            group.start_soon(ask, number)
        await anyio.wait_all_tasks_blocked()  # the event loop goes on meanwhile
        gate.open.set()
    assert sorted(gate.made) == [1, 2]
    paths = sorted(answer.path for answer in answers)
    assert paths == [str(tmp_path / "copies" / f"v00000{number}") for number in (1, 1, 1, 2, 2)]
    for each in published:
        assert checksums_of(tmp_path / "copies" / Path(each.path or "").name).total == each.checksum


async def test_who_has_waited_long_enough_is_told_and_the_copy_goes_on(
    published: list[Published], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, copies = Gate(monkeypatch), LocalCopies(tmp_path / "copies")
    late = await copies.answer(request(published, 1, timeout_s=0.05))
    assert (late.path, late.reason) == ("", "not copied within 0.05 s; the copy continues in the background")
    gate.open.set()
    assert (await copies.answer(request(published, 1))).path
    assert gate.made == [1]


async def test_more_versions_at_a_time_than_it_takes_are_refused(
    published: list[Published], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, copies = Gate(monkeypatch), LocalCopies(tmp_path / "copies")
    for number in range(10, 10 + MAX_JOBS):
        asked = LocalCopyRequested(version=number, checksum="c", path=str(tmp_path), timeout_s=0.01)
        assert "the copy continues in the background" in (await copies.answer(asked)).reason
    assert (await copies.answer(request(published, 1))).reason == f"busy: {MAX_JOBS} other versions are being copied"
    gate.open.set()


async def test_what_cannot_be_copied_is_told_with_the_reason(published: list[Published], tmp_path: Path) -> None:
    copies = LocalCopies(tmp_path / "copies")
    path = published[1].path
    assert path is not None
    flip(path / "delta-00001-of-00001.bin", 0)
    answer = await copies.answer(request(published, 2))
    assert answer.path == ""
    assert "damaged: the CRC of layers.1.w does not match" in answer.reason
    assert (await copies.answer(request(published, 1))).path


async def test_a_failure_of_ours_is_an_answer_too(
    published: list[Published], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Path:
        raise RuntimeError("a defect")

    monkeypatch.setattr(copying, "make_copy", fail)
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    answer = await LocalCopies(tmp_path / "copies").answer(request(published, 1))
    for thread in threading.enumerate():
        if thread.name == "copy":
            thread.join(20)  # it fails after its answer
    assert answer.reason == "the node daemon failed to copy it; see logs/daemon.jsonl"


async def test_a_copy_that_an_engine_has_read_is_compared_and_left_as_it_is(
    published: list[Published], tmp_path: Path
) -> None:
    each = published[1]
    copies = LocalCopies(tmp_path / "copies")
    ask = msgspec.structs.replace(request(published, 2), files=dict(each.files))
    given = await copies.answer(ask)
    was_read = msgspec.structs.replace(ask, was_read=True)
    assert await copies.answer(was_read) == given
    flip(Path(given.path) / "model.safetensors", -1)
    for _ in range(2):
        damaged = await copies.answer(was_read)
        assert damaged.path == ""
        assert damaged.reason.startswith(f"{given.path}/model.safetensors: damaged: its CRC-32 is ")
    assert await copies.answer(ask) == await copies.answer(was_read) == given
