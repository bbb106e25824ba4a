"""Policies: how a claim chooses among ready rows. Pass one as `get_meta(sampler=...)`; they run in the server.

Policies read these tags, which a put attaches to rows: `group_id` (any JSON value that is no list or mapping),
`weight_version_min` (int). Those of `rl_tq.policies.staleness` are for the option `staleness` of a partition.
"""

from __future__ import annotations

from dataclasses import fields
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from rl_tq.policies.groups import GroupComplete
from rl_tq.policies.rows import AllReady, Fifo
from rl_tq.policies.staleness import Admission, BatchRatio, GroupAge, OldestToken, QueueLength, ThresholdFraction
from rl_tq.types.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "GROUP",
    "POLICIES",
    "Admission",
    "AllReady",
    "BatchRatio",
    "Fifo",
    "GroupAge",
    "GroupComplete",
    "OldestToken",
    "Policy",
    "QueueLength",
    "ThresholdFraction",
    "policy_from_json",
    "policy_named",
]

GROUP = "rl_tq.policies"
"""Entry-point group of custom policies."""

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Fifo, AllReady, GroupComplete, Admission, OldestToken, GroupAge, BatchRatio, QueueLength, ThresholdFraction,
    )
}  # fmt: skip


def policy_from_json(value: Mapping[str, Any]) -> Policy:
    """The inverse of `Policy.to_json`.

    Raises:
        ValueError: there is no such policy, or it has no such parameter.
    """
    kind = policy_named(value["name"])
    given = {key: item for key, item in value.items() if key != "name"}
    known = {each.name for each in fields(kind)}
    if given.keys() != known:
        raise ValueError(f"policy {value['name']!r} takes {sorted(known)}, not {sorted(given)}")
    return kind(**given)


def policy_named(name: str) -> type[Policy]:
    """Class of a policy, shipped or installed.

    Raises:
        ValueError: there is none of that name, or it cannot be imported.
    """
    if name in POLICIES:
        return POLICIES[name]
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise ValueError(f"there is no policy {name!r} where the server runs; there are {sorted({*POLICIES, *found})}")
    try:
        kind: Any = found[name].load()
    except ImportError as error:
        raise ValueError(
            f"policy {name!r} is installed, and cannot be imported where the server runs: {error}"
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, Policy) and getattr(kind, "name", None) == name):
        raise ValueError(f"the entry point {name!r} of {GROUP} must be a subclass of Policy whose name is {name!r}")
    return kind
