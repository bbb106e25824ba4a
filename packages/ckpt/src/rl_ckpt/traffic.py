"""Traffic of a sync from shard to shard: bytes from rank to rank and over the links of nodes, and the seconds expected.

A cost model of sizes and links alone: each node has one link, which sends and receives at once, and ranks of one node
copy in its memory. What is computed meanwhile (digests, exports) is not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from rl_ckpt.sharded import ShardPlan

if TYPE_CHECKING:
    from rl_ckpt.types import Placement


class Traffic:
    """Bytes of one sync."""

    def __init__(self, placement: Placement) -> None:
        plan = ShardPlan(placement.sources, placement.targets)
        self.pairs: dict[tuple[int, int], int] = {}
        """Bytes from a rank of the trainer to a rank of one replica."""
        self.sent: Counter[str] = Counter()
        """Bytes that leave each node."""
        self.received: Counter[str] = Counter()
        """Bytes that arrive at each node."""
        self.copied: Counter[str] = Counter()
        """Bytes that stay in each node."""
        self.num_bytes = sum(
            placement.sizes[name] * math.prod(shape)
            for name, shape in {shard.name: shard.shape for shards in placement.sources for shard in shards}.items()
        )
        """Bytes of the weights."""
        for source in range(plan.num_sources):
            for target in plan.moves.targets_of(source):
                moves = plan.moves.moves(source, target)
                size = sum(move.num_elements * placement.sizes[move.source.name] for move in moves)
                self.pairs[source, target] = size
                for relay, *others in placement.groups(source, target):
                    nodes = [placement.target_nodes[replica][target] for replica in (relay, *others)]
                    self._count(placement.source_nodes[source], nodes[0], size)
                    for node in nodes[1:]:
                        self._count(nodes[0], node, size)
        self._gathered = self._gather(placement)

    def _count(self, source: str, target: str, size: int) -> None:
        if source == target:
            self.copied[source] += size
        else:
            self.sent[source] += size
            self.received[target] += size

    def _gather(self, placement: Placement) -> tuple[int, int]:
        """Bytes over the busiest link when all ranks gather, and when rank 0 sends all to every rank of a replica."""
        nodes = set(placement.source_nodes)
        gathered = self.num_bytes * (len(nodes) - 1) // len(nodes)
        first = placement.source_nodes[0]
        sent = sum(self.num_bytes for nodes in placement.target_nodes for node in nodes if node != first)
        return gathered, sent

    def seconds(self, link_bytes_per_s: float, memory_bytes_per_s: float) -> float:
        """Least time of a sync: that of the busiest link or memory."""
        over_links = max([0, *self.sent.values(), *self.received.values()]) / link_bytes_per_s
        return max(over_links, max([0, *self.copied.values()]) / memory_bytes_per_s)

    def gathered_seconds(self, link_bytes_per_s: float, memory_bytes_per_s: float) -> float:
        """Least time where every rank gathers whole tensors and rank 0 sends them, one after the other."""
        gathered, sent = self._gathered
        return max(gathered / link_bytes_per_s, sent / link_bytes_per_s, self.num_bytes / memory_bytes_per_s)

    def lines(self, placement: Placement, link_gbit_per_s: float, memory_gb_per_s: float) -> list[str]:
        """Lines of text: who sends what to whom, what each link carries, and the seconds expected."""
        speeds = link_gbit_per_s * 1e9 / 8, memory_gb_per_s * 1e9
        num_replicas = len(placement.target_nodes)
        lines = [f"weights: {_gb(self.num_bytes)}, {len(placement.sizes)} tensors, to {num_replicas} replicas"]
        for (source, target), size in sorted(self.pairs.items()):
            places = ", ".join(
                placement.target_nodes[relay][target]
                + (f" by a relay, replica {relay}, to {', '.join(map(str, others))} too" if others else "")
                for relay, *others in placement.groups(source, target)
            )
            lines.append(
                f"rank {source} ({placement.source_nodes[source]}) -> receiver {target} ({places}): {_gb(size)}"
            )
        for node in sorted({*self.sent, *self.received, *self.copied}):
            parts = self.sent[node], self.received[node], self.copied[node]
            lines.append("{}: sends {}, receives {}, copies {}".format(node, *map(_gb, parts)))
        lines.append(f"speeds: {link_gbit_per_s:g} Gbit/s a node, {memory_gb_per_s:g} GB/s of memory")
        gathered = self.gathered_seconds(*speeds)
        lines.append(f"expected: {self.seconds(*speeds):.3g} s; gathered and sent by rank 0, {gathered:.3g} s at least")
        return lines


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
