"""Command lines `rl-train RECIPE [key=value ...]`, `rl-eval RECIPE ...`, `rl-sample RECIPE ...` or `OUTPUT_DIR`.

Exit codes: 0 done, 1 it failed, 2 bad input (one sentence, before anything is started), 130 Ctrl-C, 143 SIGTERM.
What takes long to import is imported inside: from the first moment on a signal is answered with a sentence.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import signal
import sys
import threading
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from rl_trainer.config import Config
    from rl_trainer.data import Datasets


_MOST_FAILURES = 5
"""Rows with failed completions that `rl-eval` prints."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Constant of malloc.h."""


class _Main(Protocol):
    """A command line: takes its arguments, `sys.argv`'s without them, and returns the exit code."""

    def __call__(self, argv: Sequence[str] | None = None) -> int: ...


def _command(program: str) -> Callable[[_Main], _Main]:
    """Give a command line the exit codes and sentences that all of them have."""

    def decorate(body: _Main) -> _Main:
        @wraps(body)
        def command(argv: Sequence[str] | None = None) -> int:
            ended: list[int] = []

            def on_sigterm(number: int, frame: FrameType | None) -> None:
                ended.append(number)
                raise KeyboardInterrupt

            takes_signals = threading.current_thread() is threading.main_thread()
            before = signal.signal(signal.SIGTERM, on_sigterm) if takes_signals else None
            try:
                return _answered(program, body, argv)
            except KeyboardInterrupt:
                if not ended:
                    print(f"{program}: interrupted", file=sys.stderr)
                    return 128 + signal.SIGINT
            except SystemExit as end:
                if end.code != signal.SIGTERM:  # of the handler that `ray.init` installs in the place of ours
                    raise
            finally:
                if takes_signals:
                    signal.signal(signal.SIGTERM, before)
            print(f"{program}: ended by SIGTERM", file=sys.stderr)
            return 128 + signal.SIGTERM

        return command

    return decorate


_ANYWAY = "--resume-anyway"
"""How `--resume=anyway` is parsed."""


def _answered(program: str, body: _Main, argv: Sequence[str] | None) -> int:
    from rl_trainer.errors import InputError, page_of, sentence_of

    try:
        return body(argv)
    except InputError as error:
        print(f"{program}: {error}\n  more in {page_of(error)}", file=sys.stderr)
        return 2
    except Exception as error:
        if (sentence := sentence_of(error)) is None:
            raise
        print(f"{program}: {sentence}\n  more in {page_of(error)}", file=sys.stderr)
        return 1


@_command("rl-train")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    from rl_trainer.config import RECIPES, load_config

    recipes = ", ".join(sorted(path.stem for path in RECIPES.glob("*.yaml")))
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["--from-verl"]:  # all that follows is verl's, in Hydra's syntax
        return _from_verl(argv[1:])
    parser = argparse.ArgumentParser(
        prog="rl-train",
        description="Reinforcement-learning post-training of a language model.",
        epilog="rl-train --from-verl FILE.sh|FILE.yaml|key=value... prints the recipe equal to settings of verl.",
    )
    parser.add_argument("recipe", nargs="?", help=f"a shipped recipe ({recipes}), or a YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="configuration overrides, e.g. seed=3 batch.group_size=16"
    )
    parser.add_argument("--runtime", choices=("ray", "inline", "auto"), help="shorthand for runtime=...")
    parser.add_argument("--profile", action="store_true", help="shorthand for tracking.profile=true: write trace.json")
    parser.add_argument("--print-config", action="store_true", help="print every key, with its doc, type and source")
    parser.add_argument("--explain", metavar="KEY", help="say what a key means, what it may hold, and who reads it")
    parser.add_argument("--list", action="store_true", help="list recipes, backends, estimators, losses and plug-ins")
    parser.add_argument("--completion", choices=("bash", "zsh"), help="print what the shell needs to complete keys")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the plan, and start nothing")
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="print what a step would take; rates are further key=value, or run=OUTPUT_DIR, and cluster=NODESxGPUS",
    )
    parser.add_argument("--quiet", action="store_true", help="print errors alone; metrics.jsonl has the numbers")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in output_dir, if any; --resume=anyway also if data, base model, "
        "tokenizer, template or a file of code changed since",
    )
    parser.add_argument(_ANYWAY, dest="resume", action="store_const", const="anyway", help=argparse.SUPPRESS)
    parser.add_argument(
        "--verify",
        metavar="OUTPUT_DIR",
        help="compare every file of a run's checkpoints (or of one checkpoint) with its digest, and start nothing",
    )
    # As an option with an optional value, `--resume` would take the recipe behind it for its value.
    arguments = parser.parse_intermixed_args([_ANYWAY if each == "--resume=anyway" else each for each in argv])
    if (listing := _listing(arguments)) is not None:
        print(listing)
        return 0
    if arguments.verify is None and arguments.recipe is None:
        parser.error("give a recipe (--list names them), or --verify OUTPUT_DIR")
    overrides = [*arguments.overrides, *([f"runtime={arguments.runtime}"] if arguments.runtime else [])]
    overrides += ["tracking.profile=true"] if arguments.profile else []
    keep_freed_memory()
    if arguments.verify is not None:
        return _verify(Path(arguments.verify))
    if arguments.simulate:
        return _simulate(arguments.recipe, overrides)
    config = load_config(arguments.recipe, overrides)
    if arguments.print_config:
        from rl_trainer.config.explain import annotated

        print(annotated(config, arguments.recipe, overrides), end="")
        return 0
    config.check_runtime()
    from rich.console import Console

    from rl_trainer.runtime.processes import quiet_libraries, rare_collections

    with rare_collections():
        from rl_trainer.planning.prepare import prepare, resumed
        from rl_trainer.run import run

    quiet_libraries()
    console = Console(quiet=arguments.quiet)
    if arguments.dry_run:
        prepared = prepare(resumed(config) if arguments.resume else config, resume=arguments.resume)
        prepared.rows.rest()
        prepared.show(console)
        return 0
    return 130 if run(config, console, resume=arguments.resume)["interrupted"] else 0


def _listing(arguments: argparse.Namespace) -> str | None:
    """Output of `--explain`, `--list` and `--completion`; None without them."""
    if arguments.explain is not None:
        from rl_trainer.config.explain import explain

        return explain(arguments.explain)
    if not (arguments.list or arguments.completion):
        return None
    from rl_trainer.commands import catalog

    return catalog.listing() if arguments.list else catalog.completion(arguments.completion)


def _from_verl(argv: Sequence[str]) -> int:
    """Print the recipe equal to verl's settings, and above it the settings without a counterpart."""
    from rl_trainer.errors import ConfigError
    from rl_trainer.recipes.from_verl import convert

    if not argv:
        raise ConfigError("--from-verl needs verl's settings: a .yaml or .sh file, or the overrides of a command line")
    print(convert(argv).text(), end="")
    return 0


def _simulate(recipe: str, overrides: Sequence[str]) -> int:
    from rich.console import Console

    from rl_trainer.commands.simulate import INPUTS, forecast
    from rl_trainer.config import load_config
    from rl_trainer.errors import ConfigError
    from rl_trainer.planning.plan import show_table

    given = {key: value for key, _, value in (each.partition("=") for each in overrides) if key in INPUTS}
    config = load_config(recipe, [each for each in overrides if each.partition("=")[0] not in INPUTS])
    if config.policies:
        raise ConfigError(
            f"--simulate is of one policy, and the run has {', '.join(config.policies)}; leave policies out"
        )
    show_table(Console(), "simulated step", forecast(config, given))
    return 0


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


@_command("rl-eval")
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
    import asyncio
    import json
    from dataclasses import asdict

    from rl_trainer.errors import ConfigError, InputError
    from rl_trainer.evaluation import sample, summarise
    from rl_trainer.output_dir import write_whole

    try:
        ks = [int(k) for k in arguments.k.split(",")]
        if not 0 < min(ks) <= max(ks) <= arguments.samples:
            raise ConfigError(f"--k={arguments.k} must be between 1 and --samples={arguments.samples}")
        config, datasets = _policy(arguments, arguments.recipe)
        problems = asyncio.run(sample(config, datasets, num_samples=arguments.samples, url=arguments.url))
    except ValueError as error:
        raise InputError(str(error)) from error
    if arguments.output:
        write_whole(Path(arguments.output), "".join(json.dumps(asdict(problem)) + "\n" for problem in problems))
    for name, estimate in summarise(problems, ks).items():
        print(f"{name:12s} {estimate.mean:.3f} +- {estimate.half_width:.3f}")
    num_failed = sum(problem.num_failed for problem in problems)
    print(f"{'rows':12s} {len(problems)}, {num_failed} of {len(problems) * arguments.samples} completions failed")
    for problem in [problem for problem in problems if problem.num_failed][:_MOST_FAILURES]:
        print(f"{'failed':12s} {problem.num_failed} of {problem.failure}")
    return 0


@_command("rl-sample")
def main_sample(argv: Sequence[str] | None = None) -> int:
    """Show samples: those that a run saved, or fresh ones of a policy; exit codes as those of `main`."""
    parser = argparse.ArgumentParser(prog="rl-sample", description="Look at samples of a run, or of a policy.")
    parser.add_argument("source", help="output_dir of a run with tracking.keep_samples=true, or a recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe; model.path is the policy")
    parser.add_argument("--count", type=int, default=4, help="of a run: samples to show; of a recipe: held-out rows")
    parser.add_argument("--order", choices=("first", "best", "worst"), default="first", help="by reward")
    parser.add_argument("--step", type=int, help="of a run: the step; the last one by default")
    parser.add_argument("--samples", type=int, help="of a recipe: completions per row, 1 by default")
    parser.add_argument("--url", help="of a recipe: a rollout server that runs already")
    arguments = parser.parse_intermixed_args(argv)
    from rich.console import Console

    from rl_trainer import evaluation
    from rl_trainer import samples as show
    from rl_trainer.errors import ConfigError, InputError

    order, count = arguments.order, arguments.count
    samples = 1 if arguments.samples is None else arguments.samples
    if min(count, samples) < 1:
        raise ConfigError(f"--count={count} and --samples={samples} must be at least 1")
    try:
        if Path(arguments.source).is_dir():
            if arguments.samples or arguments.url or arguments.overrides:
                raise ConfigError(f"{arguments.source} is a run: --samples, --url and key=value are of a recipe")
            found = show.kept(arguments.source, step=arguments.step, order=order, count=count)
        else:
            if arguments.step is not None:
                raise ConfigError("--step is of a run, and a recipe was given")
            config, datasets = _policy(arguments, arguments.source)
            found = evaluation.fresh(config, datasets, url=arguments.url, order=order, count=count, num_samples=samples)
    except ValueError as error:
        raise InputError(str(error)) from error
    show.show(Console(), found)
    return 0


def _policy(arguments: argparse.Namespace, recipe: str) -> tuple[Config, Datasets]:
    from rl_trainer.config import load_config
    from rl_trainer.planning.prepare import prepare_policy

    return prepare_policy(load_config(recipe, arguments.overrides), is_served=arguments.url is not None)


def keep_freed_memory() -> None:
    """Make malloc keep freed memory, here and in child processes: a page fault costs more than its use.

    The variables are read when a process starts; this one is set by mallopt(3), where the C library is glibc.
    """
    for name, parameter, size in (("MMAP", _M_MMAP_THRESHOLD, 32 * 2**20), ("TRIM", _M_TRIM_THRESHOLD, 2**31 - 1)):
        wanted = os.environ.setdefault(f"MALLOC_{name}_THRESHOLD_", str(size))
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).mallopt(parameter, int(wanted))


if __name__ == "__main__":
    raise SystemExit(main())
