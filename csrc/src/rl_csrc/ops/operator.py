"""Operators: one op with its kernels, its `torch.library` schema, its fake implementation and its gradient.

An eager call goes straight to the device's kernel: torch's dispatcher takes longer than a small op. Under
torch.compile, export and tensor subclasses it is `torch.ops.rl_csrc.<name>`. Both have the same gradient.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.library import custom_op

from rl_csrc import reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_KERNEL_MODULES = {"cpu": "rl_csrc.cpu", "cuda": "rl_csrc.cuda"}
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def kernel(name: str, x: Tensor) -> Callable[..., Any]:
    """The function that runs on a tensor like `x`: its device's kernel, or plain torch for other devices and dtypes."""
    return _find(name, "cpu" if x.is_cpu else x.device.type, x.dtype in _KERNEL_DTYPES)


@cache
def _find(name: str, device_type: str, has_dtype: bool) -> Callable[..., Any]:
    module = _kernels(device_type) if has_dtype else None
    return getattr(module, name, None) or getattr(reference, name)


@cache
def _kernels(device_type: str) -> Any:
    """The kernel module of a device type, or None where it was not built."""
    name = _KERNEL_MODULES.get(device_type)
    built = device_type == "cpu" or importlib.util.find_spec("rl_csrc._cuda") is not None
    return importlib.import_module(name) if name and built else None


class Operator:
    """An op that a call runs directly, or records for autograd, or hands to the dispatcher. Made at import, once.

    Args:
        name: Under which `torch.ops.rl_csrc` has it.
        schema: Arguments and results as torch.library writes them. A result cannot be None.
        run: What it does, with the arguments of the schema. A result that is None is empty (as `filled` makes it, like
            the first one) for the dispatcher and for autograd, and stays None in an eager call without a gradient.
        fake: The same arguments to empty results of the same shapes.
        save: `setup_context` of autograd, for an op with a gradient: (ctx, arguments, results).
        backward: (ctx, gradients of the results) to the gradients of the arguments.
        differentiable: Positions of the arguments that may want a gradient.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        run: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        save: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
        differentiable: tuple[int, ...] = (0,),
    ) -> None:
        self._run = run
        self._differentiable = differentiable
        self._function: Any = None

        def run_filled(*arguments: Any) -> Any:
            results = run(*arguments)
            return tuple(filled(x, results[0]) for x in results) if isinstance(results, tuple) else results

        registered = cast("Any", custom_op(f"rl_csrc::{name}", mutates_args=(), schema=schema))(run_filled)
        registered.register_fake(fake)
        if save is not None and backward is not None:
            registered.register_autograd(backward, setup_context=save)

            def forward(ctx: Any, *arguments: Any) -> Any:  # with setup_context, apply would inspect signatures: 85 us
                results = run_filled(*arguments)
                save(ctx, arguments, results)
                return results

            methods = {"forward": staticmethod(forward), "backward": staticmethod(_once(backward))}
            self._function = type(name, (torch.autograd.Function,), methods)
        self._library_op = getattr(torch.ops.rl_csrc, name).default

    def __call__(self, *arguments: Any) -> Any:
        """Run it on arguments that are checked."""
        if torch.compiler.is_compiling() or type(arguments[0]) not in _PLAIN:
            return self._library_op(*arguments)
        if self._function is not None and torch.is_grad_enabled():
            for position in self._differentiable:
                x = arguments[position]
                if x is not None and x.requires_grad:
                    return self._function.apply(*arguments)
        return self._run(*arguments)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    return cast("Any", torch.autograd.function.once_differentiable)(backward)


def like_first(x: Tensor, *_rest: Any) -> Tensor:
    """The fake of an op whose result is as its first argument is."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def filled(x: Tensor | None, like: Tensor) -> Tensor:
    """An optional result as a schema returns it: empty for None."""
    return like.new_empty(0) if x is None else x


def emptied(x: Tensor) -> Tensor | None:
    """The same back: None for an empty result."""
    return x if x.numel() else None


def split(value: float | Tensor) -> tuple[Tensor | None, float]:
    """A number or tensor as the two arguments a schema has for it."""
    return (value, 1.0) if isinstance(value, torch.Tensor) else (None, float(value))


def number(tensor: Tensor | None, scalar: float) -> float | Tensor:
    """The two arguments of a schema as the number or tensor they are."""
    return scalar if tensor is None else tensor


def float_type(x: Tensor) -> torch.dtype:
    """What results are in: float32, or float64 where `x` is."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
