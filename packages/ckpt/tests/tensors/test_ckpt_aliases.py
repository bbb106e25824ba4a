"""Tied weights, over any pattern of ties, and on the way through nodes and files."""

import asyncio

import pytest
import safetensors
import torch
from ckpt_nodes import Relay
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_ckpt
from rl_ckpt.testing import assert_same, new_name, receive_all
from rl_ckpt.testing.aliases import AliasDeltaSuite, AliasSuite

NUM_NAMES = 5
some = st.lists(st.one_of(st.integers(0, 2), st.none()), min_size=NUM_NAMES, max_size=NUM_NAMES)
patterns = st.lists(some.filter(lambda memories: any(m is not None for m in memories)), min_size=1, max_size=3)


class Inproc(AliasSuite, AliasDeltaSuite):
    def new_address(self):
        return f"inproc://{new_name()}"


@pytest.mark.process
@settings(max_examples=15, deadline=None)
@given(patterns)
def test_any_ties_are_bound_under_every_name(syncs):
    Inproc().check_ties(syncs)


@pytest.mark.process
@settings(max_examples=15, deadline=None)
@given(patterns)
def test_differences_of_any_ties(syncs):
    Inproc().check_differences(syncs)


@pytest.mark.parametrize("is_tied_here", [True, False])
def test_a_relay_passes_ties_on(is_tied_here):
    embed = torch.randn(1000)
    weights = {"embed": embed, "norm": torch.ones(3), "head": embed}
    mine = torch.zeros(1000)
    into = {"embed": mine, "norm": torch.zeros(3), "head": mine if is_tied_here else torch.zeros(1000)}

    async def main():
        upstream, downstream = f"inproc://{new_name()}", f"inproc://{new_name()}"
        async with (
            rl_ckpt.connect(upstream, role="send", bucket_bytes=1024) as sender,
            Relay(upstream, downstream, bucket_bytes=2048) as relay,
            rl_ckpt.connect(downstream, role="receive") as receiver,
        ):
            await sender.prepare()
            report, below, got = await asyncio.gather(
                sender.send_weights(weights.items(), version=1), relay.receive_into(into), receive_all(receiver)
            )
        assert_same(got, weights)
        assert_same(into, weights)
        for each in (report, below):
            assert (each.num_tensors, each.digest) == (3, rl_ckpt.tree_digest(weights))
            assert each.num_wire_bytes < 5000

    asyncio.run(main())


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_folder_holds_tied_tensors_once(tmp_path, is_registered):
    embed = torch.randn(512, 1024)
    weights = {"embed": embed, "norm": torch.ones(3), "head": embed, "t": embed.t()}
    with (
        rl_ckpt.connect(f"file://{tmp_path}", role="send") as sender,
        rl_ckpt.connect(f"file://{tmp_path}", role="receive") as receiver,
    ):
        if is_registered:
            sender.register_source(weights)
        report = sender.send(None if is_registered else weights.items(), version=1)
        got = dict(receiver.recv(clone=True))
    assert_same(got, weights)
    assert receiver.digest == report.digest == rl_ckpt.tree_digest(weights)
    assert (report.num_tensors, report.num_bytes - report.num_wire_bytes) == (4, embed.nbytes)
    (path,) = tmp_path.glob("*.safetensors")
    with safetensors.safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {"embed", "norm", "t"}
        assert file.metadata() == {"head": "embed"}
