"""RL of a tiny action policy: python packages/omni/bench/actions.py FOLDER bins|flow [KEY=VALUE ...].

A policy that imitated demonstrations for a short time learns by rl-train to reach the target that its instruction
names. Writes curve.json into FOLDER, and the run into FOLDER/run.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy
import torch

from rl_agent.registry import create_environments, create_tokenizer
from rl_omni.actions import load_policy, save_policy
from rl_omni.pictures import picture_of
from rl_omni.testing import write_tiny_policy

EXAMPLE = Path(__file__).parents[3] / "examples/actions"
HEADS = {"bins": {"num_bins": 16}, "flow": {"num_steps": 4, "noise": 0.5}}


def episodes(seeds):
    """Environments after their reset."""
    source = create_environments(f"{EXAMPLE / 'reach.py'}:Reach")
    for seed in seeds:
        environment = source.make()
        yield environment, environment.reset(seed=seed)[0]


def random_policy(num_episodes=500):
    """Success rate of uniform actions."""
    draws, reached = numpy.random.default_rng(0), 0.0
    for environment, _ in episodes(range(num_episodes)):
        done = False
        while not done:
            _, reward, is_there, is_over, _ = environment.step(draws.uniform(-1, 1, 2))
            reached, done = reached + reward, is_there or is_over
    return reached / num_episodes


def imitate(source, target, num_demonstrations=3000, num_steps=900, noise=0.4):
    """Imitate the first action of an expert whose hand shakes."""
    torch.manual_seed(0)
    policy, tokenizer = load_policy(source), create_tokenizer(str(source))
    prompts, pictures, actions = [], [], []
    for environment, observation in episodes(range(10**6, 10**6 + num_demonstrations)):
        prompts.append(tokenizer.prompt({"prompt": [{"role": "user", "content": observation}]})[0])
        pictures.append((picture_of(observation[0]["image"]) * 255).round().byte())
        shaken = torch.tensor(environment.expert(), dtype=torch.float32) + noise * torch.randn(2)
        actions.append(shaken.clamp(-1, 1)[None])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.01)
    for _ in range(num_steps):
        rows = torch.randint(len(prompts), (64,)).tolist()
        hidden = policy.hidden([prompts[i] for i in rows], [pictures[i] for i in rows])
        loss = policy.head.imitation_loss(hidden, torch.stack([actions[i] for i in rows]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    save_policy(target, source, policy.state_dict())


def main():
    folder, kind, keys = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    model, run = folder / "model", folder / "run"
    head = {"kind": kind, "chunk_size": 1, "action_size": 2, **HEADS[kind]}
    imitate(write_tiny_policy(folder / "random", head, ("reach", "the", "target"), patch_size=8), model)
    command = [sys.executable, "-m", "rl_trainer.cli", str(EXAMPLE / "reach.yaml"), f"model.path={model}"]
    command += [f"agent.environment={EXAMPLE / 'reach.py'}:Reach", f"output_dir={run}"]
    subprocess.run([*command, *keys], check=True)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [record["reward"] for record in records if record["step"] > 0]
    (folder / "curve.json").write_text(json.dumps({"random_policy": random_policy(), "curve": curve}))


if __name__ == "__main__":
    main()
