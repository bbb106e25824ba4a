"""Queue of a stranger: rows in this process's memory, for all of its threads, at `stranger://NAME`."""

import itertools
import threading
from collections import Counter, defaultdict
from types import SimpleNamespace

from tensordict import TensorDict

from rl_tq import errors
from rl_tq.base import TransferQueue
from rl_tq.types import AdvanceReport, BatchMeta, Credit, PartitionOptions, RestoreReport
from strangers.rows import Row, choose, column_of, fill, outstanding, reference, spend

NUMBERS, SERVED = itertools.count(1), {}


def serve(name, *, timeout_s, snapshot=None):
    if snapshot is not None or name in SERVED:
        raise errors.AddressError(f"stranger://{name} is served already, or was to start from a snapshot")
    books = {"rows": {}, "options": defaultdict(PartitionOptions), "versions": Counter(), "credits": {}}
    SERVED[name] = SimpleNamespace(changed=threading.Condition(), **books)
    return Store(name, timeout_s=timeout_s, is_host=True)


def connect(name, *, timeout_s):
    return Store(name, timeout_s=timeout_s)


class Store(TransferQueue):
    def __init__(self, name, *, timeout_s, is_host=False):
        if name not in SERVED:
            raise errors.ServerLostError(f"no process serves stranger://{name} in this process")
        self.address, self._timeout_s, self._name = f"stranger://{name}", timeout_s, name
        self._is_host, self._all, self._changed = is_host, SERVED[name], SERVED[name].changed

    def _wait(self, is_met, timeout_s, why):
        seconds = self._timeout_s if timeout_s is None else timeout_s
        if not self._changed.wait_for(lambda: self._name not in SERVED or is_met(), seconds):
            raise errors.WaitTimeoutError(f"{why}; waited {seconds:g} s")
        if self._name not in SERVED:
            raise errors.ServerLostError(f"{self.address} was closed")

    def _in(self, partition):
        return [row for row in self._all.rows.values() if row.partition == partition]

    def _groups(self, partition):
        return outstanding(self._all, partition, self._in(partition))

    def _rows(self, meta):
        by_id = {row.sample_id: row.number for row in self._in(meta.partition)}
        numbers = meta.rows or [by_id.get(sample_id) for sample_id in meta.sample_ids]
        if any(number not in self._all.rows for number in numbers):
            raise errors.StaleReferenceError(f"a row of {meta.partition!r} was cleared")
        return [self._all.rows[number] for number in numbers]

    def put(self, data, *, partition, sample_ids=None, tags=None, credit=None, timeout_s=None):
        with self._changed:
            if sample_ids is None:
                tags = spend(credit or (), self._all.credits, tags, self._groups(partition))
                rows = [Row(next(NUMBERS), partition) for _ in tags or next(iter(data.values()))]
            else:
                named = BatchMeta(partition=partition, sample_ids=tuple(sample_ids), columns=())
                rows = self._rows(sample_ids if isinstance(sample_ids, BatchMeta) else named)
            filled = fill(rows, data, tags)
            self._all.rows |= {row.number: row for row in rows}
            self._changed.notify_all()
            return filled

    def get(self, meta, columns=None, *, out=None, device=None):
        with self._changed:
            rows, names = self._rows(meta), meta.columns if columns is None else columns
            if missing := [name for name in names if not all(name in row.cells for row in rows)]:
                raise errors.MissingDataError(f"a row has no column {missing[0]!r}")
            found = {name: column_of([row.cells[name] for row in rows]) for name in names}
            return TensorDict(found, batch_size=[len(rows)], device=device)

    def get_meta(self, *, partition, columns, batch_size, task, sampler=None, timeout_s=None, lease_s=None):
        def claim():
            ready = [row for row in self._in(partition) if row.columns >= {*columns} and task not in row.leases]
            return chosen.extend(choose(ready, batch_size, sampler or self._groups(partition))) or chosen

        chosen = []
        with self._changed:
            self._wait(claim, timeout_s, f"fewer than {batch_size} rows of {partition!r} are ready for {task!r}")
            leases = tuple([row.leases.setdefault(task, next(NUMBERS)) for row in chosen])
            return reference(chosen, columns, task=task, leases=leases)

    def ack(self, meta, *, step=0):
        for row, lease in zip(self._rows(meta), meta.leases, strict=True):
            if row.leases.get(meta.task) != lease:
                raise errors.LeaseLostError(f"the lease of {row.sample_id} was returned")
            row.acked[meta.task] = step
        if self._all.options[meta.partition].tasks:
            self.clear(meta)

    def nack(self, meta, *, reason="it was not acknowledged"):
        with self._changed:
            for row in self._rows(meta):
                row.num_returns, row.leases[meta.task] = row.num_returns + 1, 0
                if row.num_returns < self._all.options[meta.partition].max_attempts:
                    del row.leases[meta.task]
            self._changed.notify_all()

    def restore(self, partition, step, *, task=None):
        undone = [row for row in self._in(partition) if row.acked.get(task, step + 1) > step and row.leases.get(task)]
        for row in undone:
            row.acked.pop(task, row.leases.pop(task))
        return RestoreReport(num_returned=len(undone), num_cleared=0, num_revoked=0)

    def configure(self, partition, **options):
        self._all.options[partition] = PartitionOptions(**options)

    def advance(self, partition, weight_version):
        self._all.versions[partition] = weight_version
        groups = (index := self._groups(partition)).expired()
        rows = [self._all.rows[number] for number in index.rows_of(groups)]
        self._all.credits = {n: each for n, each in self._all.credits.items() if each.group_id not in groups}
        self._drop(rows)
        return AdvanceReport(num_cleared=len(rows), groups=tuple(groups))

    def admit(self, *, partition, num_rows, num_bytes=0, group_id=None, timeout_s=None):
        number, asked = next(NUMBERS), {"num_rows": num_rows, "num_bytes": num_bytes, "group_id": group_id}
        with self._changed:
            self._wait(lambda: self._groups(partition).has_room, timeout_s, f"{partition!r} admits no more groups")
            asked |= {"partition": partition, "weight_version": self._all.versions[partition]}
            return self._all.credits.setdefault(number, Credit(number=number, **asked))

    def release(self, credit):
        self._all.credits.pop(credit.number, None)
        self._drop([])

    def clear(self, meta_or_partition):
        self._drop((self._in if isinstance(meta_or_partition, str) else self._rows)(meta_or_partition))

    def _drop(self, rows):
        with self._changed:
            for row in rows:
                self._all.rows.pop(row.number, None)
            self._changed.notify_all()

    def stats(self):
        names = {row.partition for row in self._all.rows.values()}
        return {"partitions": {name: {"rows": len(self._in(name))} for name in names}}

    def close(self):
        if self._is_host:
            SERVED.pop(self._name, None)
            self._drop([])
