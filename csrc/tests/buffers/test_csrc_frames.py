"""Frames: what goes in comes out, as views, over memory, files and sockets, and as FRAMES.md lays it out."""

import gc
import socket
import struct
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_csrc import DeadlineError, FrameError, PeerDiedError, digest, frames
from rl_csrc.buffers.frames import Ragged


def raw(tensor):
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)


def same(a, b):
    if isinstance(a, tuple):
        return same(a[0], b[0]) and same(a[1], b[1])
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))
    return bytes(a) == bytes(b)


@st.composite
def dense(draw):
    dtype = draw(st.sampled_from(frames.DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    item = torch.empty(0, dtype=torch.uint8).view(dtype).element_size()
    count = 1
    for n in shape:
        count *= n
    g = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return torch.randint(0, 2, (count * item,), dtype=torch.uint8, generator=g).view(dtype).reshape(shape)


@st.composite
def ragged(draw):
    def cut(n):
        lengths = draw(st.lists(st.integers(0, 3), max_size=5))
        dtype = draw(st.sampled_from([torch.int32, torch.int64]))
        return (
            torch.tensor([0, *lengths]).cumsum(0).to(dtype) if n is None else torch.tensor([0, n // 2, n], dtype=dtype)
        )

    inner = cut(None)
    value = Ragged(torch.randn(int(inner[-1]), draw(st.integers(1, 3))), inner)
    return Ragged(value, cut(len(inner) - 1)) if draw(st.booleans()) else value


values = st.one_of(dense(), ragged(), st.binary(max_size=90))


@pytest.mark.process
@given(st.dictionaries(st.text(max_size=12), values, max_size=6), st.booleans(), st.integers(0, 2**64 - 1))
def test_round_trip(mapping, checksum, tag):
    frame = frames.encode(mapping, checksum=checksum, tag=tag)
    block = frame.to_bytes()
    assert bytes(block) == b"".join(frame.segments())
    assert len(block) == frame.nbytes
    assert frame.nbytes % 64 == 0
    view = frames.decode(block, verify=checksum)
    assert (list(view), view.tag, view.nbytes, view.has_digest) == (list(mapping), tag, frame.nbytes, checksum)
    assert list(view.to_dict()) == list(mapping)
    for name, value in mapping.items():
        assert same(value, view[name])
        assert same(value, view.to_dict()[name])
    fused = bytearray(frame.nbytes + 8)
    frames.encode(mapping, tag=tag).write_into(fused, checksum=True)
    frames.decode(fused, verify=True)


def test_layout_by_hand():
    """Read one frame with nothing but struct and the text of FRAMES.md."""
    block = frames.encode(
        {"w": torch.tensor([[1, 2, 3]], dtype=torch.int16), "é": b"xyz"}, checksum=True, tag=5
    ).to_bytes()
    fields = struct.unpack_from("<8sHHIQIIIIQQQ", block)
    assert fields[:10] == (b"\x89RLF\r\n\x1a\n", 1, 0, 1, 384, 256, 2, 2, 3, 5)
    assert fields[10] == digest(block[256:])
    assert fields[11] == digest(block[:56] + bytes(8) + block[64:256])
    assert struct.unpack_from("<QQIHBBBBBBIQQQQ", block, 64) == (256, 6, 0, 1, 0, 5, 2, 0, 0, 0, 0, 0, 0, 0, 0)
    assert struct.unpack_from("<QQIHBBBBBBIQQQQ", block, 128) == (320, 3, 1, 2, 2, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0)
    assert struct.unpack_from("<2Q", block, 192) == (1, 3)
    assert block[208:211] == "wé".encode()
    assert block[256:262] == struct.pack("<3h", 1, 2, 3)
    assert block[320:323] == b"xyz"
    assert not any(block[211:256] + block[262:320] + block[323:])


def test_ragged_layout_by_hand():
    value = Ragged(Ragged(torch.arange(4.0), torch.tensor([0, 1, 4])), torch.tensor([0, 2], dtype=torch.int32))
    block = frames.encode({"r": value}).to_bytes()
    entry = struct.unpack_from("<QQIHBBBBBBIQQQQ", block, 64)
    assert entry == (192, 16, 0, 1, 1, 12, 1, 2, 2, 1, 0, 256, 24, 320, 8)
    assert struct.unpack_from("<3q", block, 256) == (0, 1, 4)


def test_every_dtype_has_its_own_code():
    assert len(set(frames.DTYPES)) == len(frames.DTYPES)
    for code, dtype in enumerate(frames.DTYPES, start=1):
        block = frames.encode({"x": torch.zeros(16, dtype=torch.uint8).view(dtype)}).to_bytes()
        assert block[64 + 23] == code
        assert frames.decode(block)["x"].dtype == dtype


@pytest.mark.process
def test_encode_copies_nothing_and_keeps_its_tensors():
    x = torch.randn(1000)
    gone = weakref.ref(x)
    frame = frames.encode({"x": x, "b": b"abc"})
    view = torch.frombuffer(bytearray(frame.buffers[0]), dtype=torch.float32)
    assert torch.equal(view, x)
    x[0] = 42
    assert struct.unpack_from("<f", frame.buffers[0])[0] == 42
    assert frame.buffers[0].readonly
    del x, view
    gc.collect()
    assert gone() is not None
    buffers = frame.buffers
    del frame
    gc.collect()
    assert bytes(buffers[1]) == b"abc"
    assert gone() is not None
    del buffers
    gc.collect()
    assert gone() is None


@pytest.mark.process
def test_decode_gives_views_that_keep_the_block():
    block = torch.empty(4096, dtype=torch.uint8)
    frames.encode({"x": torch.arange(5), "b": b"abc", "r": (torch.arange(3), torch.tensor([0, 3]))}).write_into(block)
    gone = weakref.ref(block)
    view = frames.decode(block)
    x = view["x"]
    assert block.data_ptr() <= x.data_ptr() < block.data_ptr() + 4096
    x[0] = 7
    assert view["x"][0] == 7
    b = view["b"]
    del block, view
    gc.collect()
    assert gone() is not None
    assert x.tolist() == [7, 1, 2, 3, 4]
    del x
    gc.collect()
    assert bytes(b) == b"abc"
    del b
    gc.collect()
    assert gone() is None


def test_awkward_tensors():
    z = torch.randn(3, 4, dtype=torch.complex64)
    jagged = torch.nested.nested_tensor([torch.arange(3), torch.arange(2)], layout=torch.jagged)
    mapping = {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(3, 4).t(),
        "strided": torch.randn(10)[::3],
        "expanded": torch.randn(1).expand(5),
        "conjugated": z.conj(),
        "imaginary": z.conj().imag,
        "negated": z.conj().imag[:1, :1],  # a single number is contiguous, whatever its stride
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "buffer": bytearray(b"q"),
        "view": memoryview(b"0123456789")[::2],
    }
    view = frames.decode(frames.encode({**mapping, "jagged": jagged}).to_bytes())
    for name in (
        "scalar",
        "empty",
        "transposed",
        "strided",
        "expanded",
        "conjugated",
        "imaginary",
        "negated",
        "parameter",
    ):
        assert torch.equal(view[name], mapping[name].detach()), name
        assert view[name].shape == mapping[name].shape
    assert bytes(view["buffer"]) == b"q"
    assert bytes(view["view"]) == b"02468"
    assert view["jagged"].values.tolist() == [0, 1, 2, 0, 1]
    assert view["jagged"].offsets.tolist() == [0, 3, 5]


def test_read_only_blocks_decode():
    view = frames.decode(bytes(frames.encode({"x": torch.arange(3), "b": b"q"}).to_bytes()))
    assert view["x"].tolist() == [0, 1, 2]
    assert view["b"].readonly


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3, "is a int"),
        (torch.zeros(2, device="meta"), "on meta"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        ((torch.zeros(3), torch.tensor([0, 2])), "rise from 0"),
        ((torch.zeros(3), torch.tensor([0, 2, 1, 3])), "rise from 0"),
        ((torch.zeros(3), torch.tensor([0.0, 3.0])), "int32 or int64"),
        ((torch.tensor(1.0), torch.tensor([0, 1])), "0-dimensional"),
        ((1, 2, 3), "is a tuple"),
        ((b"abc", torch.tensor([0, 3])), "holds a bytes"),
    ],
)
def test_what_cannot_be_framed(value, says):
    with pytest.raises(FrameError, match=says) as info:
        frames.encode({"some name": value})
    assert "some name" in str(info.value)


def test_three_levels_long_names_and_strange_names():
    two = Ragged(Ragged(torch.zeros(2), torch.tensor([0, 2])), torch.tensor([0, 1]))
    with pytest.raises(FrameError, match="three deep"):
        frames.encode({"x": Ragged(two, torch.tensor([0, 1]))})
    with pytest.raises(FrameError, match="65535"):
        frames.encode({"x" * 70_000: b""})
    with pytest.raises(FrameError, match="names are str"):
        frames.encode({3: b""})
    with pytest.raises(FrameError, match="tag is -1"):
        frames.encode({}, tag=-1)


def test_small_buffers_and_unknown_names():
    frame = frames.encode({"x": torch.zeros(100)})
    with pytest.raises(FrameError, match="the buffer 10"):
        frame.write_into(bytearray(10))
    view = frames.decode(frame.to_bytes())
    with pytest.raises(KeyError):
        view["y"]
    assert "y" not in view
    assert 3 not in view
    assert view.get("y") is None


def test_file(tmp_path):
    mapping = {"x": torch.randn(1000), "y": b"z" * 100}
    path = tmp_path / "frame"
    assert frames.save(path, mapping, tag=3) == path.stat().st_size
    view = frames.load(path, verify=True)
    assert torch.equal(view["x"], mapping["x"])
    view["x"].zero_()  # private pages
    assert torch.equal(frames.load(path)["x"], mapping["x"])
    assert [p.name for p in tmp_path.iterdir()] == ["frame"]
    path.write_bytes(b"")
    with pytest.raises(FrameError, match="empty"):
        frames.load(path)


def test_socket_with_more_parts_than_one_writev_takes():
    mapping = {f"t{i}": torch.randn(300) for i in range(1500)}
    a, b = socket.socketpair()
    with a, b:
        sender = threading.Thread(target=lambda: frames.encode(mapping, checksum=True).send(a, timeout_s=30))
        sender.start()
        view = frames.receive(b, timeout_s=30, max_nbytes=1 << 26)
        sender.join()
    assert all(torch.equal(view[name], tensor) for name, tensor in mapping.items())


@pytest.mark.process
def test_a_socket_that_pauses_inside_a_frame_is_waited_for():
    data = b"".join(bytes(part) for part in frames.encode({"x": torch.arange(100)}).segments())
    a, b = socket.socketpair()
    with a, b:
        a.sendall(data[:70])
        timer = threading.Timer(0.2, a.sendall, [data[70:]])
        timer.start()
        assert torch.equal(frames.receive(b, timeout_s=60, max_nbytes=1 << 20)["x"], torch.arange(100))
        timer.join()


@pytest.mark.process
def test_socket_deadlines_name_the_peer():
    a, b = socket.socketpair()
    frame = frames.encode({"x": torch.zeros(1 << 20)})
    with a, b:
        with pytest.raises(DeadlineError, match="took"):
            frame.send(a, timeout_s=0.1)
        with pytest.raises(FrameError, match="at most 1000"):
            frames.receive(b, timeout_s=1, max_nbytes=1000)
    a, b = socket.socketpair()
    with b:
        with pytest.raises(DeadlineError, match="0 of 64"):
            frames.receive(b, timeout_s=0.1, max_nbytes=1000)
        a.sendall(bytes(frame.header[:70]))
        a.close()
        with pytest.raises(PeerDiedError, match="closed the connection after 6 of"):
            frames.receive(b, timeout_s=1, max_nbytes=1 << 23)
    a, b = socket.socketpair()
    with a, b:
        a.sendall(b"GET / HTTP/1.1\r\n" * 4)
        with pytest.raises(FrameError, match="out of step"):
            frames.receive(b, timeout_s=1, max_nbytes=1000)
