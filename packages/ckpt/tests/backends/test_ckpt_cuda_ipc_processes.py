"""`cuda-ipc://` between processes, without a GPU: memory that one owns and others map. And what the fake keeps to."""

import asyncio
import gc
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import ckpt_gpu
import pytest
import torch
from ckpt_gpu import FakeGpu, fake_gpu

import rl_ckpt
from rl_ckpt import BackendError, Resharding, ShardSpec
from rl_ckpt.protocol.channel import Channel
from rl_ckpt.protocol.messages import Session
from rl_ckpt.testing import assert_same, new_name, sample_weights

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memfd and abstract UNIX sockets need Linux"),
    pytest.mark.process,
]

CHILD = f"""
    import sys

    sys.path.insert(0, {str(Path(ckpt_gpu.__file__).parent)!r})
    import asyncio, os, sys, torch, rl_ckpt
    from pathlib import Path
    from rl_ckpt import Resharding, ShardSpec
    from rl_ckpt.tensors.spec import as_bytes
    from rl_ckpt.testing import sample_weights
    from ckpt_gpu import use_fake_gpu
    from rl_ckpt.testing.helpers import blank

    gpu = use_fake_gpu()
    num_mappings = lambda: Path("/proc/self/maps").read_text().count("emulated-gpu")
"""
RECEIVE = """
    url, mode, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
    names = list(sample_weights())
    into = blank(sample_weights())
    if mode == "device":
        into = gpu.hold(into)
    mine = num_mappings()
    mapped = lambda: (num_mappings() - mine, gpu.num_opened - gpu.num_closed)
    with rl_ckpt.connect(url, role="receive", timeout_s=60) as receiver:
        print("open", flush=True)
        while receiver.version != last:
            if mode == "iterate":
                into = dict(receiver.recv(clone=True))
            else:
                receiver.recv_into(into, staged=mode == "staged")
            is_right = all(
                torch.equal(as_bytes(into[name]), as_bytes(tensor))
                for name, tensor in sample_weights(receiver.version).items()
            )
            is_right = is_right and rl_ckpt.tree_digest(into) == receiver.digest and set(into) == set(names)
            print(receiver.version, is_right, *mapped(), len(os.listdir("/proc/self/fd")), flush=True)
    print(*mapped())
"""


def child(code, *arguments):
    code = textwrap.dedent(CHILD) + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def said_by(process):
    """All that it says from now on, word by word; it ends well."""
    lines, _ = process.communicate(timeout=120)
    assert process.returncode == 0, process.returncode
    return [line.split() for line in lines.splitlines()]


@pytest.fixture
def gpu():
    with fake_gpu() as gpu:
        yield gpu


def on_device(gpu):
    """Tensors of every kind: most in one allocation, two tied, some that cannot be read as bytes where they are."""
    weights = gpu.hold(sample_weights())
    weights["lm_head.weight"] = weights["embed.weight"]
    weights["strided"] = gpu.allocate(8 * 12 * 4).view(torch.float32).view(8, 12)[::2, 1::3]
    weights["complex"] = weights["complex"].conj()
    return weights


def set_to(weights, version):
    for name, tensor in sample_weights(version).items():
        weights[name].copy_(tensor)


@pytest.mark.slow
@pytest.mark.parametrize("is_registered", [True, False], ids=["mapped", "ring"])
def test_fifty_versions_reach_every_kind_of_receiver_process(gpu, is_registered):
    """One comes late; the source is registered anew again and again. The bits are right, and nothing grows."""
    url, last = f"cuda-ipc://{new_name()}", 50
    num_descriptors = set()
    with rl_ckpt.connect(url, role="send", timeout_s=60, bucket_bytes=1024) as sender:
        asyncio.run(sender.prepare())
        receivers = [child(RECEIVE, url, mode, last) for mode in ("device", "iterate", "staged")]
        weights = on_device(gpu)
        for version in range(1, last + 1):
            if version == 12:
                receivers.append(child(RECEIVE, url, "host", last))
            if is_registered and version % 10 == 1:
                weights = on_device(gpu)
                sender.register_source(weights)
            set_to(weights, version)
            sent = None if is_registered else weights.items()
            report = sender.send(sent, version=version, num_peers=len(receivers))
            assert (len(report.receipts), report.lost) == (len(receivers), ())
            num_descriptors |= {len(list(Path("/proc/self/fd").iterdir()))} if 30 < version < last else set()
        for i, receiver in enumerate(receivers):
            (is_open, *told), end = (lines := said_by(receiver))[:-1], lines[-1]
            assert is_open == ["open"]
            first = 12 if i == 3 else 1
            mapped = str(2 if is_registered else 1)  # the ring, and all of the source
            assert [line[:4] for line in told] == [[str(v), "True", mapped, mapped] for v in range(first, last + 1)]
            assert len({line[4] for line in told[5:]}) == 1, "descriptors"
            assert end == ["0", "0"]
    assert len(num_descriptors) == 1


def test_differences_and_a_late_comer(gpu):
    """Through the ring: who tells differences keeps a copy on the host, and gives that to who comes late."""
    url = f"cuda-ipc://{new_name()}"

    async def main():
        async with rl_ckpt.connect(url, role="send", timeout_s=60, delta=True) as sender:
            weights = gpu.hold({"a": torch.randn(300_000), "b": torch.randn(3, 3).bfloat16()})
            sender.register_source(weights)
            await sender.prepare()
            code = """
                into = gpu.hold({"a": torch.zeros(300_000), "b": torch.zeros(3, 3).bfloat16()})
                with rl_ckpt.connect(sys.argv[1], role="receive", timeout_s=60) as receiver:
                    while receiver.version != 3:
                        receiver.recv_into(into)
                        print(receiver.version, rl_ckpt.tree_digest(into), flush=True)
            """
            first, digests = child(code, url), []
            for version in (1, 2, 3):
                weights["a"][version::1000] += 1
                report = await sender.send_weights(version=version)
                assert report.num_deltas == (0 if version == 1 else 1), report
                digests.append([str(version), str(rl_ckpt.tree_digest(weights))])
            assert said_by(first) == digests
            late = child(code, url)
            async with asyncio.timeout(60):
                while await sender.resend_current() is None:  # noqa: ASYNC110  # it is the poll that is tested
                    await asyncio.sleep(0.05)
            assert said_by(late) == digests[-1:]

    asyncio.run(main())


PLAN = """
    def held_by(rank, axis):
        cuts = {"up": ((8, 6), axis), "norm": ((64,), 0 if axis == 0 else None)}
        return [
            ShardSpec.on_mesh(name, shape, mesh=(2,), placements=(cut,), coordinate=(rank,))
            for name, (shape, cut) in cuts.items()
        ]

    plan = Resharding([held_by(rank, 0) for rank in (0, 1)], [held_by(rank, 1) for rank in (0, 1)])
"""


@pytest.mark.slow
def test_from_rows_to_columns(gpu):
    """What a slice is decides: one that lies in one piece is read where it is, another goes through the ring."""
    namespace = {"Resharding": Resharding, "ShardSpec": ShardSpec}
    exec(textwrap.dedent(PLAN), namespace)
    plan = namespace["plan"]
    url = f"cuda-ipc://{new_name()}"
    up, norm = torch.randn(8, 6), torch.randn(64)
    receivers = [
        child(
            textwrap.dedent(PLAN)
            + textwrap.dedent("""
            url, rank = sys.argv[1], int(sys.argv[2])
            mine = gpu.hold({"up": torch.zeros(8, 3), "norm": torch.zeros(64)})

            async def main():
                ends = [rl_ckpt.connect(f"{url}-{source}-{rank}", role="receive", timeout_s=60) for source in (0, 1)]
                for _ in range(2):
                    await asyncio.gather(
                        *(end.receive_into(plan.incoming(source, rank, mine)) for source, end in enumerate(ends))
                    )
                    print(rl_ckpt.tree_digest(mine), flush=True)
                for end in ends:
                    await end.close()

            asyncio.run(main())
            """),
            url,
            rank,
        )
        for rank in (0, 1)
    ]

    async def main():
        shards = [gpu.hold({"up": up[4 * r : 4 * r + 4], "norm": norm[32 * r : 32 * r + 32]}) for r in (0, 1)]
        ends = {(s, t): rl_ckpt.connect(f"{url}-{s}-{t}", role="send", timeout_s=60) for s in (0, 1) for t in (0, 1)}
        for (s, t), end in ends.items():
            end.register_source(lambda s=s, t=t: plan.outgoing(s, t, shards[s]))
        for version in (1, 2):
            await asyncio.gather(*(end.send_weights(version=version) for end in ends.values()))
            for shard in shards:
                shard["up"].mul_(3)
                shard["norm"].mul_(3)
        for end in ends.values():
            await end.close()

    asyncio.run(main())
    for rank, receiver in enumerate(receivers):
        columns = up[:, 3 * rank : 3 * rank + 3]
        expected = [{"up": columns * by, "norm": norm * by} for by in (1, 3)]
        assert said_by(receiver) == [[str(rl_ckpt.tree_digest(weights))] for weights in expected]


@pytest.mark.slow
def test_a_sender_dying_before_mapping_is_reported_as_dead(monkeypatch, gpu):
    """And not that its handle is none: a receiver then waits for its successor."""
    del gpu
    code = """
        end = rl_ckpt.connect(sys.argv[1], role="send", timeout_s=60)
        try:
            end.send([("t", torch.ones(3))], version=int(sys.argv[2]))
        except rl_ckpt.CkptError:
            pass
        asyncio.run(end.close())
    """
    url, killed = f"cuda-ipc://{new_name()}", []
    from rl_ckpt.backends.cuda_ipc import CudaReceive

    mapping = CudaReceive.map_slots

    def kill_first(self, session: Session, channel: Channel):
        if not killed:
            killed.append(first.pid)
            first.kill()
            first.wait(60)
            successor.append(child(code, url, 2))
        return mapping(self, session, channel)

    monkeypatch.setattr(CudaReceive, "map_slots", kill_first)
    first, successor = child(code, url, 1), []
    with rl_ckpt.connect(url, role="receive", timeout_s=60) as receiver:
        assert_same(dict(receiver.recv(clone=True)), {"t": torch.ones(3)})
        assert receiver.version == 2
    assert killed
    assert said_by(successor[0]) == []
    first.stdout.close()


HOLDER = """
    weights = gpu.hold({"t": torch.arange(1000)})
    address, size = gpu.allocation_of(weights["t"])
    print(gpu.export(address).hex(), size, flush=True)
    if sys.stdin.readline() == "free\\n":
        del weights
        print("freed", flush=True)
        sys.stdin.readline()
"""


def holder():
    code = textwrap.dedent(CHILD) + textwrap.dedent(HOLDER)
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    handle, size = process.stdout.readline().split()
    return process, bytes.fromhex(handle), int(size)


def is_whole(mapped):
    return torch.equal(mapped[:8000].view(torch.int64), torch.arange(1000))


def test_the_fake_keeps_mapped_memory_of_a_killed_process():
    """Existing mappings stay valid; the handle cannot be opened again."""
    owner, handle, size = holder()
    with owner:
        gpu = FakeGpu()
        mapped = gpu.open(handle, size)
        owner.kill()
        owner.wait()
        assert is_whole(mapped)
        gpu.close(mapped)
        with pytest.raises(BackendError, match="error 400"):
            gpu.open(handle, size)


def test_the_fake_overwrites_what_is_freed_while_it_is_mapped():
    owner, handle, size = holder()
    with owner:
        gpu = FakeGpu()
        mapped = gpu.open(handle, size)
        owner.stdin.write("free\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "freed\n"
        assert bool((mapped == 255).all())
        with pytest.raises(BackendError, match="error 400"):
            FakeGpu().open(handle, size)
        gpu.close(mapped)
        owner.stdin.write("\n")


def test_the_fake_maps_handles_once_and_kills_late_readers():
    code = """
        handle, size = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
        one, other = gpu.open(handle, size), gpu.open(handle, size)
        assert one.data_ptr() == other.data_ptr() and num_mappings() == 1
        gpu.close(one)
        print(int(other[8]), flush=True)
        gpu.close(other)
        print(int(one[8]), flush=True)
    """
    owner, handle, size = holder()
    with owner, child(code, handle.hex(), size) as reader:
        assert reader.stdout.read() == "1\n"
        assert reader.wait() == -signal.SIGSEGV
        owner.kill()


def test_the_fake_gives_reused_addresses_another_handle():
    gc.collect()  # the errors of earlier tests keep frames alive, and those memory of another fake
    before = Path("/proc/self/maps").read_text().count("emulated-gpu")
    gpu = FakeGpu()
    handles = set()
    for _ in range(3):
        memory = gpu.allocate(5000)
        handles.add(gpu.export(memory.data_ptr()))
        assert gpu.export(memory.data_ptr()) in handles
        del memory
    assert len(handles) == 3
    assert Path("/proc/self/maps").read_text().count("emulated-gpu") <= before
