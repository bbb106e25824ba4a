"""What the recipes that train agents learn: held-out reward after the warm start and after RL, next to baselines.

`rl-bench agent_recipes --json FILE` runs what `outputs/agent_recipes` does not have yet, three seeds of each recipe;
`python benchmarks/agent_recipes.py FILE.json FILE.svg` draws the figure.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_agent import create_loop
from rl_agent.recipes import kuhn, search
from rl_agent.testing import FakeGenerator, FakeTokenizer
from rl_bench.run import half_width_95
from rl_trainer.config import load_config
from rl_trainer.data import load_datasets

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_bench import Run

RECIPES = ("gym", "search", "self_play", "harness", "gui")
SEEDS = dict.fromkeys(RECIPES, (1, 2, 3))
"""Seeds of each recipe."""
FOLDER = Path("outputs/agent_recipes")


def main(run: Run) -> None:
    """Run the recipes, and compare."""
    recipes = RECIPES[:1] if run.quick else RECIPES
    found = {
        name: {"baselines": known_baselines(name), "seeds": [trained(name, seed) for seed in SEEDS[name]]}
        for name in recipes
    }
    for name, results in found.items():
        better = -1 if name == "self_play" else 1  # exploitability has to fall
        gains = [better * (each["reward"][-1] - each["reward"][0]) for each in results["seeds"]]
        results |= {"gain_mean": statistics.mean(gains), "gain_half_width_95": half_width_95(gains)}
        for what, at in (("after the warm start", 0), ("after RL", -1)):
            rewards = [each["reward"][at] for each in results["seeds"]]
            run.record(
                f"{name}: held out, {what}", f"ours, seeds: {len(rewards)}", rewards, unit=_unit(name), role="ours"
            )
    run.parameters(command="rl-train NAME seed=N runtime=inline", recipes=found)


def trained(name: str, seed: int) -> dict[str, Any]:
    """Run one recipe, unless it was run before; returns held-out reward by step, and seconds."""
    folder = FOLDER / f"{name}-{seed}"
    if (result := folder / "result.json").is_file():
        return json.loads(result.read_text())
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "rl_trainer.cli", name, f"seed={seed}", "runtime=inline", f"output_dir={folder}"]
    subprocess.run(command, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [(each["step"], each["eval_reward"]) for each in records if each.get("eval_reward") is not None]
    if name == "self_play":
        models = {0: folder / "model"} | {_step(each): each / "model" for each in folder.glob("checkpoint-*")}
        curve = [(step, kuhn.exploitability(kuhn.bets_of(str(models[step])))) for step in sorted(models)]
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    steps, rewards = ([*each] for each in zip(*curve, strict=True))
    values = {"seed": seed, "step": steps, "reward": rewards, "cpu_s": cpu_s, "wall_s": time.monotonic() - start}
    result.write_text(json.dumps(values))
    return values


def known_baselines(name: str) -> dict[str, float]:
    """Measure the baselines of a recipe, unless they were before."""
    result = FOLDER / f"{name}-baselines.json"
    if not result.is_file():
        FOLDER.mkdir(parents=True, exist_ok=True)
        result.write_text(json.dumps(baselines(name)))
    return json.loads(result.read_text())


def baselines(name: str) -> dict[str, float]:
    """Mean held-out reward of a random answer, and of the best of those that always answer the same."""
    if name == "self_play":
        constant = [dict.fromkeys(kuhn.SITUATIONS, float(bet)) for bet in (0, 1)]
        uniform = kuhn.exploitability(dict.fromkeys(kuhn.SITUATIONS, 0.5))
        return {"random": uniform, "constant": min(map(kuhn.exploitability, constant))}
    config = load_config(name)
    rows = load_datasets(config.data, seed=config.seed, agent=config.agent).eval
    if name == "search":
        truths = [row["reward_model"]["ground_truth"] for row in rows]
        return {
            "random": 1 / len(search.answers()),
            "constant": max(truths.count(each) for each in search.answers()) / len(truths),
        }
    choose, tokenizer = random.Random(0), FakeTokenizer()

    def mean(reply: Callable[[str], str]) -> float:
        def answer(request: Any) -> list[int]:
            shown = tokenizer.decode(request.prompt_token_ids)
            return [*tokenizer.encode("done" if "<|im_start|>tool" in shown else reply(shown)), tokenizer.eos_token_id]

        return asyncio.run(_played(name, FakeGenerator(answer), tokenizer, rows))

    constants = {"gym": ["0", "1", "2", "3"], "harness": ["3 return 0"]}
    same = [lambda _, each=each: each for each in constants.get(name, [])] or [lambda shown: _filled(shown, (1, 2, 3))]
    return {"random": mean(lambda shown: _RANDOM[name](shown, choose)), "constant": max(mean(reply) for reply in same)}


async def _played(name: str, server: FakeGenerator, tokenizer: FakeTokenizer, rows: list[Any]) -> float:
    config = load_config(name)
    options = dict(config.agent.options)
    if config.agent.environment is not None:
        options["environment"] = config.agent.environment
    loop: Any = create_loop(config.agent.loop, server, tokenizer, **options)
    try:
        outputs = [await loop.run({"max_new_tokens": 1000}, row) for row in rows]
    finally:
        await loop.close()
    return statistics.mean(each[0].reward if isinstance(each, list) else each.reward for each in outputs)


def _any_edit(shown: str, choose: random.Random) -> str:
    """An expression of the function's variables, as the recipe's are made."""
    first, second = re.findall(r"def \w+\((\w+), (\w+)\)", shown)[0]
    return f"3 return {first} {choose.choice('+-*')} {second} {choose.choice('+-')} {choose.randint(1, 9)}"


def _filled(shown: str, numbers: tuple[int, ...]) -> str:
    """The task's values in the fields of these numbers, and the button."""
    (task,) = re.findall(r"Fill in and send: (.*)", shown)
    fills = [{"element": at, "text": each.split()[1]} for at, each in zip(numbers, task.split(", "), strict=True)]
    calls = [*({"name": "fill", "arguments": each} for each in fills), {"name": "click", "arguments": {"element": 4}}]
    return "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)


_RANDOM: dict[str, Callable[[str, random.Random], str]] = {
    "gym": lambda _, choose: choose.choice("0123"),
    "harness": _any_edit,
    "gui": lambda shown, choose: _filled(shown, tuple(choose.sample((1, 2, 3), 3))),
}


def draw(source: Path, target: Path) -> None:
    """Draw the curves of a result file, a panel per recipe."""
    import matplotlib as mpl
    from matplotlib import pyplot

    mpl.use("svg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "", "font.size": 8}
    recipes = json.loads(source.read_text())["parameters"]["recipes"]
    figure, panels = pyplot.subplots(1, len(recipes), figsize=(2.1 * len(recipes), 2.2), layout="constrained")
    for panel, (name, found) in zip(panels, recipes.items(), strict=True):
        for each in found["seeds"]:
            panel.plot(each["step"], each["reward"], marker="o", markersize=2, linewidth=1, color="tab:blue")
        panel.axhline(found["baselines"]["random"], color="gray", linewidth=0.8, linestyle=":")
        panel.axhline(found["baselines"]["constant"], color="gray", linewidth=0.8, linestyle="--")
        panel.set(title=name, xlabel="step of RL", ylabel=_unit(name), ylim=(0, 1.02))
    figure.savefig(target, metadata={"Date": None})


def _unit(name: str) -> str:
    return "exploitability" if name == "self_play" else "held-out reward"


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
