"""Weight transfer from the engine's ranks to the replicas: from shard to shard, or gathered and sent by rank 0."""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rl_ckpt.types import Placement, join_addresses, merge_reports, relay_address
from rl_engine.errors import naming
from rl_trainer.errors import ConfigError
from rl_trainer.output_dir import write_whole
from rl_trainer.runtime.network import LISTENING, scheme_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from rl_ckpt.types import Address, SyncReport
    from rl_engine.types import LoraConfig
    from rl_trainer.workers.engine_worker import EngineWorker
    from rl_trainer.workers.rollout import Receivers, WeightShapes
    from rl_trainer.workers.weights import LocalWeights


PLAN_FILE = "weights-plan.json"
"""File of the output folder that says who sends what to whom."""
CHECK_S = 0.1
"""Seconds between two looks at what others wait for."""
_RELAYED = ("tcp", "nixl")
"""Transports between machines that send to each receiver by itself: there, one of a node sends on to the others."""


class WeightTransfer(ABC):
    """Weight transfer: sends versions from the actor to all replicas."""

    def __init__(self, actor: EngineWorker) -> None:
        self._actor = actor

    def weights_for(self, member: int) -> WeightShapes | None:
        """The tensors whose layout a replica has to report with its receivers; None: it need not."""
        del member
        return None

    def join(self, member: int, receivers: Receivers) -> None:
        """Note what a replica declares, before it takes part in a sync."""
        del member, receivers

    @abstractmethod
    def addresses(self, members: Sequence[int]) -> dict[int, str]:
        """Address that each of these replicas, which take part in the next sync, receives from."""

    @abstractmethod
    def send(self, version: int, receivers: Mapping[int, int]) -> SyncReport:
        """Send and commit a version once all `receivers` (number by replica) have joined.

        Raises:
            SyncAbortedError: it is committed nowhere.
        """

    def call_off(self) -> None:
        """Abort a waiting `send`, from another thread."""
        self._actor.call_off()

    def dismiss(self, why: str) -> None:
        """Notify receivers that have come since `send` failed that no sync begins."""
        self._actor.dismiss_receivers(why)


class GatheredTransfer(WeightTransfer):
    """Gathered transfer: all ranks gather tensor by tensor, and rank 0 sends to every receiver.

    `is_own`: the actor was created with another address, so that each call names this one.
    """

    def __init__(self, actor: EngineWorker, address: str, *, is_own: bool = False) -> None:
        super().__init__(actor)
        self._address, self._is_own = address, is_own

    def addresses(self, members: Sequence[int]) -> dict[int, str]:
        """Address of rank 0's session, for all."""
        return dict.fromkeys(members, self._address)

    def send(self, version: int, receivers: Mapping[int, int]) -> SyncReport:
        """See `WeightTransfer`."""
        session = (self._address,) if self._is_own else ()
        report = self._actor.send_weights(version, sum(receivers.values()), *session)
        assert report is not None, "rank 0 sends and reports"
        return report


class ShardedTransfer(WeightTransfer):
    """Sharded transfer: every rank sends its shards, receivers take their slices, one commit for all.

    The plan and the sessions are made before the first sync, of the layouts that both sides report, and serve every
    later one. Between machines, one replica of a node takes what another one there is to have as well, and sends it on.

    The plan is written to `folder`, for `rl-ckpt plan`.
    """

    def __init__(self, actor: EngineWorker, pattern: str, folder: Path | None = None) -> None:
        super().__init__(actor)
        self._pattern, self._folder = pattern, folder
        self._opened: list[dict[int, str]] = []
        """Addresses of the sessions, by rank of the engine and receiver of a replica."""
        self._groups: dict[tuple[int, int], list[list[int]]] = {}
        """Replicas by rank of the engine and receiver, in groups whose first one sends on to the rest."""
        self._below = ""
        """Prefix of the addresses of the relays' sessions."""
        self._held: list[LocalWeights] = []
        """Weights that each rank of the engine holds."""
        self._joined: dict[int, Receivers] = {}
        """Declaration of each replica."""

    def weights_for(self, member: int) -> WeightShapes | None:
        """All tensors, for a replica that has not reported its layout yet.

        Raises:
            ConfigError: the engine exports whole tensors only.
        """
        if member in self._joined:
            return None
        if not self._held:
            layouts = self._actor.weight_layout()
            self._held = [each for each in layouts if each is not None]
            if len(self._held) < len(layouts):
                raise ConfigError("this engine.backend exports whole tensors only; set weights.mode=gathered")
        return {spec.name: (each.dtypes[spec.name], spec.shape) for each in self._held for spec in each.specs}

    def join(self, member: int, receivers: Receivers) -> None:
        """See `WeightTransfer`.

        Raises:
            ConfigError: its receivers take other slices than those of the replicas before it.
        """
        if member in self._joined:
            return
        for other, joined in self._joined.items():
            if receivers.layout != joined.layout:
                raise ConfigError(
                    f"rollout replica {member} cuts the weights otherwise than replica {other}; start all of them with "
                    "the same rollout.parallel, or set weights.mode=gathered"
                )
        self._joined[member] = receivers
        if self._folder is not None:
            self._placement([*self._joined]).save(self._folder / PLAN_FILE)

    def _placement(self, members: Sequence[int]) -> Placement:
        joined = [self._joined[member] for member in members]
        dtypes = {name: dtype for each in self._held for name, dtype in each.dtypes.items()}
        return Placement(
            sizes={name: getattr(torch, dtype).itemsize for name, dtype in dtypes.items()},
            sources=[each.specs for each in self._held],
            targets=joined[0].layout,
            source_nodes=[each.host for each in self._held],
            target_nodes=[[each.host] * len(each.layout or [[]]) for each in joined],
            has_relays=scheme_of(self._pattern) in _RELAYED,
        )

    def addresses(self, members: Sequence[int]) -> dict[int, str]:
        """The sessions of all ranks, or of relays on a replica's node; opened when they are asked for first.

        They are opened anew where other replicas than before take part and one of them is, or was, a relay.
        """
        targets = self._joined[members[0]].layout
        groups = self._groups_of(members, 1 if targets is None else len(targets))
        if not self._opened or (groups != self._groups and _has_relay(self._groups, groups)):
            held = tuple(each.specs for each in self._held)
            self._opened = self._actor.open_sessions(held, targets, self._pattern)
            self._below = f"shm://relay-{secrets.token_hex(6)}"
        self._groups = groups
        return {member: self._address_of(member, 1 if targets is None else len(targets)) for member in members}

    def _groups_of(self, members: Sequence[int], num_targets: int) -> dict[tuple[int, int], list[list[int]]]:
        placement = self._placement(members)
        return {
            (source, target): [[members[replica] for replica in group] for group in placement.groups(source, target)]
            for source in range(len(self._held))
            for target in range(num_targets)
        }

    def _address_of(self, member: int, num_targets: int) -> str:
        addresses: list[dict[int, Address | str]] = []
        for source, opened in enumerate(self._opened):
            own: dict[int, Address | str] = {}
            for target, address in opened.items():
                group = next(group for group in self._groups[source, target] if member in group)
                below = f"{self._below}-{source}-{target}-{group[0]}"
                direct = address if len(group) == 1 else relay_address(address, below, len(group) - 1)
                own[target] = direct if member == group[0] else below
            addresses.append(own)
        return join_addresses(addresses, num_targets).to_json()

    def send(self, version: int, receivers: Mapping[int, int]) -> SyncReport:
        """See `WeightTransfer`."""
        try:
            digest = self._actor.join_digest(self._actor.stage_weights(version, self._num_direct(len(receivers))))
        except Exception as error:
            with ThreadPoolExecutor(1, thread_name_prefix="abort-weights") as thread:
                aborted = thread.submit(self._actor.abort_weights, str(error) or repr(error))
                while not wait([aborted], timeout=CHECK_S).done:
                    self._actor.call_off()  # the other ranks, which may wait for receivers that wait for this one
                aborted.result()
            raise
        reports = self._actor.commit_weights(version, digest)
        return merge_reports(reports, version=version, digest=digest)

    def _num_direct(self, num_replicas: int) -> int | list[dict[int, int]]:
        """Receivers that sessions wait for: all replicas, or by rank and receiver those that no relay sends to."""
        if not _has_relay(self._groups):
            return num_replicas
        return [
            {target: len(self._groups[source, target]) for target in opened}
            for source, opened in enumerate(self._opened)
        ]


def _has_relay(*arrangements: Mapping[tuple[int, int], list[list[int]]]) -> bool:
    return any(len(group) > 1 for groups in arrangements for each in groups.values() for group in each)


def write_start_adapter(folder: Path, model_path: Path, lora: LoraConfig) -> Path:
    """Write an adapter that changes nothing, in peft's format: what servers start with before the first sync.

    Raises:
        ConfigError: no linear layer of the model has one of the target names.
    """
    tensors: dict[str, Tensor] = {}
    for layer, (rows, columns) in start_layers(model_path, lora).items():
        tensors[f"base_model.model.{layer}.lora_A.weight"] = torch.zeros(lora.rank, columns)
        tensors[f"base_model.model.{layer}.lora_B.weight"] = torch.zeros(rows, lora.rank)
    if not tensors:
        raise ConfigError(f"engine.lora.target_modules={list(lora.target_modules)} names no layer of {model_path}")
    folder.mkdir(parents=True, exist_ok=True)
    with naming(folder / "adapter_model.safetensors"):
        save_file(tensors, folder / "adapter_model.safetensors")
    described: dict[str, object] = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha, "bias": "none"}
    described["target_modules"] = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors})
    write_whole(folder / "adapter_config.json", json.dumps(described))
    return folder


def start_layers(model_path: Path, lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """Linear layers of the decoder with one of the target names, and their sizes, by the files' headers."""
    found: dict[str, tuple[int, int]] = {}
    for file in sorted(model_path.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - a file, not a mapping
                shape = tuple(weights.get_slice(name).get_shape())
                layer = name.removesuffix(".weight")
                is_wanted = layer.rpartition(".")[2] in lora.target_modules if lora.target_modules else True
                if is_wanted and len(shape) == 2 and ".layers." in name and layer != name:
                    found[layer] = shape[0], shape[1]
    return found


def check_start_layers(layers: Sequence[str], model_path: Path, lora: LoraConfig) -> None:
    """Check that servers can have the engine's adapter: it is on `layers`, which are linear layers of the folder.

    Raises:
        ConfigError: they are not; names one.
    """
    start = start_layers(model_path, lora)
    beyond = sorted({*layers} ^ start.keys())
    if beyond:
        has = "which servers do not adapt" if beyond[0] in layers else "on which the engine has no adapter"
        raise ConfigError(
            f"engine.lora.export=adapter sends the adapter alone, on linear layers of the decoder, and target_modules "
            f"takes {beyond[0]}, {has}. Name engine.lora.target_modules without it, or leave export out: servers are "
            "sent the model with the adapter added in"
        )


CHAIN_LENGTH = 16
"""Over a folder, a version in so many is whole: who joins reads that, and at most the differences that follow it."""


def chain_address(address: str) -> str:
    """The address of a folder or object store, to which differences are written unless it says itself how often."""
    return address if "chain=" in address else f"{address}{'&' if '?' in address else '?'}chain={CHAIN_LENGTH}"


def session_pattern(address: str, *, delta: bool) -> str:
    """The address of a session as one of many, with places for `{rank}`, `{target}` and `{host}`."""
    scheme, _, rest = address.partition("://")
    name, _, query = rest.partition("?")
    place = "{host}:0" if scheme in LISTENING else f"{name}-{{rank}}-{{target}}"
    options = "&".join([*([query] if query else []), *(["delta=1"] if delta else [])])
    return f"{scheme}://{place}{'?' if options else ''}{options}"
