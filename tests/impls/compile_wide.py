"""Compile the kernels of tiles for Hopper, without a GPU: a line with kernel, M, N and bytes of shared memory each.

A kernel that asks for more than a multiprocessor has fails only where it is loaded, and at the one width that asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

from normcheck.impls.kernels import backward, forward, gated, grouped, l2norm, modulated, rotary

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8"}
OPTIONS = ("num_warps", "num_stages", "launch_pdl")


def compiled(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """``kernel`` as a launch with these arguments would have it compiled."""
    named = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
    signature, fixed, facts = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = named[name]
        if isinstance(value, torch.Tensor):
            signature[name], facts[(i,)] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
        elif name in constants or value is None or (value == 1 and name not in forward.ROW_COUNTS):
            signature[name], fixed[(i,)] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and name not in forward.ROW_COUNTS:
                facts[(i,)] = [["tt.divisibility", 16]]
    options = {name: value for name, value in constants.items() if name in OPTIONS}
    source = triton.compiler.ASTSource(kernel, signature, fixed, facts)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def calls(M: int, N: int, dtype: torch.dtype) -> Iterator[Any]:
    """Functions, each of which launches what one op does forward or backward for x of this shape."""

    def of(*shape: int, own: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=own, device="cuda")

    x, w, (rstd, mean) = of(M, N), of(N, own=torch.float32), (of(M, own=torch.float32) for _ in range(2))
    saved = {"rstd": rstd, "mean": mean}
    tiled: dict[str, Any] = {"max_block": 8192}
    for residual in (None, of(M, N)):
        more = {"how": backward._tile(M, N, on_gpu=True, max_block=8192)}
        yield lambda r=residual, more=more: backward.backward(x, x, w, w, **saved, added=r, **more)
        wide = {"how": forward._tile(M, N, on_gpu=True, max_block=16384)}
        yield lambda r=residual, wide=wide: forward.forward(x, w, w, eps=1e-5, residual=r, **wide)
    yield lambda: gated.forward(x, x, w, eps=1e-5, **tiled)
    yield lambda: gated.backward(x, x, x, w, rstd=rstd, **tiled)
    yield lambda: gated.backward(x, x, x, w, rstd=rstd, before=True, **tiled)
    yield lambda: l2norm.forward(x, eps=1e-5)
    yield lambda: l2norm.backward(x, x, rstd=rstd, eps=1e-5)
    v, of_sum = of(1, N), {"source": x, "gate": of(1, N), "added": x}
    yield lambda: modulated.forward(x, v, v, eps=1e-5, centered=True)
    yield lambda: modulated.backward(x, x, v, rstd=rstd, mean=mean)
    yield lambda: modulated.forward(x, v, v, eps=1e-5, centered=True, residual=x, gate=v)
    yield lambda: modulated.backward(x, x, v, rstd=rstd, mean=mean, **of_sum)
    split, one = of(M, 1, N), of(1, own=torch.float32)  # made, as a torch without CUDA cuts none of a fake tensor
    yield lambda: grouped.forward(split, one, one, eps=1e-5, groups=1, silu=True)
    heads, weight, angles = of(M, 2048), of(512, own=torch.float32), of(M, 128, own=torch.float32)
    of_heads: dict[str, Any] = {"q_heads": 2, "k_heads": 1}
    for paired in (False, True):
        own = (heads, weight, weight, angles, angles), {**of_heads, "interleaved": paired}
        yield lambda own=own: rotary.forward(*own[0], eps=1e-5, **own[1])
        yield lambda own=own: rotary.backward(heads, *own[0], rstd=of(M, 3, own=torch.float32), **own[1])
    yield lambda: grouped.backward(split, split, one, one, mean=mean, rstd=rstd, groups=1, silu=True)


def every(shapes: tuple[tuple[int, int], ...], dtype: torch.dtype) -> Iterator[tuple[str, int, int, int]]:
    """(kernel, M, N, bytes of shared memory) of each kernel that is launched for one of ``shapes``."""
    launched: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], int, int]] = {}
    at = (0, 0)

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        kinds = [a.dtype if isinstance(a, torch.Tensor) else a for a in arguments]
        launched.setdefault(f"{kernel.fn.__name__} {kinds} {constants}", (kernel, arguments, constants, *at))

    for module in (backward, forward, gated, grouped, l2norm, modulated, rotary):
        module.launch = note  # type: ignore[attr-defined]
    backward._starts_early = lambda device: True  # type: ignore[assignment]
    gated.room_on = modulated.room_on = lambda device: False  # type: ignore[attr-defined, assignment]
    with FakeTensorMode(allow_non_fake_inputs=True):
        for at in shapes:
            for call in calls(*at, dtype):
                call()
    for kernel, arguments, constants, M, N in launched.values():
        yield kernel.fn.__name__, M, N, compiled(kernel, arguments, constants).metadata.shared


if __name__ == "__main__":
    for name, M, N, shared in every(((300, 4099), (300, 8192)), torch.float32):
        print(name, M, N, shared)
