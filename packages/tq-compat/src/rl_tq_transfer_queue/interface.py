"""The functions of TransferQueue: one queue per job, found by name where Ray runs, else of this process."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
from tensordict import TensorDict

from rl_tq.errors import WaitTimeoutError
from rl_tq_transfer_queue.client import TransferQueueClient, in_thread
from rl_tq_transfer_queue.metadata import KVBatchMeta
from rl_tq_transfer_queue.service.job import Config, ControllerHost, merged
from rl_tq_transfer_queue.utils.logging_utils import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_tq_transfer_queue.service.rpc import ControllerInfo


P = ParamSpec("P")
T = TypeVar("T")

_logger = get_logger(__name__)
NAME, NAMESPACE = "TransferQueueController", "transfer_queue"
_METADATA_FILE, _CONTROLLER_FILE = "metadata.json", "controller_state.records"
_START_S = 300.0
"""Ray starts a process for the controller, which imports torch: among many workers of few cores, minutes."""


class _Session:
    """What this process has: a client, and the controller where it runs here or was started from here."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.client: TransferQueueClient | None = None
        self.local: ControllerHost | None = None
        self.actor: Any = None


_session = _Session()


def init(conf: Mapping[str, Any] | None = None) -> Config | Mapping[str, Any] | None:
    """Start the queue of a job, or connect to it where it runs already (`conf` is then ignored).

    Where Ray is initialized, the controller is an actor that every process of the cluster finds; else it runs here.

    Args:
        conf: `controller.sampler` (an instance, a class, or the name of one of the four), `controller.polling_mode`,
            `backend.SimpleStorage.total_storage_size` (samples), `metrics.enabled`, `metrics.port`. What spreads
            values over storage units has no counterpart here and is accepted: they lie in the memory of the host
            that put them.

    Raises:
        ValueError: an option has no counterpart here.
    """
    ray = _ray()
    with _session.lock:
        if ray is None and _session.local is not None:
            return conf
        if ray is not None and _join(ray):
            return conf
        final = merged(conf)
        if ray is None:
            _session.local = ControllerHost(final, "127.0.0.1")
            _connect(final)
        else:
            try:
                _session.actor = _start(ray, final)
            except ValueError:  # somebody else was faster
                if not _join(ray):
                    raise
                return final
            final = _config_of(_session.actor, ray)
            _connect(final)
        return final


def close() -> None:
    """End the queue, for all processes."""
    with _session.lock:
        if _session.client is not None:
            _session.client.close()
        if _session.local is not None:
            _session.local.close()
        if _session.actor is not None and (ray := _ray()) is not None:
            ray.kill(_session.actor)
        _session.client = _session.local = _session.actor = None


def get_client() -> TransferQueueClient:
    """The client of this process, for the interface by global index."""
    if _session.client is None:
        raise RuntimeError("Please initialize the TransferQueue first by calling `init()`!")
    return _session.client


def get_metrics_endpoint() -> str | None:
    """`host:port` of the Prometheus metrics; None where they are not enabled."""
    _client()
    ray = _ray()
    if _session.local is not None:
        conf = _session.local.get_config()
    elif ray is not None and _session.actor is not None:
        conf = _config_of(_session.actor, ray)
    else:
        return None
    return conf.metrics.get("endpoint")


# By key


def kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: dict[str, Any] | None = None,
    data_parser: Callable[[Any], Any] | None = None,
) -> KVBatchMeta:
    """Store fields or tags of one sample. A dict's values have no batch dimension, a `TensorDict`'s have one of 1."""
    if fields is not None and not isinstance(fields, TensorDict):
        fields = TensorDict({name: _batch_of_one(value) for name, value in fields.items()}, batch_size=[1])
    return kv_batch_put([key], partition_id, fields, None if tag is None else [tag], data_parser)


def kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: Callable[[Any], Any] | None = None,
) -> KVBatchMeta:
    """Put fields or tags of samples by key. Returns the fields that all of them have then.

    Raises:
        ValueError: neither is given, or their numbers differ.
    """
    if fields is None and tags is None:
        raise ValueError("Please provide at least one parameter of `fields` or `tags`.")
    if fields is not None and fields.batch_size[0] != len(keys):
        raise ValueError(f"there are {len(keys)} `keys`, and `fields` has batch_size {fields.batch_size[0]}")
    if tags is not None and len(tags) != len(keys):
        raise ValueError(f"keys with length {len(keys)} does not match length of tags {len(tags)}")
    client = _client()
    meta = client.kv_retrieve_meta(keys, partition_id, create=True)
    meta.update_custom_meta(tags)
    if fields is not None:
        meta = client.put(fields, meta, data_parser=data_parser)
    else:
        client.set_custom_meta(meta)
    return KVBatchMeta(list(keys), meta.custom_meta, partition_id, meta.field_names, meta.extra_info)


def kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: list[str] | str | None = None) -> TensorDict:
    """The fields that a `KVBatchMeta` names, or some of them."""
    if meta.partition_id is None:
        raise ValueError("Must provide partition_id in the input KVBatchMeta.")
    names = [select_fields] if isinstance(select_fields, str) else select_fields
    if names is not None and any(name not in (meta.fields or []) for name in names):
        raise ValueError(f"Fields in select_fields were not found: {names} were given, and meta has {meta.fields}.")
    return kv_batch_get(meta.keys, meta.partition_id, meta.fields if names is None else names)


def kv_batch_get(keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None) -> TensorDict:
    """Get fields of samples by key; None: the fields that all of them have.

    Raises:
        ValueError: a key or field is not there. (The original leaves a missing key out of the batch in silence.)
    """
    wanted = [keys] if isinstance(keys, str) else list(keys)
    client = _client()
    meta = client.kv_retrieve_meta(wanted, partition_id)
    if len(meta) < len(wanted):
        known = client.kv_list(partition_id).get(partition_id, {})
        missing = [key for key in wanted if key not in known]
        raise ValueError(f"keys or partition were not found: {missing[:5]} in partition {partition_id!r}")
    if select_fields is not None:
        names = [select_fields] if isinstance(select_fields, str) else list(select_fields)
        if missing := [name for name in names if name not in meta.field_schema]:
            raise ValueError(f"fields {missing} are not ready in all the requested keys, which have {meta.field_names}")
        meta = meta.select_fields(names)
    return client.get_data(meta)


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """Partition to key to tags."""
    return _client().kv_list(partition_id)


def kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """Forget samples; keys that are not there do not matter."""
    client = _client()
    meta = client.kv_retrieve_meta(keys, partition_id)
    if meta:
        client.clear_samples(meta)


async_kv_put = in_thread(kv_put)
async_kv_batch_put = in_thread(kv_batch_put)
async_kv_batch_get_by_meta = in_thread(kv_batch_get_by_meta)
async_kv_batch_get = in_thread(kv_batch_get)
async_kv_list = in_thread(kv_list)
async_kv_clear = in_thread(kv_clear)


# Checkpoints


def save_checkpoint(
    checkpoint_dir: str | Path, *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """Checkpoint the queue into a directory. An older one is replaced atomically; a failed save leaves it as it was.

    Values are always written, as they are in memory only: `include_storage=False` logs that, as in the original.
    """
    if not include_storage:
        _logger.warning("include_storage=False has no effect: values are in memory only, and are saved all the same")
    client = _client()
    target = Path(checkpoint_dir)
    partial, old = (target.with_name(target.name + ending) for ending in (".tmp", ".old"))
    for each in (partial, old):
        shutil.rmtree(each, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        client.save_controller_checkpoint(str(partial / _CONTROLLER_FILE))
        client.save_storage_checkpoint(str(partial))
        (partial / _METADATA_FILE).write_text(json.dumps({"storage_saved": True, "user_metadata": metadata or {}}))
        if target.exists():
            target.rename(old)
        partial.rename(target)
    except BaseException as error:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):  # that of a full disk names no file
            error.filename = error.filename or str(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Restore the queue from the files of `save_checkpoint`. Reading them runs no code.

    Raises:
        FileNotFoundError: there is none.
    """
    client = _client()
    path = Path(checkpoint_dir)
    old = path.with_name(path.name + ".old")
    if not path.exists() and old.exists():  # a save was killed between its two renames
        old.rename(path)
    for name in (_METADATA_FILE, _CONTROLLER_FILE):
        if not (path / name).exists():
            raise FileNotFoundError(f"{name} not found in {path}: it is not a checkpoint")
    client.load_controller_checkpoint(str(path / _CONTROLLER_FILE))
    client.load_storage_checkpoint(str(path))


# Parts


def _client() -> TransferQueueClient:
    if _session.client is None:
        ray = _ray()
        with _session.lock:
            if ray is None or not _join(ray):
                raise RuntimeError("TransferQueue is not initialized. Call init() first.")
    return get_client()


def _connect(conf: Config) -> None:
    _session.client = TransferQueueClient(f"client_{os.getpid()}", cast("ControllerInfo", conf.controller.zmq_info))


def _ray() -> Any:
    """Ray, where this process runs with it."""
    ray: Any = sys.modules.get("ray")
    return ray if ray is not None and ray.is_initialized() else None


def _join(ray: Any) -> bool:
    """Connect to the job's controller, if there is one."""
    try:
        actor = ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return False
    if _session.client is None or _session.actor != actor:
        _session.actor = actor
        _connect(_config_of(actor, ray))
    return True


def _config_of(actor: Any, ray: Any) -> Config:
    """Configuration of a running controller.

    Raises:
        WaitTimeoutError: it does not.
    """
    try:
        return ray.get(actor.get_config.remote(), timeout=_START_S)
    except ray.exceptions.GetTimeoutError as error:
        raise WaitTimeoutError(
            f"the actor {NAME!r} of the namespace {NAMESPACE!r} did not answer within {_START_S} s of being asked: it "
            "is still starting, or its node is overloaded; `ray list actors` and the logs of its worker say which"
        ) from error


def _start(ray: Any, conf: Config) -> Any:
    is_one_host = len([node for node in ray.nodes() if node["Alive"]]) == 1
    host = "127.0.0.1" if is_one_host else ray.util.get_node_ip_address()
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    actor = ray.remote(ControllerHost).options(
        name=NAME, namespace=NAMESPACE, num_cpus=0, max_concurrency=16, scheduling_strategy=strategy
    )
    return actor.remote(conf, host)


def _batch_of_one(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            raise ValueError("fields of one sample hold no nested tensors: pass a TensorDict of batch_size 1")
        return value.unsqueeze(0)
    return [value]
