"""A folder as the transport: what is published, what is not, and who gets which version."""

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

import rl_ckpt
from rl_ckpt import (
    AddressError,
    AttestationError,
    DigestError,
    PeerTimeoutError,
    ReceiverState,
    SyncAbortedError,
    TensorError,
    VersionError,
    connect,
    tree_digest,
)
from rl_ckpt.backends.file.folder import Folder
from rl_ckpt.testing import assert_same, failure, receive_all, sample_weights

pytest.importorskip("safetensors")


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/policy"


def ends(url, **options):
    return connect(url, role="send", **options), connect(url, role="receive", **({"timeout_s": 20} | options))


def test_a_successor_keeps_published_data_and_removes_the_rest(url, tmp_path):
    async def work():
        sender, receiver = ends(url)
        async with sender:
            await sender.send_weights(sample_weights().items(), version=1)
        for name in ("version-2-0.safetensors", "version-2-0.safetensors.partial"):
            (tmp_path / "policy" / name).touch()
        async with connect(url, role="send") as successor, receiver:
            await successor.prepare()
            assert len([*(tmp_path / "policy").glob("*.safetensors*")]) == 1
            assert_same(await receive_all(receiver), sample_weights())

    asyncio.run(work())


def test_a_version_removed_while_opening_is_looked_up_again(url, monkeypatch):
    read, gone = Folder.read, [FileNotFoundError()]

    def removed(folder, version):
        if gone:
            raise gone.pop()
        return read(folder, version)

    async def work():
        sender, receiver = ends(url)
        async with sender, receiver:
            await sender.send_weights(sample_weights().items(), version=1)
            monkeypatch.setattr(Folder, "read", removed)
            assert_same(await receive_all(receiver), sample_weights())
        assert not gone

    asyncio.run(work())


@pytest.mark.process
def test_every_tensor_kind_survives_and_joiners_get_the_newest(url):
    async def work():
        sender, receiver = ends(url)
        async with sender, receiver:
            for version in (1, 5):
                report = await sender.send_weights(sample_weights(version).items(), version=version)
                assert (report.version, report.digest) == (version, tree_digest(sample_weights(version)))
            assert_same(await receive_all(receiver), sample_weights(5))
            assert (receiver.version, receiver.state, receiver.digest) == (5, ReceiverState.COMMITTED, sender.digest)
            waiting = asyncio.ensure_future(receive_all(receiver))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await sender.send_weights(sample_weights(6).items(), version=6)
            assert_same(await waiting, sample_weights(6))

    asyncio.run(work())


def test_the_files_are_ordinary_safetensors_with_a_manifest(url, tmp_path):
    from safetensors.torch import load_file

    with connect(url, role="send") as sender:
        sender.send(sample_weights().items(), version=3)
    manifest = json.loads((tmp_path / "policy" / f"version-{3:020d}.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("rl-ckpt 2", 3)
    assert [entry["name"] for entry in manifest["tensors"]] == list(sample_weights())
    stored = load_file(tmp_path / "policy" / manifest["tensors"][0]["file"])
    assert_same({entry["name"]: stored[entry["stored_as"]] for entry in manifest["tensors"]}, sample_weights())


def test_many_files_for_one_version(url, tmp_path, monkeypatch):
    from rl_ckpt.backends import file

    monkeypatch.setattr(file, "FILE_BYTES", 1000)
    weights = {f"t{i}": torch.randn(100 + i) for i in range(9)}
    sender, receiver = ends(url)
    with sender, receiver:
        sender.send(weights.items(), version=1)
        assert_same({name: tensor.clone() for name, tensor in receiver.recv()}, weights)
    assert len(list((tmp_path / "policy").glob("*.safetensors"))) == 3  # of three tensors, 1,200 bytes and more


def test_old_versions_go_and_whoever_reads_one_reads_on(url, tmp_path):
    async def work():
        sender, receiver = ends(url + "?keep=1")
        async with sender, receiver:
            await sender.send_weights(sample_weights(1).items(), version=1)
            reading = receiver.receive_weights()
            name, first = await anext(reading)
            for version in (2, 3):
                await sender.send_weights(sample_weights(version).items(), version=version)
            assert (
                sorted(path.name[:28] for path in (tmp_path / "policy").glob("version-*")) == [f"version-{3:020d}"] * 2
            )
            got = {name: first} | {name: tensor async for name, tensor in reading}
            assert_same(got, sample_weights(1))
            assert_same(await receive_all(receiver), sample_weights(3))

    asyncio.run(work())


def test_damage_is_found_before_a_tensor_is_handed_out(url, tmp_path):
    async def work():
        sender, receiver = ends(url)
        async with sender, receiver:
            weights = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
            await sender.send_weights(weights.items(), version=1)
            [path] = (tmp_path / "policy").glob("*.safetensors")
            data = bytearray(path.read_bytes())
            data[-5] ^= 1  # in b, which lies behind a
            path.write_bytes(data)
            error = await failure(DigestError, receive_all(receiver))
            assert "'b'" in str(error)
            assert (receiver.version, receiver.state) == (None, ReceiverState.POISONED)
            await sender.send_weights(weights.items(), version=2)
            assert_same(await receive_all(receiver), weights)
            assert (receiver.version, receiver.state) == (2, ReceiverState.COMMITTED)

    asyncio.run(work())


def test_a_manifest_that_is_none(url, tmp_path):
    async def work():
        sender, receiver = ends(url)
        async with sender, receiver:
            await sender.send_weights({"a": torch.ones(1)}.items(), version=1)
            path = tmp_path / "policy" / f"version-{1:020d}.json"
            good = path.read_text()
            for text in ("{", "[]", "{}", good.replace("rl-ckpt 2", "rl-ckpt 9"), good.replace('"version-', '"/etc/x')):
                path.write_text(text)
                await failure(rl_ckpt.ProtocolError, receive_all(receiver))
            path.write_text(good)
            assert_same(await receive_all(receiver), {"a": torch.ones(1)})

    asyncio.run(work())


def test_a_source_that_raises_publishes_nothing_and_is_drained(url, tmp_path):
    taken = []

    def source(error):
        for i in range(6):
            taken.append(i)
            yield ("t0" if i == 3 and error == "twice" else f"t{i}"), torch.ones(10)
        if error == "raises":
            raise RuntimeError("the export broke")

    with connect(url, role="send") as sender:
        for error, cause in (("raises", RuntimeError), ("twice", TensorError)):
            with pytest.raises(SyncAbortedError) as caught:
                sender.send(source(error), version=1)
            assert isinstance(caught.value.__cause__, cause)
        assert taken == [*range(6), *range(6)]
        assert [path.name for path in (tmp_path / "policy").iterdir()] == [".writer"]
        for weights, kind in (({}, TensorError), ({"c": torch.ones(2, dtype=torch.complex128)}, TensorError)):
            with pytest.raises(SyncAbortedError) as caught:
                sender.send(weights.items(), version=1)
            assert isinstance(caught.value.__cause__, kind)
        sender.send({"a": torch.ones(1)}.items(), version=4)
        with pytest.raises(SyncAbortedError, match="must be above 4") as caught:
            sender.send({"a": torch.ones(1)}.items(), version=4)
        assert isinstance(caught.value.__cause__, VersionError)


def test_the_error_of_a_full_disk_names_the_file(url, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with connect(url, role="send") as sender:
        sender.send({"a": torch.ones(1)}.items(), version=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with pytest.raises(SyncAbortedError) as caught:
                sender.send({"a": torch.ones(5000)}.items(), version=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert re.search(r"policy/.*\.safetensors cannot be written: .*File too large", str(caught.value.__cause__))
        assert not [*tmp_path.glob("policy/*.partial")]
    with connect(url, role="receive") as receiver:
        assert dict(receiver.recv())["a"].tolist() == [1.0]


def test_an_engine_that_does_not_hold_what_was_read(url):
    weights, engine = {"a": torch.ones(5), "b": torch.ones(3)}, {"a": torch.zeros(5), "b": torch.zeros(3)}
    sender, receiver = ends(url)
    with sender, receiver:
        sender.send(weights.items(), version=1)
        receiver.attest_with(lambda: engine)

        def load_all_but_b():
            for name, tensor in receiver.recv():
                if name != "b":
                    engine[name].copy_(tensor)

        with pytest.raises(AttestationError, match="holds 2 of them"):
            load_all_but_b()
        assert (receiver.version, receiver.state) == (None, ReceiverState.POISONED)
        assert receiver.recv_into(engine) == 1
        assert_same(engine, weights)


@pytest.mark.process
def test_one_writer_at_a_time_and_waits_that_end(url):
    async def work():
        sender, receiver = ends(url, timeout_s=0.3)
        async with sender, receiver, connect(url, role="send") as second:
            await sender.prepare()
            await sender.prepare()
            await failure(AddressError, second.prepare())
            error = await failure(PeerTimeoutError, receive_all(receiver))
            assert "no version above -1" in str(error)
            assert not hasattr(receiver, "send_weights")
            assert not hasattr(sender, "receive_weights")
            await sender.close()
            await second.prepare()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file://relative/path", "absolute"),
        ("file:///x?keep=0", "versions to keep"),
        ("file:///x?kep=1", "options of this backend: keep"),
    ],
)
def test_urls_that_are_refused(url, message):
    with pytest.raises(AddressError, match=message):
        connect(url, role="send")


@pytest.mark.process
def test_a_killed_writer_publishes_nothing_and_is_cleaned_up(url, tmp_path):
    code = """
        import sys, signal
        import torch
        import rl_ckpt
        from rl_ckpt.backends import file
        file.FILE_BYTES = 100

        def source():
            for i in range(5):
                yield f"t{i}", torch.ones(100)
            print("stopped", flush=True)
            signal.pause()

        with rl_ckpt.connect(sys.argv[1], role="send") as sender:
            sender.send({"a": torch.ones(1)}.items(), version=1)
            sender.send(source(), version=2)
    """
    writer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), url], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "stopped\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    assert len(list((tmp_path / "policy").glob("*.safetensors"))) > 1
    sender, receiver = ends(url)
    with sender, receiver:
        assert_same({name: tensor.clone() for name, tensor in receiver.recv()}, {"a": torch.ones(1)})
        asyncio.run(sender.prepare())
        assert len(list((tmp_path / "policy").glob("*.safetensors"))) == 1
        sender.send({"a": torch.zeros(1)}.items(), version=2)
        assert_same({name: tensor.clone() for name, tensor in receiver.recv()}, {"a": torch.zeros(1)})


def test_a_registered_source_is_published_from_where_it_is(url, monkeypatch):
    """Large tensors are not copied first, tied ones are written once, others of one memory are copied."""
    import safetensors.torch

    from rl_ckpt.backends import file

    addresses = {}
    save_file = safetensors.torch.save_file
    monkeypatch.setattr(
        file.safetensors.torch,
        "save_file",
        lambda batch, *rest: (addresses.update({n: t.data_ptr() for n, t in batch.items()}), save_file(batch, *rest)),
    )

    async def work():
        sender, receiver = ends(url)
        async with sender, receiver:
            large = torch.randn(1 << 19)
            weights = sample_weights() | {"large": large, "tied": large, "half": large[: 1 << 18]}
            sender.register_source(weights)
            for version in (1, 2):
                large.add_(1)
                report = await sender.send_weights(version=version)
                assert report.digest == tree_digest(weights)
                assert_same(await receive_all(receiver), weights)
            assert addresses["large"] == large.data_ptr()
            assert "tied" not in addresses
            assert addresses["half"] != large.data_ptr()
            weights["large"] = large.clone()
            error = await failure(SyncAbortedError, sender.send_weights(version=3))
            assert "'large' was registered at" in str(error)

    asyncio.run(work())


def test_a_staged_version_is_installed_whole_or_not_at_all(url, tmp_path):
    async def work():
        sender, receiver = ends(url)
        async with sender, receiver:
            weights = {f"t{i}": torch.randn(1000) for i in range(4)}
            into = {name: torch.zeros(1000) for name in weights}
            await sender.send_weights(weights.items(), version=1)
            assert await receiver.receive_into(into, staged=True) == 1
            assert_same(into, weights)
            await sender.send_weights({name: -tensor for name, tensor in weights.items()}.items(), version=2)
            (path,) = (tmp_path / "policy").glob("version-*2-00000.safetensors")
            raw = bytearray(path.read_bytes())
            raw[-1] ^= 1
            path.write_bytes(raw)
            await failure(DigestError, receiver.receive_into(into, staged=True))
            assert_same(into, weights)
            assert (receiver.version, receiver.state) == (1, ReceiverState.COMMITTED)
            await sender.send_weights({name: tensor + 1 for name, tensor in weights.items()}.items(), version=3)
            receiver.attest_with(lambda: weights)
            await failure(AttestationError, receiver.receive_into(into, staged=True))
            assert_same(into, weights)
            assert (receiver.version, receiver.state) == (1, ReceiverState.COMMITTED)
            receiver.attest_with(lambda: into)
            assert await receiver.receive_into(into, staged=True) == 3
            assert_same(into, {name: tensor + 1 for name, tensor in weights.items()})

    asyncio.run(work())


def test_a_version_missing_a_tensor_leaves_refusing_targets(url):
    """The consumer's tensors are of two versions then, and the one that was taken is not in force."""

    async def work():
        sender, receiver = ends(url)
        async with sender, receiver:
            weights = {"a": torch.ones(3), "b": torch.ones(4)}
            into = {"a": torch.zeros(3), "b": torch.zeros(4)}
            await sender.send_weights(weights.items(), version=1)
            assert await receiver.receive_into(into) == 1
            for version, part in enumerate([{"a": torch.full((3,), 2.0)}, weights | {"c": torch.ones(1)}], 2):
                await sender.send_weights(part.items(), version=version)
                await failure(TensorError, receiver.receive_into(into))
                assert (receiver.version, receiver.digest, receiver.state) == (
                    1,
                    tree_digest(weights),
                    ReceiverState.POISONED,
                )
            await sender.send_weights(weights.items(), version=4)
            assert await receiver.receive_into(into) == 4
            assert_same(into, weights)
            assert receiver.state is ReceiverState.COMMITTED

    asyncio.run(work())


def test_targets_that_share_memory_cannot_hold_two_contents(url):
    async def work():
        sender, receiver = ends(url)
        async with sender, receiver:
            alias = torch.zeros(3)
            await sender.send_weights([("a", torch.ones(3)), ("b", torch.zeros(3))], version=1)
            error = await failure(TensorError, receiver.receive_into({"a": alias, "b": alias}))
            assert "'a', 'b' share memory" in str(error), error
            assert (receiver.version, receiver.state) == (None, ReceiverState.POISONED)

    asyncio.run(work())


def test_a_tensor_changed_before_its_write_is_not_published(url, monkeypatch):
    """It is written from where it is, after its digest was made: readers would find a version that is none."""
    weights = {f"t{i}": torch.zeros(1 << 19) for i in range(3)}

    async def work():
        sender, receiver = ends(url)
        async with sender, receiver:
            sender.register_source(weights)
            with monkeypatch.context() as patch:
                put = Folder.put

                def late(self, name, write):
                    weights["t1"].add_(1)
                    return put(self, name, write)

                patch.setattr(Folder, "put", late)
                error = await failure(SyncAbortedError, sender.send_weights(version=1))
            assert "'t1' was written to" in str(error), error
            await sender.send_weights(version=1)
            assert_same(await receive_all(receiver), weights)

    asyncio.run(work())
