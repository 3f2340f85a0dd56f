"""Samples on the wire."""

import msgspec
import pytest

from messages import SampleStatus, SampleSummary, SegmentRef


def test_a_sample_has_one_of_five_statuses() -> None:
    assert [str(status) for status in SampleStatus] == ["pending", "completed", "truncated", "aborted", "failed"]


@pytest.mark.parametrize("status", SampleStatus)
def test_a_summary_comes_back_whole_with_its_status_as_text(status: SampleStatus) -> None:
    summary = SampleSummary(
        index=3,
        part=1,
        status=status,
        segments=(SegmentRef(seq=9, position=2), SegmentRef(seq=11, position=0)),
        prompt_len=4,
        response_len=5,
        reward=-0.5,
        score={"score": -0.5, "pred": "72", "deep": {"list": [1, None]}},
        first_version=2,
        last_version=3,
        reason="why",
    )
    data = msgspec.json.encode(summary)
    assert msgspec.json.decode(data)["status"] == status.value
    for codec in (msgspec.json, msgspec.msgpack):
        back = codec.decode(codec.encode(summary), type=SampleSummary)
        assert back == summary
        assert back.status is status
