"""A trainer of one's own, of the parts alone: python examples/custom_trainer.py MODEL_FOLDER [STEPS].

GRPO in one process. The reward is the share of tokens that are the digit 7: put yours in its place.
"""

import asyncio
import sys

import torch
from tensordict import TensorDict

import rl_agent
import rl_ckpt
import rl_csrc
import rl_engine
import rl_rollout
from rl_rollout import GenerateRequest, SamplingParams, ServerConfig

PROMPTS, GROUP, NEW_TOKENS = ["1 + 1 =", "12 + 34 =", "7 + 7 ="], 8, 8


def policy_loss(output, rows):
    behaviour, advantages, mask = (rows[name].values() for name in ("rollout_logprobs", "advantages", "loss_mask"))
    tokens = output.counts.tokens  # of the whole batch: micro-batches add up
    result = rl_csrc.policy_loss(output.logprobs, behaviour, advantages, mask, output.cu_seqlens, num_tokens=tokens)
    return result.loss, {}


def request(step, index, prompt):
    params = SamplingParams(max_new_tokens=NEW_TOKENS, seed=1000 * step + index)
    return GenerateRequest(request_id=f"{step}/{index}", prompt_token_ids=tuple(prompt), sampling_params=params)


def jagged(rows, dtype=torch.int64):
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.tensor([x for row in rows for x in row], dtype=dtype), offsets)


async def train(model_path: str, num_steps: int) -> list[float]:
    tokenizer = rl_agent.load_tokenizer(model_path)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS for _ in range(GROUP)]
    groups = torch.arange(len(PROMPTS)).repeat_interleave(GROUP)
    seven = set(tokenizer("7")["input_ids"])
    config = rl_engine.EngineConfig(model_path=model_path, optimizer=rl_engine.OptimizerConfig(lr=1e-2))
    worker = rl_engine.TrainingWorker(config)
    server = rl_rollout.create_server("embedded", ServerConfig(model_path=model_path))
    await server.start()
    sender = rl_ckpt.connect("inproc://weights", role="send")
    receiver = rl_ckpt.connect("inproc://weights", role="receive")
    means = []
    for step in range(num_steps):
        outputs = await asyncio.gather(*(server.generate(request(step, i, ids)) for i, ids in enumerate(prompts)))
        assert all(set(o.weight_versions) == {step} for o in outputs), "a token of other weights"
        rewards = torch.tensor([sum(t in seven for t in o.token_ids) / len(o.token_ids) for o in outputs])
        advantages = rl_csrc.group_norm(rewards, groups)
        completions = [o.token_ids for o in outputs]
        columns = {
            "prompt_token_ids": jagged(prompts),
            "completion_token_ids": jagged(completions),
            "loss_mask": jagged([[1] * len(c) for c in completions]),
            "rollout_logprobs": jagged([o.logprobs for o in outputs], torch.float32),
            "advantages": jagged([[float(a)] * len(c) for a, c in zip(advantages, completions)], torch.float32),
        }
        worker.forward_backward(TensorDict(columns, batch_size=[len(prompts)]), policy_loss)
        worker.optim_step()
        sending = sender.send_weights(worker.engine.get_per_tensor_param()[0], version=step + 1, num_peers=1)
        await asyncio.gather(sending, server.update_weights(receiver, step + 1))
        means.append(rewards.mean().item())
        print(f"step {step}: mean reward {means[-1]:.3f}")
    await asyncio.gather(server.stop(), sender.close(), receiver.close())
    worker.close()
    return means


if __name__ == "__main__":
    asyncio.run(train(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20))
