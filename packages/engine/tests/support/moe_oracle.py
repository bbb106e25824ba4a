"""A mixture of experts as a plain Hugging Face model that sees one row at a time, its auxiliary loss written out."""

import random

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from rl_engine.testing import ragged_batch

LAYERS, EXPERTS, TOP_K, COEF = 2, 4, 2, 0.3
SIZES = {
    "vocab_size": 79, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 128, "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "moe_intermediate_size": 16, "decoder_sparse_step": 1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip


def write_model(folder, *, is_normalised=True):
    torch.manual_seed(3)
    config = AutoConfig.for_model("qwen3_moe", **SIZES, norm_topk_prob=is_normalised)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def draw_rows(seed=11, count=7):
    """(prompt, completion, routed): routed is, for each token but the last, K different experts in each layer."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        prompt, completion = ([draw.randrange(70) for _ in range(draw.randint(1, 9))] for _ in "pc")
        inputs = len(prompt) + len(completion) - 1
        rows.append(
            (prompt, completion, [[draw.sample(range(EXPERTS), TOP_K) for _ in range(LAYERS)] for _ in range(inputs)])
        )
    return rows


def batch_of(rows, *, is_routed):
    batch = ragged_batch([row[0] for row in rows], [row[1] for row in rows])
    if is_routed:
        batch["routed_experts"] = torch.nested.nested_tensor(
            [torch.tensor(row[2]) for row in rows], layout=torch.jagged
        )
    return batch


def reference(folder, rows, *, is_routed, coef):
    """Mean negative log-likelihood, auxiliary loss, log-probs, and gradients by their names in the folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model.set_experts_implementation("eager")
    gates = [layer.mlp.gate for layer in model.model.layers]
    probabilities, counts, wanted = [[] for _ in gates], torch.zeros(LAYERS, EXPERTS, dtype=torch.float64), []

    def watch(layer):
        def hook(module, inputs, output):
            logits, weights, chosen = output
            soft = logits.softmax(-1)
            if is_routed:
                chosen = wanted[-1][:, layer]
                weights = soft.gather(1, chosen)
                weights = weights / weights.sum(-1, keepdim=True) if model.config.norm_topk_prob else weights
            probabilities[layer].append(soft)
            for expert in chosen.flatten().tolist():
                counts[layer, expert] += 1
            return logits, weights, chosen

        return hook

    for layer, gate in enumerate(gates):
        gate.register_forward_hook(watch(layer))
    total, tokens, logprobs = 0.0, 0, []
    for prompt, completion, routed in rows:
        wanted.append(torch.tensor(routed))
        logits = model(torch.tensor([prompt + completion[:-1]])).logits[0, len(prompt) - 1 :]
        scored = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        logprobs.append(scored.detach())
        total, tokens = total - scored.sum(), tokens + len(completion)
    aux = 0.0
    for layer in range(LAYERS):
        mean = torch.cat(probabilities[layer]).mean(0)
        aux = aux + EXPERTS * (counts[layer] / counts[layer].sum() * mean).sum()
    (total / tokens + coef * aux).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients |= revert_weight_conversion(model, {name: parameter.grad})
    return {
        "loss": float(total.detach() / tokens),
        "aux": float(aux.detach()),
        "norm": float(torch.nn.utils.get_total_norm(list(gradients.values()))),
        "logprobs": logprobs,
        "gradients": gradients,
    }
