"""One rank of the multi-process tests: `engine_ranks.py FOLDER`, with torchrun's environment."""

import random
import sys
import threading
import weakref
from dataclasses import asdict, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from rl_engine import (
    BatchError,
    CheckpointError,
    ConfigError,
    EngineConfig,
    LoraConfig,
    ModelFolderError,
    NonFiniteError,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    ShardSpec,
    create_engine,
)
from rl_engine.layers.packed_attention import LAYOUT_KWARG, SequenceGroup, packed_attention, row_layout
from rl_engine.losses import sft_loss
from rl_engine.testing import ragged_batch


def neighbour(name):
    """Another file of this folder, as a module."""
    spec = spec_from_file_location(name, next(Path(__file__).parents[1].rglob(f"{name}.py")))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


moe_oracle, images = neighbour("moe_oracle"), neighbour("test_engine_multimodal")
SEEDS = 3
EXTRAS = {"entropy": True, "sum_pi_squared": True}


def draw_rows(seed):
    """Rows of one logical batch: (prompt, completion, mask). Every other one has the prompt of the row before it."""
    draw = random.Random(seed)

    def tokens(size):
        return [draw.randrange(78) for _ in range(size)]

    rows = []
    for row in range(draw.randint(2, 9)):
        completion = tokens(draw.randint(1, 15))
        prompt = rows[-1][0] if row % 2 else tokens(draw.randint(1, 20))
        rows.append((prompt, completion, [draw.randint(0, 1) for _ in completion]))
    rows[0][2][0] = 1
    return rows


def batch_of(rows):
    return ragged_batch(*map(list, zip(*rows, strict=True))) if rows else ragged_batch([], [])


def build(folder, **changes):
    options = {"precision": Precision.FLOAT64, "optimizer": OptimizerConfig(lr=1e-2, eps=1e-3, total_steps=10)}
    engine = create_engine("fsdp", EngineConfig(model_path=str(folder), timeout_s=60.0, **(options | changes)))
    engine.initialize()
    return engine


def full(grad):
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def gradients(engine):
    named = engine.parts.built.scorer.model.named_parameters()
    return {name: full(parameter.grad).clone() for name, parameter in named if parameter.grad is not None}


def one_step(engine, data):
    engine.optimizer_zero_grad()
    loss = engine.forward_backward_batch(data, sft_loss).metrics["loss"]
    norm = engine.optimizer_step()
    engine.lr_scheduler_step()
    return loss, norm


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}


def long_row(folder, layout):
    """What is said of a row of thirty tokens where a rank has room for twenty."""
    engine = build(folder, max_tokens_per_gpu=20, parallel=layout)
    row = ragged_batch([[1] * 10], [[2] * 20])
    said = refusal_of(lambda: engine.forward_backward_batch(row, None))
    engine.close()
    return said


def by_layout(folder, rank, size, layout):
    """Losses, gradients and log-probs of every seed, rows dealt to ranks at random."""
    seen = {"gradients": [], "losses": [], "logprobs": [], "micro-batches": []}
    for seed in range(SEEDS):
        draw = random.Random(100 + seed)
        engine = build(folder, max_tokens_per_gpu=draw.choice([36, 50, 90, 4096]), parallel=layout)
        owner = [draw.randrange(size) if seed else 0 for _ in draw_rows(seed)]  # seed 0: rank 0 has every row
        mine = [row for row, at in zip(draw_rows(seed), owner, strict=True) if at == rank]
        output = engine.forward_backward_batch(batch_of(mine), sft_loss)
        assert output.columns.batch_size[0] == len(mine)
        seen["gradients"].append(gradients(engine))
        seen["losses"].append(output.metrics["loss"])
        seen["micro-batches"].append(engine.parts.built.world.exchange(output.num_micro_batches))
        own = [row.tolist() for row in output.columns["logprobs"].unbind()] if mine else []
        theirs = [iter(rows) for rows in engine.parts.built.world.exchange(own)]
        seen["logprobs"].append([next(theirs[at]) for at in owner])
        engine.close()
    return seen


def shared_attention(rank, size):
    """Attention with its tokens cut over ranks, and the same with all of them here: outputs and gradients."""
    lengths, heads = [9, 4, 7, 2], 2 * size
    sequence_group = SequenceGroup(group=torch.distributed.group.WORLD, rank=rank, size=size)
    draw = torch.Generator().manual_seed(0)
    options = {"sliding_window": 5, "s_aux": torch.randn(heads, generator=draw, dtype=torch.float64)}
    rows = row_layout([*lengths, -sum(lengths) % size] if sum(lengths) % size else lengths, torch.device("cpu"))
    total = rows.cu_seqlens[-1].item()
    whole = [torch.randn(1, n, total, 4, generator=draw, dtype=torch.float64) for n in (heads, size, size)]
    weight = torch.randn(1, total, heads, 4, generator=draw, dtype=torch.float64)
    share = slice(rank * total // size, (rank + 1) * total // size)
    found = []
    for part, layout in ((slice(None), rows), (share, replace(rows, sequence_group=sequence_group))):
        inputs = [tensor[:, :, part].clone().requires_grad_() for tensor in whole]
        out, _ = packed_attention(None, *inputs, None, **{LAYOUT_KWARG: layout}, **options)
        grads = torch.autograd.grad((out * weight[:, part]).sum(), inputs)
        here = slice(None) if part is share else share
        found.append([out[:, here], *(grad[:, :, here] for grad in grads)])
    return found


def experts_step(engine, rank, size):
    """Loss, auxiliary loss and norm of a mixture of experts, its own choice of them and a server's."""
    seen = []
    for is_routed in (False, True):
        engine.optimizer_zero_grad()
        mine = moe_oracle.batch_of(moe_oracle.draw_rows()[rank::size], is_routed=is_routed)
        metrics = engine.forward_backward_batch(mine, sft_loss).metrics
        seen.append((metrics["loss"], metrics["router_aux_loss"], engine.optimizer_step()))
    return seen


def own_bytes():
    """Of this process's own memory; what it maps of files comes and goes with what else the machine does."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def loading_memory(folder, world):
    """Bytes that each rank's memory grew by at most while a model of 25 M parameters was built and sharded."""
    before, seen, is_done = own_bytes(), [0], threading.Event()

    def watch():
        while not is_done.wait(0.002):
            seen.append(own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        wide = build(folder, optimizer=None, precision=Precision.FLOAT32, init="random")
    finally:
        is_done.set()
        watcher.join()
    grown = world.exchange(max(seen) - before)
    streamed = most_alive(wide)
    whole = sum(tensor.numel() * 4 for _, tensor in wide.get_per_tensor_param()[0])
    wide.close()
    return grown, whole, streamed


def most_alive(engine):
    """Elements of the streamed tensors that are alive at once, where each is let go before the next is asked for.

    Also those of the largest tensor.
    """
    given, most, largest = [], 0, 0
    stream = iter(engine.get_per_tensor_param()[0])
    for _, tensor in stream:
        largest = max(largest, tensor.numel())
        given.append(weakref.ref(tensor))
        del tensor
        alive = [found for ref in given if (found := ref()) is not None]
        most = max(most, sum(found.numel() for found in alive))
        del alive
    return most, largest


def background_checkpoint(model, folder, mine):
    """The step after a background save, and the same step from what it wrote; then a save that fails."""
    engine = build(model, async_checkpoints=True)
    one_step(engine, mine)
    engine.save_checkpoint(folder / "in_background", 4)
    straight = (*one_step(engine, mine), weights(engine))
    assert engine.load_checkpoint(folder / "in_background") == 4
    again = (*one_step(engine, mine), weights(engine))
    (folder / "a file").write_text("")
    engine.save_checkpoint(folder / "a file" / "checkpoint", 5)
    try:
        engine.save_checkpoint(folder / "in_background", 6)
        failure = None
    except CheckpointError as error:
        failure = str(error)
    engine.save_checkpoint(folder / "in_background", 6)
    engine.close()
    return straight, again, failure


def assembled(engine, world):
    """The weights put together from every rank's shards; what no shard covers is NaN."""
    mine = [(spec, tensor.clone()) for spec, tensor in engine.get_local_shards()]
    found = {}
    plain = [(asdict(spec), tensor) for spec, tensor in mine]
    for fields, tensor in (shard for shards in world.exchange(plain) for shard in shards):
        spec = ShardSpec(**fields)
        full = found.setdefault(spec.name, torch.full(spec.shape, torch.nan, dtype=tensor.dtype))
        assert tuple(tensor.shape) == spec.sizes
        full[tuple(slice(at, at + size) for at, size in zip(spec.offsets, spec.sizes, strict=True))] = tensor
    return found, sum(tensor.numel() for _, tensor in mine)


def shards_are_the_weights(engine, world):
    """Whether they are, and the share of them that is here."""
    found, here = assembled(engine, world)
    whole = weights(engine)
    torch.testing.assert_close(found, whole, rtol=0, atol=0)
    return here / sum(tensor.numel() for tensor in whole.values())


def refusal_of(call):
    try:
        call()
    except (BatchError, ConfigError, ModelFolderError) as error:
        return str(error)
    return None


def nan_on_rank_1(engine, mine, rank):
    """What every rank says of a NaN that one of them computes, and whether the weights stayed."""

    def loss(output, rows):
        share, metrics = sft_loss(output, rows)
        return share * (float("nan") if rank == 1 else 1.0), metrics

    before = weights(engine)
    engine.optimizer_zero_grad()
    engine.forward_backward_batch(mine, loss)
    try:
        engine.optimizer_step()
        said = None
    except NonFiniteError as error:
        said = str(error)
    after = weights(engine)
    unchanged = all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    return engine.parts.built.world.exchange((said, unchanged))


def main(folder):
    torch.set_num_threads(1)
    model = folder / "model"
    first = build(model, max_tokens_per_gpu=4096)  # makes the process group; the others join it
    rank, size = first.parts.built.world.rank, first.parts.built.world.size
    memory = loading_memory(folder / "wide", first.parts.built.world)
    layouts = {"dp": ParallelConfig(), "sp2": ParallelConfig(sp=2)}
    if size > 2:
        layouts |= {"hybrid": ParallelConfig(dp_replicate=2), "sp2 hybrid": ParallelConfig(sp=2, dp_replicate=2)}
    else:
        layouts |= {"replicas": ParallelConfig(dp_replicate=2)}
    seen = {name: by_layout(model, rank, size, layout) for name, layout in layouts.items()}
    seen["long row"] = {name: long_row(model, layout) for name, layout in layouts.items()}
    seen["memory"] = memory
    seen["attention"] = shared_attention(rank, size)
    for name, layout in (("heads", {"sp": size}), ("ranks", {"dp_replicate": 3})):
        folder_ = folder / "odd heads" if name == "heads" else model
        seen[f"refused {name}"] = refusal_of(lambda at=folder_, to=layout: build(at, parallel=ParallelConfig(**to)))

    still = OptimizerConfig(lr=0.0, weight_decay=0.0)
    for name, layout in layouts.items():
        options = {"parallel": layout, "max_tokens_per_gpu": 20, "router_aux_loss_coef": moe_oracle.COEF}
        engine = build(folder / "moe", optimizer=still, **options)
        seen[f"{name} experts"] = experts_step(engine, rank, size)
        seen[f"{name} share"] = shards_are_the_weights(engine, first.parts.built.world)
        engine.close()

    seeing = build(folder / "sees", max_tokens_per_gpu=24)
    numbers = images.patch_numbers(folder / "sees")
    rows = images.rows_of(numbers)
    seen["images"] = one_step(seeing, images.batch_of(rows[rank::size]))
    seeing.close()
    seeing = build(folder / "sees", max_tokens_per_gpu=40)
    rows = images.with_videos(rows, numbers, "qwen3_vl")
    seen["videos"] = one_step(seeing, images.batch_of_videos(rows[rank::size]))
    seeing.close()

    rows = draw_rows(7)
    mine = batch_of(rows[rank::size])
    seen["nan"] = nan_on_rank_1(first, mine, rank)
    seen["first"] = one_step(first, mine)
    first.save_checkpoint(folder / "written_by_many", 3)
    first.save_model(folder / "model_by_many")
    seen["straight"] = (*one_step(first, mine), weights(first))
    resumed = build(model)
    assert resumed.load_checkpoint(folder / "written_by_one") == 5
    seen["from_one"] = (*one_step(resumed, mine), weights(resumed))
    resumed.forward_backward_batch(mine, None)  # which leaves weights gathered, if nobody minds
    assert resumed.load_checkpoint(folder / "written_by_many") == 3
    seen["again"] = (*one_step(resumed, mine), weights(resumed))
    resumed.close()
    seen["background"] = background_checkpoint(model, folder, mine)
    nowhere = refusal_of(lambda: build(folder / "nowhere"))
    seen["refused folder"] = first.parts.built.world.exchange(nowhere)

    bad = ragged_batch([[1]], [[999 if rank == 1 else 2]])
    seen["refusal"] = refusal_of(lambda: first.forward_backward_batch(bad, sft_loss))
    odd = ragged_batch([[row] for row in range(1 + 8 * rank)], [[2]] * (1 + 8 * rank))
    odd["advantages" if rank else "rewards"] = torch.zeros(1 + 8 * rank)
    seen["odd columns"] = refusal_of(lambda: first.forward_backward_batch(odd, sft_loss))

    narrow = build(model, precision=Precision.BFLOAT16)
    seen["bfloat16"] = one_step(narrow, mine)
    seen["bfloat16_dtypes"] = {str(tensor.dtype) for tensor in weights(narrow).values()}
    narrow.close()
    adapted = build(model, lora=LoraConfig(rank=2))
    with adapted.eval_mode(), adapted.adapter_off():
        seen["without_adapter"] = adapted.forward_backward_batch(mine, sft_loss, forward_only=True).metrics["loss"]
    seen["adapted"] = [one_step(adapted, mine) for _ in range(3)]
    seen["merged"] = weights(adapted)
    adapted.close()
    frozen = build(model, optimizer=None, num_candidates=3, parallel=ParallelConfig(sp=2), **EXTRAS)
    with frozen.eval_mode():
        columns = frozen.forward_backward_batch(mine, None).columns
    seen["frozen"] = first.parts.built.world.exchange({name: column.values() for name, column in columns.items()})
    frozen.close()
    first.close()
    if rank == 0:
        torch.save(seen, folder / "seen.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
