"""The catalogue under docs/reference/ is what the structs and the actors say."""

import json
import re
from pathlib import Path

import pytest

from actors.registry import ROLES, hosted
from bin import describe_messages
from messages import message_types, tag_of
from messages.catalogue import json_schemas
from runtime.settings.load import load_topology
from tests.runtime.settings.shipped import LAPTOP

DOCS = Path(__file__).parents[2] / "docs" / "reference"


def test_the_committed_catalogue_is_current() -> None:
    assert describe_messages.main(["--check"]) == 0


def test_a_stale_catalogue_is_found(tmp_path: Path) -> None:
    assert describe_messages.main(["--docs", str(tmp_path)]) == 0
    assert describe_messages.main(["--docs", str(tmp_path), "--check"]) == 0
    (tmp_path / "messages.md").write_text("old")
    assert describe_messages.main(["--docs", str(tmp_path), "--check"]) == 1


@pytest.mark.parametrize("name", ["asyncapi.json", "schema.json"])
def test_every_reference_of_a_document_leads_somewhere(name: str) -> None:
    text = (DOCS / "messages" / name).read_text()
    references = re.findall(r'"\$ref": ?"([^"#]*)#/([^"]+)"', text)
    assert len(references) == text.count('"$ref"') > 20
    for file, reference in references:
        place = json.loads((DOCS / "messages" / (file or name)).read_text())
        for part in reference.split("/"):
            place = place[part]


def test_the_page_has_every_field_of_every_message_and_its_parts() -> None:
    sections = dict(re.findall(r"\n### `?(\w+)`?\n(.*?)(?=\n##|\Z)", (DOCS / "messages.md").read_text(), re.DOTALL))
    for tag, message_type in message_types().items():
        assert re.findall(r"^\| `(\w+)` \|", sections[tag], re.MULTILINE) == list(message_type.__struct_fields__)
    named = set(json_schemas()["$defs"]) - {message_type.__name__ for message_type in message_types().values()}
    assert named <= set(sections), named - set(sections)


def test_every_stored_message_has_a_writer_and_every_task_a_reader() -> None:
    daemons = {"actor_started", "actor_exited", "run_stalled", "run_stopped", "node_left", "event_loop_blocked"}
    buses = {"message_dead_lettered", "dead_letter"}
    later = {"column_published"}  # of stages that no recipe declares yet
    topology = load_topology(LAPTOP).topology
    written = {tag_of(message) for role in ROLES for message in hosted(role, topology, Path()).actor_type.writes}
    calls = {tag for tag, message in message_types().items() if message.plane == "call"}
    assert set(message_types()) - written - calls - daemons - buses - later == set()


def test_arrays_are_described_as_lists_of_numbers_and_as_what_they_are_packed() -> None:
    field = json_schemas()["$defs"]["Segment"]["properties"]["rollout_log_probs"]
    assert field["items"] == {"type": "number"}
    assert "extension 2 (float32" in field["description"]
