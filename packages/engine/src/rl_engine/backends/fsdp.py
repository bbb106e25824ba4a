"""The `fsdp` backend: any Hugging Face causal LM, or a scalar head on its trunk, sharded by FSDP2.

One rank computing in one number format needs neither sharding nor a process group and gets the bare module. On several,
every rank builds the model without memory and reads its shards from the folder. Where the folder's tensors are not
those of the model side by side (older names, drawn weights, an adapter), rank 0 alone reads the whole and sends the
others their shards, one parameter at a time.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

from rl_engine.checkpoint import hf_folder
from rl_engine.checkpoint.hf_folder import DTYPES, parameter_dtype, trains_narrow
from rl_engine.checkpoint.slices import Piece, find_pieces, open_folder, read_shards, shapes_of
from rl_engine.distributed.expert_parallel import check_experts, divide_experts
from rl_engine.errors import BackendError, ConfigError, EngineError, ModelFolderError
from rl_engine.layers import peft_lora as lora
from rl_engine.layers.logprobs import LinearHead
from rl_engine.layers.moe import check_aux
from rl_engine.layers.mtp import MtpLayer
from rl_engine.layers.multimodal import ImageInputs, vision_tower
from rl_engine.layers.onednn_linear import use_onednn
from rl_engine.layers.packed_attention import SequenceGroup, check_heads
from rl_engine.layers.row_adapters import RowAdapters
from rl_engine.model.activations import treat_parts
from rl_engine.model.export import WeightExport
from rl_engine.model.hf import (
    HuggingFaceScorer,
    PolicyScorer,
    ValueScorer,
    check_attention,
    find_linear_head,
    make_buffers,
    set_buffer,
    without_layers,
)
from rl_engine.model.module_engine import Capabilities, ModuleBackend, ModuleEngine
from rl_engine.model.settings import check_adapter, check_candidates, check_float8, compute_device, shares_prefixes
from rl_engine.types import EngineConfig, Fp8, Head, ModelInit, ParallelConfig, PeftConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import transformers
    from torch.distributed.device_mesh import DeviceMesh

    from rl_engine.base import Engine
    from rl_engine.distributed.world import World
    from rl_engine.model.module_engine import EngineParts
    from rl_engine.model.scorer import BuiltModel, Scorer


def create(config: EngineConfig) -> Engine:
    """The registry's entry."""
    return ModuleEngine(FsdpBackend(config))


class FsdpBackend(ModuleBackend):
    """See `ModuleBackend`: transformers' models, sharded by fully_shard."""

    capabilities = Capabilities(trains_mtp=True)

    def check(self, world_size: int) -> str | None:
        """See `ModuleBackend`."""
        return check_fit(self.config, world_size)

    @property
    def needs_group(self) -> bool:
        """See `ModuleBackend`."""
        return needs_sharding(self.config, 1)

    def build(self, world: World) -> tuple[HuggingFaceScorer, PeftConfig | None]:
        """See `ModuleBackend`."""
        return build_scorer(self.config, world)

    def parts(self, built: BuiltModel) -> EngineParts:
        """See `ModuleBackend`."""
        parts = super().parts(built)
        return parts if built.peft is None else replace(parts, export=AdaptedExport(built))

    def check_weights(self) -> None:
        """See `ModuleBackend`."""
        super().check_weights()
        if self.config.trains_mtp:
            scorer, _ = _scorer_of(_empty_model(self.config), self.config)
            _require_slices(scorer, self.config, find_pieces(scorer.named_weights(), scorer.to_folder))

    def row_adapters(self, scorer: Scorer) -> RowAdapters:
        """See `ModuleBackend`."""
        config = self.config
        assert isinstance(scorer, HuggingFaceScorer)
        for is_met, what in (
            (config.head == Head.LM, f"head is {config.head}"),
            (config.parallel.sp == 1, f"parallel.sp is {config.parallel.sp}, which cuts rows"),
            (not config.torch_compile, "torch_compile is true, and other adapters would be other graphs"),
            (not config.dropout, "dropout is true"),
            (scorer.multimodal is None, f"{type(scorer.model).__name__} takes images"),
        ):
            if not is_met:
                raise ConfigError(
                    f"Rows with adapters of their own are not possible: {what}. Train one adapter, by lora."
                )
        scorer.adapters = scorer.adapters or RowAdapters(scorer.model, scorer.layers())
        return scorer.adapters

    def adapter_off(self, built: BuiltModel) -> Any:
        """See `ModuleBackend`."""
        return None if built.peft is None else lora.without_adapter(built.scorer.model)


class AdaptedExport(WeightExport):
    """Weights of a model with peft's adapter: merged, or the adapter alone."""

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        scorer = self._built.scorer
        named = scorer.named_weights()
        if self._built.config.exports_adapter:
            yield from ((name, self.cast(tensor)) for name, tensor in lora.adapter_weights(named))
            return
        for name, full in lora.merged_weights(scorer.model, named):
            yield from scorer.to_folder({name: self.cast(full)}).items()


def check_fit(config: EngineConfig, world_size: int) -> str | None:
    """Refuse what cannot be honoured on that many ranks, by settings and the folder's config alone.

    Returns:
        What keeps rows from sharing prompts; None where nothing does.

    Raises:
        BackendError: a setting needs a package that is not installed.
        ConfigError: a setting that the model or the number of ranks does not allow.
        ModelFolderError: no config, or an unknown architecture.
    """
    _check_parallel(config.parallel)
    check_replicas(config.parallel, world_size)
    check_adapter(config)
    check_float8(config, "fsdp", (Fp8.TENSORWISE, Fp8.ROWWISE))
    ep = config.parallel.ep
    if config.lora is not None and ep > 1:
        raise ConfigError(f"parallel.ep is {ep} and lora is set; peft's adapters want all experts on every rank.")
    model = _empty_model(config)
    scorer, _ = _scorer_of(model, config)
    check_attention(scorer)
    if config.fp8 != Fp8.OFF:
        _to_float8(scorer.model, config.fp8)
    check_candidates(config.num_candidates, scorer.config.vocab_size)
    if ep > 1:
        check_experts(model, ep, world_size // config.parallel.dp_replicate // ep)
    return _sharing_obstacle(scorer, config)


def build_scorer(config: EngineConfig, world: World) -> tuple[HuggingFaceScorer, PeftConfig | None]:
    """The model as a scorer on this rank's device, and peft's description of its adapter. Collective.

    Raises:
        ConfigError: there is no compiler, and one is needed.
        ModelFolderError: the folder cannot be loaded; on every rank.
    """
    scorer, peft, sliced = _slices_of(config, world)
    if scorer is None:
        scorer, peft = _scorer_of(load_on_rank_0(config, world), config)
    has_whole = sliced is None and world.rank == 0
    if isinstance(scorer, PolicyScorer):
        if has_whole:
            scorer.head = find_linear_head(scorer.model)
        head = world.exchange(None if scorer.head is None else asdict(scorer.head))[0]
        scorer.head = None if head is None else LinearHead(**head)
    if config.fp8 != Fp8.OFF:  # after the head was looked for on a CPU, which has no such products by rows
        _to_float8(scorer.model, config.fp8)
    source: dict[str, Tensor] = dict(scorer.named_parameters()) if has_whole and world.size > 1 else {}
    if config.torch_compile:
        compile_layers(scorer, world.device)
    if needs_sharding(config, world.size):
        _shard(scorer, world, config)
    home = compute_device(config, world)
    if sliced is not None:
        _read_slices(scorer, sliced, config, home)
    elif world.size > 1:
        _fill(scorer, source, world, home)
    scorer.to(home)
    for module in scorer.modules() if config.cpu_offload else ():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(world.device))
    scorer.sequence_group = _sequence_group(world, config.parallel.sp)
    if config.lora is None:
        scorer.requires_grad_(config.optimizer is not None)
    if config.freeze_vision:
        scorer.model.get_submodule(vision_tower(scorer.model)).requires_grad_(False)
    scorer.train(config.optimizer is not None)
    return scorer, peft


def _scorer_of(
    model: transformers.PreTrainedModel, config: EngineConfig
) -> tuple[HuggingFaceScorer, PeftConfig | None]:
    """The model as its settings want it, and peft's description of its adapter.

    Raises:
        BackendError: a setting needs a package that is not installed.
        ConfigError: a setting that the model does not allow.
    """
    tower = vision_tower(model) if config.freeze_vision else None
    peft = None if config.lora is None else lora.add_adapter(model, config.lora, config.seed, config.head, tower)
    if config.head == Head.LM:
        scorer = PolicyScorer(model, config, is_compiled=config.torch_compile)
        if config.trains_mtp:
            _check_mtp(scorer, config)
            scorer.mtp = MtpLayer(model, Path(config.model_path))
    else:
        scorer = ValueScorer(model, is_compiled=config.torch_compile)
    if not config.torch_compile:  # which fuses norms itself, and differentiates products
        fuse_norms(model)
        use_onednn(model)
    if config.activation_checkpointing:
        _recompute_layers(model)
    treat_parts(scorer.layers(), config)
    _check_sequence(scorer, config.parallel.sp)
    check_aux(config.router_aux_loss_coef, scorer.experts)
    if config.torch_compile:
        _check_compilable(scorer, config)
    scorer.shares_prefixes = shares_prefixes(config, _sharing_obstacle(scorer, config))
    return scorer, peft


def load_on_rank_0(config: EngineConfig, world: World) -> transformers.PreTrainedModel:
    """The whole model on rank 0, an empty one elsewhere. Collective.

    Raises:
        ModelFolderError: the folder cannot be loaded; on every rank.
    """
    dtype = parameter_dtype(config)
    model: transformers.PreTrainedModel | None = None
    problem: str | None = None
    if world.rank == 0:
        try:
            model = hf_folder.load_model(
                config.model_path,
                init=config.init,
                dtype=dtype,
                seed=config.seed,
                head=config.head,
                mtp=config.mtp,
                has_dropout=config.dropout,
            )
        except ModelFolderError as error:
            problem = str(error)
    problem = world.exchange(problem)[0]
    if problem is not None:
        raise ModelFolderError(problem)
    return _empty_model(config) if model is None else model


def _empty_model(config: EngineConfig) -> transformers.PreTrainedModel:
    return hf_folder.empty_model(
        config.model_path, dtype=parameter_dtype(config), head=config.head, has_dropout=config.dropout
    )


def open_slices(config: EngineConfig, pieces: Mapping[str, list[Piece]] | None, *, is_tied: bool, world: World) -> bool:
    """Whether every rank can read its shards of the folder itself: it has all pieces, and nothing else. Collective."""
    is_able = config.init == ModelInit.PRETRAINED and pieces is not None
    if is_able:
        assert pieces is not None
        try:
            with open_folder(config, shapes_of(pieces), is_tied=is_tied):
                pass
        except ModelFolderError:  # of other names, which transformers may know; or damaged, which it says
            if hf_folder.block_size(config.model_path) is not None:
                raise  # transformers is not asked to load these
            is_able = False
    return all(world.exchange(is_able))


def _slices_of(
    config: EngineConfig, world: World
) -> tuple[HuggingFaceScorer | None, PeftConfig | None, dict[str, list[Piece]] | None]:
    """An empty scorer, and what its tensors are made of, where every rank reads its own. Collective."""
    if config.lora is not None or config.init != ModelInit.PRETRAINED:
        return None, None, None
    if world.size == 1 and hf_folder.block_size(config.model_path) is None and not config.trains_mtp:
        return None, None, None
    model = _empty_model(config)
    scorer, peft = _scorer_of(model, config)
    pieces = find_pieces(scorer.named_weights(), scorer.to_folder)
    if config.trains_mtp:
        _require_slices(scorer, config, pieces)
    if not open_slices(config, pieces, is_tied=bool(_ties(scorer)), world=world):
        return None, None, None
    if isinstance(scorer, PolicyScorer):
        is_found = True
        try:
            small = without_layers(hf_folder.empty_model(config.model_path, dtype=torch.float32, num_tokens=64))
            scorer.head = find_linear_head(small)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            is_found = False  # it does not run without layers: its weights tell, read whole
        if not all(world.exchange(is_found)):
            return None, None, None
    make_buffers(model)
    return scorer, peft, pieces


def _read_slices(
    scorer: HuggingFaceScorer, pieces: dict[str, list[Piece]], config: EngineConfig, home: torch.device
) -> None:
    """Give this rank its shards of the folder, in its own number format."""
    made = {name: buffer for name, buffer in scorer.named_buffers() if not buffer.is_meta}
    ties = _ties(scorer)
    scorer.to_empty(device=home)
    _tie(ties)
    for name, buffer in made.items():
        set_buffer(scorer, name, buffer.to(home))
    with (
        torch.no_grad(),
        open_folder(config, shapes_of(pieces), is_tied=bool(ties)) as read,
    ):
        read_shards(scorer.named_weights(), pieces, read)


def needs_sharding(config: EngineConfig, size: int) -> bool:
    """Whether the module is FSDP's: on several ranks, in two number formats, or in two places."""
    return size > 1 or trains_narrow(config) or config.cpu_offload


def _fill(scorer: Scorer, source: dict[str, Tensor], world: World, home: torch.device) -> None:
    """Send every rank its shards of rank 0's weights, and its buffers. Collective."""
    if world.rank == 0:
        scorer.to(home)
    else:
        ties = _ties(scorer)
        scorer.to_empty(device=home)
        _tie(ties)
    hand_out(_tensors(scorer), source, world)


@torch.no_grad()
def hand_out(tensors: Mapping[str, Tensor], source: dict[str, Tensor], world: World) -> None:
    """Fill every rank's `tensors`, or its shards of them, one after the other. Collective.

    Args:
        tensors: Parameters and buffers; those that are not sharded are taken from rank 0's.
        source: On rank 0, the whole of those that are sharded, taken out as they go.
        world: All ranks.

    Raises:
        EngineError: ranks built different models.
    """
    mine = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    if world.exchange(mine)[0] != mine:
        raise EngineError("Ranks built different models from one folder; do all of them see the same files?")
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            dist.broadcast(tensor, 0)
            continue
        if world.rank == 0:
            full = source.pop(name).to(world.device)
        else:
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=world.device)
        shard = distribute_tensor(full, tensor.device_mesh, tensor.placements)
        tensor.to_local().copy_(shard.to_local())


def _tensors(scorer: Scorer) -> dict[str, Tensor]:
    return {**dict(scorer.named_parameters()), **dict(scorer.named_buffers())}


def _ties(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Groups of modules that share a parameter; moving off the meta device would make copies."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((owner, name))
    return [group for group in places.values() if len(group) > 1]


def _tie(ties: list[list[tuple[nn.Module, str]]]) -> None:
    """Restore shared parameters."""
    for (first, name), *others in ties:
        for module, other in others:
            setattr(module, other, getattr(first, name))


def _to_float8(model: transformers.PreTrainedModel, recipe: Fp8) -> None:
    """Put torchao's float8 linear modules in the place of those of the layers, on the same weights.

    Routers keep theirs, as do modules whose sizes the kernels do not take.

    Raises:
        BackendError: torchao is not installed.
    """
    try:
        library: Any = import_module("torchao.float8")
    except ImportError as error:
        raise BackendError(
            f"fp8 is {recipe} and fsdp needs torchao for it ({error}); try: pip install torchao"
        ) from error

    def is_taken(module: nn.Module, name: str) -> bool:
        sizes = module.weight.shape if isinstance(module, nn.Linear) else (1,)
        is_router = name.rpartition(".")[2] in ("gate", "router")
        return ".layers." in f".{name}" and not is_router and all(size % 16 == 0 for size in sizes)

    known = library.Float8LinearConfig.from_recipe_name(str(recipe))
    library.convert_to_float8_training(model, module_filter_fn=is_taken, config=replace(known, pad_inner_dim=True))


def _recompute_layers(model: transformers.PreTrainedModel) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})  # the older name goes in transformers 6


def _check_mtp(scorer: HuggingFaceScorer, config: EngineConfig) -> None:
    """Refuse models and settings with which the layer for multi-token prediction is not trained.

    Raises:
        ConfigError: says which.
    """
    for is_met, what in (
        (config.parallel.sp == 1, f"parallel.sp is {config.parallel.sp}, whose ranks have the next token elsewhere"),
        (not config.torch_compile, "torch_compile is true"),
        (scorer.is_packed and scorer.multimodal is None, f"{type(scorer.model).__name__} takes images or padded rows"),
    ):
        if not is_met:
            raise ConfigError(f"mtp is train and {what}. Set it otherwise, or mtp=freeze.")


def _require_slices(scorer: Scorer, config: EngineConfig, pieces: Mapping[str, list[Piece]] | None) -> None:
    """Refuse a folder that has not all tensors of the model and its layer for multi-token prediction.

    Raises:
        ModelFolderError: says which; transformers itself cannot load the layer.
    """
    if pieces is None:
        raise ModelFolderError(f"mtp is train and {config.model_path} has joined tensors. Use mtp=freeze.")
    with open_folder(config, shapes_of(pieces), is_tied=bool(_ties(scorer))):
        pass


def _check_parallel(parallel: ParallelConfig) -> None:
    """Refuse what cannot be honoured on any number of ranks, before anything starts."""
    if replace(parallel, sp=1, dp_replicate=1, ep=1) != ParallelConfig():
        raise ConfigError(f"parallel is {parallel}; the fsdp backend takes sp, dp_replicate and ep only. Use megatron.")


def check_replicas(parallel: ParallelConfig, size: int) -> None:
    """Refuse groups that the number of ranks does not divide into.

    Raises:
        ConfigError: says which.
    """
    for name in ("sp", "dp_replicate"):
        if size % getattr(parallel, name):
            raise ConfigError(f"parallel.{name} = {getattr(parallel, name)} does not divide {size} ranks.")
    if (size // parallel.dp_replicate) % parallel.ep:
        raise ConfigError(f"parallel.ep = {parallel.ep} does not divide {size // parallel.dp_replicate} ranks.")


def _sequence_group(world: World, sp: int) -> SequenceGroup | None:
    """Sequence-parallel group of this rank. Collective."""
    if sp == 1:
        return None
    axes = init_device_mesh(world.device.type, (world.size // sp, sp), mesh_dim_names=("dp", "sp"))
    return SequenceGroup(group=axes.get_group("sp"), rank=world.rank % sp, size=sp)


def _check_sequence(scorer: HuggingFaceScorer, sp: int) -> None:
    """Refuse a model whose tokens cannot be cut over ranks.

    Raises:
        ConfigError: says why.
    """
    if sp == 1:
        return
    config = scorer.model.config.get_text_config()
    if not scorer.is_packed:
        raise ConfigError(
            f"parallel.sp is {sp}; {type(scorer.model).__name__} has layers that mix tokens outside attention, or "
            "attends in its own way, so its rows cannot be cut. Set it to 1."
        )
    if scorer.multimodal is not None or scorer.has_state:
        what = "takes images whole" if scorer.multimodal is not None else "carries state from token to token"
        raise ConfigError(f"parallel.sp is {sp}; {type(scorer.model).__name__} {what}. Set it to 1.")
    check_heads(sp, config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads))


def _sharing_obstacle(scorer: HuggingFaceScorer, config: EngineConfig) -> str | None:
    """Why tokens that two rows begin with in common cannot be computed once, or None."""
    name = type(scorer.model).__name__
    if config.parallel.sp > 1:
        return f"parallel.sp is {config.parallel.sp}, which cuts rows over ranks"
    if not scorer.is_packed:
        return f"{name} has layers that mix tokens outside attention, or attends in its own way"
    if isinstance(scorer.multimodal, ImageInputs):
        return f"{name} takes images without grids, whose features cannot be distinguished"
    if scorer.has_state:
        return f"{name} has layers whose state begins with every row"
    if scorer.experts is not None:
        return f"{name} has routers, whose load and replay are of every row's own tokens"
    if scorer.mtp is not None:
        return "mtp is train, whose layer reads the token after each, and rows go on with different ones"
    if config.optimizer is not None and _drops_out(scorer):
        return f"{name} is trained with dropout, which every row has its own of"
    return None


def _drops_out(scorer: HuggingFaceScorer) -> bool:
    """Whether a layer zeroes activations at random while it is trained: by a module, or a rate of the config."""
    rates = [module.p for module in scorer.modules() if isinstance(module, nn.Dropout)]
    for name, rate in scorer.config.to_dict().items():
        is_of_a_head = name.startswith(("summary", "classifier"))  # of kinds that are not built here
        if ("dropout" in name or "pdrop" in name) and not is_of_a_head:
            rates.append(rate or 0.0)
    return any(rate > 0 for rate in rates)


def _shard(scorer: HuggingFaceScorer, world: World, config: EngineConfig) -> None:
    """Shard each decoder layer, then the rest with the root; parameters stay in their own format between uses.

    With `parallel.ep` a layer's experts are divided among ranks first, and each is sharded over the ranks that have it:
    along its second axis, so that a rank holds one box of every tensor.
    """
    compute, replicas, ep = DTYPES[config.precision], config.parallel.dp_replicate, config.parallel.ep
    wide = torch.float64 if compute == torch.float64 else torch.float32
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if config.cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {"offload_policy": offload}
    if ep > 1:
        mesh = _mesh(world, replicate=replicas, shard=world.size // replicas // ep, expert=ep)
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=wide, cast_forward_inputs=False)
        axes = mesh["replicate", "shard"] if replicas > 1 else mesh["shard"]
        for module in divide_experts(scorer.model, mesh["expert"]):
            fully_shard(module, mesh=axes, mp_policy=policy, shard_placement_fn=lambda _: Shard(1), **options)
    mesh = _mesh(world, replicate=replicas, shard=world.size // replicas)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=wide)
    for module in [*scorer.layers(), scorer]:
        fully_shard(module, mesh=mesh, mp_policy=policy, **options)
    sum_gradients(scorer)


def _mesh(world: World, *, replicate: int, **axes: int) -> DeviceMesh:
    """Mesh of all ranks along the named axes, the last of them neighbours; no `replicate` where it is 1. Collective."""
    sizes = {"replicate": replicate, **axes} if replicate > 1 else axes
    return init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _check_compilable(scorer: HuggingFaceScorer, config: EngineConfig) -> None:
    """Refuse layers that would be compiled again and again, or parts of which are recomputed or offloaded.

    Raises:
        ConfigError: says what they have.
    """
    if not scorer.is_packed or scorer.has_state or scorer.experts is not None or scorer.multimodal is not None:
        raise ConfigError(
            f"torch_compile is true and {type(scorer.model).__name__} has routers, images or layers that mix tokens "
            "outside attention, which are compiled anew for every batch. Set it to false."
        )
    if config.treats_parts:
        raise ConfigError("torch_compile is true, and recompute or activation_offload names parts of its graphs.")


def compile_layers(scorer: HuggingFaceScorer, device: torch.device) -> None:
    """Let torch compile every decoder layer at its first use, for any number of tokens.

    Raises:
        ConfigError: there is no compiler.
    """
    try:
        torch.compile(torch.sin)(torch.ones(2, device=device))
    except Exception as error:  # whatever a missing compiler raises, by torch's version and the device
        raise ConfigError(
            "torch_compile is true and torch finds no compiler that works (a C++ compiler for the CPU, Triton for a "
            f"GPU): {error}. Install one, or set it to false."
        ) from error
    for layer in scorer.layers():
        layer.compile(dynamic=True)


def sum_gradients(root: nn.Module) -> None:
    """Let FSDP add gradients up over ranks, where it would average: losses are shares of a whole batch's."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum


_NORM_SIZE, _NORM_EPS = 16, 0.25


def fuse_norms(model: nn.Module) -> None:
    """Let the model's RMSNorms (Zhang and Sennrich, 1910.07467) compute by torch's kernel where they are on a GPU.

    transformers writes it as ten operations, of which torch keeps float32 copies for the backward pass. In an update
    of 0.6 B parameters on an H200 they took a third of the time of all kernels.

    Norms of another kind, such as those that scale by 1 + weight, stay too: a class is taken if it computes the same.
    """
    taken: dict[type, bool] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in taken:
            taken[kind] = is_rms_norm(kind)
        if taken[kind]:
            module.forward = partial(_normalize, module, module.forward)


def is_rms_norm(kind: type[nn.Module]) -> bool:
    """Whether a class computes x / sqrt(mean(x^2) + `variance_epsilon`) * `weight`, by one example."""
    if "RMSNorm" not in kind.__name__:
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, _NORM_SIZE, generator=generator), torch.randn(_NORM_SIZE, generator=generator)
    stand_in: Any = SimpleNamespace(weight=weight, variance_epsilon=_NORM_EPS)
    try:
        found = kind.forward(stand_in, x)
    except (AttributeError, TypeError):  # it has other numbers than these, or takes a gate
        return False
    return torch.allclose(found, functional.rms_norm(x, (_NORM_SIZE,), weight, _NORM_EPS), atol=1e-6)


def has_kernel(hidden: Tensor) -> bool:
    """Whether torch has a fused RMSNorm for such a tensor; in float64 transformers' computes in float32."""
    return hidden.is_cuda and hidden.dtype != torch.float64


def _normalize(module: Any, plain: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    weight: Tensor = module.weight
    if not has_kernel(hidden) or hidden.dtype != weight.dtype:
        return plain(hidden)
    return functional.rms_norm(hidden, weight.shape, weight, module.variance_epsilon)
