"""Metrics: the counts of a queue in the text format of Prometheus."""

from __future__ import annotations

from typing import Any


def prometheus(stats: dict[str, Any]) -> str:
    """`stats()` in the text format of Prometheus (exposition format 0.0.4)."""
    lines: list[str] = []
    series: dict[str, list[str]] = {}

    def add(name: str, value: float, **labels: str) -> None:
        text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        series.setdefault(name, []).append(f"rl_tq_{name}{{{text}}} {value}" if text else f"rl_tq_{name} {value}")

    for name, home in stats["partitions"].items():
        for key in (
            "rows",
            "bytes",
            "spilled_bytes",
            "waiters",
            "weight_version",
            "lag",
            "promised_rows",
            "promised_bytes",
        ):
            add(f"partition_{key}", home[key], partition=name)
        for reason, times in home["dropped"].items():
            add("dropped_rows_total", times, partition=name, reason=reason)
        for task, counts in home["tasks"].items():
            for key, kind in (("leased", "leased_rows"), ("acked", "acked_rows_total"), ("dead", "dead_rows")):
                add(kind, counts[key], partition=name, task=task)
    for key in ("rows", "bytes", "spilled_bytes", "extents", "leases"):
        add(key, stats[key])
    add("leases_expired_total", stats["leases_expired"])
    for name, samples in series.items():
        lines.append(f"# TYPE rl_tq_{name} {'counter' if name.endswith('_total') else 'gauge'}")
        lines += samples
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
