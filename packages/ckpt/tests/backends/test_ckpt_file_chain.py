"""Versions in a folder as differences from the one before, and in an object store: who reads them has what was sent."""

import asyncio
import json
import signal
import subprocess
import sys
import textwrap
import uuid

import pytest
import torch
from ckpt_chains import weights_of

import rl_ckpt
from rl_ckpt import AddressError, BackendError, DigestError, ProtocolError, SyncAbortedError, connect, tree_digest
from rl_ckpt.testing import assert_same, failure, receive_all

pytest.importorskip("safetensors")
fsspec = pytest.importorskip("fsspec")


@pytest.fixture(params=["file", "file+memory", "file+local"])
def url(request, tmp_path):
    path = f"{tmp_path}/policy" if request.param != "file+memory" else f"/bucket-{uuid.uuid4().hex}/policy"
    return f"{request.param}://{path}"


def names_in(url):
    fs, path = fsspec.url_to_fs(url.replace("file+", "").partition("?")[0])
    return sorted(str(name).rpartition("/")[2] for name in fs.ls(path, detail=False))


def versions_in(url):
    return [int(name.removesuffix(".json")[-20:]) for name in names_in(url) if name.endswith(".json")]


@pytest.mark.promise("A folder or object store of differences gives every reader what was sent, also one that joins")
@pytest.mark.process
def test_differences_are_small_and_give_every_bit_to_all_readers(url):
    async def work():
        async with (
            connect(f"{url}?chain=3", role="send") as sender,
            connect(url, role="receive", timeout_s=20) as reader,
        ):
            reports = []
            for version in range(1, 8):
                weights = weights_of(version)
                reports.append(await sender.send_weights(weights.items(), version=version))
                assert reports[-1].digest == tree_digest(weights)
                assert_same(await receive_all(reader), weights)
                async with connect(url, role="receive", timeout_s=20) as joiner:
                    assert_same(await receive_all(joiner), weights)
                    assert (joiner.version, joiner.digest) == (version, tree_digest(weights))
            return reports

    reports = asyncio.run(work())
    whole = reports[0].num_wire_bytes
    assert whole == sum(tensor.nbytes for tensor in weights_of(1).values())
    small = [report.num_wire_bytes < 0.03 * whole for report in reports]
    assert small == [False, True, True] * 2 + [False], "every third version is whole"
    assert [report.num_deltas for report in reports] == [0, 3, 3] * 2 + [0]


@pytest.mark.process
def test_a_reader_that_missed_versions_catches_up(url, monkeypatch):
    from rl_ckpt.backends.file.folder import Folder, ObjectStore

    opened = []
    for kind in (Folder, ObjectStore):
        original = kind.open
        monkeypatch.setattr(
            kind, "open", lambda self, name, original=original: (opened.append(name), original(self, name))[1]
        )

    async def work():
        async with (
            connect(f"{url}?chain=9&keep=9", role="send") as sender,
            connect(url, role="receive", timeout_s=20) as reader,
        ):
            for version in range(1, 7):
                await sender.send_weights(weights_of(version).items(), version=version)
                if version in (2, 3, 6):
                    opened.clear()
                    assert_same(await receive_all(reader), weights_of(version))
                    assert len(opened) == {2: 2, 3: 1, 6: 3}[version], opened

    asyncio.run(work())


@pytest.mark.promise("What a kept version is a difference from is kept")
@pytest.mark.process
def test_bases_of_a_kept_version_are_kept_and_others_pruned(url):
    """The base is the version that the kept one is a difference from."""

    async def work():
        async with connect(f"{url}?chain=4&keep=2", role="send") as sender:
            kept = []
            for version in range(1, 10):
                await sender.send_weights(weights_of(version).items(), version=version)
                kept.append(versions_in(url))
            return kept

    kept = asyncio.run(work())
    assert kept[3:] == [[1, 2, 3, 4], [1, 2, 3, 4, 5], [5, 6], [5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8, 9]]
    assert len(names_in(url)) == 2 * 5 + (".writer" in names_in(url))


@pytest.mark.process
def test_a_new_sender_or_a_failed_version_means_a_whole_version(url):
    """No difference is sent first by a new sender, nor after a failed sync."""

    def torn():
        yield from list(weights_of(3).items())[:2]
        raise RuntimeError("the trainer stumbled")

    async def work():
        async with connect(f"{url}?chain=9", role="send") as sender:
            for version in (1, 2):
                await sender.send_weights(weights_of(version).items(), version=version)
            await failure(SyncAbortedError, sender.send_weights(torn(), version=3))
            assert (await sender.send_weights(weights_of(3).items(), version=3)).num_deltas == 0
            assert (await sender.send_weights(weights_of(4).items(), version=4)).num_deltas == 3
        async with (
            connect(f"{url}?chain=9", role="send") as sender,
            connect(url, role="receive", timeout_s=20) as reader,
        ):
            assert_same(await receive_all(reader), weights_of(4))
            assert (await sender.send_weights(weights_of(5).items(), version=5)).num_deltas == 0
            assert_same(await receive_all(reader), weights_of(5))

    asyncio.run(work())


@pytest.mark.process
def test_tied_tensors_are_stored_once_in_differences_too(tmp_path):
    url = f"file://{tmp_path}/policy"
    weights = weights_of(1)
    weights["tied"] = weights["large"]

    async def work():
        async with (
            connect(f"{url}?chain=9", role="send") as sender,
            connect(url, role="receive", timeout_s=20) as reader,
        ):
            for version in (1, 2, 3):
                weights["large"][version::200] += 1
                report = await sender.send_weights(weights.items(), version=version)
                assert report.num_tensors == 4
                assert_same(await receive_all(reader), weights)
            assert report.num_wire_bytes < 0.03 * weights["large"].nbytes

    asyncio.run(work())


@pytest.mark.process
@pytest.mark.parametrize("flips", ["difference", "base"])
def test_a_flipped_bit_in_a_chain_is_found_and_recovered_from(flips, tmp_path):
    url = f"file://{tmp_path}/policy"

    async def work():
        async with (
            connect(f"{url}?chain=3", role="send") as sender,
            connect(url, role="receive", timeout_s=20) as reader,
        ):
            for version in (1, 2):
                await sender.send_weights(weights_of(version).items(), version=version)
            number = 2 if flips == "difference" else 1
            (path,) = (tmp_path / "policy").glob(f"version-{number:020d}-*.safetensors")
            data = bytearray(path.read_bytes())
            data[-9] ^= 1
            path.write_bytes(data)
            error = await failure((DigestError, ProtocolError), receive_all(reader))
            assert "version 2" in str(error) or "difference" in str(error)
            for version in (3, 4):
                await sender.send_weights(weights_of(version).items(), version=version)
            assert_same(await receive_all(reader), weights_of(4))

    asyncio.run(work())


def test_a_chain_that_does_not_end_is_refused(tmp_path):
    url = f"file://{tmp_path}/policy"

    async def work():
        async with connect(f"{url}?chain=9", role="send") as sender:
            for version in (1, 2):
                await sender.send_weights(weights_of(version).items(), version=version)
        (path,) = (tmp_path / "policy").glob("version-00000000000000000002.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "base": 2}))
        async with connect(url, role="receive", timeout_s=20) as reader:
            error = await failure(ProtocolError, receive_all(reader))
            assert "does not come before it" in str(error)

    asyncio.run(work())


def test_what_cannot_be_is_said_when_it_is_asked_for():
    with pytest.raises(AddressError, match="is not a filesystem of fsspec"):
        connect("file+nowhere://bucket/policy", role="send")
    with pytest.raises(BackendError, match=r"no backend 'shm\+s3' is installed"):
        connect("shm+s3://bucket/policy", role="send")
    with pytest.raises(AddressError, match="chain is '0'"):
        connect("file:///tmp/policy?chain=0", role="send")
    assert rl_ckpt.session.capabilities("file+memory://bucket/policy") == frozenset()


DYING_WRITER = """
    import os, signal, sys
    import torch
    import rl_ckpt
    from rl_ckpt.backends.file.folder import Folder

    def dying(name, when):
        original, counts = getattr(Folder, name), [0]

        def method(self, *arguments):
            counts[0] += 1
            if counts[0] == when:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *arguments)

        setattr(Folder, name, method)

    weights = {"w": torch.arange(100000.0)}
    with rl_ckpt.connect(sys.argv[1] + "?chain=9", role="send") as sender:
        for version in (1, 2):
            weights["w"][version] += 1
            sender.send(weights.items(), version=version)
        dying(sys.argv[2], int(sys.argv[3]))
        weights["w"][3] += 1
        sender.send(weights.items(), version=3)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("operation", "when", "published"),
    [("put", 1, 2), pytest.param("put", 2, 2, marks=pytest.mark.slow), ("prune", 1, 3)],
    ids=str,
)
def test_a_writer_killed_in_a_difference_leaves_a_whole_version(operation, when, published, tmp_path):
    """Before its tensors, before its manifest, and after it; the next writer goes on, with a whole version."""
    url = f"file://{tmp_path}/policy"
    weights = {"w": torch.arange(100000.0)}
    weights["w"][1 : published + 1] += 1
    command = [sys.executable, "-c", textwrap.dedent(DYING_WRITER), url, operation, str(when)]
    assert subprocess.run(command, check=False, timeout=120).returncode == -signal.SIGKILL

    async def work():
        async with (
            connect(f"{url}?chain=9", role="send") as sender,
            connect(url, role="receive", timeout_s=20) as reader,
        ):
            assert_same(await receive_all(reader), weights)
            assert reader.version == published
            weights["w"][50] += 1
            assert (await sender.send_weights(weights.items(), version=4)).num_deltas == 0
            assert_same(await receive_all(reader), weights)

    asyncio.run(work())
