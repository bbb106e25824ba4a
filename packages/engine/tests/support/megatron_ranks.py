"""One rank of the multi-process tests of the megatron backend: `megatron_ranks.py FOLDER LAYOUT... [alone | few]`."""

import random
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.core_model_loading import revert_weight_conversion

from rl_engine import (
    BatchError,
    ConfigError,
    EngineConfig,
    Head,
    LoraConfig,
    ModelFolderError,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    create_engine,
)
from rl_engine.backends.megatron import weights
from rl_engine.losses import sft_loss
from rl_engine.optimizer import learning_rate
from rl_engine.testing import ragged, ragged_batch

_spec = spec_from_file_location("engine_ranks", Path(__file__).with_name("engine_ranks.py"))
ranks = module_from_spec(_spec)
_spec.loader.exec_module(ranks)

__all__ = ["learning_rate"]
SEED, CANDIDATES = 5, 3
# The step is nearly proportional to the gradient, so that equal weights mean equal gradients.
OPTIMIZER = OptimizerConfig(lr=1.0, eps=1.0, weight_decay=0.01, max_grad_norm=1e9, total_steps=10)
LATENT_LAYERS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
LORA = {
    "tied": LoraConfig(rank=3, alpha=9.0),
    "v3": LoraConfig(rank=3, alpha=9.0, target_modules=LATENT_LAYERS),
}
PARTS = {
    "candidates": ["tied:tp2", "tied:sp2", "tied:pp2", "tied:cp2"],
    "adapters": [*(f"tied:{axis}" for axis in ("dp2", "tp2", "sp2", "pp2", "cp2")), "v3:sp2", "v3:pp2"],
    "critics": ["critic:tp2", "critic:sp2", "critic:pp2", "critic:cp2"],
    "experts": ["experts:dp2", "experts:sp2", "experts:pp2", "experts:ep2", "experts:cp2"],
    "dist_checkpoints": ["tied:sp2:pp2", "tied:pp2:dp2", "bias:tp2:pp2", "window:pp2:tp2", "moe:ep2:sp2",
                         "deep:vpp2:sp2", "glm:ep2:pp2", "v3:sp2:ep2", "v2:ep2:sp2", "oss:ep2:pp2"],
}  # fmt: skip
"""What two ranks do beside the plain model's steps, and in which layouts."""
FEW = {"candidates": ["tied:cp2"], "adapters": ["tied:sp2"], "critics": ["critic:pp2"], "experts": ["experts:ep2"],
       "dist_checkpoints": ["tied:sp2:pp2", "moe:ep2:sp2"]}  # fmt: skip
LAYOUTS = {
    "alone": ParallelConfig(),
    "dp2": ParallelConfig(),
    "tp2": ParallelConfig(tp=2),
    "sp2": ParallelConfig(tp=2, sequence_parallel=True),
    "pp2": ParallelConfig(pp=2),
    "ep2": ParallelConfig(ep=2),
    "vpp2": ParallelConfig(pp=2, vpp=2),
    "cp2": ParallelConfig(cp=2),
    "tp2pp2": ParallelConfig(tp=2, sequence_parallel=True, pp=2),
    "tp2dp2": ParallelConfig(tp=2),
    "pp2dp2": ParallelConfig(pp=2),
    "pp2ep2": ParallelConfig(pp=2, ep=2),
    "tp2ep2": ParallelConfig(tp=2, sequence_parallel=True, ep=2),
    "tp4": ParallelConfig(tp=4),
    "tp2cp2": ParallelConfig(tp=2, sequence_parallel=True, cp=2),
    "pp2cp2": ParallelConfig(pp=2, cp=2),
    "vpp2dp2": ParallelConfig(pp=2, vpp=2),
    "vpp2ep2": ParallelConfig(pp=2, vpp=2, ep=2),
    "cp2ep2": ParallelConfig(cp=2, ep=2),
}
SIZES = {
    "vocab_size": 79, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "head_dim": 4}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 32}  # fmt: skip
YARN32 = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
          "truncate": False, "original_max_position_embeddings": 4096}  # fmt: skip
MODELS = {
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "bias": ("qwen2", {"num_key_value_heads": 2}),
    "window": ("mistral", {"sliding_window": 6, "num_key_value_heads": 2, "head_dim": 16}),
    "odd": ("qwen3", {"num_hidden_layers": 3}),
    "deep": ("qwen3", {"tie_word_embeddings": True, "num_hidden_layers": 4}),
    "deep moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                               "decoder_sparse_step": 1, "norm_topk_prob": True, "num_hidden_layers": 4}),
    "glm": ("glm4_moe", {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True,
                         "use_qk_norm": True, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2,
                         "moe_intermediate_size": 16, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}),
    "oss": ("gpt_oss", {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
                        "sliding_window": 6, "intermediate_size": 24, "swiglu_limit": 0.3, "rope_parameters": YARN32}),
    "v2": ("deepseek_v2", {"num_hidden_layers": 2, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
                           "topk_group": 2, "topk_method": "group_limited_greedy", "n_shared_experts": 1,
                           "moe_intermediate_size": 16, "first_k_dense_replace": 1, "routed_scaling_factor": 2.0,
                           "q_lora_rank": None, **LATENT}),
    "v3": ("deepseek_v3", {"num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
                           "topk_group": 1, "n_shared_experts": 2, "moe_intermediate_size": 16,
                           "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "q_lora_rank": 24,
                           "num_mtp_layers": 0, "rope_parameters": YARN, **LATENT}),
    "moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                          "decoder_sparse_step": 1, "norm_topk_prob": True}),
}  # fmt: skip


def write_model(folder, kind):
    torch.manual_seed(3)
    name, changes = MODELS[kind]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(SIZES | changes)), dtype=torch.float32)
    for router in (buffer for named, buffer in model.named_buffers() if "e_score_correction_bias" in named):
        router.copy_(torch.randn_like(router))  # which changes the choice of experts
    for named, part in model.named_parameters():
        if "bias" in named or "sinks" in named:
            part.data.normal_(std=0.1)
    model.save_pretrained(folder / kind)


def write_critic(folder):
    torch.manual_seed(4)
    config = AutoConfig.for_model("qwen3", **SIZES, num_labels=1)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder / "critic")


def build(folder, kind, layout, **changes):
    options = {"precision": Precision.FLOAT64, "optimizer": OPTIMIZER, "max_tokens_per_gpu": 50, "timeout_s": 180.0}
    options["parallel"] = LAYOUTS[layout]
    backend = changes.pop("backend", "megatron")
    engine = create_engine(backend, EngineConfig(model_path=str(folder / kind), **(options | changes)))
    engine.initialize()
    return engine


def one_step(engine, data):
    engine.optimizer_zero_grad()
    output = engine.forward_backward_batch(data, sft_loss)
    norm = engine.optimizer_step()
    engine.lr_scheduler_step()
    return output.metrics["loss"], norm


def owners(size):
    """Which rank has each row of the logical batch: at random, so that one may have many more than another."""
    draw = random.Random(SEED)
    return [draw.randrange(size) for _ in ranks.draw_rows(SEED)]


def initial(folder, factory=AutoModelForCausalLM):
    """The weights of a folder."""
    return weights_of(factory.from_pretrained(folder, dtype=torch.float64))


def weights_of(model):
    """Float64 parameters and saved buffers of a plain model under the names of its folder."""
    saved = set(model.state_dict())
    named = dict(model.named_parameters()) | {name: part for name, part in model.named_buffers() if name in saved}
    return {name: part.detach().double() for name, part in revert_weight_conversion(model, named).items()}


def run(folder, kind, layout, before):
    engine = build(folder, kind, layout, entropy=True, sum_pi_squared=True, num_candidates=CANDIDATES)
    world = engine.parts.built.world
    mine = [row for row, rank in zip(ranks.draw_rows(SEED), owners(world.size), strict=True) if rank == world.rank]
    inputs = []
    layer = engine.parts.built.scorer.model[0].decoder.layers[0]
    watch = layer.register_forward_pre_hook(lambda _, given: inputs.append(len(given[0])))
    with engine.eval_mode():
        output = engine.forward_backward_batch(ranks.batch_of(mine), None)
    watch.remove()
    layers = sorted({int(spec.name.split(".")[2]) for spec, _ in engine.get_local_shards() if ".layers." in spec.name})
    columns, told = output.columns, {"fed": sum(inputs), "micro-batches": output.num_micro_batches, "layers": layers}
    seen = {name: [] for name in ("logprobs", "entropy", "sum_pi_squared", "candidate_token_ids", "candidate_logprobs")}
    for name, found in seen.items():
        assert columns.batch_size[0] == len(mine)
        rows = [row.tolist() for row in columns[name].unbind()] if mine else []
        assert [len(row) for row in rows] == [len(completion) for _, completion, _ in mine]
        found.extend(world.exchange(rows))
    everything = ranks.draw_rows(SEED) if world.rank == 0 else []
    lopsided = engine.forward_backward_batch(ranks.batch_of(everything), sft_loss, forward_only=True)
    assert lopsided.columns.batch_size[0] == len(everything)
    seen |= told
    seen["lopsided"] = lopsided.metrics["loss"]
    seen["step"] = one_step(engine, ranks.batch_of(mine))
    seen["weights"] = ranks.weights(engine)
    engine.save_checkpoint(folder / f"{kind}-{layout}", 3)
    seen["second"] = one_step(engine, ranks.batch_of(mine))
    seen["second_weights"] = ranks.weights(engine)
    if before:
        assert engine.load_checkpoint(folder / f"{kind}-{before}") == 3
        seen["resumed"] = one_step(engine, ranks.batch_of(mine))
        seen["resumed_weights"] = ranks.weights(engine)
    engine.save_model(folder / f"{kind}-{layout}-model")
    engine.close()
    return seen


def value_loss(output, rows):
    error = output.values - 0.5
    return (error * error * rows["loss_mask"].values()).sum() / output.counts.tokens, {}


def critic_step(engine, rows):
    engine.optimizer_zero_grad()
    output = engine.forward_backward_batch(ranks.batch_of(rows), value_loss)
    return output.metrics["loss"], engine.optimizer_step(), ranks.weights(engine)


def candidate_loss(output, rows):
    """Of the tokens named for every completion token, each weighed by its place."""
    weight = torch.arange(1.0, 4.0, dtype=torch.float64)
    return (output.candidate_logprobs * weight).sum() / output.counts.tokens, {}


def candidates_step(engine, rows):
    """A step on three named tokens for every completion token."""
    batch = ranks.batch_of(rows)
    named = [[[(7 * token + place) % 78 for place in range(3)] for token in completion] for _, completion, _ in rows]
    batch["candidate_token_ids"] = ragged([torch.tensor(row) for row in named])
    engine.optimizer_zero_grad()
    output = engine.forward_backward_batch(batch, candidate_loss)
    return output.metrics["loss"], engine.optimizer_step(), ranks.weights(engine)


def candidates(folder, rank, size, cases):
    """One step in each layout."""
    mine, seen = ranks.draw_rows(SEED)[rank::size], {}
    for case in cases:
        engine = build(folder, *case.split(":"))
        seen[case] = candidates_step(engine, mine)
        engine.close()
    return seen


def adapter_step(engine, rows, folder):
    """A step from the checkpoint of another engine."""
    engine.load_checkpoint(folder)
    return (*one_step(engine, ranks.batch_of(rows)), ranks.weights(engine))


def adapters(folder, rank, size, cases):
    """One step of an adapter in each layout, from where fsdp has taken it (a mixture: this backend)."""
    mine, seen = ranks.draw_rows(SEED)[rank::size], {}
    for kind in dict.fromkeys(case.split(":")[0] for case in cases):
        start = build(folder, kind, "dp2", lora=LORA[kind], backend="fsdp" if kind == "tied" else "megatron")
        one_step(start, ranks.batch_of(mine))
        start.save_checkpoint(folder / f"{kind} adapter", 1)
        start.close()
        for case in (case for case in cases if case.startswith(kind)):
            engine = build(folder, *case.split(":"), lora=LORA[kind])
            seen[case] = adapter_step(engine, mine, folder / f"{kind} adapter")
            engine.close()
    return seen


def critics(folder, rank, size, cases):
    """One step of a critic in each layout."""
    mine, seen = ranks.draw_rows(SEED)[rank::size], {}
    for case in cases:
        engine = build(folder, *case.split(":"), head=Head.VALUE)
        seen[case] = critic_step(engine, mine)
        engine.close()
    return seen


def experts(folder, rank, size, cases):
    """One step of a mixture of experts in each layout, with its auxiliary loss, and with experts replayed."""
    oracle, seen = ranks.moe_oracle, {}
    still = replace(OPTIMIZER, lr=0.0, weight_decay=0.0)
    for case in cases:
        options = {"optimizer": still, "max_tokens_per_gpu": 20, "activation_checkpointing": case == "experts:pp2"}
        engine = build(folder, *case.split(":"), router_aux_loss_coef=oracle.COEF, **options)
        seen[case] = ranks.experts_step(engine, rank, size)
        seen[f"{case} exported"] = exported(engine)
        seen[f"{case} share"] = ranks.shards_are_the_weights(engine, engine.parts.built.world)
        engine.close()
    return seen


def dist_checkpoints(folder, rank, size, cases):
    """Weights of a folder in Megatron-LM's format that another layout wrote; the model's own folder has none."""
    seen = {}
    for case in cases:
        kind, writer, reader = case.split(":")
        engine = build(folder, kind, writer)
        engine.save_dist_checkpoint(folder / f"{case} weights")
        engine.close()
        if rank == 0:
            AutoConfig.from_pretrained(folder / kind).save_pretrained(folder / f"{case} bare")
        dist.barrier()
        engine = build(folder, f"{case} bare", reader, dist_checkpoint=str(folder / f"{case} weights"))
        seen[case] = ranks.weights(engine)
        engine.close()
    try:
        build(folder, "odd", "pp2", dist_checkpoint=str(folder / "tied:sp2:pp2 weights"))
    except ModelFolderError as error:  # of the last stage, which lacks a layer and the head
        seen["refusal"] = str(error)
    return seen


def exported(engine):
    """By bytes that may be gathered at once, the collectives of an export and the most bytes that a tensor holds."""
    found, calls = {}, []
    kept = {name: getattr(dist, name) for name in ("broadcast", "all_gather_into_tensor")}
    for limit in (1 << 28, 1 << 14, 1):
        weights.GATHERED_BYTES = limit
        for name, call in kept.items():
            setattr(dist, name, lambda *args, call=call, **more: (calls.append(1), call(*args, **more))[1])
        stream = engine.get_per_tensor_param()[0]
        most = max(tensor.untyped_storage().nbytes() for name, tensor in stream if ".experts." in name)
        for name, call in kept.items():
            setattr(dist, name, call)
        found[limit] = (len(calls), most)
        calls.clear()
    weights.GATHERED_BYTES = 1 << 28
    return found


def pairs_seen(engine):
    """The pair ids of one micro-batch, where every rank numbers its one pair 7."""
    batch = ragged_batch([[1], [2]], [[3], [4]])
    batch["pair_id"] = torch.tensor([7, 7])
    found = []

    def keep(output, rows):
        found.extend(rows["pair_id"].tolist())
        return output.logprobs.sum(), {}

    engine.forward_backward_batch(batch, keep, forward_only=True)
    return found


def main(folder, cases):
    torch.set_num_threads(1)
    holder = None
    seen = {}
    before = {}
    parts = {"alone": {}, "few": FEW}.get(cases[-1], PARTS)
    for case in cases if parts is PARTS else cases[:-1]:
        kind, layout = case.split(":")
        if holder is None:  # makes the process group; the others join it
            holder = create_engine("fsdp", EngineConfig(model_path=str(folder / kind), optimizer=None))
            holder.initialize()
        seen[case] = run(folder, kind, layout, before.get(kind))
        before[kind] = layout
    rank = holder.parts.built.world.rank
    first = build(folder, "tied", "tp2")
    try:
        build(folder, "tied", "alone")
    except ConfigError as error:
        seen["refusal"] = str(error)
    try:
        first.forward_backward_batch(ragged_batch([[1]], [[999 if rank == 1 else 2]]), sft_loss)
    except BatchError as error:
        seen["bad_batch"] = str(error)
    seen["pairs"] = pairs_seen(first)
    seen["streamed"] = ranks.most_alive(first)
    first.close()
    if holder.parts.built.world.size == 2:
        for name, layouts in parts.items():
            seen[name] = globals()[name](folder, rank, 2, layouts)
    holder.close()
    if rank == 0:
        torch.save(seen, folder / "seen.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
