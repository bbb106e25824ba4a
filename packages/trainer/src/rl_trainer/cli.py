"""The command lines: `rl-train RECIPE [key=value ...]`, `rl-eval RECIPE ...`, `rl-sample RECIPE ...` or `OUTPUT_DIR`.

Bad input ends with one sentence and exit code 2 before anything is started.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rl_trainer._memory import keep_freed_memory
from rl_trainer.config import RECIPES, as_tree, load_config
from rl_trainer.errors import ConfigError, InputError, sentence_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_trainer.config import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 the run failed, 2 bad input, 130 interrupted."""
    recipes = ", ".join(sorted(path.stem for path in RECIPES.glob("*.yaml")))
    parser = argparse.ArgumentParser(
        prog="rl-train", description="Reinforcement-learning post-training of a language model."
    )
    parser.add_argument("recipe", nargs="?", help=f"a shipped recipe ({recipes}), or a YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="configuration overrides, e.g. seed=3 batch.group_size=16"
    )
    parser.add_argument("--runtime", choices=("ray", "inline"), help="shorthand for runtime=...")
    parser.add_argument("--profile", action="store_true", help="shorthand for tracking.profile=true: write trace.json")
    parser.add_argument("--print-config", action="store_true", help="print the configuration and stop")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, and start nothing")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in output_dir, if any")
    parser.add_argument(
        "--verify",
        metavar="OUTPUT_DIR",
        help="compare every file of a run's checkpoints (or of one checkpoint) with its digest, and start nothing",
    )
    arguments = parser.parse_intermixed_args(argv)
    if arguments.verify is None and arguments.recipe is None:
        parser.error("give a recipe, or --verify OUTPUT_DIR")
    overrides = [*arguments.overrides, *([f"runtime={arguments.runtime}"] if arguments.runtime else [])]
    overrides += ["tracking.profile=true"] if arguments.profile else []
    keep_freed_memory()
    try:
        if arguments.verify is not None:
            return _verify(Path(arguments.verify))
        config = load_config(arguments.recipe, overrides)
        if arguments.print_config:
            print(yaml.safe_dump(as_tree(config), sort_keys=False))
            return 0
        from rl_trainer.job import plan, resumed, run

        if arguments.dry_run:
            plan(resumed(config) if arguments.resume else config, is_resumed=arguments.resume)
            return 0
        return 130 if run(config, resume=arguments.resume)["interrupted"] else 0
    except InputError as error:
        print(f"rl-train: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if (told := sentence_of(error)) is None:
            raise
        print(f"rl-train: {told}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("rl-train: interrupted", file=sys.stderr)
        return 130


def _verify(folder: Path) -> int:
    """Print a line per damaged file, and one per checkpoint; returns 1 if there is damage, else 0.

    Raises:
        InputError: there is no checkpoint.
    """
    from rl_trainer import checkpoints

    found = checkpoints.inspect(folder)
    for place, lines in found:
        print("\n".join(lines) if lines else f"{place} is whole")
    for place in checkpoints.unfinished(folder):
        print(f"{place} was not finished: no run goes on from it")
    return 1 if any(lines for _, lines in found) else 0


def main_eval(argv: Sequence[str] | None = None) -> int:
    """Measure a policy on a recipe's held-out rows; exit codes as those of `main`."""
    parser = argparse.ArgumentParser(prog="rl-eval", description="Accuracy, pass@k and maj@k of a policy.")
    parser.add_argument(
        "recipe", nargs="?", help="a shipped recipe, or a YAML file: its data, prompts and rollout settings"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides; model.path is the policy")
    parser.add_argument("--samples", type=int, default=1, help="completions per row (1: at rollout.eval_temperature)")
    parser.add_argument("--k", default="1", help="pass@k to report, separated by commas")
    parser.add_argument("--url", help="a rollout server that runs already, instead of one that is started")
    parser.add_argument("--output", help="also write every row's rewards and answers to this JSONL file")
    arguments = parser.parse_intermixed_args(argv)
    try:
        ks = [int(k) for k in arguments.k.split(",")]
        if not 0 < min(ks) <= max(ks) <= arguments.samples:
            raise ConfigError(f"--k={arguments.k} must lie between 1 and --samples={arguments.samples}")
        config = _config_of_a_policy(arguments.recipe, arguments.overrides)
        import asyncio
        import json
        from dataclasses import asdict

        from rl_trainer.evaluate import sample, summarise

        problems = asyncio.run(
            sample(config, Path(str(config.model.path)), num_samples=arguments.samples, url=arguments.url)
        )
        if arguments.output:
            Path(arguments.output).write_text("".join(json.dumps(asdict(problem)) + "\n" for problem in problems))
        for name, estimate in summarise(problems, ks).items():
            print(f"{name:12s} {estimate.mean:.3f} +- {estimate.half_width:.3f}")
        num_failed = sum(problem.num_failed for problem in problems)
        print(f"{'rows':12s} {len(problems)}, {num_failed} of {len(problems) * arguments.samples} completions failed")
        return 0
    except (InputError, ValueError) as error:
        print(f"rl-eval: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if (told := sentence_of(error)) is None:
            raise
        print(f"rl-eval: {told}", file=sys.stderr)
        return 1


def main_sample(argv: Sequence[str] | None = None) -> int:
    """Show samples: those that a run kept, or fresh ones of a policy; exit codes as those of `main`."""
    parser = argparse.ArgumentParser(prog="rl-sample", description="Look at samples of a run, or of a policy.")
    parser.add_argument("source", help="output_dir of a run with tracking.keep_samples=true, or a recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe; model.path is the policy")
    parser.add_argument("--count", type=int, default=4, help="of a run: samples to show; of a recipe: held-out rows")
    parser.add_argument("--order", choices=("first", "best", "worst"), default="first", help="by reward")
    parser.add_argument("--step", type=int, help="of a run: the step; the last one by default")
    parser.add_argument("--samples", type=int, help="of a recipe: completions per row, 1 by default")
    parser.add_argument("--url", help="of a recipe: a rollout server that runs already")
    arguments = parser.parse_intermixed_args(argv)
    try:
        from rich.console import Console

        from rl_trainer import show

        order, count = arguments.order, arguments.count
        samples = 1 if arguments.samples is None else arguments.samples
        if min(count, samples) < 1:
            raise ConfigError(f"--count={count} and --samples={samples} must be at least 1")
        if Path(arguments.source).is_dir():
            if arguments.samples or arguments.url or arguments.overrides:
                raise ConfigError(f"{arguments.source} is a run: --samples, --url and key=value are of a recipe")
            found = show.kept(arguments.source, step=arguments.step, order=order, count=count)
        else:
            if arguments.step is not None:
                raise ConfigError("--step is of a run, and a recipe was given")
            config = _config_of_a_policy(arguments.source, arguments.overrides)
            found = show.fresh(config, url=arguments.url, order=order, count=count, num_samples=samples)
        show.show(Console(), found)
        return 0
    except (InputError, ValueError) as error:
        print(f"rl-sample: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if (told := sentence_of(error)) is None:
            raise
        print(f"rl-sample: {told}", file=sys.stderr)
        return 1


def _config_of_a_policy(recipe: str, overrides: Sequence[str]) -> Config:
    from rl_trainer.preflight import check_model

    config = load_config(recipe, overrides)
    if config.model.path is None:
        raise ConfigError("model.path is not set: give the folder of the policy")
    check_model(config)
    return config


if __name__ == "__main__":
    raise SystemExit(main())
