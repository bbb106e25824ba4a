"""The workspace's measuring stick: ours, the peers and the limit measured in one run, one table, one JSON."""

from rl_bench.machine import has_card
from rl_bench.run import Role, Row, Run, missing

__all__ = ["Role", "Row", "Run", "has_card", "missing"]
