"""docs/format.md says what the code does: names of requests, sizes, numbers."""

import re
from pathlib import Path

import pytest

from rl_tq.columns import locations
from rl_tq.columns.schema import ColumnKind
from rl_tq.memory import generations
from rl_tq.protocol import framing, handshake
from rl_tq.protocol.service import Service

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/format.md").read_text()
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
    magic = handshake._MAGIC
    assert f"`{magic[:7].decode()}` and the version, {magic[7]} (8 bytes), and a nonce (32 bytes)" in TEXT
    assert handshake._GREETING.size == 8 + 32
    assert handshake._ANSWER.size == 8 + 32 + 32
    assert len(handshake.proof(b"x", b"client", bytes(32), bytes(32))) == 32
    assert f"Header of {framing._HEADER.size} bytes: `RLTQ`, u32 bytes of message, u64 bytes of payload" in TEXT
    assert framing._HEADER.pack(b"RLTQ", 1, 2) == b"RLTQ" + (1).to_bytes(4, "little") + (2).to_bytes(8, "little")
    assert framing.pack({}) == (1).to_bytes(4, "little") + bytes(4) + b"\x80"
    assert f"at most {framing.MAX_MESSAGE_BYTES} bytes to a server, and {framing.MAX_REPLY_BYTES} to a client" in TEXT


def test_kinds_of_columns():
    kinds = re.search(r"kind ((?:`\w+`(?:, | or )?)+)", TEXT)
    assert kinds
    assert set(re.findall(r"`(\w+)`", kinds[1])) == {kind.value for kind in ColumnKind}
