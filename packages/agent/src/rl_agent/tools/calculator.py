"""Calculator tool: numbers, parentheses and + - * / // %."""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING

from rl_agent.errors import ToolError

if TYPE_CHECKING:
    from collections.abc import Callable

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MAX_CHARACTERS = 500


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression of numbers, parentheses and + - * / // %, for example 12 * (3 + 4)."""
    if len(expression) > _MAX_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters; at most {_MAX_CHARACTERS} are allowed")
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ToolError(f"{expression!r} is not an arithmetic expression") from error
    except ArithmeticError as error:
        raise ToolError(str(error)) from error


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # pyright: ignore[reportReturnType] - its type was looked at
    if isinstance(node, ast.BinOp) and (operate := _BINARY.get(type(node.op))):
        return operate(_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
        return _value(node.operand)
    raise ValueError
