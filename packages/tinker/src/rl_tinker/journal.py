"""Journal: records of sessions, models, samplers and checkpoints, and the operations of every model, in SQLite.

Each write is one transaction that is on disk (WAL, `synchronous=FULL`) before it returns; writes that arrive together
share one. Everything that the server acknowledges was written here first.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rl_tinker.errors import JournalError
from rl_tinker.types import Checkpoint, Model, Operation, Sampler, Session, Status

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Job = tuple[Sequence["Statement"], Future[None]]

Record = Session | Model | Sampler | Checkpoint
R = TypeVar("R", Session, Model, Sampler, Checkpoint)
Statement = tuple[str, tuple[Any, ...]]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (kind TEXT, id TEXT, body BLOB, PRIMARY KEY (kind, id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS operations (
  id TEXT PRIMARY KEY, model TEXT, tenant TEXT, seq INTEGER, kind TEXT, body BLOB, created REAL, status TEXT,
  result BLOB, content_type TEXT, finished REAL, tokens INTEGER, attempts INTEGER
);
CREATE INDEX IF NOT EXISTS by_model ON operations (model, seq);
CREATE TABLE IF NOT EXISTS curves (model TEXT, step INTEGER, time REAL, loss REAL, tokens INTEGER);
CREATE INDEX IF NOT EXISTS curve_of ON curves (model, step);
"""
_COLUMNS = tuple(Operation.__struct_fields__)
_INSERT = f"INSERT OR IGNORE INTO operations ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
_CLOSE_TIMEOUT_S = 30.0


def put(record: Record) -> Statement:
    """Statement that inserts or replaces a record."""
    values = (type(record).__name__, record.id, msgspec.json.encode(record))
    return "INSERT OR REPLACE INTO records VALUES (?, ?, ?)", values


def delete(record: Record) -> Statement:
    """Statement that deletes a record."""
    return "DELETE FROM records WHERE kind = ? AND id = ?", (type(record).__name__, record.id)


def accept(operation: Operation) -> Statement:
    """Statement that inserts an operation, unless it is there."""
    return _INSERT, tuple(getattr(operation, name) for name in _COLUMNS)


def finish(operation: Operation) -> Statement:
    """Statement that stores the outcome of an operation."""
    names = ("status", "result", "content_type", "finished", "body")
    values = (*(getattr(operation, name) for name in names), operation.id)
    return f"UPDATE operations SET {', '.join(f'{name} = ?' for name in names)} WHERE id = ?", values


def forget_bodies(model: str, before: int) -> Statement:
    """Statement that drops the bodies of finished operations that a restored model does not need again."""
    values = (model, before, Status.PENDING)
    return "UPDATE operations SET body = x'' WHERE model = ? AND seq < ? AND status != ?", values


def forget_operation(operation: Operation) -> Statement:
    """Statement that deletes an operation with its result."""
    return "DELETE FROM operations WHERE id = ?", (operation.id,)


def forget_curve(model: str) -> Statement:
    """Statement that deletes the loss curve of a model."""
    return "DELETE FROM curves WHERE model = ?", (model,)


def add_point(model: str, step: int, time: float, loss: float, tokens: int) -> Statement:
    """Statement that adds a point to the loss curve of a model."""
    return "INSERT INTO curves VALUES (?, ?, ?, ?, ?)", (model, step, time, loss, tokens)


class Journal:
    """Journal of one server, which has a thread for the database.

    Raises:
        JournalError: it cannot be opened, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        try:
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise JournalError(f"{path} cannot be opened as a journal: {error}; is it a file of rl-tinker?") from error
        self._lock = threading.Lock()
        """Held by a transaction, and by a read."""
        self._thread = threading.Thread(target=self._run, name="rl-tinker-journal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finish what is queued, and close the database. Idempotent."""
        self._jobs.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._database.close()

    async def write(self, *statements: Statement) -> None:
        """Run statements in one transaction; returns when it is on disk.

        Raises:
            JournalError: nothing of it was written.
        """
        future: Future[None] = Future()
        self._jobs.put((statements, future))
        await asyncio.wrap_future(future)

    def records(self, kind: type[R]) -> dict[str, R]:
        """All records of a kind, by id."""
        rows = self._read("SELECT id, body FROM records WHERE kind = ?", (kind.__name__,))
        return {name: msgspec.json.decode(body, type=kind) for name, body in rows}

    def operations(self) -> list[Operation]:
        """All operations, by model and number; results are left in the database."""
        listed = ", ".join("x'' AS result" if name == "result" else name for name in _COLUMNS)
        rows = self._read(f"SELECT {listed} FROM operations ORDER BY model, seq", ())
        return [msgspec.convert(dict(zip(_COLUMNS, row, strict=True)), Operation) for row in rows]

    def result(self, operation_id: str) -> bytes:
        """Stored result of an operation; empty without one."""
        rows = self._read("SELECT result FROM operations WHERE id = ?", (operation_id,))
        return rows[0][0] if rows else b""

    def curve(self, model: str) -> list[tuple[int, float]]:
        """Loss per token of each step of a model; steps whose loss is not finite are gaps, since JSON has no NaN."""
        finite = "COUNT(loss) = COUNT(*) AND MAX(ABS(loss)) < 9e999"  # SQLite stores a NaN as NULL
        return self._read(
            "SELECT step, SUM(loss) / MAX(SUM(tokens), 1) FROM curves WHERE model = ? "
            f"GROUP BY step HAVING {finite} ORDER BY step",
            (model,),
        )

    def _read(self, statement: str, values: tuple[Any, ...]) -> list[Any]:
        with self._lock:
            return self._database.execute(statement, values).fetchall()

    def _run(self) -> None:
        while jobs := self._waiting():
            if not self._committed([each for statements, _ in jobs for each in statements]):
                for _, future in jobs:
                    future.set_result(None)
            else:  # one of them is at fault: each in a transaction of its own
                for statements, future in jobs:
                    if (error := self._committed(statements)) is None:
                        future.set_result(None)
                    else:
                        future.set_exception(JournalError(f"{self.path} cannot be written: {error}"))

    def _committed(self, statements: Sequence[Statement]) -> Exception | None:
        """Commit; returns any error, so that the thread goes on and answers every writer."""
        try:
            return self.commit(statements)
        except Exception as error:  # noqa: BLE001 - raised by `write`
            return error

    def _waiting(self) -> list[Job]:
        """Writes that wait and whose writer waits too, at least one; none once the journal is closed."""
        jobs: list[Job] = []
        while not jobs or not self._jobs.empty():
            job = self._jobs.get()
            if job is None:
                self._jobs.put(None)  # for the next call
                break
            if job[1].set_running_or_notify_cancel():
                jobs.append(job)
        return jobs

    def commit(self, statements: Sequence[Statement]) -> sqlite3.Error | None:
        """Run statements in one transaction, in the thread of the journal; returns its error."""
        with self._lock:
            try:
                self._database.execute("BEGIN")
                for statement, values in statements:
                    self._database.execute(statement, values)
                self._database.execute("COMMIT")
            except sqlite3.Error as error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                return error
        return None
