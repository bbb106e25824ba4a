"""Host of a job's controller: configuration, RPC server and Prometheus endpoint."""

from __future__ import annotations

import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import TYPE_CHECKING, Any, cast

from rl_tq.cli import prometheus
from rl_tq_transfer_queue import sampler as samplers
from rl_tq_transfer_queue.controller import TransferQueueController
from rl_tq_transfer_queue.service.rpc import ControllerServer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_tq_transfer_queue.sampler import BaseSampler


class Config(dict[str, Any]):
    """Mapping whose values are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no {name!r}; there are {sorted(self)}") from None

    def __reduce__(self) -> Any:
        return Config, (dict(self),)


class ControllerHost:
    """Controller of a job with its RPC server and configuration: a Ray actor, or in this process."""

    def __init__(self, conf: Config, host: str) -> None:
        options, storage = conf.controller, conf.backend.SimpleStorage
        key = secrets.token_hex(32)
        is_alone = host == "127.0.0.1"
        self._controller = TransferQueueController(
            options.sampler, options.polling_mode, "shm://" if is_alone else f"tcp://{host}:0",
            storage.total_storage_size, None if is_alone else key,
        )  # fmt: skip
        self._server = ControllerServer(self._controller, host, key)
        options["zmq_info"] = self._server.info
        if conf.metrics.enabled:
            conf.metrics["endpoint"] = _serve_metrics(self._controller, host, conf.metrics.port)
        self._conf = conf

    def get_config(self) -> Config:
        """Configuration of the job."""
        return self._conf

    def list_partitions(self) -> list[str]:
        """See `TransferQueueController.list_partitions`."""
        return self._controller.list_partitions()

    def get_partition_snapshot(self, partition_id: str) -> Any:
        """See `TransferQueueController.get_partition_snapshot`."""
        return self._controller.get_partition_snapshot(partition_id)

    def clear_partition(self, partition_id: str) -> None:
        """See `TransferQueueController.clear_partition`."""
        self._controller.clear_partition(partition_id)

    def register_sampler(self, sampler: BaseSampler | type[BaseSampler]) -> None:
        """See `TransferQueueController.register_sampler`."""
        self._controller.register_sampler(sampler)

    def close(self) -> None:
        """Close the RPC server and the queue."""
        self._server.close()
        self._controller.close()


def merged(conf: Mapping[str, Any] | None) -> Config:
    """A configuration over the defaults.

    Raises:
        ValueError: an option has no counterpart here.
    """
    # The file that the original's recipes read; in YAML's flow style, which is JSON.
    known = json.loads(resources.files("rl_tq_transfer_queue").joinpath("config.yaml").read_text("utf-8"))
    final = _overlaid(known, conf or {}, "")
    if final.backend.storage_backend != "SimpleStorage":
        raise ValueError(
            f"backend.storage_backend is {final.backend.storage_backend!r}: here it is 'SimpleStorage', served by rl-tq"
        )
    if final.backend.SimpleStorage.required_node_resource is not None:
        raise ValueError("backend.SimpleStorage.required_node_resource has no counterpart here: leave it out")
    chosen = final.controller.sampler
    if isinstance(chosen, str):
        final.controller["sampler"] = getattr(samplers, chosen, None)
        if final.controller.sampler is None:
            raise ValueError(f"Could not find sampler {chosen!r}")
    return final


def _overlaid(known: dict[str, Any], given: Mapping[str, Any], where: str) -> Config:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{where or 'the configuration'} has no {unknown} here; it has {sorted(known)}")
    final = Config()
    for name, default in known.items():
        value: Any = given.get(name, default)
        is_section = isinstance(default, dict)
        final[name] = _overlaid(cast("dict[str, Any]", default), value, f"{where}{name}.") if is_section else value
    return final


def _serve_metrics(controller: TransferQueueController, host: str, port: int) -> str:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = prometheus(controller.stats()).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is http.server's
            del format, args

    server = ThreadingHTTPServer((host, port), Handler)
    threading.Thread(target=server.serve_forever, name="rl-tq-compat-metrics", daemon=True).start()
    return f"{host}:{server.server_address[1]}"
