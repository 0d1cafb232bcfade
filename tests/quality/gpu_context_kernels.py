"""RMSNorms that are right in eager mode on a GPU and wrong on a stream, in a graph or on another GPU; right twins.

``normcheck verify --impl tests/quality/gpu_context_kernels.py:NAME --op rmsnorm``. ``WRONG`` has the context of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.quality.context_kernels import Right, gradients


def _default(x: Tensor) -> Any:
    return torch.cuda.stream(torch.cuda.default_stream(x.device))


def forward_on_default_stream(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: y is computed on the default stream, whatever stream is current."""
    with _default(x):
        y: Tensor = Right.apply(x, weight, eps)
    return y


class BackwardOnDefaultStream(Right):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        with _default(dy):
            dx, dw = gradients(dy, *ctx.saved_tensors)
        return dx, dw, None


def backward_on_default_stream(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: so are dx and dw."""
    y: Tensor = BackwardOnDefaultStream.apply(x, weight, eps)
    return y


def another_when_captured(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: while a graph is captured it forgets eps."""
    y: Tensor = Right.apply(x, weight, 0.0 if torch.cuda.is_current_stream_capturing() else eps)
    return y


class BackwardNotRecorded(Right):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        if not torch.cuda.is_current_stream_capturing():
            return *gradients(dy, *ctx.saved_tensors), None
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None


def backward_not_recorded(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: its backward launches nothing that a graph records."""
    y: Tensor = BackwardNotRecorded.apply(x, weight, eps)
    return y


_outputs: dict[tuple[Any, ...], Tensor] = {}


def one_output_when_captured(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: all graphs of one shape write y to the same memory."""
    y: Tensor = Right.apply(x, weight, eps)
    if torch.cuda.is_current_stream_capturing():
        y.data = _outputs.setdefault((y.shape, y.dtype), y.detach().clone()).copy_(y.detach())
    return y


def ambient_device(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: it computes on the current device, which need not be that of x."""
    y: Tensor = Right.apply(x.to("cuda"), weight.to("cuda"), eps)
    return y


def leaves_another_device(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: afterwards the device of x is the current one."""
    torch.cuda.set_device(x.device)
    y: Tensor = Right.apply(x, weight, eps)
    return y


def guards_its_device(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Right: the device of x is current only as long as it computes."""
    with torch.cuda.device(x.device):
        y: Tensor = Right.apply(x, weight, eps)
    return y


def waits(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Right, and told: it waits for the GPU, so that no graph can have it."""
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("expected a finite weight")
    y: Tensor = Right.apply(x, weight, eps)
    return y


def right(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    y: Tensor = Right.apply(x, weight, eps)
    return y


RIGHT = {"right": right, "guards_its_device": guards_its_device}
WRONG: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "forward_on_default_stream": (forward_on_default_stream, "stream", "y"),
    "backward_on_default_stream": (backward_on_default_stream, "stream", "dx"),
    "another_when_captured": (another_when_captured, "graph", "y"),
    "backward_not_recorded": (backward_not_recorded, "graph", "dx"),
    "one_output_when_captured": (one_output_when_captured, "graph", "y"),
    "ambient_device": (ambient_device, "device", ""),
    "leaves_another_device": (leaves_another_device, "device", ""),
}
"""Name -> the kernel, the context in which it is found, and the output; "" for an exception."""
