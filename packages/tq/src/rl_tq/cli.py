"""Command line `rl-tq`: `top ADDRESS`, `metrics ADDRESS` (for Prometheus), `trace DIRECTORY`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from rl_tq.errors import TransferQueueError
from rl_tq.registry import connect
from rl_tq.tracing import chrome_trace

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="rl-tq", description="Look into a queue that is served somewhere.")
    commands = parser.add_subparsers(dest="command", required=True)
    top = commands.add_parser("top", help="show partitions and tasks, again and again")
    top.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="time between two looks (2)")
    top.add_argument("--count", type=int, default=0, metavar="N", help="look N times and end (0: until interrupted)")
    metrics = commands.add_parser("metrics", help="print the counters in Prometheus' text format, once")
    for command in (top, metrics):
        command.add_argument("address", help="what serve() printed as its address, for example shm://my-run")
    spans = commands.add_parser("trace", help="join the spans of a directory to one timeline, as JSON for Chrome")
    spans.add_argument("directory", help="what RL_TQ_TRACE named in the processes that were traced")
    given = parser.parse_args(arguments)
    try:
        if given.command == "trace":
            json.dump(chrome_trace(given.directory), sys.stdout)
            return 0
        with connect(given.address, timeout_s=10.0) as queue:
            if given.command == "metrics":
                sys.stdout.write(prometheus(queue.stats()))
                return 0
            looks = 0
            while True:
                sys.stdout.write(table(queue.stats()))
                sys.stdout.flush()
                looks += 1
                if looks == given.count:
                    return 0
                time.sleep(given.every)
    except TransferQueueError as error:
        sys.stderr.write(f"rl-tq: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 0


def table(stats: dict[str, Any]) -> str:
    """Table of partitions and tasks, as text."""
    rows = [["partition", "rows", "MB", "waiting", "version", "lag", "dropped", "task", "leased", "acked", "dead"]]
    for name, home in stats["partitions"].items():
        shared = [
            name, home["rows"], f"{home['bytes'] / 1e6:.1f}", home["waiters"], home["weight_version"], home["lag"],
            sum(home["dropped"].values()),
        ]  # fmt: skip
        tasks = [[task, counts["leased"], counts["acked"], counts["dead"]] for task, counts in home["tasks"].items()]
        for i, task in enumerate(tasks or [["-", "", "", ""]]):
            rows.append([str(cell) for cell in (shared if not i else [""] * len(shared)) + task])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    total = f"{stats['rows']} rows, {stats['bytes'] / 1e6:.1f} MB, {stats['leases']} leases"
    return "\n".join([f"{time.strftime('%H:%M:%S')}  {total}", *lines]) + "\n\n"


_PARTITION_GAUGES = (
    "rows", "bytes", "waiters", "weight_version", "lag", "promised_rows", "promised_bytes"
)  # fmt: skip


def prometheus(stats: dict[str, Any]) -> str:
    """`stats()` in the text format of Prometheus (exposition format 0.0.4)."""
    lines: list[str] = []
    series: dict[str, list[str]] = {}

    def add(name: str, value: float, **labels: str) -> None:
        text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        series.setdefault(name, []).append(f"rl_tq_{name}{{{text}}} {value}" if text else f"rl_tq_{name} {value}")

    for name, home in stats["partitions"].items():
        for key in _PARTITION_GAUGES:
            add(f"partition_{key}", home[key], partition=name)
        for reason, times in home["dropped"].items():
            add("dropped_rows_total", times, partition=name, reason=reason)
        for task, counts in home["tasks"].items():
            for key, kind in (("leased", "leased_rows"), ("acked", "acked_rows_total"), ("dead", "dead_rows")):
                add(kind, counts[key], partition=name, task=task)
    for key in ("rows", "bytes", "extents", "leases"):
        add(key, stats[key])
    add("leases_expired_total", stats["leases_expired"])
    for name, samples in series.items():
        lines.append(f"# TYPE rl_tq_{name} {'counter' if name.endswith('_total') else 'gauge'}")
        lines += samples
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
