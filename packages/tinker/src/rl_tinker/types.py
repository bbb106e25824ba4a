"""Types of rl-tinker: configuration, records that the journal stores, parameters of the API."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Rate = Annotated[float, Meta(ge=0)]
Beta = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Configuration of `rl-tinker serve`. Keys are written with dots: `model.path`, `server.replicas`."""

    model_path: str
    """Hugging Face folder of the base model, or its id on the hub."""
    model_name: str = ""
    """Name that clients ask for as `base_model`; by default `model.path` as given."""
    output_dir: str = "rl-tinker"
    """Folder of the journal, the models' states and the checkpoints. A server that starts on it continues from it."""
    host: str = "127.0.0.1"
    """Interface to bind. One that is not loopback needs `keys`."""
    port: int = 8765
    """Port to bind; 0 picks a free one."""
    keys: str = ""
    """TOML file of tenants, their API keys and quotas; without it every key is a tenant of its own."""
    ranks: int = 1
    """Training processes on this machine, one per GPU."""
    backend: str = "fsdp"
    """Backend of rl-engine."""
    training: str = "lora"
    """`lora`: adapters over the frozen base model. `full`: all its weights, by one tenant, and one run at a time."""
    dtype: str = "auto"
    """Number format of training: `float32`, `bfloat16`, or `auto`."""
    max_adapters: int = 32
    """Most adapters in the memory of the training processes, and most in that of a sampling server; the least recently
    used one makes room, and is loaded again when it is needed."""
    max_rank: int = 256
    """Largest rank of an adapter; vLLM reserves the memory of `max_adapters` adapters of this rank."""
    max_model_len: int = 4096
    """Longest row of training or sampling, tokens."""
    server_backend: str = "embedded"
    """Backend of rl-rollout that samples."""
    server_replicas: int = 1
    """Sampling servers."""
    server_tp: int = 1
    """GPUs of each sampling server (tensor parallel)."""
    server_options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Options of the sampling servers' backend, as in `server.options.command=LINE`; values are JSON or text."""
    timeout_s: float = 1800.0
    """Longest time that one command to the training processes or to a sampling server may take, seconds."""

    @property
    def is_full(self) -> bool:
        """Whether all weights are trained."""
        return self.training == "full"

    @property
    def max_models(self) -> int:
        """Most models in the memory of the training processes."""
        return 1 if self.is_full else self.max_adapters


class LossName(StrEnum):
    """Loss function of the API; formulas in `rl_engine`."""

    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"
    CISPO = "cispo"
    DRO = "dro"


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a LoRA adapter, as `create_model` gives it."""

    rank: int = 32
    """Rank of the two matrices of each adapted layer."""
    seed: int = 0
    """Seed of the initial values."""
    train_attn: bool = True
    """Whether attention projections are adapted."""
    train_mlp: bool = True
    """Whether MLP projections are adapted."""
    train_unembed: bool = True
    """Whether the output layer is adapted."""


class AdamParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of one optimizer step: AdamW, as torch defines it."""

    learning_rate: Rate = 1e-4
    beta1: Beta = 0.9
    beta2: Beta = 0.95
    eps: Annotated[float, Meta(gt=0)] = 1e-12
    weight_decay: Rate = 0.0
    grad_clip_norm: Rate = 0.0
    """Largest global gradient norm; 0 does not clip."""


class Kind(StrEnum):
    """Kind of an operation on a model."""

    CREATE = "create_model"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE = "save_weights"
    SAVE_FOR_SAMPLER = "save_weights_for_sampler"
    SAVE_EXTERNAL = "save_weights_external"
    LOAD = "load_weights"
    REJECTED = "rejected"
    """Request that was answered with an error: it uses up its number, for which later operations would wait."""


class Status(StrEnum):
    """Status of an operation."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Session(msgspec.Struct, kw_only=True):
    """Session of one client."""

    id: str
    tenant: str
    created: float
    """Seconds since the epoch."""
    seen: float
    """Time of the last heartbeat."""
    finished: str = ""
    """Reason for which it ended; empty while it lasts."""
    display_name: str | None = None
    user_metadata: dict[str, Any] | None = None
    num_clients: int = 0
    """Sampling clients that joined after the first."""


class Model(msgspec.Struct, kw_only=True):
    """Training run: one adapter, or the base model's own weights, with its optimizer."""

    id: str
    session: str
    tenant: str
    created: float
    last_request: float
    adapter: AdapterSpec | None
    """None: all weights of the base model are trained."""
    next_seq: int = 0
    """Number of the operation that runs next."""
    state: str = ""
    """Folder of the durable weights and optimizer state, below the models folder; empty before they exist."""
    step: int = 0
    """Optimizer steps taken."""
    user_metadata: dict[str, Any] | None = None
    is_unloaded: bool = False

    @property
    def rank(self) -> int | None:
        """Rank of the adapter; None: all weights are trained."""
        return None if self.adapter is None else self.adapter.rank


class Checkpoint(msgspec.Struct, kw_only=True):
    """Checkpoint with a `tinker://` path."""

    path: str
    model: str
    tenant: str
    kind: str
    """`training` (with the optimizer), `sampler`, or `external` (to download)."""
    folder: str
    """Folder below the checkpoints folder."""
    created: float
    adapter: AdapterSpec | None
    step: int
    size_bytes: int
    expires: float | None = None
    is_public: bool = False
    user_metadata: dict[str, Any] | None = None

    @property
    def id(self) -> str:
        """Its path."""
        return self.path

    @property
    def name(self) -> str:
        """Id of the checkpoint within its run, such as `weights/final`."""
        return self.path.removeprefix("tinker://").partition("/")[2]


class Sampler(msgspec.Struct, kw_only=True):
    """Sampling session: a checkpoint, or the base model."""

    id: str
    session: str
    tenant: str
    checkpoint: str = ""
    """Path of the checkpoint; empty: the base model."""


class Operation(msgspec.Struct, kw_only=True):
    """Operation on a model, which is also the future that a client polls."""

    id: str
    model: str
    tenant: str
    seq: int
    kind: Kind
    body: bytes
    """Body of the request, as it arrived (decompressed); empty once it cannot be needed again. Of a rejected one: the
    error."""
    created: float
    status: Status = Status.PENDING
    result: bytes = b""
    content_type: str = "application/json"
    finished: float = 0.0
    tokens: int = 0
    """Tokens of its rows: its share of the training processes."""
    attempts: int = 0
    """Times that the training processes were lost while it ran."""


class Verb(StrEnum):
    """What the training processes are to do."""

    CREATE = "create"
    """Add a model with new weights, and write its state to `folder`."""
    RESTORE = "restore"
    """Add a model with the weights in `folder`; without `optimizer` its moments are zero."""
    SAVE = "save"
    """Write the state of a model to `folder`."""
    EXPORT = "export"
    """Write all weights of a model to `folder`, as Hugging Face's folders have them."""
    DROP = "drop"
    """Remove a model from memory."""
    FORWARD = "forward"
    """Run `requests` of several models in one pass; with `backward` their gradients are added."""
    OPTIM_STEP = "optim_step"
    """Step the optimizer of a model by `adam`, drop its gradient, and write its new state to `folder`."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Command to the training processes. Folders are absolute."""

    verb: Verb
    model: str = ""
    adapter: AdapterSpec | None = None
    folder: str = ""
    optimizer: bool = True
    requests: list[tuple[str, bytes]] = []
    """Models, and bodies of `forward_backward`."""
    backward: bool = False
    adam: AdamParams | None = None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to one command."""

    error: str = ""
    results: list[bytes] = []
    """Of a pass: for each request the encoded output."""
    errors: list[str] = []
    """Of a pass: for each request the error that its own rows caused, or an empty string."""
    metrics: dict[str, float] = {}
    """Of an optimizer step."""
