"""Chains of versions in an S3-like object store: a real HTTP server, which s3fs talks to as it would to Amazon's."""

import asyncio
import uuid
from functools import partial

import ckpt_chains
import pytest

from rl_ckpt import AttestationError, DigestError, connect, tree_digest
from rl_ckpt.testing import assert_same, failure, receive_all

pytestmark = pytest.mark.process

pytest.importorskip("s3fs")
fsspec = pytest.importorskip("fsspec")
server_module = pytest.importorskip("moto.server")

weights_of = partial(ckpt_chains.weights_of, large=3 << 19)
"""Two leaves."""


@pytest.fixture(scope="module")
def endpoint():
    """The address of a server of buckets, in a thread of this process, for the length of this file."""
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def url(endpoint, monkeypatch):
    """A prefix of a new bucket, under the variables by which every S3 client is configured."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    fsspec.filesystem("s3").clear_instance_cache()  # an earlier endpoint's
    bucket = f"bucket-{uuid.uuid4().hex}"
    files.mkdir(bucket)
    return f"file+s3://{bucket}/run/policy"


def objects_in(url):
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    return sorted(str(name).rpartition("/")[2] for name in files.ls(url.removeprefix("file+s3://"), detail=False))


def versions_in(url):
    return [int(name.removesuffix(".json")[-20:]) for name in objects_in(url) if name.endswith(".json")]


@pytest.mark.promise("In an S3-like store a chain is published, pruned and joined, and its readers are attested")
def test_a_chain_is_published_pruned_joined_and_attested(url):
    """Four versions, every second one whole; one reader follows, another joins at each, a third misses two."""

    async def work():
        followed, reports = {}, []
        async with (
            connect(f"{url}?chain=2&keep=1", role="send") as sender,
            connect(url, role="receive", timeout_s=20) as follower,
            connect(url, role="receive", timeout_s=20) as idler,
        ):
            follower.attest_with(lambda: followed)
            for version in range(1, 5):
                weights = weights_of(version)
                reports.append(await sender.send_weights(weights.items(), version=version))
                assert reports[-1].digest == tree_digest(weights)
                if not followed:
                    followed |= {name: tensor.clone() for name, tensor in weights.items()}
                assert await follower.receive_into(followed) == version
                assert_same(followed, weights)
                async with connect(url, role="receive", timeout_s=20) as joiner:
                    held = {name: tensor.clone() for name, tensor in weights_of(0).items()}
                    joiner.attest_with(lambda held=held: held)
                    assert await joiner.receive_into(held) == version
                    assert_same(held, weights)
                    assert joiner.digest == reports[-1].digest
                if version in (1, 4):
                    assert_same(await receive_all(idler), weights)
            return reports

    reports = asyncio.run(work())
    whole = reports[0].num_wire_bytes
    assert [report.num_wire_bytes < 0.03 * whole for report in reports] == [False, True] * 2
    assert versions_in(url) == [3, 4], "the last one, and what it is a difference from"
    assert len(objects_in(url)) == 2 * 2


def test_a_reader_with_a_different_engine_rejects_the_version(url):
    async def work():
        async with (
            connect(f"{url}?chain=3", role="send") as sender,
            connect(url, role="receive", timeout_s=20) as reader,
        ):
            held = {name: tensor.clone() for name, tensor in weights_of(1).items()}
            lost = {name: tensor.clone() for name, tensor in held.items()}
            await sender.send_weights(weights_of(1).items(), version=1)
            await reader.receive_into(held)
            await sender.send_weights(weights_of(2).items(), version=2)
            reader.attest_with(lambda: lost)
            error = await failure(AttestationError, reader.receive_into(held))
            assert "its loader lost or changed some" in str(error)
            assert reader.version == 1

    asyncio.run(work())


@pytest.mark.parametrize("number", [1, 2], ids=["base", "difference"])
def test_a_flipped_bit_in_an_object_is_found_by_whoever_joins(number, url):
    async def work():
        async with connect(f"{url}?chain=3", role="send") as sender:
            for version in (1, 2):
                await sender.send_weights(weights_of(version).items(), version=version)
            files, prefix = fsspec.url_to_fs(url.removeprefix("file+"))
            (path,) = (f"{prefix}/{name}" for name in objects_in(url) if f"{number:020d}-" in name)
            data = bytearray(files.cat_file(path))
            data[-9] ^= 1
            files.pipe_file(path, bytes(data))
            async with connect(url, role="receive", timeout_s=20) as joiner:
                await failure(DigestError, receive_all(joiner))
                assert joiner.version is None
                for version in (3, 4):
                    await sender.send_weights(weights_of(version).items(), version=version)
                assert_same(await receive_all(joiner), weights_of(4))

    asyncio.run(work())
