"""`rl-train RECIPE [key=value ...]`: the command line.

Bad input ends with one sentence and exit code 2 before anything is started.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from rl_trainer.config import RECIPES, load_config
from rl_trainer.errors import InputError, TrainerError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 done, 1 the run failed, 2 bad input, 130 interrupted."""
    recipes = ", ".join(sorted(path.stem for path in RECIPES.glob("*.yaml")))
    parser = argparse.ArgumentParser(
        prog="rl-train", description="Reinforcement-learning post-training of a language model."
    )
    parser.add_argument("recipe", help=f"a shipped recipe ({recipes}), or a YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="configuration overrides, e.g. seed=3 batch.group_size=16"
    )
    parser.add_argument("--runtime", choices=("ray", "inline"), help="shorthand for runtime=...")
    parser.add_argument("--print-config", action="store_true", help="print the configuration and stop")
    arguments = parser.parse_intermixed_args(argv)
    overrides = [*arguments.overrides, *([f"runtime={arguments.runtime}"] if arguments.runtime else [])]
    _keep_freed_memory()
    try:
        config = load_config(arguments.recipe, overrides)
        if arguments.print_config:
            print(_as_yaml(config))
            return 0
        from rl_trainer.job import run

        return 130 if run(config)["interrupted"] else 0
    except InputError as error:
        print(f"rl-train: {error}", file=sys.stderr)
        return 2
    except TrainerError as error:
        print(f"rl-train: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("rl-train: interrupted", file=sys.stderr)
        return 130


def _keep_freed_memory() -> None:
    """Have the processes that this one starts keep freed memory: touching a page anew costs far more than using it."""
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 * 2**20))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**31))


def _as_yaml(config: object) -> str:
    import json
    from dataclasses import asdict

    import yaml

    return yaml.safe_dump(json.loads(json.dumps(asdict(config))), sort_keys=False)  # pyright: ignore[reportArgumentType] - a dataclass instance


if __name__ == "__main__":
    raise SystemExit(main())
