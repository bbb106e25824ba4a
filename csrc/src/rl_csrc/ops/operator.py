"""Operator registration: kernels, `torch.library` schema, fake implementation and gradient of an op; argument checks.

An eager call goes straight to the device's kernel, because torch's dispatcher takes longer than a small op. Under
torch.compile, export and tensor subclasses the op is `torch.ops.rl_csrc.<name>`. Both have the same gradient.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.library import custom_op

from rl_csrc import reference
from rl_csrc.errors import ArgumentError
from rl_csrc.native import has_cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_KERNEL_MODULES = {"cpu": "rl_csrc.cpu", "cuda": "rl_csrc.cuda"}
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def kernel(name: str, x: Tensor) -> Callable[..., Any]:
    """Implementation of op `name` for x's device and dtype: a kernel, or else the plain-torch reference."""
    return _find(name, "cpu" if x.is_cpu else x.device.type, x.dtype in _KERNEL_DTYPES)


@cache
def _find(name: str, device_type: str, has_dtype: bool) -> Callable[..., Any]:
    module = _kernels(device_type) if has_dtype else None
    return getattr(module, name, None) or getattr(reference, name)


@cache
def _kernels(device_type: str) -> Any:
    """Kernel module of a device type; None if it was not built."""
    name = _KERNEL_MODULES.get(device_type)
    built = device_type == "cpu" or has_cuda()
    return importlib.import_module(name) if name and built else None


class Operator:
    """Registered op. A call runs the kernel, records it for autograd, or goes through torch's dispatcher.

    Args:
        name: Under which `torch.ops.rl_csrc` has it.
        schema: Arguments and results as torch.library writes them. A result cannot be None.
        run: Implementation, with the arguments of the schema. A result of None stays None in an eager call, and is an
            empty tensor for the dispatcher (see `filled`).
        fake: Fake implementation: the same arguments to empty results of the same shapes.
        save: (ctx, arguments, results): saves on ctx what backward needs. A result may be None or empty.
        backward: (ctx, which differentiable arguments need a gradient, gradients of the results) to the gradients of
            the differentiable arguments.
        differentiable: Positions of the arguments that may want a gradient.
        differentiable_results: Positions of the results that have a gradient. The gradient of an unused one is None.
        num_outputs: Number of results that a caller uses. The others, which backward needs, are no outputs of an eager
            call with a gradient: autograd takes a microsecond for each.
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
        differentiable_results: tuple[int, ...] = (0,),
        num_outputs: int = 1,
    ) -> None:
        self._run = run
        self._differentiable = differentiable
        self._function: Any = None

        def run_filled(*arguments: Any) -> Any:
            results = run(*arguments)
            return tuple(filled(x, results[0]) for x in results) if isinstance(results, tuple) else results

        registered = cast("Any", custom_op(f"rl_csrc::{name}", mutates_args=(), schema=schema))(run_filled)
        registered.register_fake(fake)
        self._library_op = getattr(torch.ops.rl_csrc, name).default
        if save is not None and backward is not None:
            schema_of = self._library_op._schema
            constant = [i for i in range(len(schema_of.returns)) if i not in differentiable_results]
            constant_outputs = [i for i in constant if i < num_outputs]

            def forward(ctx: Any, *given: Any) -> Any:
                results = run(*given[-1])
                save(ctx, given[-1], results)
                _mark(ctx, results, constant_outputs)
                return results[:num_outputs]

            def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
                return *backward(ctx, ctx.needs_input_grad[:-1], *grads), None

            def library_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
                save(ctx, inputs, output)
                _mark(ctx, output, constant)

            def library_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
                found = backward(ctx, [ctx.needs_input_grad[i] for i in differentiable], *grads)
                every: list[Any] = [None] * len(schema_of.arguments)
                for position, gradient in zip(differentiable, found, strict=True):
                    every[position] = gradient
                return tuple(every)

            # The differentiable arguments, and a tuple of all: every argument of `apply` costs 0.2 us, and with a
            # setup_context it would inspect signatures (85 us).
            methods = {"forward": staticmethod(forward), "backward": staticmethod(_once(gradients))}
            self._function = type(name, (torch.autograd.Function,), methods)
            registered.register_autograd(library_gradients, setup_context=library_save)

    def __call__(self, *arguments: Any) -> Any:
        """Run the op on checked arguments."""
        if is_compiling() or type(arguments[0]) not in _PLAIN:
            return self._library_op(*arguments)
        if self._function is not None and _is_grad_enabled():
            for position in self._differentiable:
                x = arguments[position]
                if x is not None and x.requires_grad:
                    return self._function.apply(*[arguments[i] for i in self._differentiable], arguments)
        return self._run(*arguments)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
# A small op takes a few microseconds, of which each look into torch's module is 0.03.
_is_grad_enabled = torch.is_grad_enabled
_FLOAT32, _FLOAT64, _INT64, _BOOL = torch.float32, torch.float64, torch.int64, torch.bool


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    return cast("Any", torch.autograd.function.once_differentiable)(backward)


def _mark(ctx: Any, results: tuple[Tensor | None, ...], constant: list[int]) -> None:
    ctx.set_materialize_grads(False)  # an unused result costs no backward pass
    marked = [results[i] for i in constant if results[i] is not None]
    if marked:
        ctx.mark_non_differentiable(*marked)


def like_first(x: Tensor, *_rest: Any) -> Tensor:
    """Fake implementation of an op whose result has the shape and dtype of its first argument."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def filled(x: Tensor | None, like: Tensor) -> Tensor:
    """Optional result as a schema needs it: an empty tensor for None."""
    return like.new_empty(0) if x is None else x


def emptied(x: Tensor | None) -> Tensor | None:
    """Inverse of `filled`: None for an empty result."""
    return x if x is not None and x.numel() else None


def split(value: float | Tensor) -> tuple[Tensor | None, float]:
    """Number or tensor as the two arguments that a schema has for it: (tensor or None, number)."""
    return (value, 1.0) if isinstance(value, Tensor) else (None, float(value))


def float_type(x: Tensor) -> torch.dtype:
    """Dtype of the results: float64 where `x` is float64, else float32."""
    return _FLOAT64 if x.dtype is _FLOAT64 else _FLOAT32


def check_one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ArgumentError for an option that is not one of `allowed`."""
    if value not in allowed:
        raise ArgumentError(f"{name} is {value!r}; allowed are {', '.join(allowed)}.")


def check_same_length(name: str, x: Tensor | None, num: int) -> None:
    """Raise ArgumentError for a per-token tensor that is not `[num]`."""
    if x is not None and (x.dim() != 1 or x.size(0) != num):
        raise ArgumentError(f"{name} has shape {list(x.shape)}; wanted [{num}], one entry per token.")


def check_rows(logits: Tensor, labels: Tensor, row_index: Tensor | None) -> None:
    """Raise ArgumentError unless logits are `[R, V]` and labels `[T]`, with T = R unless there is a row index."""
    if logits.dim() != 2 or labels.dim() != 1:
        raise ArgumentError(
            f"logits has shape {list(logits.shape)} and labels {list(labels.shape)}; "
            "wanted [rows, vocabulary] and [tokens]. Flatten the batch first."
        )
    if row_index is None and labels.size(0) != logits.size(0):
        raise ArgumentError(
            f"{labels.shape[0]} labels for {logits.shape[0]} rows of logits; "
            "give as many, or say with row_index which row each scores."
        )
    if row_index is not None and row_index.shape != labels.shape:
        raise ArgumentError(
            f"row_index has shape {list(row_index.shape)}; wanted that of labels, {list(labels.shape)}."
        )


def integers(x: Tensor) -> Tensor:
    """Contiguous int64 tensor with the values of x; x itself if it is one."""
    return x if x.dtype is _INT64 and x.is_contiguous() else x.to(_INT64).contiguous()


def optional_integers(x: Tensor | None) -> Tensor | None:
    """`integers` of x; None for None."""
    return None if x is None else integers(x)


def booleans(mask: Tensor) -> Tensor:
    """Contiguous bool tensor of a 0/1 mask; the mask itself if it is one."""
    return mask if mask.dtype is _BOOL and mask.is_contiguous() else mask.to(_BOOL).contiguous()


def optional_booleans(mask: Tensor | None) -> Tensor | None:
    """`booleans` of a mask; None for None."""
    return None if mask is None else booleans(mask)


def floats(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Detached contiguous tensor with the values of x in float32, or in float64 if `like` (default: x) is float64."""
    wanted = _FLOAT64 if (x if like is None else like).dtype is _FLOAT64 else _FLOAT32
    if x.dtype is wanted and not x.requires_grad and x.is_contiguous():
        return x
    return x.detach().to(wanted).contiguous()


def optional_floats(x: Tensor | None, like: Tensor) -> Tensor | None:
    """`floats` of x; None for None."""
    return None if x is None else floats(x, like)


def per_token(value: float | Tensor, num: int, name: str) -> tuple[Tensor | None, float]:
    """Per-token option as the two arguments of a schema: (float32 tensor `[num]` or None, number)."""
    if type(value) is float:
        return None, value
    if not isinstance(value, Tensor):
        return None, float(value)
    if value.dim() == 0:
        value = value.expand(num)
    check_same_length(name, value, num)
    return value.detach().to(_FLOAT32).contiguous(), 1.0
