"""One rank of the tests of expert parallelism on fsdp: `expert_ranks.py FOLDER`, with torchrun's environment."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

from rl_engine import OptimizerConfig, ParallelConfig, Precision
from rl_engine.distributed.expert_parallel import expert_modules
from rl_engine.losses import sft_loss

_spec = spec_from_file_location("engine_ranks", Path(__file__).with_name("engine_ranks.py"))
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)
oracle = ranks.moe_oracle
LAYOUTS = {
    2: {"ep1": ParallelConfig(), "ep2": ParallelConfig(ep=2), "ep2 sp2": ParallelConfig(ep=2, sp=2)},
    4: {
        "ep1": ParallelConfig(),
        "ep2": ParallelConfig(ep=2),
        "ep4": ParallelConfig(ep=4),
        "ep2 hybrid": ParallelConfig(ep=2, dp_replicate=2),
        "ep2 sp2": ParallelConfig(ep=2, sp=2),
    },
}
STEP = OptimizerConfig(lr=1e-2, eps=1e-3, max_grad_norm=0.05)


def gathered(engine, data):
    """Most bytes of one layer's experts that are on this rank while the layer computes."""
    seen = []

    def note(module, _):  # after FSDP's own hook, which gathers
        parts = [getattr(weight, "_local_tensor", weight) for weight in module.parameters(recurse=False)]
        seen.append(sum(part.numel() * part.element_size() for part in parts))

    hooks = [module.register_forward_pre_hook(note) for module in expert_modules(engine.parts.built.scorer)]
    engine.forward_backward_batch(data, None)
    for hook in hooks:
        hook.remove()
    return max(seen)


def folder_gradients(engine):
    """Whole gradients under the names of the folder."""
    found = {}
    for name, grad in ranks.gradients(engine).items():
        found |= engine.parts.built.scorer.to_folder({name: grad})
    return found


def steps_of(folder, rank, size, layout, precision):
    """Losses, norms, gradients and weights of a mixture, with its own choice of experts and a server's."""
    seen = {}
    for is_routed in (False, True):
        engine = ranks.build(
            folder, optimizer=STEP, parallel=layout, precision=precision, max_tokens_per_gpu=20,
            router_aux_loss_coef=oracle.COEF, activation_checkpointing=is_routed,
            recompute=() if is_routed else ("moe",),
        )  # fmt: skip
        mine = oracle.batch_of(oracle.draw_rows()[rank::size], is_routed=is_routed)
        engine.optimizer_zero_grad()
        metrics = engine.forward_backward_batch(mine, sft_loss).metrics
        gradients = folder_gradients(engine)
        norm = engine.optimizer_step()
        numbers = (metrics["loss"], metrics["router_aux_loss"], norm)
        seen[is_routed] = {"numbers": numbers, "gradients": gradients, "weights": ranks.weights(engine)}
        engine.close()
    return seen


def lopsided():
    """Rows of which a server sent every token to the first two experts, those of rank 0."""
    return [
        (prompt, completion, [[[0, 1]] * oracle.LAYERS for _ in routed])
        for prompt, completion, routed in oracle.draw_rows()
    ]


def main(folder):
    torch.set_num_threads(1)
    first = ranks.build(folder / "moe")  # makes the process group; the others join it
    world = first.parts.built.world
    rank, size = world.rank, world.size
    seen = {}
    for name, layout in LAYOUTS[size].items():
        seen[name] = {
            str(precision): steps_of(folder / "moe", rank, size, layout, precision)
            for precision in (Precision.FLOAT64, Precision.FLOAT32)
        }
    everything = oracle.batch_of(oracle.draw_rows()[rank::size], is_routed=False)
    seen["gathered"] = {}
    for name, layout in LAYOUTS[size].items():
        engine = ranks.build(folder / "moe", parallel=layout)
        seen["gathered"][name] = world.exchange(gathered(engine, everything))
        engine.close()

    layout = LAYOUTS[size]["ep2"]
    engine = ranks.build(folder / "moe", optimizer=STEP, parallel=layout)
    seen["share"] = ranks.shards_are_the_weights(engine, world)
    ranks.one_step(engine, everything)
    engine.save_checkpoint(folder / "by ep2", 3)
    engine.save_model(folder / "model by ep2")
    seen["straight"] = (*ranks.one_step(engine, everything), ranks.weights(engine))
    assert engine.load_checkpoint(folder / "by ep2") == 3
    seen["again"] = (*ranks.one_step(engine, everything), ranks.weights(engine))
    engine.load_checkpoint(folder / "by one")
    seen["from one"] = (*ranks.one_step(engine, everything), ranks.weights(engine))
    engine.close()
    one_sided = oracle.batch_of(oracle.draw_rows()[: 1 if rank == 0 else 0], is_routed=False)
    engine = ranks.build(folder / "moe", parallel=layout)
    seen["lopsided"] = ranks.one_step(engine, oracle.batch_of(lopsided()[rank::size], is_routed=True))
    engine.close()
    for kind in ("gpt_oss", "deepseek_v3"):
        for name, ep in (("ep1", 1), ("ep2", 2)):
            engine = ranks.build(folder / kind, optimizer=STEP, parallel=ParallelConfig(ep=ep))
            # then rank 0 alone has a row
            steps = [ranks.one_step(engine, data) for data in (everything, one_sided)]
            seen[f"{kind} {name}"] = (steps, ranks.weights(engine))
            engine.close()
    drawn = ranks.build(folder / "moe", init="random", parallel=layout)
    seen["drawn"] = ranks.weights(drawn)
    drawn.close()
    narrow = ranks.build(folder / "moe", precision=Precision.BFLOAT16, parallel=layout)
    seen["bfloat16"] = ranks.one_step(narrow, everything)
    narrow.close()
    first.close()
    if rank == 0:
        torch.save(seen, folder / "seen.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
