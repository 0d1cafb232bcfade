# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Kernels that do to a GPU what must not stop a run; each is right otherwise, and each stands beside an innocent one.

``normcheck verify --impl tests/quality/gpu_killers.py`` on a machine with a GPU; what came of it is in ``golden/gpu``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from normcheck import Implementation


def rmsnorm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """The right answer, by torch; gradients by autograd."""
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


@triton.jit
def far_store(ptr, AWAY: tl.constexpr):
    """Store where nothing is."""
    tl.store(ptr + tl.program_id(0).to(tl.int64) + AWAY, 1.0)


@triton.jit
def odd_store(ptr):
    """Store a float at an address that is not a multiple of four."""
    address = ptr.to(tl.int64) + 1
    tl.store(address.to(tl.pointer_type(tl.float32)), 1.0)


@triton.jit
def wait_for(flag_ptr):
    """Wait for what nobody writes."""
    while tl.load(flag_ptr, volatile=True) == 0:
        pass


def illegal_access(x: Tensor) -> None:
    """An illegal memory access."""
    far_store[(1,)](torch.zeros(8, device=x.device), AWAY=1 << 40)


def misaligned_address(x: Tensor) -> None:
    """A misaligned address."""
    odd_store[(1,)](torch.zeros(8, device=x.device))


def device_assert(x: Tensor) -> None:
    """A device-side assertion."""
    torch.zeros(8, device=x.device)[torch.full((1,), 1000, device=x.device)]


def endless_kernel(x: Tensor) -> None:
    """A kernel that never ends."""
    wait_for[(1,)](torch.zeros(1, dtype=torch.int32, device=x.device))


def out_of_memory(x: Tensor) -> None:
    """More memory than there is."""
    torch.empty(1 << 46, dtype=torch.uint8, device=x.device)


def surfaces_later(x: Tensor) -> None:
    """An illegal access on another stream, behind a pause: whoever looks next would be told."""
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        far_store[(1,)](torch.zeros(8, device=x.device), AWAY=1 << 40)


def killing(what: Callable[[Tensor], None], *, above: int = 0) -> Implementation:
    """rmsnorm that does ``what`` where N > ``above``."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        if x.shape[-1] > above:
            what(x)
        return rmsnorm(x, weight, bias, eps=eps)

    return Implementation(name=what.__name__, op="rmsnorm", forward=forward, dtypes=("fp32",))


def wrong_device(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """y on the CPU."""
    return rmsnorm(x, weight, bias, eps=eps).detach().cpu()


def returns_early(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """y is written by another stream that nobody waits for."""
    y = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        y.copy_(rmsnorm(x, weight, bias, eps=eps).detach())
    return y


def whole(forward: Callable[..., Tensor]) -> Implementation:
    """A function as an implementation."""
    return Implementation(name=forward.__name__, op="rmsnorm", forward=forward, dtypes=("fp32",))


IMPLEMENTATIONS = (
    whole(rmsnorm),
    killing(illegal_access, above=16),
    killing(misaligned_address),
    killing(device_assert),
    killing(endless_kernel),
    killing(out_of_memory),
    killing(surfaces_later),
    whole(wrong_device),
    whole(returns_early),
)
