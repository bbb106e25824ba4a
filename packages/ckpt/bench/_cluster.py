"""Many receivers behind slow links: 64 real ones on four nodes, with and without relays; and a cluster, simulated.

Real: two ranks of a trainer and four nodes of 16 receivers each are processes here, over TCP, and a rank's connections
share its link: the kernel paces each to its part of it (`SO_MAX_PACING_RATE`). Inside a node relays go over `shm`.

Simulated: the pairs, groups and bytes that the product's plan names (`ShardPlan`, `Placement.groups`) as flows that
share links max-min fairly, without latency; validated on the real runs' own layout. A node has one link, in and out,
and one memory; a rank takes and sends no faster than its CPU digests and copies.
"""

import asyncio
import itertools
import multiprocessing
import os
import time
from collections import Counter

import torch
from packages.ckpt.bench._child import TOKEN, pace, shapes

import rl_ckpt
from rl_bench import Role
from rl_ckpt import Placement, ShardSpec
from rl_ckpt.traffic import Traffic

NUM_SOURCES, NUM_NODES, PER_NODE = 2, 4, 16
ROWS, COLUMNS = 64, 1024
"""Of each of the float32 tensors of the real runs."""
LINK_BYTES_PER_S = 16e6
MEMORY_BYTES_PER_S = 50e9
RANK_BYTES_PER_S = 2.5e9
"""Of one rank: 0.4 CPU seconds a GB, the goal that `rl-bench weights` holds receivers to."""
TIMEOUT_S = 300.0
GBIT = 1e9 / 8


# ---- the simulation


def simulate(flows, capacity):
    """Seconds until all flows are through, each at its max-min fair rate. Flows are (bytes, the resources it takes)."""
    left = [[size, resources] for size, resources in flows if size]
    now = 0.0
    while left:
        rates = fair_rates([resources for _, resources in left], capacity)
        step = min(size / rate for (size, _), rate in zip(left, rates, strict=True))
        now += step
        for flow, rate in zip(left, rates, strict=True):
            flow[0] -= step * rate
        left = [flow for flow in left if flow[0] > 1.0]
    return now


def fair_rates(flows, capacity):
    """Max-min fair rates: the most loaded resource is shared first, then what is left of the others."""
    rates, room = [0.0] * len(flows), dict(capacity)
    users = Counter(resource for resources in flows for resource in resources)
    todo = set(range(len(flows)))
    while todo:
        tightest = min((name for name in users if users[name]), key=lambda name: room[name] / users[name])
        rate = room[tightest] / users[tightest]
        for index in [index for index in todo if tightest in flows[index]]:
            rates[index] = rate
            todo.discard(index)
            for resource in flows[index]:
                room[resource] -= rate
                users[resource] -= 1
    return rates


def between(source, target):
    return (f"{source} memory",) if source == target else (f"{source} out", f"{target} in")


def planned_flows(placement, traffic):
    """What the plan sends, over links and, from relays, inside nodes."""
    flows = []
    for (source, target), size in traffic.pairs.items():
        for relay, *others in placement.groups(source, target):
            node = placement.target_nodes[relay][target]
            ends = (f"trainer rank {source}", f"rank {target} of {relay}")
            flows.append((size, (*between(placement.source_nodes[source], node), *ends)))
            for other in others:
                ends = (f"rank {target} of {relay}", f"rank {target} of {other}")
                flows.append((size, (*between(node, placement.target_nodes[other][target]), *ends)))
    return flows


def capacity_of(placement, link):
    nodes = {*placement.source_nodes, *(node for nodes in placement.target_nodes for node in nodes)}
    capacity = {f"{node} {end}": link for node in nodes for end in ("in", "out")}
    capacity |= {f"{node} memory": MEMORY_BYTES_PER_S for node in nodes}
    capacity |= {f"trainer rank {rank}": RANK_BYTES_PER_S for rank in range(len(placement.sources))}
    replicas = enumerate(placement.target_nodes)
    ranks = [f"rank {target} of {replica}" for replica, own in replicas for target in range(len(own))]
    return capacity | dict.fromkeys(ranks, RANK_BYTES_PER_S)


def gathered_seconds(placement, num_bytes, link, *, is_broadcast):
    """All-gather over the trainer's nodes in a ring, then whole weights from rank 0 to all ranks of servers."""
    capacity = capacity_of(placement, link)
    nodes = list(dict.fromkeys(placement.source_nodes))
    part = num_bytes * (len(nodes) - 1) / len(nodes)
    ring = [(part, between(node, nodes[i - 1])) for i, node in enumerate(nodes)] if len(nodes) > 1 else []
    seconds = simulate(ring, capacity)
    takers = [node for own in placement.target_nodes for node in own]
    if is_broadcast:  # a pipelined chain over the nodes, and a copy for each rank of them
        chain = [nodes[0], *dict.fromkeys(takers)]
        flows = [(num_bytes, between(a, b)) for a, b in itertools.pairwise(chain)]
        flows += [(num_bytes * (count - 1), between(node, node)) for node, count in Counter(takers).items()]
    else:
        flows = [(num_bytes, between(nodes[0], node)) for node in takers]
    return seconds + simulate(flows, capacity)


def model_specs(num_layers, vocab_size, scale):
    """Shapes of Qwen3-0.6B with every axis `scale` times as long."""
    return {name: tuple(scale * n for n in shape) for name, shape in shapes(num_layers, vocab_size).items()}


def cut(sizes, rank, num_ranks, axis_of):
    return [
        ShardSpec.on_mesh(name, shape, mesh=(num_ranks,), placements=(axis_of(name, shape),), coordinate=(rank,))
        for name, shape in sizes.items()
    ]


def is_row_parallel(name, shape):
    return None if len(shape) < 2 else 1 if "o_proj" in name or "down_proj" in name else 0


def cluster(num_layers=36):
    """Four nodes of eight fsdp ranks, and four of eight server ranks: four replicas at tp=2 on each."""
    sizes = model_specs(num_layers, 37_984, 4)
    return Placement(
        sizes=dict.fromkeys(sizes, 2),
        sources=[cut(sizes, rank, 32, lambda name, shape: 0) for rank in range(32)],
        targets=[cut(sizes, rank, 2, is_row_parallel) for rank in range(2)],
        source_nodes=[f"trainer {rank // 8}" for rank in range(32)],
        target_nodes=[[f"server {replica // 4}"] * 2 for replica in range(16)],
        has_relays=True,
    )


def simulated(run, link_gbit=25.0):
    """Rows of the cluster: seconds of the plan over its bound, beside gathering and sending, in one simulation."""
    placement = cluster(4 if run.quick else 36)
    traffic, link = Traffic(placement), link_gbit * GBIT
    bound = traffic.seconds(link, MEMORY_BYTES_PER_S)
    seconds = simulate(planned_flows(placement, traffic), capacity_of(placement, link))
    size = f"{traffic.num_bytes / 1e9:.1f} GB"
    what = f"simulated: {size}, 32 fsdp ranks to 16 replicas at tp=2, 8 nodes x 8 ranks, {link_gbit:g} Gbit/s"
    note = "event simulation of the plan"
    run.record(what, "the busiest link", [bound], unit="s", role=Role.LIMIT, note=note)
    run.record(what, "shard to shard, relays", [seconds], unit="s", goal=">= 0.8 of limit", note=note)
    for name, is_broadcast in (("gather, rank 0 sends to each rank", False), ("gather, pipelined broadcast", True)):
        other = gathered_seconds(placement, traffic.num_bytes, link, is_broadcast=is_broadcast)
        run.record(what, name, [other], unit="s", role=Role.PEER, note=note)


# ---- real receivers


def names(num_tensors):
    return [f"layer.{number}" for number in range(num_tensors)]


def spec_of(name, rank):
    return ShardSpec.on_mesh(name, (ROWS, COLUMNS), mesh=(NUM_SOURCES,), placements=(0,), coordinate=(rank,))


def source(pipe, rank, num_tensors, connection_bytes_per_s):
    """A rank of the trainer. Each of its connections is paced."""
    torch.set_num_threads(1)
    pace(connection_bytes_per_s)
    specs = [[spec_of(name, each) for name in names(num_tensors)] for each in range(NUM_SOURCES)]
    weights = torch.randn(ROWS // NUM_SOURCES, COLUMNS)

    async def serve():
        sender = rl_ckpt.ShardedSender(
            rl_ckpt.ShardPlan(specs), rank, lambda to: "tcp://127.0.0.1:0", token=TOKEN, timeout_s=TIMEOUT_S
        )
        pipe.send((await sender.prepare())[0])
        while (told := await asyncio.to_thread(pipe.recv)) is not None:
            command, version, value = told
            if command == "stage":
                shards = [(spec, weights) for spec in specs[rank]]
                pipe.send(await sender.stage(lambda s=shards: s, version=version, num_replicas=value))
            else:
                pipe.send(await sender.commit(value, version))
        await sender.close()

    asyncio.run(serve())


def node(pipe, addresses, num_tensors):
    """A node of receivers: each with the addresses of its own."""
    torch.set_num_threads(1)

    async def serve():
        held = [{name: torch.zeros(ROWS, COLUMNS) for name in names(num_tensors)} for _ in addresses]
        receivers = [rl_ckpt.ShardedReceiver(own, token=TOKEN, timeout_s=TIMEOUT_S) for own in addresses]
        pipe.send("ready")
        while await asyncio.to_thread(pipe.recv) is not None:
            await asyncio.gather(*(r.receive_into(h) for r, h in zip(receivers, held, strict=True)))
            pipe.send(time.monotonic())
        await asyncio.gather(*(receiver.close() for receiver in receivers))

    asyncio.run(serve())


class Processes:
    """Ranks of a trainer and nodes of receivers, of which one of a node takes each slice, or every one does."""

    def __init__(self, num_tensors, *, has_relays):
        self.num_tensors = num_tensors
        self.placement = Placement(
            sizes=dict.fromkeys(names(num_tensors), 4),
            sources=[[spec_of(name, rank) for name in names(num_tensors)] for rank in range(NUM_SOURCES)],
            targets=None,
            source_nodes=[f"trainer {rank}" for rank in range(NUM_SOURCES)],
            target_nodes=[[f"server {replica // PER_NODE}"] for replica in range(NUM_NODES * PER_NODE)],
            has_relays=has_relays,
        )
        self.traffic = Traffic(self.placement)
        self.groups = [self.placement.groups(rank, 0) for rank in range(NUM_SOURCES)]
        self._context, self._children, self._version = multiprocessing.get_context("spawn"), [], 0
        paced = int(LINK_BYTES_PER_S / len(self.groups[0]))
        self._sources = [self._start(source, rank, num_tensors, paced) for rank in range(NUM_SOURCES)]
        above = [pipe.recv() for pipe in self._sources]
        addresses = [
            [self._address(rank, above[rank], replica) for rank in range(NUM_SOURCES)] for replica in range(64)
        ]
        parts = [addresses[i * PER_NODE : (i + 1) * PER_NODE] for i in range(NUM_NODES)]
        self._nodes = [self._start(node, part, num_tensors) for part in parts]
        for pipe in self._nodes:
            pipe.recv()

    def _address(self, rank, above, replica):
        group = next(group for group in self.groups[rank] if replica in group)
        below = f"shm://bench-relay-{os.getpid()}-{rank}-{group[0]}?bucket_bytes=1048576"
        if replica != group[0]:
            return below
        return above if len(group) == 1 else rl_ckpt.relay_address(above, below, len(group) - 1)

    def _start(self, function, *arguments):
        mine, theirs = self._context.Pipe()
        child = self._context.Process(target=function, args=(theirs, *arguments), daemon=True)
        child.start()
        self._children.append(child)
        return mine

    def __call__(self):
        """Seconds of one sync, from the call to the last receiver's commit."""
        self._version += 1
        since = time.monotonic()
        for pipe in self._nodes:
            pipe.send("receive")
        for rank, pipe in enumerate(self._sources):
            pipe.send(("stage", self._version, len(self.groups[rank])))
        digest = rl_ckpt.join_digest([pipe.recv() for pipe in self._sources])
        for pipe in self._sources:
            pipe.send(("commit", self._version, digest))
        reports = [pipe.recv() for pipe in self._sources]
        assert all(len(report.receipts) == len(self.groups[0]) for report in reports)
        return max(pipe.recv() for pipe in self._nodes) - since

    def close(self):
        for pipe in (*self._sources, *self._nodes):
            pipe.send(None)
        for child in self._children:
            child.join(20)
            child.kill()


def measured(run, repetitions=3):
    """Rows of 64 real receivers, with the bound and the simulation of the same layout."""
    num_tensors = 32 if run.quick else 128
    for name, has_relays in (("relays, one a node", True), ("every receiver by itself", False)):
        processes = Processes(num_tensors, has_relays=has_relays)
        try:
            processes()  # connections, names, memory
            seconds = [processes() for _ in range(repetitions if has_relays else 1)]
        finally:
            processes.close()
        placement, traffic = processes.placement, processes.traffic
        bound = traffic.seconds(LINK_BYTES_PER_S, MEMORY_BYTES_PER_S)
        expected = simulate(planned_flows(placement, traffic), capacity_of(placement, LINK_BYTES_PER_S))
        what = f"64 receivers on 4 nodes, {traffic.num_bytes / 1e6:.0f} MB, links of 16 MB/s, {name}"
        note = "real sockets, paced"
        run.record(what, "the busiest link", [bound], unit="s", role=Role.LIMIT)
        goal = ">= 0.8 of limit" if has_relays else None
        run.record(what, "rl-ckpt", seconds, unit="s", goal=goal, note=note)
        ratios = [each / expected for each in seconds]
        run.record(f"measured over simulated, {name}", "rl-ckpt", ratios, unit="x", note=note)
