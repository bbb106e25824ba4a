"""What a get does for a device, with the CPU as the device; and on a GPU where there is one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_tq
from rl_tq.columns.device import DeviceCopier, plan

CPU = torch.device("cpu")
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def moved(parts: list[torch.Tensor]) -> torch.Tensor:
    nbytes = sum(part.nbytes for part in parts)
    target = torch.full((nbytes + 64,), 0xAA, dtype=torch.uint8)
    mover = DeviceCopier(CPU)
    mover.move(parts, target[:nbytes])
    mover.finish()
    assert target[nbytes:].unique().tolist() == [0xAA]
    return target[:nbytes].view(parts[0].dtype).view(-1, *parts[0].shape[1:])


def test_a_column_that_lies_as_asked_is_one_copy():
    values = torch.arange(10.0)
    planned = plan([values[2:5], values[5:9]])
    assert planned.is_in_order
    [(memory, start)] = planned.spans
    assert (memory.data_ptr(), len(memory), start) == (values[2:].data_ptr(), 7, 0)


def test_a_shuffled_column_is_one_copy_and_an_index():
    values = torch.arange(24).view(12, 2)
    planned = plan([values[8:11], values[1:3], values[4:8]])
    [(memory, start)] = planned.spans
    assert (memory.data_ptr(), len(memory), start) == (values[1:].data_ptr(), 10, 0)
    assert (planned.firsts, planned.lengths) == ((7, 0, 3), (3, 2, 4))
    assert moved([values[8:11], values[1:3], values[4:8]]).tolist() == values[[8, 9, 10, 1, 2, 4, 5, 6, 7]].tolist()


def test_rows_of_two_memories_are_two_copies_and_few_are_joined():
    one, other = torch.arange(10.0), torch.arange(100.0, 110.0)
    planned = plan([other[1:4], one[5:9], other[0:1]])
    assert [len(memory) for memory, _ in planned.spans] == [4, 4]
    assert planned.firsts == (1, 4, 0)
    sparse = plan([one[0:1], one[9:10]])
    assert [memory.tolist() for memory, _ in sparse.spans] == [[0.0, 9.0]]
    assert sparse.is_in_order
    assert sparse.spans[0].memory.data_ptr() != one.data_ptr()


DTYPES = [torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.float64]


@pytest.mark.process
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 11), st.integers(0, 6)), min_size=1, max_size=9),
    st.sampled_from(DTYPES),
    st.sampled_from([(), (1,), (3,), (2, 2)]),
)
def test_pieces_come_one_after_the_other(pieces, dtype, shape):
    width = torch.Size(shape).numel() * dtype.itemsize
    rows = [torch.randint(0, 2, (12 * width,), dtype=torch.uint8).view(dtype).view(12, *shape) for _ in range(2)]
    parts = [rows[which][start : start + count] for which, start, count in pieces]
    expected = b"".join(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in parts)
    assert moved(parts).contiguous().view(-1).view(torch.uint8).numpy().tobytes() == expected


@pytest.mark.parametrize("storage", ["inproc", "shm", "tcp"])
def test_a_get_to_a_device_is_what_a_get_is(storage):
    torch.manual_seed(1)
    address = "tcp://127.0.0.1:0" if storage == "tcp" else f"{storage}://"
    with rl_tq.serve(address, timeout_s=20.0) as queue:
        metas = []
        for rows in (5, 1, 30):
            lengths = torch.randint(0, 2000, (rows,)).tolist()
            data = {
                "dense": torch.rand(rows, 3), "flags": torch.rand(rows) > 0.5,
                "r": [torch.rand(n) for n in lengths], "ids": [torch.randint(0, 9, (n,)) for n in lengths],
                "turns": [[torch.rand(2), torch.rand(n % 3)] for n in lengths], "t": [str(n) for n in lengths],
            }  # fmt: skip
            metas.append(queue.put(data, partition="p"))
        whole = rl_tq.BatchMeta.concat(metas)
        for order in (range(36), torch.randperm(36).tolist(), [35, 0], [7, 7, 3]):
            meta = whole.reorder(order)
            there, here = queue.get(meta, device="cpu"), queue.get(meta)
            assert torch.equal(there["dense"], here["dense"])
            assert torch.equal(there["flags"], here["flags"])
            for column in ("r", "ids"):
                assert torch.equal(there[column].values(), here[column].values())
                assert torch.equal(there[column].offsets(), here[column].offsets())
            assert torch.equal(there["turns", "values"].values(), here["turns", "values"].values())
            assert there["t"].tolist() == here["t"].tolist()


@pytest.mark.gpu
@NEEDS_CUDA
@pytest.mark.parametrize("rows", [4, 64])
def test_values_reach_a_gpu(rows):
    torch.manual_seed(1)
    with rl_tq.serve("shm://", timeout_s=60.0) as queue, rl_tq.connect(queue.address) as peer:
        lengths = torch.randint(1, 200_000, (rows,)).tolist()
        meta = peer.put({"r": [torch.rand(n) for n in lengths], "x": torch.rand(rows, 7)}, partition="p")
        buffer = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        for order in (range(rows), torch.randperm(rows).tolist(), [rows - 1, 0]):
            shuffled = meta.reorder(order)
            here = queue.get(shuffled)
            for there in (queue.get(shuffled, device="cuda"), queue.get(shuffled, out=buffer)):
                assert there["r"].device.type == "cuda"
                assert torch.equal(there["r"].values().cpu(), here["r"].values())
                assert torch.equal(there["x"].cpu(), here["x"])
        queue.clear("p")  # memory that was registered is unmapped, and other memory comes in its place
        again = peer.put({"r": [torch.ones(n) for n in lengths]}, partition="p")
        assert queue.get(again, device="cuda")["r"].values().unique().tolist() == [1.0]
