"""What the groups of figures share: the rows of the result, printed as they come, and the size of the logits."""

from __future__ import annotations

import statistics
from typing import Any

ROWS, VOCAB = 8192, 151936
DEVICE = "cuda"


class Table:
    """Rows of the result, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        metric: str,
        system: str,
        samples: list[float] | None,
        *,
        role: str = "ours",
        unit: str = "ms",
        goal: float | None = None,
        goal_of_limit: float | None = None,
        note: str = "",
    ) -> None:
        """Add one line; `goal` in the row's unit, `goal_of_limit` as a share of the limit's speed."""
        row: dict[str, Any] = {"system": system, "metric": metric, "unit": unit, "role": role, "note": note}
        row |= {"median": None, "min": None, "max": None, "n": 0, "wall_s": None, "cpu_s": None}
        if samples:
            row |= {"median": statistics.median(samples), "min": min(samples), "max": max(samples), "n": len(samples)}
        row["_goal"], row["_goal_of_limit"], row["_samples"] = goal, goal_of_limit, samples or []
        self.rows.append(row)
        if samples:
            print(f"{metric:44s} {system:28s} {row['median']:10.4f} {unit:5s} {row['min']:10.4f} {note}", flush=True)
        else:
            print(f"{metric:44s} {system:28s} missing: {note}", flush=True)

    def copy_to(self, run: Any) -> None:
        """Record the rows with an `rl_bench.Run`."""
        from rl_bench import Role

        limited: set[str] = set()
        for row in self.rows:
            if row["role"] == "limit" and row["metric"] in limited:
                continue
            limited |= {row["metric"]} if row["role"] == "limit" else set()
            sign = ">=" if row["unit"].endswith("/s") else "<="
            goal = f"{sign} {row['_goal']} {row['unit']}" if row["_goal"] else None
            if row["_goal_of_limit"]:
                goal = f">= {row['_goal_of_limit']:.4f} of limit"
            which = {"role": Role(row["role"]), "unit": row["unit"], "goal": goal, "note": row["note"]}
            run.record(row["metric"], row["system"], row["_samples"], **which)

    def finished(self) -> list[dict[str, Any]]:
        """The rows with ratios to the limit and to the best peer of their metric, and whether the goal was met."""

        def best(metric: str, role: str, rate: bool) -> float | None:
            found = [r["median"] for r in self.rows if r["metric"] == metric and r["role"] == role and r["median"]]
            return (max if rate else min)(found) if found else None

        for row in self.rows:
            rate = row["unit"].endswith("/s")
            for role, key in (("limit", "ratio_to_limit"), ("peer", "ratio_to_best_peer")):
                base = best(row["metric"], role, rate)
                known = base and row["median"] and (role == "limit" or row["role"] == "ours")
                row[key] = (row["median"] / base if rate else base / row["median"]) if known else None
            goal, share, _ = row.pop("_goal"), row.pop("_goal_of_limit"), row.pop("_samples")
            sign = ">=" if rate else "<="
            row["goal"] = f"{sign} {goal} {row['unit']}" if goal else f">= {share:.4g} of limit" if share else None
            row["met"] = None
            if row["median"] is not None and goal:
                row["met"] = row["median"] >= goal if rate else row["median"] <= goal
            elif row["ratio_to_limit"] is not None and share:
                row["met"] = row["ratio_to_limit"] >= share
        return self.rows
