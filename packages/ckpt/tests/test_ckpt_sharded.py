"""Weights from shard to shard: one transaction over all pairs of ranks, one digest however the model is cut."""

import asyncio
import math
import re
from contextlib import AsyncExitStack

import pytest
import torch
from ckpt_ranks import decide
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_ckpt
from rl_ckpt import Addresses, ShardSpec, join_addresses
from rl_ckpt.errors import AddressError, SyncAbortedError, TensorError, VersionError
from rl_ckpt.protocol.messages import Encoded
from rl_ckpt.sharded import ShardedReceiver, ShardedSender, ShardPlan
from rl_ckpt.tensors import digest_share
from rl_ckpt.tensors.digest_share import DigestShare, join_digest
from rl_ckpt.testing import new_name
from rl_ckpt.testing.helpers import until

pytestmark = pytest.mark.process  # seconds of computation

SHAPES = {"up": (17, 6), "down": (6, 17), "norm": (6,), "scale": (), "embed": (2048, 1030), "none": (0, 3)}
TIMEOUT_S = 20.0


def model(version, dtype=torch.float32):
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def cut_over(num_ranks, axis_of):
    """By rank its shards: each tensor along one axis, or held by every rank where that is None."""
    return [
        [
            ShardSpec.on_mesh(name, shape, mesh=(num_ranks,), placements=(axis_of(name, shape),), coordinate=(rank,))
            for name, shape in SHAPES.items()
        ]
        for rank in range(num_ranks)
    ]


def rows(name, shape):
    return 0 if shape else None


def columns(name, shape):
    return 1 if len(shape) > 1 else None


def part(tensor, spec):
    return tensor[tuple(slice(a, a + n) for a, n in zip(spec.offsets, spec.sizes, strict=True))].contiguous()


def box_of(spec):
    return tuple((start, start + size) for start, size in zip(spec.offsets, spec.sizes, strict=True))


def shards_of(weights, specs):
    return lambda: ((spec, part(weights[spec.name], spec)) for spec in specs)


class Cluster:
    """Ranks of a trainer, and replicas of a server, in this process."""

    def __init__(self, sources, targets=None, num_replicas=1, option=""):
        self.sources, self.targets, self.num_replicas = sources, targets, num_replicas
        self.plan = ShardPlan(sources, targets)
        self.name, self.option = new_name(), option
        self.stack = AsyncExitStack()

    async def __aenter__(self):
        self.senders = [
            ShardedSender(
                self.plan, rank, lambda t, r=rank: f"inproc://{self.name}-{r}-{t}{self.option}", timeout_s=TIMEOUT_S
            )
            for rank in range(len(self.sources))
        ]
        for sender in self.senders:
            self.stack.push_async_callback(sender.close)
        addresses = [await sender.prepare() for sender in self.senders]
        self.receivers = {
            (replica, target): await self.stack.enter_async_context(
                ShardedReceiver([each[target] for each in addresses if target in each], timeout_s=TIMEOUT_S)
            )
            for replica in range(self.num_replicas)
            for target in range(self.plan.num_targets)
        }
        self.held = {key: self.empty(key[1]) for key in self.receivers}
        return self

    async def __aexit__(self, *details):
        await self.stack.aclose()

    def empty(self, target):
        if self.targets is None:
            return {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        return {spec.name: torch.zeros(spec.sizes) for spec in self.targets[target]}

    def receive(self, key, **options):
        shards = None if self.targets is None else {spec.name: spec for spec in self.targets[key[1]]}
        return self.receivers[key].receive_into(self.held[key], shards, **options)

    async def stage(self, weights, version):
        return await asyncio.gather(
            *(
                sender.stage(shards_of(weights, specs), version=version, num_replicas=self.num_replicas)
                for sender, specs in zip(self.senders, self.sources, strict=True)
            ),
            return_exceptions=True,
        )

    async def sync(self, weights, version, **options):
        """What a trainer does: all ranks stage, and one decision for all."""
        receiving = [asyncio.ensure_future(self.receive(key, **options)) for key in self.receivers]
        shares = await self.stage(weights, version)
        reports = await decide(self.senders, shares, version)
        return reports, await asyncio.gather(*receiving, return_exceptions=True)

    def whole(self, replica):
        """The model that a replica holds, put together."""
        if self.targets is None:
            return self.held[replica, 0]
        weights = {name: torch.full(shape, float("nan")) for name, shape in SHAPES.items()}
        for target, specs in enumerate(self.targets):
            for spec in specs:
                box = tuple(slice(a, a + n) for a, n in zip(spec.offsets, spec.sizes, strict=True))
                weights[spec.name][box] = self.held[replica, target][spec.name]
        return weights


LAYOUTS = {
    "rows to one": (cut_over(2, rows), None),
    "rows to columns": (cut_over(3, rows), cut_over(2, columns)),
    "columns to rows": (cut_over(2, columns), cut_over(3, rows)),
    "one to one": (cut_over(1, rows), None),
    "replicas to columns": (cut_over(2, lambda name, shape: None), cut_over(2, columns)),
}


@pytest.mark.promise(
    "From shard to shard all pairs of ranks commit one version, with the digest of the whole model, or none does"
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_every_rank_gets_slices_in_one_version_with_one_digest(layout, num_replicas):
    sources, targets = LAYOUTS[layout]

    async def main():
        async with Cluster(sources, targets, num_replicas) as cluster:
            for version in (1, 2):
                weights = model(version)
                reports, versions = await cluster.sync(weights, version)
                assert versions == [version] * len(cluster.receivers)
                assert {report.digest for report in reports} == {rl_ckpt.tree_digest(weights)}
                sizes = SHAPES.values() if targets is None else [spec.sizes for specs in targets for spec in specs]
                wanted = sum(4 * math.prod(each) for each in sizes)
                assert sum(report.num_bytes for report in reports) == wanted, "every byte that is wanted moves once"
                receipts = [receipt for report in reports for receipt in report.receipts]
                assert all(receipt.is_attested and receipt.num_bound == receipt.num_tensors for receipt in receipts)
                for replica in range(num_replicas):
                    held = cluster.whole(replica)
                    assert all(torch.equal(held[name], weights[name]) for name in weights)

    asyncio.run(main())


@pytest.mark.process
def test_names_and_sessions_are_sent_once_and_never_again(monkeypatch):
    told, init = [], Encoded.__init__

    def noting(self, message):
        init(self, message)
        told.append((type(message).__name__, len(self._body)))

    monkeypatch.setattr(Encoded, "__init__", noting)

    async def main():
        async with Cluster(*LAYOUTS["rows to columns"]) as cluster:
            await cluster.sync(model(1), 1)
            first, told[:] = told[:], []
            await cluster.sync(model(2), 2)
            return first, told

    first, second = asyncio.run(main())
    once = {"Hello", "Session", "Manifest"}
    assert once <= {kind for kind, _ in first}
    assert not once & {kind for kind, _ in second}
    assert sum(size for _, size in second) < 0.7 * sum(size for _, size in first)


@pytest.mark.process
def test_a_rank_s_failure_is_committed_nowhere_and_next_is_whole():
    sources, targets = LAYOUTS["rows to columns"]

    async def main():
        async with Cluster(sources, targets, 2) as cluster:
            await cluster.sync(model(1), 1)
            good, cluster.sources = cluster.sources, [*cluster.sources[:2], []]
            errors, answers = await cluster.sync(model(2), 2)
            assert "does not hold 'down' any more" in " ".join(map(str, errors))
            assert all(isinstance(answer, rl_ckpt.CkptError) for answer in answers), answers
            assert {receiver.version for receiver in cluster.receivers.values()} == {1}
            cluster.sources = good
            _, versions = await cluster.sync(model(3), 3)
            assert versions == [3] * 4
            assert all(torch.equal(cluster.whole(1)[name], tensor) for name, tensor in model(3).items())

    asyncio.run(main())


@pytest.mark.process
def test_the_decision_is_one_for_all_ranks_also_after_every_vote():
    async def main():
        async with Cluster(*LAYOUTS["rows to columns"]) as cluster:
            receiving = [asyncio.ensure_future(cluster.receive(key)) for key in cluster.receivers]
            shares = await cluster.stage(model(1), 1)
            assert not any(isinstance(share, BaseException) for share in shares)
            assert not any(task.done() for task in receiving), "nobody is committed before the decision"
            await asyncio.gather(*(sender.abort("the controller has changed its mind") for sender in cluster.senders))
            for answer in await asyncio.gather(*receiving, return_exceptions=True):
                assert isinstance(answer, SyncAbortedError)
                assert "changed its mind" in str(answer)

    asyncio.run(main())


@pytest.mark.promise("Who waits for a sync that is called off before it began is told at once")
@pytest.mark.process
def test_waiters_for_a_cancelled_sync_are_notified_at_once():
    """One of two replicas has not come; the other one is not left waiting to its deadline."""

    async def main():
        async with Cluster(*LAYOUTS["rows to columns"], 2) as cluster:
            waiting = [asyncio.ensure_future(cluster.receive((0, target))) for target in (0, 1)]
            staging = asyncio.ensure_future(cluster.stage(model(1), 1))
            ends = [end for sender in cluster.senders for end in sender._ends.values()]
            await until(
                lambda: all(end._peers and any(peer.waiting for peer in end._peers.members.admitted) for end in ends)
            )
            assert not staging.done()
            staging.cancel("replica 1 is gone")
            async with asyncio.timeout(TIMEOUT_S / 4):
                answers = await asyncio.gather(*waiting, return_exceptions=True)
            for answer in answers:
                assert isinstance(answer, SyncAbortedError)
                assert "called the sync off" in str(answer)
            _, versions = await cluster.sync(model(2), 2)
            assert versions == [2] * 4

    asyncio.run(main())


@pytest.mark.process
def test_a_commit_heard_by_one_session_counts_for_its_receiver():
    """A sender that dies after every vote takes nothing back, once another one has told the decision."""

    async def main():
        async with Cluster(*LAYOUTS["rows to columns"]) as cluster:
            receiving = [asyncio.ensure_future(cluster.receive(key)) for key in cluster.receivers]
            digest = join_digest(await cluster.stage(model(1), 1))
            await cluster.senders[2].close()
            await asyncio.gather(*(sender.commit(digest, 1) for sender in cluster.senders[:2]))
            assert await asyncio.gather(*receiving) == [1, 1]
            assert all(torch.equal(cluster.whole(0)[name], tensor) for name, tensor in model(1).items())

    asyncio.run(main())


@pytest.mark.process
def test_a_receiver_failing_before_the_vote_cancels_the_sync():
    async def main():
        async with Cluster(*LAYOUTS["rows to columns"]) as cluster:

            def refuse(names):
                assert names == {name for name in SHAPES if name != "none"}
                raise RuntimeError("the loader has no room")

            errors, answers = await cluster.sync(model(1), 1, on_landed=refuse)
            assert len(errors) == 3
            assert any("no room" in str(error) for error in errors)
            assert any("no room" in str(answer) for answer in answers)
            _, versions = await cluster.sync(model(2), 2)
            assert versions == [2, 2]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (True, True),  # it has compared, and what landed is overwritten
        (False, False),
        (None, "its engine holds"),  # the targets are read, and are not what landed any more
    ],
)
def test_engines_that_compare_are_trusted_and_others_are_read(says, told):
    """An engine that compares its weights with the received ones is trusted; otherwise the targets are read."""

    async def main():
        async with Cluster(*LAYOUTS["rows to columns"]) as cluster:

            def overwrite(names):
                for targets in cluster.held.values():
                    for tensor in targets.values():
                        tensor.zero_()
                return says

            reports, answers = await cluster.sync(model(1), 1, on_landed=overwrite)
            if isinstance(told, str):
                assert told in " ".join(map(str, [*reports, *answers]))
                return
            assert answers == [1, 1]
            assert {receipt.is_attested for report in reports for receipt in report.receipts} == {told}

    asyncio.run(main())


@pytest.mark.process
def test_a_receiver_with_an_undeclared_layout_is_named():
    sources, targets = cut_over(2, rows), cut_over(2, rows)

    async def main():
        async with Cluster(sources, targets) as cluster:
            cluster.targets = targets[::-1]
            cluster.held = {key: cluster.empty(key[1]) for key in cluster.receivers}
            errors, answers = await cluster.sync(model(1), 1)
            told = " ".join(map(str, [*errors, *answers]))
            assert "it has another layout than it declared" in told
            assert f"inproc://{cluster.name}-" in told
        async with Cluster(sources, None) as cluster:
            cluster.held[0, 0]["more"] = torch.zeros(3)
            _, answers = await cluster.sync(model(1), 1)
            assert isinstance(answers[0], TensorError)
            assert "0 elements of 'more' came, and it has 3" in str(answers[0])

    asyncio.run(main())


def test_one_value_tells_every_rank_of_a_server_its_sessions():
    addresses = join_addresses([{0: "shm://a0", 1: "shm://a1"}, {1: "shm://b1"}], 2)
    urls = [[address.url for address in addresses.of(target)] for target in (0, 1)]
    assert urls == [["shm://a0"], ["shm://a1", "shm://b1"]]
    assert Addresses.from_json(addresses.to_json()) == addresses
    assert Addresses.from_json("shm://whole") is None
    for rank in (2, -1):
        with pytest.raises(AddressError, match=f"for 2 ranks; this is rank {rank}"):
            addresses.of(rank)


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"ranks": 3}', '{"ranks": [[{}]]}', '{"ranks": [[{"url": "a", "x": 1}]]}']
)
def test_text_that_holds_no_addresses_is_refused(text):
    with pytest.raises(AddressError, match="holds no addresses"):
        Addresses.from_json(text)


def test_a_port_found_by_a_rank_comes_with_its_session_options():
    spec = ShardSpec(name="w", shape=(4,), offsets=(0,), sizes=(4,))

    async def main():
        sender = ShardedSender(ShardPlan([[spec]]), 0, lambda t: "tcp://127.0.0.1:0?delta=1", token="of the test")
        (address,) = (await sender.prepare()).values()
        async with ShardedReceiver([address], token="of the test", timeout_s=TIMEOUT_S) as receiver:
            held = torch.zeros(4)
            receiving = asyncio.ensure_future(receiver.receive_into({"w": held}))
            share = await sender.stage(lambda: [(spec, torch.arange(4.0))], version=1)
            await sender.commit(join_digest([share]), 1)
            assert await receiving == receiver.version == 1
            assert held.tolist() == [0, 1, 2, 3]
        await sender.close()
        return address

    assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d+\?delta=1", asyncio.run(main()))


def test_of_tied_targets_one_has_to_come():
    weights = {"embed": torch.randn(4, 3)}
    spec = ShardSpec(name="embed", shape=(4, 3), offsets=(0, 0), sizes=(4, 3))
    name = new_name()

    async def main():
        sender = ShardedSender(ShardPlan([[spec]]), 0, lambda t: f"inproc://{name}", timeout_s=TIMEOUT_S)
        addresses = await sender.prepare()
        held = torch.zeros(4, 3)
        targets = {"embed": held, "head": held, "other": torch.zeros(2)}
        async with ShardedReceiver([*addresses.values()], timeout_s=TIMEOUT_S) as receiver:
            for version, strict in ((1, False), (2, True)):
                receiving = asyncio.ensure_future(receiver.receive_into({**targets}, strict=strict))
                staged = await asyncio.gather(
                    sender.stage(lambda: [(spec, weights["embed"])], version=version), return_exceptions=True
                )
                if strict:
                    with pytest.raises(TensorError, match="0 elements of 'other' came"):
                        await receiving
                else:
                    await sender.commit(join_digest(staged), version)
                    assert await receiving == 1
                    assert torch.equal(held, weights["embed"])
        await sender.close()

    asyncio.run(main())


def test_slices_of_two_versions_are_never_one_model():
    async def main():
        async with Cluster(cut_over(2, rows), None) as cluster:
            receiving = asyncio.ensure_future(cluster.receive((0, 0)))
            staging = [
                sender.stage(shards_of(model(version), specs), version=version)
                for version, (sender, specs) in enumerate(zip(cluster.senders, cluster.sources, strict=True), start=1)
            ]
            shares = await asyncio.gather(*staging, return_exceptions=True)
            assert all(isinstance(share, SyncAbortedError) for share in shares)
            with pytest.raises(VersionError, match="slices of different versions came"):
                await receiving

    asyncio.run(main())


@pytest.mark.process
def test_differences_go_only_to_receivers_of_the_base_version():
    async def main():
        async with Cluster(cut_over(2, rows), cut_over(2, rows), 2, "?delta=1") as cluster:
            weights = model(1)
            whole, _ = await cluster.sync(weights, 1)
            weights = {**weights, "embed": weights["embed"].clone()}
            weights["embed"].view(-1)[::100] += 1
            told, versions = await cluster.sync(weights, 2)
            assert versions == [2] * 4
            assert {report.digest for report in told} == {rl_ckpt.tree_digest(weights)}
            bytes_of = [sum(report.num_wire_bytes for report in reports) for reports in (whole, told)]
            assert bytes_of[1] <= 0.06 * bytes_of[0]
            assert all(torch.equal(cluster.whole(1)[name], tensor) for name, tensor in weights.items())
            del cluster.receivers[0, 1], cluster.held[0, 1]
            await cluster.stack.aclose()

    asyncio.run(main())


SHAPE = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)


@pytest.mark.parametrize(
    ("shape", "axis", "dtype"),
    [
        ((2100, 2048), 1, torch.bfloat16),  # rows of 4 KiB, over several leaves
        ((2100, 2048), 1, torch.float32),
        ((6, 96, 640), 2, torch.bfloat16),  # experts, cut inside
        ((6, 96, 640), 1, torch.bfloat16),
        ((40, 24), 1, torch.float64),
        ((40, 26), 1, torch.bfloat16),  # words are cut
        ((3, 90_000), 1, torch.float32),  # long rows
        ((2, 4, 8, 16), 3, torch.float32),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_shares_of_split_tensors_add_up_to_the_digest(shape, axis, dtype, num_ranks):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole[0] = 0  # as what stands beside a part
    size = -(-shape[axis] // num_ranks)
    for is_view in (True, False):
        shares = []
        for start in range(0, shape[axis], size):
            end = min(shape[axis], start + size)
            box = tuple((start, end) if each == axis else (0, n) for each, n in enumerate(shape))
            part = whole.narrow(axis, start, end - start)
            share = DigestShare(dtype, shape)
            for first, last in ((0, shape[0] // 2), (shape[0] // 2, shape[0])):
                rows = ((first, last), *box[1:])
                own = part[first:last]
                share.add(own if is_view else own.contiguous(), rows)
            shares.append({"w": share})
        assert join_digest(shares) == rl_ckpt.tree_digest({"w": whole})


def test_many_short_rows_are_digested_together(monkeypatch):
    calls, digest_sum = [], digest_share.digest_sum
    monkeypatch.setattr(
        digest_share, "digest_sum", lambda data, offset=0: calls.append(1) or digest_sum(data, offset=offset)
    )
    for _ in range(2):
        calls.clear()
        share = DigestShare(torch.bfloat16, (4096, 1024))
        share.add(torch.ones(4096, 512, dtype=torch.bfloat16), ((0, 4096), (512, 1024)))
    assert len(calls) < 20, "one for each row the first time, for the zeros; a few for each MiB after it"


@pytest.mark.process
@settings(max_examples=150, deadline=None)
@given(shape=SHAPE, num_ranks=st.integers(1, 4), axis=st.integers(0, 2), size=st.sampled_from([1, 2, 4, 8]))
def test_shares_of_any_cut_add_up_to_the_digest_of_the_whole(shape, num_ranks, axis, size):
    dtype = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}[size]
    tensor = torch.randint(-100, 100, shape).to(dtype)
    axis = axis % len(shape) if shape else None
    shares = []
    for rank in range(num_ranks):
        spec = ShardSpec.on_mesh("w", shape, mesh=(num_ranks,), placements=(axis,), coordinate=(rank,))
        share = DigestShare(dtype, shape)
        if axis is not None or rank == 0:
            share.add(part(tensor, spec), box_of(spec))
        shares.append({"w": share})
    assert join_digest(shares) == rl_ckpt.tree_digest({"w": tensor})


@pytest.mark.parametrize(
    ("shape", "axis"), [((1050, 4099), 0), ((1050, 4099), 1), ((5, 1 << 20), 1), ((3, 700_001), 0)]
)
def test_shares_add_up_over_leaves_and_split_words(shape, axis):
    tensor = torch.randint(-100, 100, shape).to(torch.bfloat16)
    shares = []
    for rank in range(3):
        spec = ShardSpec.on_mesh("w", shape, mesh=(3,), placements=(axis,), coordinate=(rank,))
        shares.append({"w": DigestShare(tensor.dtype, shape)})
        shares[-1]["w"].add(
            part(tensor, spec), tuple((a, a + n) for a, n in zip(spec.offsets, spec.sizes, strict=True))
        )
    assert join_digest(shares) == rl_ckpt.tree_digest({"w": tensor})
    with pytest.raises(TensorError, match="elements of 'w' were counted"):
        join_digest(shares[:2])
