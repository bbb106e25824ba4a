"""Storages with one mistake each, over `inproc`, that the published suite has to catch. Run by test_suite.py.

Run as a program: for each name given, whether the suite fails, as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rl_tq
from rl_tq import registry as _registry
from rl_tq.storage import inproc
from rl_tq.storage.inproc import InprocQueue
from rl_tq.testing import TransferQueueContract
from rl_tq.types import AdvanceReport

STORAGES: dict[str, type[InprocQueue]] = {}


def planted(kind: type[InprocQueue]) -> type[InprocQueue]:
    STORAGES[kind.__name__] = kind
    return kind


@planted
class NoMistake(InprocQueue):
    """The control: the suite passes."""


@planted
class CacheOutlivesClear(InprocQueue):
    cache: dict = {}  # noqa: RUF012

    def get(self, meta, columns=None, **options):
        key = (
            self.address,
            meta.partition,
            meta.generation,
            meta.rows,
            meta.sample_ids,
            tuple(columns or meta.columns),
        )
        self._check_open()
        if options.get("out") is None and key in self.cache:
            return self.cache[key].clone()
        batch = super().get(meta, columns, **options)
        if options.get("out") is None and meta.rows:
            self.cache[key] = batch.clone()
        return batch


class Late(InprocQueue):
    """Deadlines are 5 s late."""

    def late(self, timeout_s: float | None) -> float:
        return (self.timeout_s if timeout_s is None else timeout_s) + 5.0


@planted
class LateClaims(Late):
    def get_meta(self, *, timeout_s=None, **options):
        return super().get_meta(timeout_s=self.late(timeout_s), **options)


@planted
class LatePuts(Late):
    def put(self, data, *, timeout_s=None, **options):
        return super().put(data, timeout_s=self.late(timeout_s), **options)


@planted
class LateAdmissions(Late):
    def admit(self, *, timeout_s=None, **options):
        return super().admit(timeout_s=self.late(timeout_s), **options)


@planted
class LateLeases(InprocQueue):
    def get_meta(self, *, lease_s=None, **options):
        return super().get_meta(lease_s=None if lease_s is None else lease_s + 5.0, **options)


@planted
class EarlyLeases(InprocQueue):
    def get_meta(self, *, lease_s=None, **options):
        return super().get_meta(lease_s=None if lease_s is None else lease_s / 100, **options)


@planted
class NoPatience(InprocQueue):
    def get_meta(self, *, timeout_s=None, **options):
        return super().get_meta(timeout_s=0.0, **options)


@planted
class NackAcks(InprocQueue):
    def nack(self, meta, *, reason="it was not acknowledged"):
        self.ack(meta)


@planted
class NackForgetsItsReason(InprocQueue):
    def nack(self, meta, *, reason="it was not acknowledged"):
        super().nack(meta)


@planted
class NackOfNothing(InprocQueue):
    def nack(self, meta, *, reason="it was not acknowledged"):
        pass


@planted
class AckOfNothing(InprocQueue):
    def ack(self, meta, *, step=0):
        pass


@planted
class AckForgetsItsStep(InprocQueue):
    def ack(self, meta, *, step=0):
        super().ack(meta)


@planted
class AckOfTheFirstRowOnly(InprocQueue):
    def ack(self, meta, *, step=0):
        super().ack(meta.reorder([0]), step=step)


@planted
class ExtendOfNothing(InprocQueue):
    def extend(self, meta, lease_s):
        pass


@planted
class ClearOfNothing(InprocQueue):
    def clear(self, meta_or_partition):
        pass


@planted
class ClearOfTheWholePartition(InprocQueue):
    def clear(self, meta_or_partition):
        super().clear(getattr(meta_or_partition, "partition", meta_or_partition))


@planted
class RowsInTheirOwnOrder(InprocQueue):
    def get(self, meta, columns=None, **options):
        order = sorted(range(len(meta)), key=lambda i: meta.rows[i]) if meta.rows else range(len(meta))
        return super().get(meta.reorder(list(order)), columns, **options)


@planted
class WritesReachTheQueue(InprocQueue):
    """Who gets the same rows twice gets the same memory."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.given: dict = {}

    def get(self, meta, columns=None, **options):
        key = (meta.generation, meta.rows, tuple(columns or meta.columns))
        fresh = super().get(meta, columns, **options)
        return fresh if options.get("out") is not None else self.given.setdefault(key, fresh)


@planted
class PutColumnByColumn(InprocQueue):
    """A put that fails half-way leaves the half."""

    def put(self, data, *, partition, sample_ids=None, tags=None, **options):
        columns = list(data.keys())
        if len(columns) < 2 or any(isinstance(data[name], rl_tq.PerGroup) for name in columns):
            return super().put(data, partition=partition, sample_ids=sample_ids, tags=tags, **options)
        first = super().put(
            {columns[0]: data[columns[0]]}, partition=partition, sample_ids=sample_ids, tags=tags, **options
        )
        rest = {name: data[name] for name in columns[1:]}
        return first.union(super().put(rest, partition=partition, sample_ids=first))


@planted
class TagsReplaceTags(InprocQueue):
    """What a put returns has its own tags only."""

    def put(self, data, *, tags=None, **options):
        meta = super().put(data, tags=tags, **options)
        return meta if tags is None else replace(meta, tags=tuple(dict(tag) for tag in tags))


@planted
class ReleaseOfNothing(InprocQueue):
    def release(self, credit):
        pass


@planted
class RestoreOfNothing(InprocQueue):
    def restore(self, partition, step, *, task=None):
        return rl_tq.types.RestoreReport(num_returned=0, num_cleared=0, num_revoked=0)


@planted
class RestoreOfEveryTask(InprocQueue):
    def restore(self, partition, step, *, task=None):
        return super().restore(partition, step)


@planted
class AdvanceOfNothing(InprocQueue):
    def advance(self, partition, weight_version):
        return AdvanceReport(num_cleared=0)


@planted
class AShorterBatch(InprocQueue):
    """Missing rows are left out."""

    def get(self, meta, columns=None, **options):
        try:
            return super().get(meta, columns, **options)
        except (rl_tq.MissingDataError, rl_tq.StaleReferenceError):
            for i in range(len(meta)):
                try:
                    return super().get(meta.reorder([i]), columns, **options)
                except (rl_tq.MissingDataError, rl_tq.StaleReferenceError):
                    continue
            raise


@planted
class OneTaskForAll(InprocQueue):
    def get_meta(self, *, task, **options):
        return super().get_meta(task="all", **options)


@planted
class ConfigureOfNothing(InprocQueue):
    def configure(self, partition, **options):
        pass


@planted
class NoDeadLetters(InprocQueue):
    def dead_letters(self, partition, task):
        return super().dead_letters("nowhere", task)


@planted
class RoundedValues(InprocQueue):
    """As a codec that loses bits would have it."""

    def get(self, meta, columns=None, **options):
        batch = super().get(meta, columns, **options)
        for name, value in list(batch.items()):
            if isinstance(value, torch.Tensor) and value.dtype is torch.float64 and not value.is_nested:
                batch[name] = value.float().double()
        return batch


@planted
class CloseOfNothing(InprocQueue):
    def close(self):
        pass


@planted
class ASnapshotWithoutAcks(InprocQueue):
    def ack(self, meta, *, step=0):
        super().ack(meta, step=step)
        self.acked = [*getattr(self, "acked", []), meta]

    def snapshot(self, path, *, timeout_s=None):
        for meta in getattr(self, "acked", []):
            super().restore(meta.partition, -1, task=meta.task)
        super().snapshot(path, timeout_s=timeout_s)


def storage_of(kind: type[InprocQueue]) -> Any:
    """`inproc` with another client."""

    def made(make: Any) -> Any:
        def call(name: str, *, timeout_s: float, **options: Any) -> InprocQueue:
            real = inproc.InprocQueue
            inproc.InprocQueue = kind
            try:
                return make(name, timeout_s=timeout_s, **options)
            finally:
                inproc.InprocQueue = real

        return call

    # An address says "inproc", whose clients are then of the real kind: it is renamed.
    return SimpleNamespace(serve=made(inproc.serve), connect=made(inproc.connect))


def verdicts(names: list[str]) -> dict[str, str]:
    """Name to the first test that failed, or nothing."""
    found: dict[str, str] = {}
    real = _registry.load_storage
    for name in names:
        storage = storage_of(STORAGES[name])
        _registry.load_storage = lambda scheme, storage=storage: storage if scheme == "inproc" else real(scheme)
        failed: list[str] = []
        plugin = SimpleNamespace(
            pytest_runtest_logreport=lambda report, failed=failed: (
                failed.append(report.nodeid) if report.failed else None
            )
        )
        TestPlanted.__name__ = name
        options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "-o", "addopts=", "--import-mode=importlib"]
        code = pytest.main([__file__, *options, "-o", "python_files=planted.py"], plugins=[plugin])
        if code not in (0, 1):
            raise SystemExit(f"pytest ended with {code}")
        found[name] = failed[0].rpartition("::")[2] if failed else ""
    _registry.load_storage = real
    return found


class TestPlanted(TransferQueueContract):
    address = "inproc://"

    @pytest.fixture(autouse=True)
    def _is_run_as_a_program(self):
        if "--planted" not in sys.argv:
            pytest.skip("for test_suite.py")


if __name__ == "__main__":
    result = verdicts(sys.argv[2:])
    sys.stdout.write("VERDICTS " + json.dumps(result) + "\n")
