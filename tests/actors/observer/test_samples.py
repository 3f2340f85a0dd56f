"""The page's view of samples: who gets them, what a request may ask, and that texts of a run stay texts."""

import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.observer import samples
from actors.observer.observed import Observed
from actors.observer.page import Page, report_page, served
from actors.observer.samples import Samples
from actors.observer.shown_samples import MAX_TOKENS, extremes, token_texts, tokens_shown, worst_and_best_first
from messages import Outcome, SampleStatus
from runtime.data.dump_files import columns_path, keep_newest, write_pair
from runtime.data.dumps import Fate
from runtime.data.trained_tokens import TrainedTokens, trained_path, write_trained
from tests.actors.observer.test_page import ANY_PORT, SECRET, WITH_SECRET
from tests.build.dumps import dumped_group
from tests.build.samples import segment

MODEL = Path(__file__).parents[3] / "topologies/demo/models/reverse-digits"
SCRIPT = "<script>alert(1)</script>"

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def opened(directory: Path | None) -> AsyncGenerator[aiohttp.ClientSession]:
    page = Page(Observed("r"), lambda: SECRET, dumps=directory)
    async with (
        served(page, ANY_PORT) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
    ):
        yield client


async def answered(client: aiohttp.ClientSession, path: str, **query: Any) -> tuple[int, Any]:
    response = await client.get(path, params=query, headers=WITH_SECRET)
    assert response.headers["Content-Type"] == "application/json"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert "script-src 'self'" in response.headers["Content-Security-Policy"]
    return response.status, msgspec.json.decode(await response.read())


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    groups = [
        dumped_group(1, (0.5, 1.0, 0.0, None), prompt=SCRIPT),
        dumped_group(
            2,
            (0.0,),
            texts=("see SCRIPT",),
            status=SampleStatus.FAILED,
            reason=f"the grader raised {SCRIPT}",
            score={"why": SCRIPT},
            fate=Fate(verdict=Outcome.DROP, verdict_reason="zero std"),
        ),
    ]
    directory = tmp_path / "dump"
    directory.mkdir()
    write_pair(directory, 0, groups, (1, 0))
    (tmp_path / "rollout_1.jsonl").write_bytes(b"secret")
    (directory / "tokenizer").mkdir()
    shutil.copy(MODEL / "tokenizer.json", directory / "tokenizer")
    return directory


async def test_a_group_whose_step_was_removed_since_is_not_there_any_more(dumps: Path) -> None:
    write_pair(dumps, 1, [dumped_group(7, (0.0, 1.0))], (2, 0))
    async with opened(dumps) as client:
        _, listed = await answered(client, "/samples")
        assert listed["num_groups"] == 3
        keep_newest(dumps, 1)
        _, gone = await answered(client, "/samples/group", group=1)
        assert gone["problem"] == "The dumps have no group 1."
        _, listed = await answered(client, "/samples")
        assert [each["group"] for each in listed["groups"]] == [7]


async def test_a_group_has_its_worst_and_best_sample_first_and_what_the_grader_said(dumps: Path) -> None:
    async with opened(dumps) as client:
        status, listed = await answered(client, "/samples", sort="reward")
        assert (status, listed["num_groups"], listed["next"], listed["problem"]) == (200, 2, None, "")
        assert [(each["group"], each["reward"], each["length"]) for each in listed["groups"]] == [
            (1, 0.5, 2.5),
            (2, 0, 1),
        ]
        samples = {}
        for number in (1, 2):
            _, found = await answered(client, "/samples/group", group=number)
            samples[number] = {each["place"]: each["response"] for each in found["samples"]}
        best_and_worst = {1: [samples[1][1], samples[1][2]], 2: [samples[2][0]]}  # of rewards 0.5, 1, 0, none; and 0
        assert {each["group"]: each["responses"] for each in listed["groups"]} == best_and_worst
        status, group = await answered(client, "/samples/group", group=1)
        assert [(each["place"], each["reward"]) for each in group["samples"]] == [(2, 0), (1, 1), (0, 0.5), (3, None)]
        status, group = await answered(client, "/samples/group", group=2, step=0)
        assert (group["outcome"], group["reason"]) == ("dropped", "zero std")
        assert group["samples"][0]["status"] == "failed"


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([], []), ([1.0], [0]), ([None], [0]), ([0.0, 1.0], [1, 0]), ([1.0, 1.0, 1.0], [2]), ([None, 0.5, None], [1])],
)
def test_a_list_shows_the_best_and_the_worst_of_a_group(rewards: list[float | None], expected: list[int]) -> None:
    assert extremes(rewards) == expected


async def test_a_script_in_a_prompt_or_of_a_grader_is_a_text_in_json(dumps: Path) -> None:
    async with opened(dumps) as client:
        _, listed = await answered(client, "/samples", search="<SCRIPT>ALERT")
        assert [(each["group"], each["prompt"]) for each in listed["groups"]] == [(1, SCRIPT)]
        _, group = await answered(client, "/samples/group", group=1)
        assert group["prompt"] == SCRIPT
        _, group = await answered(client, "/samples/group", group=2)
        assert group["samples"][0]["reason"] == f"the grader raised {SCRIPT}"
        assert msgspec.json.decode(group["samples"][0]["score"]) == {"why": SCRIPT}


async def test_tokens_have_text_log_prob_mask_and_weights(dumps: Path) -> None:
    async with opened(dumps) as client:
        status, tokens = await answered(client, "/samples/tokens", group=1, step=0, place=1)
        assert (status, tokens["total"], tokens["ids"]) == (200, 3, [5, 10, 11])
        assert (tokens["inputs"], tokens["mask"]) == ([1, 0, 0], [0, 1, 0])
        assert (tokens["log_probs"], tokens["versions"]) == ([None, -0.5, -0.5], [None, 1, 1])
        assert len(tokens["texts"]) == 3
        _, rest = await answered(client, "/samples/tokens", group=1, step=0, place=1, **{"from": 2})
        assert (rest["from"], rest["ids"], rest["texts"]) == (2, [11], tokens["texts"][2:])


async def test_tokens_have_what_the_trainer_added(dumps: Path) -> None:
    tokens = TrainedTokens(
        group_id=np.array([1]),
        index=np.array([1]),
        part=np.array([0]),
        left_out=np.zeros(1, np.uint8),
        lengths=np.array([3]),
        trainer_log_probs=np.array([np.nan, -0.75, np.nan], np.float32),
        rules=np.array([0, 2, 1], np.uint32),
        staleness=np.array([-1, 4, -1], np.int32),
        rule_names=("loss_mask", "clip"),
        reasons=(),
    )
    async with opened(dumps) as client:
        _, before = await answered(client, "/samples/tokens", group=1, place=1)
        assert (before["is_trained"], before["rules"]) == (False, [])
        write_trained(dumps, 0, tokens)
        _, shown = await answered(client, "/samples/tokens", group=1, place=1)
        assert (shown["is_trained"], shown["rule_names"], shown["rules"]) == (True, ["loss_mask", "clip"], [0, 2, 1])
        assert (shown["trainer_log_probs"], shown["staleness"]) == ([None, -0.75, None], [-1, 4, -1])
        trained_path(dumps, 0).write_bytes(b"PK damaged")
        status, left = await answered(client, "/samples/tokens", group=1, place=1)
        assert (status, left["ids"], left["is_trained"]) == (200, shown["ids"], False)
        assert "trained_0.npz: cannot be read" in left["trained_problem"]


async def test_a_group_of_a_step_that_is_not_read_yet_is_asked_for_again(
    dumps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "READ_S", 0.0)  # one step at a time, newest first
    write_pair(dumps, 1, [dumped_group(3)], (2, 0))
    async with opened(dumps) as client:
        first = await answered(client, "/samples/group", group=1)
        assert first == (200, {"problem": "Group 1 is looked for: 1 step left to read.", "again": True})
        _, found = await answered(client, "/samples/group", group=1)
        assert (found["group"], found["step"]) == (1, 0)
        _, never = await answered(client, "/samples/group", group=9)
        assert never == {"problem": "The dumps have no group 9.", "again": False}


@pytest.mark.parametrize(
    ("path", "query", "status", "problem"),
    [
        ("/samples/group", {"group": "../../rollout_1"}, 400, "group: is not a number"),
        ("/samples/group", {"group": "1", "step": "../rollout_1"}, 400, "step: is not a number"),
        ("/samples/group", {"group": "1", "step": "-1"}, 400, "step: is not a number"),
        ("/samples/group", {"group": "\u0663"}, 400, "group: is not a number"),
        ("/samples/group", {"group": "9" * 16}, 400, "group: is not a number"),
        ("/samples/group", {}, 400, "group: is missing"),
        ("/samples/group", {"group": "7"}, 200, "The dumps have no group 7."),
        ("/samples/group", {"group": "1", "step": "1"}, 200, "no group 1 in the files rollout_1 of step 2"),
        ("/samples/tokens", {"group": "1", "place": "4"}, 200, "no sample at place 4"),
        ("/samples/tokens", {"group": "1", "place": "x"}, 400, "place: is not a number"),
        ("/samples", {"sort": "__class__"}, 400, "sort: is not known; allowed: step, reward"),
        ("/samples", {"order": "up"}, 400, "order: is not known"),
        ("/samples", {"offset": "1e9"}, 400, "offset: is not a number"),
        ("/samples", {"search": "x" * 1001}, 400, "search: has 1001 characters"),
    ],
)
async def test_a_wrong_parameter_is_named(
    dumps: Path, path: str, query: dict[str, str], status: int, problem: str
) -> None:
    async with opened(dumps) as client:
        found, content = await answered(client, path, **query)
        assert found == status
        assert problem in content["problem"]


async def test_the_guard_of_the_page_stands_before_samples(dumps: Path) -> None:
    async with opened(dumps) as client:
        for path in ("/samples", "/samples/group?group=1", "/samples/tokens?group=1&place=0"):
            for headers, expected in (
                ({}, 401),
                ({"Authorization": "Bearer guess"}, 401),
                ({**WITH_SECRET, "Host": "evil.example"}, 403),
            ):
                response = await client.get(path, headers=headers)
                assert response.status == expected
                assert SCRIPT not in await response.text()


async def test_without_dumps_the_setting_is_named(tmp_path: Path) -> None:
    async with opened(None) as client:
        for path in ("/samples", "/samples/group", "/samples/tokens"):
            status, content = await answered(client, path)
            assert status == 200  # a browser reports another one as an error
            assert "run.dump_details = DIRECTORY" in content["problem"]
    async with opened(tmp_path / "later") as client:
        status, content = await answered(client, "/samples")
        assert (status, content["groups"]) == (200, [])
        assert "later: cannot be read: No such file" in content["problem"]


async def test_damaged_tokens_cost_their_sample_alone(dumps: Path) -> None:
    async with opened(dumps) as client:
        assert (await answered(client, "/samples"))[0] == 200
        columns_path(dumps, 0).write_bytes(b"")
        status, content = await answered(client, "/samples/tokens", group=1, place=0)
        assert status == 409
        assert "rollout_0.npz: cannot be read" in content["problem"]
        assert (await answered(client, "/samples/group", group=1))[0] == 200


def test_the_order_of_samples_by_hand() -> None:
    assert worst_and_best_first([0.5, 2.0, None, -1.0, 2.0]) == [3, 1, 4, 0, 2]
    assert worst_and_best_first([1.0, 1.0]) == [1, 0]
    assert worst_and_best_first([None]) == [0]


def test_input_of_a_tool_is_told_from_what_the_engine_sampled() -> None:
    shown = tokens_shown(
        [segment((7,), prompt=(1, 2), spans=((3, 0, 1),)), segment((8, 9), prompt=(4,), spans=((3, 0, 1), (4, 1, 2)))],
        None,
        0,
    )
    assert shown["ids"] == [1, 2, 7, 4, 8, 9]
    assert shown["inputs"] == [1, 1, 0, 1, 0, 0]
    assert shown["versions"] == [None, None, 3, None, 3, 4]
    assert shown["texts"] is None


def test_a_long_sample_comes_in_parts() -> None:
    long = [segment(tuple(range(MAX_TOKENS + 5)))]
    assert (len(tokens_shown(long, None, 0)["ids"]), tokens_shown(long, None, 0)["total"]) == (4000, 4006)
    assert tokens_shown(long, None, MAX_TOKENS)["ids"] == [3999, 4000, 4001, 4002, 4003, 4004]
    assert tokens_shown(long, None, 9999)["ids"] == []


@settings(max_examples=25)
@given(text=st.text(max_size=30), begin=st.integers(0, 10))
def test_texts_of_tokens_add_up_to_the_text_even_if_a_character_has_several_tokens(text: str, begin: int) -> None:
    ids = list(text.encode())

    def decode(some: Any) -> str:
        return bytes(some).decode(errors="replace")

    texts = token_texts(ids, decode, 0, len(ids))
    assert len(texts) == len(ids)
    assert "".join(texts) == text
    first = len(text[:begin].encode())
    assert "".join(token_texts(ids, decode, first, len(ids))) == text[begin:]


def state_in(page: bytes) -> Any:
    """What the scripts of a report get."""
    return msgspec.json.decode(page.partition(b'id="state">')[2].partition(b"</script>")[0])


def test_a_report_has_the_worst_and_best_groups_of_the_newest_steps(dumps: Path) -> None:
    page = report_page(Observed("r"), {}, {}, dumps, live=False)
    assert SCRIPT.encode() not in page  # it would end the script that holds it
    shown = state_in(page)["samples"]
    assert [group["group"] for group in shown["listed"]["groups"]] == [1, 2]
    assert [group["prompt"] for group in shown["groups"]] == [SCRIPT, "say"]
    assert sorted(shown["tokens"]) == ["0/1/1", "0/1/2", "0/2/0"]  # of group 1 the best and the worst
    assert shown["tokens"]["0/1/1"]["ids"] == [5, 10, 11]


def test_a_report_is_bounded_and_says_why_it_has_no_samples(tmp_path: Path) -> None:
    for step in range(22):
        groups = [dumped_group(2 * step + number, (0.0, 1.0), texts=("x" * 30_000,) * 2) for number in range(2)]
        write_pair(tmp_path, step, groups, (step, 0))
    found = Samples(tmp_path).report(max_bytes=100_000)
    assert {group["step"] for group in found["groups"]} <= set(range(2, 22))
    assert len(found["groups"]) == 3  # 13,333 characters for each of the two responses
    assert Samples(None).report()["listed"]["problem"].startswith("The run keeps no samples: observe.samples = true")
    assert "cannot be read" in Samples(tmp_path / "no").report()["listed"]["problem"]
