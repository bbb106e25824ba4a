"""What RL teaches tiny action policies: success before and after, by head, algorithm and seed, next to random actions.

`rl-bench actions --json FILE` runs what `outputs/actions` does not have yet; `python packages/omni/bench/actions.py
FILE.json FILE.svg` draws the figure. A policy imitates demonstrations for a short time, and learns on by rl-train.
"""

import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import numpy
import torch

from rl_agent.registry import create_environments, create_tokenizer
from rl_bench.run import half_width_95
from rl_omni.actions import load_policy, save_policy
from rl_omni.pictures import picture_of
from rl_omni.testing import write_tiny_policy

ROOT = Path(__file__).parents[3]
EXAMPLE, FOLDER = ROOT / "examples/actions", Path("outputs/actions")
HEADS = {"bins": {"action_size": 2, "num_bins": 16}, "flow": {"action_size": 2, "num_steps": 4, "noise": 0.5}}
RECIPES = {"GRPO, bins": ("reach", "bins"), "PPO, bins": ("reach_ppo", "bins"), "GRPO, flow": ("reach_flow", "flow")}
SEEDS = (1, 2, 3)
"""Seeds of each curve's runs, which choose episodes and samples. The policy after imitation is the same."""


def episodes(environment, seeds):
    """Environments after their reset."""
    source = create_environments(f"{EXAMPLE}/{environment}")
    for seed in seeds:
        made = source.make()
        yield made, made.reset(seed=seed)[0]


def random_policy(environment="reach.py:Reach", size=2, num_episodes=500):
    """Success rate of uniform actions."""
    draws, reached = numpy.random.default_rng(0), 0.0
    for made, _ in episodes(environment, range(num_episodes)):
        done = False
        while not done:
            _, reward, is_there, is_over, _ = made.step(draws.uniform(-1, 1, size))
            reached, done = reached + reward, is_there or is_over
    return reached / num_episodes


def imitate(source, target, environment="reach.py:Reach", num_demonstrations=3000, num_steps=900, noise=0.4):
    """Imitate the first action of an expert whose hand shakes."""
    torch.manual_seed(0)
    policy, tokenizer = load_policy(source), create_tokenizer(str(source))
    prompts, pictures, actions = [], [], []
    for made, observation in episodes(environment, range(10**6, 10**6 + num_demonstrations)):
        prompts.append(tokenizer.prompt({"prompt": [{"role": "user", "content": observation}]})[0])
        pictures.append((picture_of(observation[0]["image"]) * 255).round().byte())
        shown = torch.tensor(made.expert(), dtype=torch.float32)
        actions.append((shown + noise * torch.randn(len(shown))).clamp(-1, 1)[None])
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


def imitated(kind):
    """Folder of the policy that imitated, made once."""
    model = FOLDER / kind / "model"
    if not (model / "model_index.json").is_file():
        head = {"kind": kind, "chunk_size": 1, **HEADS[kind]}
        random = write_tiny_policy(FOLDER / kind / "random", head, ("reach", "the", "target"), patch_size=8)
        imitate(random, model)
    return model


def trained(name, seed, *keys):
    """Held-out success before and after, reward of every step, and CPU seconds, of a run that is made once."""
    recipe, kind = RECIPES[name]
    folder = FOLDER / f"{recipe}-{kind}-{seed}"
    if not (result := folder / "result.json").is_file():
        model, before = imitated(kind), resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "rl_trainer.cli", f"{EXAMPLE / recipe}.yaml", f"model.path={model}"]
        command += [f"agent.environment={EXAMPLE / 'reach.py'}:Reach", f"output_dir={folder}", f"seed={seed}"]
        subprocess.run([*command, *keys], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        values = {
            name: [each[name] for each in records if each[name] is not None] for name in ("eval_reward", "reward")
        }
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        result.write_text(json.dumps({"seed": seed, "cpu_s": cpu_s, **values}))
    return json.loads(result.read_text())


def main(run):
    """Run the recipes, and compare."""
    found = {}
    for name in [*RECIPES][:1] if run.quick else RECIPES:
        seeds = [trained(name, seed, *(["steps=2"] if run.quick else [])) for seed in SEEDS]
        first, last = ([each["eval_reward"][at] for each in seeds] for at in (0, -1))
        gains = [after - before for before, after in zip(first, last, strict=True)]
        found[name] = {"seeds": seeds, "gain_mean": statistics.mean(gains), "gain_half_width_95": half_width_95(gains)}
        for what, values in (("after imitation", first), ("after RL", last)):
            run.record(f"{name}: success {what}", f"ours, seeds: {len(seeds)}", values, unit="success", role="ours")
    run.parameters(command="rl-train RECIPE seed=N", random_policy=random_policy(), recipes=found)


def draw(source, target):
    """Draw the curves of a result file, a panel for each head and algorithm."""
    import matplotlib as mpl
    from matplotlib import pyplot

    mpl.use("svg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 8}
    parameters = json.loads(Path(source).read_text())["parameters"]
    figure, panels = pyplot.subplots(1, len(parameters["recipes"]), figsize=(6.6, 2.2), layout="constrained")
    for panel, (name, found) in zip(panels, parameters["recipes"].items(), strict=True):
        for each in found["seeds"]:
            panel.plot(range(1, len(each["reward"]) + 1), each["reward"], linewidth=0.8, color="tab:blue")
        before = statistics.mean(each["eval_reward"][0] for each in found["seeds"])
        panel.axhline(before, color="gray", linewidth=0.8, linestyle="--")
        panel.axhline(parameters["random_policy"], color="gray", linewidth=0.8, linestyle=":")
        panel.set(title=name, xlabel="step of RL", ylabel="success", ylim=(0, 1.02))
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(sys.argv[1], sys.argv[2])
