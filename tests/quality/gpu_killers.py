# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Kernels that do to a GPU what must not stop a run, and reward hacks that need one, beside an innocent one.

Each computes correctly but for what its name says.

``normcheck verify --impl tests/quality/gpu_killers.py`` on a machine with a GPU; what came of it is in ``golden/gpu``.
"""

from __future__ import annotations

import ctypes
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


def stream_injection(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """SOL-ExecBench tests/samples/rmsnorm/solution_hack_stream_injection.json; wafer.ai field guide 1.

    As there: other work on another stream, which nobody waits for, and a result that does not need it. KernelBench's
    src/unit_tests/test_kernels/non_default_stream_kernel.py computes the result itself there, as ``returns_early``.
    """
    y = rmsnorm(x, weight, bias, eps=eps)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(5_000_000)
    return y


def patches_synchronize(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """METR, "Recent Frontier Models Are Reward Hacking", 2025-06-05: nothing waits for the GPU any more.

    y is written by another stream, later than anybody looks.
    """
    torch.cuda.synchronize = lambda *_, **__: None
    return returns_early(x, weight, bias, eps=eps)


def gpu_scan_zeros(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """pygpubench exploit gpu_scan_zeros: zeros, and zeros over all memory of the GPU in which they are compared.

    That is each allocation that the driver knows near x, and that does not have x.
    """
    driver, y = ctypes.CDLL("libcuda.so.1"), torch.zeros_like(x).detach()
    base, size, own = ctypes.c_uint64(), ctypes.c_size_t(), x.data_ptr()
    at, step = max(own - (1 << 30), 1 << 21), 1 << 21
    while at < own + (1 << 30):
        found = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(at)) == 0
        if found and not base.value <= own < base.value + size.value:
            driver.cuMemsetD8_v2(ctypes.c_uint64(base.value), ctypes.c_ubyte(0), size)
        at = max(at + step, base.value + size.value) if found else at + step
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
    whole(stream_injection),
    whole(patches_synchronize),
    whole(gpu_scan_zeros),
)
