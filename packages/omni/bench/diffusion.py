"""GRPO on a tiny flow-matching picture model: python packages/omni/bench/diffusion.py FOLDER [STEPS].

A model that was pretrained on flat pictures of any colour learns to paint the colour that its prompt names. Engine and
server meet through rl-ckpt (weights) and rl-tq (samples). Writes curve.json and grid.png into FOLDER.
"""

import asyncio
import json
import sys
from pathlib import Path
from time import monotonic

import torch
from PIL import Image

import rl_ckpt
import rl_csrc
import rl_tq
from rl_engine.registry import create_engine
from rl_engine.types import EngineConfig, LoraConfig, OptimizerConfig
from rl_omni import colour_reward, columns_of
from rl_omni.pipeline import load_pipeline
from rl_omni.testing import write_tiny_pipeline
from rl_rollout.registry import create_server
from rl_rollout.types import GenerateRequest, SamplingParams, ServerConfig

COLOURS = {(1,): (0.8, 0.2, 0.2), (2,): (0.2, 0.8, 0.2), (3,): (0.2, 0.2, 0.8)}
"""Colour by prompt; inside the range, so that clamping to it is no short cut."""
GROUP, EPOCHS, LR = 16, 2, 1e-3


def pretrain(folder, num_steps=400):
    """Flow matching on flat pictures of uniformly random colours, whatever the prompt."""
    torch.manual_seed(0)
    model = load_pipeline(folder)
    optimizer = torch.optim.AdamW(model.transformer.parameters(), lr=2e-3)
    prompts = [model.encode(prompt) for prompt in COLOURS]
    for _ in range(num_steps):
        data = (torch.rand(32, 3, 1, 1) * 2 - 1).expand(32, 3, 8, 8)
        noise, times = torch.randn(32, 3, 8, 8), torch.rand(32)
        mixed = data + times.view(-1, 1, 1, 1) * (noise - data)
        picked = [prompts[i] for i in torch.randint(3, (32,)).tolist()]
        loss = (model.velocity(mixed, times, picked) - (noise - data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.transformer.save_pretrained(Path(folder) / "transformer")


def policy_loss(output, rows):
    behaviour, advantages, mask = (rows[name].values() for name in ("rollout_logprobs", "advantages", "loss_mask"))
    result = rl_csrc.policy_loss(
        output.logprobs, behaviour, advantages, mask, output.cu_seqlens, num_tokens=output.counts.tokens
    )
    return result.loss, {}


async def pictures(server, step, group=GROUP):
    prompts = [prompt for prompt in COLOURS for _ in range(group)]
    requests = [
        GenerateRequest(
            request_id=f"{step}/{i}", prompt_token_ids=p, sampling_params=SamplingParams(seed=1000 * step + i)
        )
        for i, p in enumerate(prompts)
    ]
    outputs = await asyncio.gather(*(server.generate(request) for request in requests))
    rewards = [colour_reward(o.picture, COLOURS[p]) for o, p in zip(outputs, prompts, strict=True)]
    return requests, outputs, torch.tensor(rewards)


def learn(engine, queue, step):
    """Claim a step's rows, train on them, acknowledge them."""
    columns = ["prompt_token_ids", "latents", "timesteps", "step_stds", "loss_mask", "rollout_logprobs", "advantages"]
    meta = queue.get_meta(partition="train", columns=columns, batch_size=GROUP * len(COLOURS), task="actor")
    batch = queue.get(meta, columns)
    for _ in range(EPOCHS):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, policy_loss)
        engine.optimizer_step()
    queue.ack(meta, step=step)
    queue.clear("train")


async def train(folder, num_steps, lora=None):
    optimizer = OptimizerConfig(lr=LR * (4 if lora else 1), weight_decay=0.0)
    config = EngineConfig(model_path=str(folder), optimizer=optimizer, lora=lora, max_tokens_per_gpu=512)
    engine = create_engine("diffusion", config)
    engine.initialize()
    options = {"num_steps": 8, "noise": 0.7}
    server = create_server("diffusion", ServerConfig(model_path=str(folder), options=options))
    await server.start()
    queue = rl_tq.serve("inproc://")
    sender = rl_ckpt.connect("inproc://pictures", role="send")
    receiver = rl_ckpt.connect("inproc://pictures", role="receive")
    grids, curve, began = [(await pictures(server, 10_000, 8))[1]], [], monotonic()
    groups = torch.arange(len(COLOURS)).repeat_interleave(GROUP)
    for step in range(num_steps):
        requests, outputs, rewards = await pictures(server, step)
        assert {version for o in outputs for version in o.weight_versions} == {step}, "a step of other weights"
        curve.append(rewards.mean().item())
        advantages = rl_csrc.group_norm(rewards, groups)
        columns = columns_of(requests, outputs)
        columns["advantages"] = [
            a.expand(len(o.logprobs)).float().clone() for a, o in zip(advantages, outputs, strict=True)
        ]
        queue.put(columns, partition="train")
        await asyncio.to_thread(learn, engine, queue, step)
        sending = sender.send_weights(engine.get_per_tensor_param()[0], version=step + 1, num_peers=1)
        await asyncio.gather(sending, server.update_weights(receiver, step + 1))
        print(f"step {step}: reward {curve[-1]:.3f}, {monotonic() - began:.0f} s", flush=True)
    grids.append((await pictures(server, 10_000, 8))[1])
    await asyncio.gather(server.stop(), sender.close(), receiver.close())
    queue.close()
    engine.close()
    return curve, grids


def random_reward():
    """Mean reward of decoded noise: a policy that does not denoise."""
    torch.manual_seed(0)
    noise = ((torch.randn(48, 3, 8, 8) + 1) / 2).clamp(0, 1)
    return sum(colour_reward(each, list(COLOURS.values())[i % 3]) for i, each in enumerate(noise)) / 48


def draw(grids, file):
    """One row per prompt; eight pictures before RL on the left, the same seeds after it on the right."""
    rows = [
        torch.cat(
            [torch.nn.functional.pad(o.picture, (1, 1, 1, 1), value=1.0) for grid in grids for o in grid[i : i + 8]], 2
        )
        for i in range(0, 24, 8)
    ]
    pixels = (torch.cat(rows, 1).permute(1, 2, 0) * 255).byte().numpy()
    image = Image.fromarray(pixels)
    image.resize((image.width * 4, image.height * 4), Image.Resampling.NEAREST).save(file)


def main():
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40
    began = monotonic()
    write_tiny_pipeline(folder)
    pretrain(folder)
    print(f"pretrained in {monotonic() - began:.0f} s", flush=True)
    result = {"random_policy": random_reward()}
    for name, lora in (("full", None), ("lora", LoraConfig(rank=8, alpha=16.0))):
        began = monotonic()
        result[name], grids = asyncio.run(train(folder, num_steps, lora))
        result[f"{name}_s"] = round(monotonic() - began)
        if name == "full":
            draw(grids, folder / "grid.png")
    result["without_rl"] = result["full"][0]
    (folder / "curve.json").write_text(json.dumps(result))
    print(
        json.dumps(
            {
                k: v if not isinstance(v, list) else [round(x, 3) for x in v[:: max(1, len(v) // 8)]]
                for k, v in result.items()
            }
        )
    )


if __name__ == "__main__":
    main()
