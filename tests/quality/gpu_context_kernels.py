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


class SumsElsewhere(Right):
    """dw is summed on a stream of its own, which the current one ``waits`` for, or not."""

    waits = False

    @classmethod
    def backward(cls, ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        dx, _ = gradients(dy, x, weight, rstd)
        current, own = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        own.wait_stream(current)
        with torch.cuda.stream(own):
            _, dw = gradients(dy, x, weight, rstd)
        for tensor in (dy, x, weight, rstd):
            tensor.record_stream(own)
        dw.record_stream(current)
        if cls.waits:
            current.wait_stream(own)
        return dx, dw, None


class SumsElsewhereAndWaits(SumsElsewhere):
    waits = True


def sums_elsewhere(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: nobody waits for the stream on which dw is summed."""
    y: Tensor = SumsElsewhere.apply(x, weight, eps)
    return y


def sums_elsewhere_and_waits(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Right: the current stream waits for it."""
    y: Tensor = SumsElsewhereAndWaits.apply(x, weight, eps)
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


RIGHT = {
    "right": right,
    "guards_its_device": guards_its_device,
    "sums_elsewhere_and_waits": sums_elsewhere_and_waits,
}
WRONG: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "forward_on_default_stream": (forward_on_default_stream, "stream", "y"),
    "backward_on_default_stream": (backward_on_default_stream, "stream", "dx"),
    "sums_elsewhere": (sums_elsewhere, "stream", "dw"),
    "another_when_captured": (another_when_captured, "graph", "y"),
    "backward_not_recorded": (backward_not_recorded, "graph", "dx"),
    "one_output_when_captured": (one_output_when_captured, "graph", "y"),
    "ambient_device": (ambient_device, "device", ""),
    "leaves_another_device": (leaves_another_device, "device", ""),
}
"""Name -> the kernel, the context in which it is found, and the output; "" for an exception."""
