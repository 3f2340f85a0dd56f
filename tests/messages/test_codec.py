"""Messages survive the wire, also without later fields, and what does not decode says why."""

import inspect

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from messages import (
    BucketSent,
    BufferStarted,
    ColumnPublished,
    DeadLetter,
    DecodeError,
    EvalEnded,
    EvalIssued,
    EvalSetSize,
    Float32Array,
    GroupCompleted,
    GroupsIssued,
    HaltAnswered,
    Int32Array,
    IssuedGroup,
    Message,
    RoundHalted,
    SampleKey,
    SampleStatus,
    SampleSummary,
    Segment,
    SegmentRef,
    SegmentsPublished,
    SnapshotTaken,
    UInt8Array,
    UpdateGroup,
    UserFunctionRaised,
    VerdictGiven,
    WeightSpan,
    WeightSyncAnswered,
    WeightSyncDecided,
    WeightSyncEnded,
    WeightSyncMember,
    WeightSyncPrepared,
    WeightSyncRequested,
    decode,
    encode,
    message_types,
    tag_of,
)
from messages.codec import CONTENT_TYPE_HEADER, JSON, MSGPACK, TYPE_HEADER

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def segment(ids: list[int], prompt: list[int]) -> Segment:
    spans = (WeightSpan(version=3, start=0, end=len(ids)),) if ids else ()
    return Segment(
        sample=SampleKey(group_id=1, attempt=2, index=3),
        prompt_ids=Int32Array(prompt),
        response_ids=Int32Array(ids),
        loss_mask=UInt8Array([1] * len(ids)),
        rollout_log_probs=Float32Array([-0.5] * len(ids)),
        weight_spans=spans,
        text="x",
    )


def published(ids: list[int], prompt: list[int]) -> SegmentsPublished:
    return SegmentsPublished(group_id=1, attempt=2, lease="l", segments=(segment(ids, prompt),))


@given(TOKENS, TOKENS, st.sampled_from([JSON, MSGPACK]))
def test_segments_survive_the_wire_in_both_encodings(ids: list[int], prompt: list[int], content_type: str) -> None:
    message = published(ids, prompt)
    back = decode(*encode(message, content_type=content_type))
    assert isinstance(back, SegmentsPublished)
    assert back.segments[0].response_ids.tolist() == ids
    assert back.segments[0].prompt_ids.tolist() == prompt
    assert back.segments[0].rollout_log_probs.dtype == np.float32
    assert encode(back, content_type=content_type) == encode(message, content_type=content_type)


def test_decoded_arrays_are_views_of_the_message() -> None:
    back = decode(*encode(published([1, 2, 3], [4])))
    assert isinstance(back, SegmentsPublished)
    assert not back.segments[0].response_ids.flags.owndata


def test_packing_costs_four_bytes_a_token() -> None:
    sizes = [len(encode(published([1] * n, [])).payload) for n in (1000, 2000)]
    assert sizes[1] - sizes[0] == 1000 * (4 + 4 + 1)


def test_a_segment_of_unequal_lengths_is_refused_at_both_ends() -> None:
    fields = msgspec.structs.asdict(segment([1, 2], [])) | {"loss_mask": UInt8Array([1])}
    with pytest.raises(ValueError, match="differ in length"):
        Segment(**fields)
    payload = encode(published([1, 2], [])).payload.replace(b"loss_mask\xd5\x03\x01\x01", b"loss_mask\xd4\x03\x01")
    with pytest.raises(DecodeError, match="differ in length"):
        decode(payload, {TYPE_HEADER: "segments_published", CONTENT_TYPE_HEADER: MSGPACK})


@pytest.mark.parametrize("spans", [(), ((0, 1),), ((0, 1), (1, 3)), ((1, 2),), ((0, 2), (2, 2))])
def test_weight_spans_that_do_not_cover_the_response_are_refused(spans: tuple[tuple[int, int], ...]) -> None:
    fields = msgspec.structs.asdict(segment([1, 2], []))
    fields["weight_spans"] = tuple(WeightSpan(version=1, start=start, end=end) for start, end in spans)
    with pytest.raises(ValueError, match="span"):
        Segment(**fields)


@pytest.mark.parametrize(
    ("payload", "headers", "reason"),
    [
        (b"{}", None, "no Physarum-Type header"),
        (b"{}", {TYPE_HEADER: "group_vanished"}, "unknown message type 'group_vanished'"),
        (b"{}", {TYPE_HEADER: "verdict_given", CONTENT_TYPE_HEADER: "text/xml"}, "unknown content type 'text/xml'"),
        (b"{", {TYPE_HEADER: "verdict_given"}, "truncated"),
        (b"{}", {TYPE_HEADER: "verdict_given"}, "missing required field `group_id`"),
        (b'{"type":"group_failed"}', {TYPE_HEADER: "verdict_given"}, "Invalid value 'group_failed'"),
        (b"\x81", {TYPE_HEADER: "segments_published", CONTENT_TYPE_HEADER: MSGPACK}, "truncated"),
    ],
)
def test_what_does_not_decode_says_why(payload: bytes, headers: dict[str, str] | None, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason.replace("`", ".").replace("(", ".")):
        decode(payload, headers)


def test_an_unknown_extension_and_a_torn_array_are_refused() -> None:
    good = encode(published([1, 2], []))
    marker = b"response_ids\xd7\x01"
    assert marker in good.payload
    with pytest.raises(DecodeError, match="unknown extension code 9"):
        decode(good.payload.replace(marker, b"response_ids\xd7\x09"), good.headers)


def test_an_array_takes_neither_two_dimensions_nor_values_out_of_range() -> None:
    with pytest.raises(ValueError, match="one dimension"):
        Int32Array(np.zeros((2, 2), dtype=np.int32))
    with pytest.raises(ValueError, match="range"):
        UInt8Array([256])


def test_arithmetic_leaves_the_packed_type() -> None:
    assert type(Int32Array([1, 2]) * 0.5) is np.ndarray


def test_unknown_fields_are_ignored_so_that_fields_can_be_added() -> None:
    payload = b'{"type":"verdict_given","group_id":1,"attempt":0,"event_seq":5,"outcome":"keep","later":1}'
    message = decode(payload, {TYPE_HEADER: "verdict_given"})
    assert isinstance(message, VerdictGiven)
    assert message.reason is None


# Bytes as they are stored. A changed line is a changed message: new fields have defaults, all else is a new tag.
GOLDEN = [
    (
        JSON,
        b'{"type":"user_function_raised","instance":"reward","function":"the grader my.py:f","traceback":"KeyError",'
        b'"took_too_long":false}',
        UserFunctionRaised(instance="reward", function="the grader my.py:f", traceback="KeyError"),
    ),
    (
        JSON,
        b'{"type":"snapshot_taken","incarnation":1,"covers":2,"fold_version":14,"content":"AP8=","chunks":[3,4],"digest":"5e"}',
        SnapshotTaken(incarnation=1, covers=2, fold_version=14, content=b"\x00\xff", chunks=(3, 4), digest="5e"),
    ),
    (
        JSON,
        b'{"type":"buffer_started","incarnation":1,"verdicts":true,"tells_source":false}',
        BufferStarted(incarnation=1),
    ),
    (
        JSON,
        b'{"type":"groups_issued","incarnation":1,"round":0,"min_version":1,'
        b'"groups":[{"group_id":0,"attempt":0,"prompt":0,"prompt_parts":[]}],"num_samples":0,"verdicts":true,'
        b'"draws":[],"draws_digest":"","num_told":0,"more":0}',
        GroupsIssued(incarnation=1, round=0, min_version=1, groups=(IssuedGroup(group_id=0, attempt=0, prompt=0),)),
    ),
    (
        JSON,
        b'{"type":"group_completed","group_id":4,"attempt":1,"lease":"a","round":2,"instance":"rollout","data":"d",'
        b'"samples":[{"index":0,"status":"completed","segments":[{"seq":9,"position":0}],"prompt_len":4,'
        b'"response_len":3,"reward":0.5,"first_version":2,"last_version":3}],"baseline":null,"metadata":{},'
        b'"prompt_parts":[],"rollout_time_s":0.0,"reward_time_s":0.0,"engine":{},"last_sample":{}}',
        GroupCompleted(
            group_id=4,
            attempt=1,
            lease="a",
            round=2,
            instance="rollout",
            data="d",
            samples=(
                SampleSummary(
                    index=0,
                    status=SampleStatus.COMPLETED,
                    segments=(SegmentRef(seq=9, position=0),),
                    prompt_len=4,
                    response_len=3,
                    reward=0.5,
                    first_version=2,
                    last_version=3,
                ),
            ),
        ),
    ),
    (
        JSON,
        b'{"type":"eval_ended","incarnation":1,"step":2,"version":3,"metrics":{"eval/s":0.5},"not_finite":[],'
        b'"newest_version":0,"not_finite_values":[],"failed":{"s":"KeyError()"},"not_asked":{"s":3}}',
        EvalEnded(
            incarnation=1, step=2, version=3, metrics={"eval/s": 0.5}, failed={"s": "KeyError()"}, not_asked={"s": 3}
        ),
    ),
    (
        JSON,
        b'{"type":"eval_issued","incarnation":1,"step":2,"version":3,"sets":[{"set":"s","num_items":4,"keeps":true,'
        b'"has_function":true}],"payload_seq":0}',
        EvalIssued(
            incarnation=1, step=2, version=3, sets=(EvalSetSize(set="s", num_items=4, keeps=True, has_function=True),)
        ),
    ),
    (
        JSON,
        b'{"type":"weight_sync_prepared","session":"1.2","incarnation":1,"version":3,"deadline_s":5.0,"part":0,'
        b'"num_parts":1}',
        WeightSyncPrepared(session="1.2", incarnation=1, version=3, deadline_s=5.0),
    ),
    (
        JSON,
        b'{"type":"weight_sync_bucket","session":"1.2","stage":0,"index":4,"names":["a"],"dtypes":["float32"],'
        b'"shapes":[[2,3]],"groups":[{"name":"g","address":"10.0.0.1","port":9,"world_size":2,"backend":"gloo"}],'
        b'"offsets":{"e":1},"payloads":{},"segments":[]}',
        BucketSent(
            session="1.2",
            stage=0,
            index=4,
            names=("a",),
            dtypes=("float32",),
            shapes=((2, 3),),
            groups=(UpdateGroup(name="g", address="10.0.0.1", port=9, world_size=2, backend="gloo"),),
            offsets={"e": 1},
        ),
    ),
    (
        JSON,
        b'{"type":"weight_sync_decided","session":"1.2","is_commit":true,"reason":"","checksum":"c","num_buckets":5,'
        b'"engine_sums":null,"no_sums":""}',
        WeightSyncDecided(session="1.2", is_commit=True, checksum="c", num_buckets=5),
    ),
    (
        JSON,
        b'{"type":"round_halted","incarnation":1,"round":2,"by_hand":false}',
        RoundHalted(incarnation=1, round=2),
    ),
    (
        JSON,
        b'{"type":"halt_answered","round":2,"num_groups":8,"reason":""}',
        HaltAnswered(round=2, num_groups=8),
    ),
    (
        JSON,
        b'{"type":"weight_sync_requested","version":3,"engines":["e"]}',
        WeightSyncRequested(version=3, engines=("e",)),
    ),
    (
        JSON,
        b'{"type":"weight_sync_answered","failed":{"e":"r"},"pending":{"f":"d"},'
        b'"members":[{"engine":"e","key":"e.1","num_ranks":2,"is_compared":true}]}',
        WeightSyncAnswered(
            failed={"e": "r"}, pending={"f": "d"}, members=(WeightSyncMember(engine="e", key="e.1", num_ranks=2),)
        ),
    ),
    (
        JSON,
        b'{"type":"weight_sync_ended","session":"1.2","incarnation":1,"version":3,"transport":"ipc","holds":["e"],'
        b'"out":{},"num_buckets":5,"sent_bytes":6,"took_s":0.5,"part":0}',
        WeightSyncEnded(
            session="1.2",
            incarnation=1,
            version=3,
            transport="ipc",
            holds=("e",),
            out={},
            num_buckets=5,
            sent_bytes=6,
            took_s=0.5,
        ),
    ),
    (
        JSON,
        b'{"type":"dead_letter","origin":"work.1","subject":"s","reason":"r","headers":{},"payload":"YWI="}',
        DeadLetter(origin="work.1", subject="s", reason="r", headers={}, payload=b"ab"),
    ),
]


@pytest.mark.parametrize(("content_type", "payload", "message"), GOLDEN, ids=lambda value: type(value).__name__)
def test_golden_bytes_are_written_and_read(content_type: str, payload: bytes, message: object) -> None:
    tag = msgspec.json.decode(payload)["type"]
    assert decode(payload, {TYPE_HEADER: tag, CONTENT_TYPE_HEADER: content_type}) == message
    assert encode(message, content_type=content_type).payload == payload  # type: ignore[arg-type]


@pytest.mark.parametrize(("content_type", "payload", "message"), GOLDEN, ids=lambda value: type(value).__name__)
def test_bytes_from_before_a_field_was_added_are_read(content_type: str, payload: bytes, message: Message) -> None:
    """Each field with a default may be missing: it was added later, or is in a run's log from before."""
    for field in msgspec.structs.fields(message):
        if field.required:
            continue
        written = {name: value for name, value in msgspec.json.decode(payload).items() if name != field.encode_name}
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()  # type: ignore[operator]
        read = decode(msgspec.json.encode(written), {TYPE_HEADER: written["type"], CONTENT_TYPE_HEADER: content_type})
        assert read == msgspec.structs.replace(message, **{field.name: default})


@pytest.mark.parametrize("tag", sorted(message_types()))
def test_a_message_is_frozen_and_takes_its_fields_by_name(tag: str) -> None:
    config = message_types()[tag].__struct_config__
    positional = [
        field
        for field in inspect.signature(message_types()[tag]).parameters.values()
        if field.kind is not field.KEYWORD_ONLY
    ]
    assert (config.frozen, positional) == (True, [])


def test_golden_bytes_of_packed_segments() -> None:
    written = encode(published([258, 3], [1])).payload.hex()
    assert written == (
        "87a474797065b27365676d656e74735f7075626c6973686564a867726f75705f696401a7617474656d707402a56c65617365a16c"
        "a87365676d656e7473918ba673616d706c6584a867726f75705f696401a7617474656d707402a5696e64657803a47061727400"
        "aa70726f6d70745f696473d60101000000ac726573706f6e73655f696473d7010201000003000000a96c6f73735f6d61736bd5"
        "030101b1726f6c6c6f75745f6c6f675f70726f6273d702000000bf000000bfac7765696768745f7370616e739183a7766572"
        "73696f6e03a5737461727400a3656e6402a474657874a178ae726f757465645f65787065727473c0"
        "ab6b6570745f636f756e7473c0a86b6570745f696473c0ab74656d7065726174757265c0a670726f6d7074a0a56c6162656cc0"
    )


def test_golden_bytes_of_a_column() -> None:
    key = SampleKey(group_id=1, attempt=2, index=3)
    column = ColumnPublished(sample=key, column="teacher_log_probs", values=Float32Array([-0.5, -1.0]))
    written = encode(column)
    fields = (
        "a474797065b0636f6c756d6e5f7075626c6973686564a673616d706c6584a867726f75705f696401a7617474656d707402"
        "a5696e64657803a47061727400a6636f6c756d6eb1746561636865725f6c6f675f70726f6273a676616c756573d702"
        "000000bf000080bf"
    )
    assert written.payload.hex() == "86" + fields + "a8746f706b5f696473c0ae746f706b5f6c6f675f70726f6273c0"
    likeliest = {"topk_ids": Int32Array([7, 9]), "topk_log_probs": Float32Array([-0.5, -1.0])}
    topk = encode(msgspec.structs.replace(column, **likeliest))
    assert topk.payload.hex() == (
        f"86{fields}a8746f706b5f696473d7010700000009000000ae746f706b5f6c6f675f70726f6273d702000000bf000080bf"
    )
    for payload in (written.payload, topk.payload):
        back = decode(payload, written.headers)
        assert isinstance(back, ColumnPublished)
        assert (back.sample, back.column, back.values.tolist()) == (key, "teacher_log_probs", [-0.5, -1.0])
        assert (back.topk_ids is None) == (payload != topk.payload)


def test_every_message_has_a_tag_of_its_own_and_says_what_it_is() -> None:
    for tag, message_type in message_types().items():
        assert tag_of(message_type) == tag
        assert message_type.__doc__
        assert message_type.topic
