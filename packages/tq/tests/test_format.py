"""docs/packages/tq/format.md says what the code does: names of requests, sizes, numbers."""

import json
import re
from pathlib import Path

import pytest
import torch

import rl_tq
from rl_csrc import frames
from rl_tq import durability
from rl_tq.client.session import Session
from rl_tq.columns import locations
from rl_tq.columns.encode import encode_columns
from rl_tq.columns.extent import plan_extent
from rl_tq.columns.schema import ColumnKind
from rl_tq.memory import arena, generations
from rl_tq.metadata.state import NOTES, State
from rl_tq.protocol import framing, handshake
from rl_tq.protocol.service import Service

ROOT = Path(__file__).parents[1]
TEXT = re.sub(r"(?<!\n)\n(?![\n#|`-])", " ", (ROOT.parents[1] / "docs/packages/tq/format.md").read_text())
"""Each paragraph in one line."""
WORDS = set(re.findall(r"`([^`]+)`", TEXT))


def section(name: str) -> str:
    return re.split(r"^## ", TEXT.partition(f"\n## {name}")[2], maxsplit=1, flags=re.MULTILINE)[0]


def test_every_request_of_the_dispatch_table_is_named():
    assert set(Service.operations) - WORDS == set()


@pytest.mark.parametrize("module", ["server/unix.py", "server/connection.py", "client/shm.py"])
def test_every_message_that_a_module_handles_is_named(module):
    text = (ROOT / "src/rl_tq" / module).read_text()
    handled = {
        name
        for names in re.findall(r'case ((?:"[a-z _]+"(?: \| )?)+)', text)
        for name in re.findall(r'"([^"]+)"', names)
    }
    assert handled
    assert handled - WORDS == set()


def test_a_hint_is_a_packed_schema_and_the_numbers_of_a_location():
    names = re.search(r"and (\d+) i64:\n((?:`\w+`(?:, |\. ))+)", TEXT)
    assert names
    fields = re.findall(r"`(\w+)`", names[2])
    assert tuple(fields) == locations.Location._fields[1:]
    assert int(names[1]) == len(fields)
    packed = locations.pack_location(b"layout", *range(len(fields)))
    assert packed == (b"layout", b"".join(i.to_bytes(8, "little") for i in range(len(fields))))
    with pytest.raises(Exception, match="9"):
        locations.pack_location(b"layout", 1)


def test_sizes_and_numbers():
    assert f"are {generations.NUM_GENERATIONS} u64" in TEXT
    magic = handshake.MAGIC
    assert f"`{magic[:7].decode()}` and the version, {magic[7]} (8 bytes), and a nonce (32 bytes)" in TEXT
    assert handshake.GREETING.size == 8 + 32
    assert handshake.ANSWER.size == 8 + 32 + 32
    assert len(handshake.proof(b"x", b"client", bytes(32), bytes(32))) == 32
    assert f"Header of {framing.HEADER.size} bytes: `RLTQ`, u32 bytes of message, u64 bytes of payload" in TEXT
    assert framing.HEADER.pack(b"RLTQ", 1, 2) == b"RLTQ" + (1).to_bytes(4, "little") + (2).to_bytes(8, "little")
    assert framing.pack({}) == (1).to_bytes(4, "little") + bytes(4) + b"\x80"
    assert f"at most {framing.MAX_MESSAGE_BYTES} bytes to a server, and {framing.MAX_REPLY_BYTES} to a client" in TEXT


def test_kinds_of_columns():
    kinds = re.search(r"kind ((?:`\w+`(?:, | or )?)+)", TEXT)
    assert kinds
    assert set(re.findall(r"`(\w+)`", kinds[1])) == {kind.value for kind in ColumnKind}


def table(name: str) -> dict[str, str]:
    """First column to second of a section's table."""
    lines = [line.strip("| ").split(" | ") for line in section(name).splitlines() if line.startswith("|")]
    return {left.strip(): right.strip() for left, right in lines[2:]}


def test_the_extent_table_lists_the_columns_of_its_frame():
    told = table("Extent")
    assert [each.partition(",")[0].partition(" (")[0].lower() for each in told] == [each.value for each in ColumnKind]
    columns = {
        "dense": torch.zeros(2, 3),
        "ragged": [torch.zeros(1), torch.zeros(2)],
        "turns": [[torch.zeros(1), torch.zeros(2)], []],
        "bytes": [b"x", b"yz"],
        "json": ["ä", None],
    }
    assert list(columns) == [each.value for each in ColumnKind]
    layout = plan_extent(encode_columns(columns))
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.write(memory)
    for (name, column), text in zip(frames.decode(memory).to_dict().items(), told.values(), strict=True):
        is_ragged = isinstance(column, frames.Ragged)
        values, num_offsets = column, 0
        while isinstance(values, frames.Ragged):
            assert values.offsets.dtype is torch.int64
            values, num_offsets = values.values, num_offsets + 1
        assert text.count("int64 offsets") == num_offsets, name
        assert ("uint8 values" in text) == (name in ("bytes", "json")), name
        assert values.dtype is (torch.uint8 if name in ("bytes", "json") else torch.float32)
        assert (len(column.offsets) - 1 if is_ragged else len(column)) == 2


def test_the_message_table_lists_requests_and_client_fields(monkeypatch):
    told = {
        op: re.sub(r"`[^`]*`|\(.*?\)|, and optionally", " ", left)
        for left in table("Shared memory (`shm`, `file`)")
        for op in re.findall(r"`(\w+)`", left)
    }
    assert set(told) == {*Service.operations, "segment", "seal", "retire", "released", "withdraw", "bye"}
    said: dict[str, set[str]] = {}
    send = Session.send

    def note(self, message, extra=None):
        said.setdefault(message["op"], set()).update(message)
        return send(self, message, extra)

    monkeypatch.setattr(Session, "send", note)
    with rl_tq.serve("shm://") as queue:
        credit = queue.admit(partition="p", num_rows=1)
        meta = queue.put({"a": torch.ones(1)}, partition="p", sample_ids=["x"], tags=[{"i": 1}], credit=credit)
        queue.put({"b": torch.ones(1)}, partition="p", sample_ids=meta)
        queue.get(rl_tq.BatchMeta(partition="p", sample_ids=("x",), columns=("a",)))
        queue.get_meta(partition="p", columns=["a"], batch_size=1, task="t", sampler=rl_tq.policies.Fifo())
    for op, fields in (
        ("put", said["put"]),
        ("locate", said["locate"]),
        ("wait", said["wait"] - {"is_claim", "after"}),
    ):
        listed = set(re.findall(r"\w+", told[op])) - {"packed"}
        assert fields - {"op", "id", "timeout_s"} <= listed, op
        assert listed - fields <= {"timeout_s"}, op


def test_the_journal_has_state_changes_and_extent_positions(tmp_path):
    journal = section("Journal (`file`)")
    with rl_tq.serve(f"file://{tmp_path}") as queue:
        queue.put({"a": torch.ones(1)}, partition="p")
        lines = [json.loads(line) for line in (tmp_path / durability.NAME).read_text().splitlines()]
    assert lines[0] == ["version", durability.VERSION]
    assert f'`["version", {durability.VERSION}]`' in journal
    fields = re.search(r'\["note_place", ([\w, ]+)\]', journal)
    assert fields
    places = [line for line in lines if line[0] == "note_place"]
    assert [len(place) - 1 for place in places] == [len(fields[1].split(", "))]
    assert all(hasattr(State, line[0]) or line[0] in NOTES for line in lines[1:] if line[0] != "note_place")


def test_segments_have_the_sizes_that_are_told():
    text = section("Shared memory (`shm`, `file`)")
    assert f"at most {arena.PACKED_BYTES >> 20} MiB" in text
    assert f"in segments of {arena.SEGMENT_BYTES >> 20} MiB" in text


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("TCP (`tcp`)", ["server/connection.py"]),
        ("NIXL (`nixl`)", ["storage/nixl.py"]),
        ("Ray (`ray`)", ["storage/ray.py", "storage/ray_owner.py"]),
        ("ZeroMQ (`zmq`)", ["storage/zmq.py", "storage/tcp.py"]),
    ],
)
def test_every_name_listed_for_a_storage_is_in_its_module(name, modules):
    told = set(re.findall(r"`(\w+)`", section(name))) - {"tcp", "nixl", "ray", "zmq", "RLTQ", "RLTQTCP"}
    told -= {"client", "server"}  # of proofs: they are in protocol/handshake.py
    sources = "".join((ROOT / "src/rl_tq" / module).read_text() for module in modules)
    sources += (ROOT / "src/rl_tq/client/client.py").read_text()
    assert {each for each in told if not re.search(rf"\b{each}\b", sources)} == set()
