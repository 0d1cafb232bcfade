"""Compile the kernels that hold rows for Hopper, without a GPU: a line with kernel, N and bytes of shared memory each.

What Gluon calls things differs between versions of Triton, and a kernel that asks for too much fails only here.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from normcheck.impls.kernels import backward, forward, held

OTHER_TYPES = dict.fromkeys(("weight_ptr", "mean_ptr", "rstd_ptr", "dw_ptr", "gate_ptr", "dgate_ptr"), "*fp32")
OTHER_TYPES |= {"eps": "fp32", "lower": "fp32", "upper": "fp32", "bits_ptr": "*u8"}
KERNELS = ((held.held_forward_kernel, forward), (held.held_gradients_kernel, backward))


OF_A_RESIDUAL = ("residual_ptr", "sum_ptr", "residual_stride", "added_ptr", "added_stride")
OF_A_GATE = ("gate_ptr", "dgate_ptr", "source_ptr", "source_stride")
ABSENT = {
    "bits": ("bias_ptr", "db_ptr", "dresidual_ptr", *OF_A_RESIDUAL, *OF_A_GATE),
    "residual": ("bias_ptr", "db_ptr", "dresidual_ptr", "bits_ptr", *OF_A_GATE),
    "gate": ("bits_ptr",),
}


def compiled(kernel: Any, module: Any, N: int, kind: str) -> Any:
    """``kernel`` as it is chosen for rows of N in bf16 with an fp32 weight: with a bitmask; with a residual, which has
    bf16 too; or with one, a gate of it, and a bias.
    """
    added = kind != "bits"
    if module is forward:
        constants = forward.hold(N, 2, 4 if added else 2).constants(N, 2)
    else:
        facts = {"with_bias": kind == "gate", "with_residual": added, "with_gate": kind == "gate"}
        constants = backward.hold(N, 2, 4, **facts).looped(N, 2)
    fixed: dict[str, Any] = {**constants, "ZERO_CENTERED": False, "ROUNDS_XHAT": False, "GATE": 0, "SIGMOID": False}
    fixed |= dict.fromkeys(ABSENT[kind])
    options = {name: fixed.pop(name) for name in ("num_warps", "num_ctas")}
    signature, constants, facts = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in fixed:
            signature[name], constants[(i,)] = "constexpr", fixed[name]
        else:
            signature[name] = OTHER_TYPES.get(name, "*bf16" if name.endswith("_ptr") else "i32")
            if name.endswith(("_ptr", "_stride")) or name == "N":
                facts[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, constants, facts)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


if __name__ == "__main__":
    for kernel, module in KERNELS:
        for N in (8704, 32768, 49152, 65536):
            for kind in ABSENT:
                made = compiled(kernel, module, N, kind)
                assert "cp.async.cg.shared.global" in made.asm["ptx"]
                assert N <= 32768 or not 48000 < made.metadata.shared <= 49152, "Triton would not ask for what it needs"
                print(kernel.fn.__name__, N, made.metadata.shared)
