"""RMSNorms that are right in eager mode and wrong in a context, each with a right twin that looks like it.

``normcheck verify --impl tests/quality/context_kernels.py:NAME``. ``WRONG`` has the context of each wrong one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from normcheck import Implementation

Saved = dict[str, Tensor]


def plain(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    xf = x.float()
    rstd = torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
    return (xf * rstd * weight.float()).to(x.dtype), rstd


def gradients(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dx, and dw in fp64, so that a sum over rows has no order that matters."""
    xhat, wdy = x.float() * rstd, dy.float() * weight.float()
    dx = rstd * (wdy - xhat * (wdy * xhat).mean(-1, keepdim=True))
    dw = (dy.double() * xhat.double()).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dw.to(weight.dtype)


class Right(torch.autograd.Function):
    """A custom Function that saves what it needs, as most do. Each fault is a subclass that changes one method."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = plain(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dx, dw = gradients(dy, *ctx.saved_tensors)
        return dx, dw, None


class OnlyWhatIsWanted(Right):
    """Right: computes no gradient that nobody wants."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dx, dw = gradients(dy, *ctx.saved_tensors)
        return dx if ctx.needs_input_grad[0] else None, dw if ctx.needs_input_grad[1] else None, None


class FrozenWeight(Right):
    """Wrong: without a gradient of the weight it takes the factor to be 1, in dx as well."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return gradients(dy, x, torch.ones_like(weight), rstd)[0], None, None
        return *gradients(dy, x, weight, rstd), None


class OverwritesSaved(Right):
    """Wrong in a second backward: the first one uses the memory of what was saved."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dx, dw = gradients(dy, *ctx.saved_tensors)
        ctx.saved_tensors[2].data.mul_(2)
        return dx, dw, None


class FreesItself(Right):
    """Right: it keeps its state beside autograd and frees it, so that a second backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = plain(x, weight, eps)
        ctx.own = (x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        own, ctx.own = ctx.own, None
        dx, dw = gradients(dy, *own)
        return dx, dw, None


_dw_buffers: dict[tuple[Any, ...], Tensor] = {}
_calls = [0]


class OneBufferForDw(Right):
    """Wrong in micro-batches: dw lies in one of eight buffers, and autograd keeps the first and adds to it."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dx, dw = gradients(dy, *ctx.saved_tensors)
        _calls[0] += 1
        key = (dw.shape, dw.dtype, _calls[0] % _RING)
        return dx, _dw_buffers.setdefault(key, torch.empty_like(dw)).copy_(dw).view_as(dw), None


_RING = 8
_ring: dict[tuple[Any, ...], Tensor] = {}


def function(of: type[Right]) -> Callable[..., Tensor]:
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        y: Tensor = of.apply(x, weight, eps)
        return y

    return forward


def ring(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: y lies in one of eight buffers, which are used in turn."""
    y: Tensor = Right.apply(x, weight, eps)
    _calls[0] += 1
    with torch.no_grad():
        kept = _ring.setdefault((y.shape, y.dtype, _calls[0] % _RING), torch.empty_like(y)).copy_(y)
    y.data = kept
    return y


def late(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: a thread writes y once more, 30 ms after it was returned."""
    y: Tensor = Right.apply(x, weight, eps)

    def write() -> None:
        time.sleep(0.03)
        y.data.add_(1)

    threading.Thread(target=write, daemon=True).start()
    return y


def no_grad_is_quick(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: if nobody wants gradients, it forgets eps."""
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    y: Tensor = Right.apply(x, weight, eps if wanted else 0.0)
    return y


def inference_mode_is_quick(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: as engines call it, it forgets eps; under torch.no_grad() it does not."""
    y: Tensor = Right.apply(x, weight, 0.0 if torch.is_inference_mode_enabled() else eps)
    return y


def in_place_without_gradients(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: if nobody wants gradients, it scales x in place."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        y: Tensor = Right.apply(x, weight, eps)
        return y
    x.mul_(torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps))
    return (x.float() * weight.float()).to(x.dtype)


def one_buffer_without_gradients(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: if nobody wants gradients, y lies in the one buffer of its shape, which the next call writes to."""
    y: Tensor = Right.apply(x, weight, eps)
    if y.requires_grad:
        return y
    return _ring.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)


def ring_without_gradients(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: if nobody wants gradients, y lies in one of eight buffers, which are used in turn."""
    y: Tensor = Right.apply(x, weight, eps)
    if y.requires_grad:
        return y
    _calls[0] += 1
    return _ring.setdefault((y.shape, y.dtype, _calls[0] % _RING), torch.empty_like(y)).copy_(y)


def no_grad_saves_nothing(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Right: if nobody wants gradients, it saves nothing."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        y: Tensor = Right.apply(x, weight, eps)
        return y
    return plain(x, weight, eps)[0]


_scratch: dict[tuple[Any, ...], Tensor] = {}


def shared_scratch(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, mine: object = None) -> Tensor:
    """Wrong: two threads share the memory in which x becomes fp32. Right with a key that is the thread's own."""
    key = (x.shape, x.dtype, x.device, mine)
    scratch = _scratch.setdefault(key, torch.empty(x.shape, dtype=torch.float32, device=x.device))
    scratch.copy_(x.detach())
    time.sleep(0.0005)  # another thread takes its turn
    y: Tensor = Right.apply(x, weight, eps)
    rstd = torch.rsqrt(scratch.square().mean(-1, keepdim=True) + eps)
    y.data = (scratch * rstd * weight.detach().float()).to(x.dtype)
    return y


def own_scratch(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    return shared_scratch(x, weight, bias, eps=eps, mine=threading.get_ident())


_kept: dict[tuple[Any, ...], Any] = {}


def converted_by_address(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: without gradients it keeps the converted weight by its address, at which other values may be by now."""
    if torch.is_grad_enabled():
        return function(Right)(x, weight, bias, eps=eps)
    key = ("converted", weight.data_ptr(), weight.shape, weight.dtype)
    return plain(x, _kept.setdefault(key, weight.double()), eps)[0]


def frozen_by_address(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: it keeps the converted weight by its address if the weight is frozen."""
    if weight.requires_grad:
        return function(Right)(x, weight, bias, eps=eps)
    key = ("frozen", weight.data_ptr(), weight.shape, weight.dtype)
    return plain(x, _kept.setdefault(key, weight.double()), eps)[0]


def converted_by_address_and_version(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: a new tensor at the address of an old one has the version that this one had."""
    if torch.is_grad_enabled():
        return function(Right)(x, weight, bias, eps=eps)
    version = 0 if weight.is_inference() else weight._version
    key = ("version", version, weight.data_ptr(), weight.shape, weight.dtype)
    return plain(x, _kept.setdefault(key, weight.double()), eps)[0]


def vectors_without_gradients(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: as engines call it, the sum of a row takes whole vectors of 8 alone."""
    whole = x.shape[-1] // 8 * 8
    if torch.is_grad_enabled() or not whole:
        return function(Right)(x, weight, bias, eps=eps)
    mean = x[..., :whole].float().square().sum(-1, keepdim=True) / x.shape[-1]
    return (x.float() * torch.rsqrt(mean + eps) * weight.float()).to(x.dtype)


_of_tensors = WeakIdKeyDictionary()


def converted_by_version(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Right: it keeps the converted weight as long as that tensor is there and has not been written to."""
    if torch.is_grad_enabled():
        return function(Right)(x, weight, bias, eps=eps)
    version, kept = _of_tensors.get(weight, (-1, weight))
    if version != weight._version:
        kept = weight.double()
        _of_tensors[weight] = weight._version, kept
    return plain(x, kept, eps)[0]


_last: list[Tensor] = []


def last_frozen(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: it keeps what it made of the last frozen weight, whatever is written to that tensor."""
    if weight.requires_grad:
        return function(Right)(x, weight, bias, eps=eps)
    if not _last or _last[0] is not weight:
        _last[:] = weight, weight.double()
    return plain(x, _last[1], eps)[0]


def number_of_first_call(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: without gradients the largest |x| of the first call of a shape, a number, scales the x of all calls."""
    if torch.is_grad_enabled():
        return function(Right)(x, weight, bias, eps=eps)
    own = float(x.abs().max())
    scale = _kept.setdefault(("largest", x.shape, x.dtype), own)
    return plain(x.float() / own * scale, weight, eps)[0].to(x.dtype)


def pointer_of_first_call(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: without gradients all calls of a shape read the x to which the first one had a pointer."""
    if torch.is_grad_enabled():
        return function(Right)(x, weight, bias, eps=eps)
    return plain(_kept.setdefault(("x", x.shape, x.dtype), x), weight, eps)[0]


_of_threads: dict[tuple[Any, ...], Tensor] = {}


def weight_by_thread(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: each thread but the main one keeps the weight of its first call."""
    y: Tensor = Right.apply(x, weight, eps)
    if threading.current_thread() is not threading.main_thread():
        key = (threading.get_ident(), weight.shape, weight.dtype)
        y.data = plain(x.detach(), _of_threads.setdefault(key, weight.detach().clone()), eps)[0]
    return y


_lock = threading.Lock()


def hangs(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: off the main thread it waits for a lock that it holds."""
    with _lock:
        if threading.current_thread() is not threading.main_thread():
            _lock.acquire()
        y: Tensor = Right.apply(x, weight, eps)
        return y


def main_thread_only(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: in another thread than the main one it takes another eps."""
    main = threading.current_thread() is threading.main_thread()
    y: Tensor = Right.apply(x, weight, eps if main else eps * 2)
    return y


def many_threads(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: with several torch threads it leaves out the first row."""
    y: Tensor = Right.apply(x, weight, eps)
    if torch.get_num_threads() > 1:
        y.data[:1] = 0
    return y


def sums_by_thread(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Right: with several torch threads it adds in another order, inside the bound."""
    xf, count = x.float(), torch.get_num_threads()
    squares = xf.square()
    parts = torch.stack([part.sum(-1) for part in squares.tensor_split(count, -1)])
    rstd = torch.rsqrt(parts.sum(0).unsqueeze(-1) / x.shape[-1] + eps)
    return (xf * rstd * weight.float()).to(x.dtype)


def no_autocast(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Told, unless asked for: under autocast y comes in another dtype than that of x."""
    y: Tensor = Right.apply(x, weight, eps)
    other = torch.float32 if x.dtype != torch.float32 else torch.bfloat16
    return y.to(other) if torch.is_autocast_enabled("cpu") else y


def another_when_compiled(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: inside torch.compile it forgets eps."""
    y: Tensor = Right.apply(x, weight, 0.0 if torch.compiler.is_compiling() else eps)
    return y


def plain_when_compiled(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Right: inside torch.compile it is torch's own formula, whose gradients torch derives."""
    if torch.compiler.is_compiling():
        return plain(x, weight, eps)[0]
    y: Tensor = Right.apply(x, weight, eps)
    return y


class PackedDy(Right):
    """Wrong: takes the last stride of dy for 1, as it is of most."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        return Right.backward(ctx, dy.mT.reshape(dy.shape) if dy.stride(-1) != 1 else dy)


class RefusesColumns(Right):
    """Right: a dy whose last stride is not 1 is refused loudly."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if dy.stride(-1) not in (0, 1) and min(dy.shape) > 1:
            raise RuntimeError("dy.stride(-1) must be 1")
        return Right.backward(ctx, dy)


class DxInX(Right):
    """Wrong: an x that is no leaf is taken for a temporary one, and dx is written to its memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.may_write = not x.is_leaf
        return Right.forward(ctx, x, weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dx, dw, _ = Right.backward(ctx, dy)
        x = ctx.saved_tensors[0]
        return x.data.copy_(dx) if ctx.may_write and dx is not None else dx, dw, None


class DwOfLeaves(Right):
    """Wrong: the gradient of a weight that was computed, such as 1 + w, is forgotten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.is_leaf = weight.is_leaf
        return Right.forward(ctx, x, weight, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dx, dw, _ = Right.backward(ctx, dy)
        return dx, dw if ctx.is_leaf else None, None


class OfDefaultDtype(Right):
    """Wrong: rstd is kept in torch's default dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = plain(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd.to(torch.get_default_dtype()))
        return y


def checkpointed(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Right: its backward computes it once more, by a way that ``torch.autograd.grad`` cannot go."""
    y: Tensor = checkpoint(Right.apply, x, weight, eps, use_reentrant=True)
    return y


RIGHT = {
    "right": function(Right),
    "refuses_columns": function(RefusesColumns),
    "checkpointed": checkpointed,
    "only_what_is_wanted": function(OnlyWhatIsWanted),
    "frees_itself": function(FreesItself),
    "no_grad_saves_nothing": no_grad_saves_nothing,
    "own_scratch": own_scratch,
    "converted_by_version": converted_by_version,
    "sums_by_thread": sums_by_thread,
    "no_autocast": no_autocast,
    "plain_when_compiled": plain_when_compiled,
}
WRONG = {
    "no_grad_is_quick": (no_grad_is_quick, "inference", "y"),
    "inference_mode_is_quick": (inference_mode_is_quick, "inference", "y"),
    "in_place_without_gradients": (in_place_without_gradients, "inference", "x"),
    "one_buffer_without_gradients": (one_buffer_without_gradients, "inference", "y"),
    "frozen_weight": (function(FrozenWeight), "frozen", "dx"),
    "overwrites_saved": (function(OverwritesSaved), "again", "dx"),
    "one_buffer_for_dw": (function(OneBufferForDw), "again", "dw"),
    "packed_dy": (function(PackedDy), "again", "dx"),
    "dx_in_x": (function(DxInX), "again", "x"),
    "dw_of_leaves": (function(DwOfLeaves), "again", "dw"),
    "of_default_dtype": (function(OfDefaultDtype), "again", "dx"),
    "ring": (ring, "again", "y"),
    "ring_without_gradients": (ring_without_gradients, "again", "y"),
    "late": (late, "again", "y"),
    "shared_scratch": (shared_scratch, "thread", "y"),
    "converted_by_address": (converted_by_address, "inference", "y"),
    "converted_by_address_and_version": (converted_by_address_and_version, "inference", "y"),
    "vectors_without_gradients": (vectors_without_gradients, "inference", "y"),
    "frozen_by_address": (frozen_by_address, "inference", "y"),
    "last_frozen": (last_frozen, "inference", "y"),
    "number_of_first_call": (number_of_first_call, "inference", "y"),
    "pointer_of_first_call": (pointer_of_first_call, "inference", "y"),
    "weight_by_thread": (weight_by_thread, "thread", "y"),
    "hangs": (hangs, "thread", ""),
    "main_thread_only": (main_thread_only, "thread", "y"),
    "another_when_compiled": (another_when_compiled, "compile", "y"),
    "many_threads": (many_threads, "threads", "y"),
}
"""Name -> the kernel, the context in which it is found, and the output; "" if it does not return."""

SHAPES = ((3, 129), (20, 24), (40, 33))
IMPLEMENTATIONS = tuple(
    Implementation(name=name, op="rmsnorm", forward=forward, biases=(False,), shapes=SHAPES)
    for name, forward in {**RIGHT, **{name: forward for name, (forward, *_) in WRONG.items()}}.items()
)
