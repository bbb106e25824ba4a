"""Mutation check: small changes of the source that the `core` tests of a module must notice.

    uv run python tools/mutants.py packages/ckpt/src/rl_ckpt/resharding.py packages/ckpt/tests/test_ckpt_resharding.py
    uv run python tools/mutants.py --most 40 --seed 1 packages/tq/src/rl_tq/metadata packages/tq/tests/metadata

A mutant is one comparison, operator, number, boolean or `not` changed. Each is tried in a fork of this process, which
gives the changed module to the import system and runs the tests; one that all tests pass is printed: a test is missing,
or the change has no effect. The exit code is 1 if any survived.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
from pathlib import Path

COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
SWAPS = {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And}
TIMEOUT_S = 120


def mutants(source: str) -> list[tuple[int, str, str]]:
    """Line, change and source of every mutant."""
    found = []
    for index, node in enumerate(ast.walk(ast.parse(source))):
        for change in changes(node):
            tree = ast.parse(source)
            target = next(each for i, each in enumerate(ast.walk(tree)) if i == index)
            before = ast.unparse(target)
            change(target)
            after = ast.unparse(target)
            if before != after:
                found.append((target.lineno, f"{before}  ->  {after}", ast.unparse(ast.fix_missing_locations(tree))))
    return found


def changes(node: ast.AST):
    """Functions that change a copy of this node in place."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS | SWAPS:
            yield lambda n: n.ops.__setitem__(0, (COMPARISONS | SWAPS)[type(n.ops[0])]())
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield lambda n: setattr(n, "op", OPERATORS[type(n.op)]())
        case ast.BoolOp(op=op):
            yield lambda n: setattr(n, "op", SWAPS[type(n.op)]())
        case ast.Constant(value=bool() as value):
            yield lambda n, value=value: setattr(n, "value", not value)
        case ast.Constant(value=int() | float() as value):
            yield lambda n, value=value: setattr(n, "value", value + 1)
        case ast.UnaryOp(op=ast.Not()):
            yield (
                lambda n: (
                    setattr(n, "op", ast.UAdd())
                    or setattr(
                        n, "operand", ast.Call(func=ast.Name(id="bool", ctx=ast.Load()), args=[n.operand], keywords=[])
                    )
                )
            )
        case _:
            pass


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import of one module from a changed source."""

    def __init__(self, name: str, file: Path, source: str) -> None:
        self.name, self.file, self.source = name, file, source

    def find_spec(self, fullname, path=None, target=None):
        """The changed module's spec; None for any other."""
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.file, loader=self)

    def create_module(self, spec):
        """As usual."""
        return

    def exec_module(self, module) -> None:
        """Run the changed source."""
        exec(compile(self.source, str(self.file), "exec"), module.__dict__)


def passes(name: str, file: Path, source: str, tests: list[str]) -> bool:
    """Whether all tests pass with a changed module, in a fork."""
    child = os.fork()
    if child == 0:
        signal.alarm(TIMEOUT_S)
        sys.meta_path.insert(0, Changed(name, file, source))
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            import pytest

            code = pytest.main(["-q", "-x", "-m", "core", "-p", "no:cacheprovider", "--no-header", *tests])
        os._exit(int(code))
    return os.waitpid(child, 0)[1] == 0


def module_name(file: Path) -> str:
    """Import name of a file below a `src` folder."""
    parts = file.with_suffix("").parts
    return ".".join(parts[len(parts) - parts[::-1].index("src") :])


def main() -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="file or folder")
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--most", type=int, default=0, help="a sample of so many; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    import pytest
    import tensordict
    import torch

    torch.set_num_threads(1)
    assert pytest and tensordict, "loaded once, for all forks"
    files = sorted(given.source.rglob("*.py")) if given.source.is_dir() else [given.source]
    found = [(file, *mutant) for file in files if file.name != "__init__.py" for mutant in mutants(file.read_text())]
    total = len(found)
    if given.most and given.most < total:
        found = random.Random(given.seed).sample(found, given.most)
    survived = 0
    for file, line, change, source in sorted(found, key=lambda each: each[:2]):
        if passes(module_name(file), file.resolve(), source, given.tests):
            survived += 1
            print(f"{file}:{line}: {change}", flush=True)
    print(f"{len(found)} of {total} mutants tried, {survived} survived", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
