"""This project's own Triton kernels, for every op: on a GPU, and interpreted on a CPU.

After a residual the stored sum is normed, so that a backward has of it what the forward normed. Codes are made of y in
fp32, by the reciprocal of their scale.

torch, triton and the kernels are imported when the first case runs: discovery reads this module on machines without
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from normcheck.cases.ops import (
    FUSED_ADD,
    GATED,
    GROUPED,
    LENGTHS,
    MODULATED,
    MODULATED_ADD,
    OPS,
    QUANTISED,
    ROTARY,
    TABLE,
)
from normcheck.impls.implementation import Implementation
from normcheck.impls.triton_calls import (
    LEAST_SCALE,
    Kernels,
    backward,
    forward,
    gate_backward,
    gate_forward,
    grouped_backward,
    grouped_forward,
    length_backward,
    length_forward,
    modulated_backward,
    modulated_forward,
    own_kernels,
    quantise,
    rotary_backward,
    rotary_forward,
)

if TYPE_CHECKING:
    pass

ON_GPUS = ("cuda",)
"""Where the ops of models are checked by default: on a CPU, interpreted, they would take the most of a run of all."""

CODED: Mapping[str, tuple[str, str, int | None]] = MappingProxyType(
    {
        "triton": ("e4m3fn", "given", None),
        "triton_token_int8": ("int8", "token", 0),
        "triton_block128": ("e4m3fn", "block128", 128),
    }
)
"""Name -> the format of its codes, what shares a scale, and how many columns do: 0 a row's, None if it is given."""


GATES: Mapping[str, tuple[bool, bool]] = MappingProxyType(
    {"triton": (False, False), "triton_sigmoid": (False, True), "triton_before": (True, False)}
)
"""Name -> whether the gate comes before the norm, and whether its activation is sigmoid."""

EPS_OF: Mapping[str, str] = MappingProxyType({"triton": "sum", "triton_max": "max", "triton_mean": "mean"})
"""Name -> what eps does where x is divided by its length."""


AFTER: Mapping[str, bool] = MappingProxyType({"triton": False, "triton_silu": True})
"""Name -> whether silu is applied to what is normed."""


def unavailable(device: str) -> str | None:
    """Why no kernel can run on ``cpu`` or ``cuda``, or None."""
    from normcheck.impls.kernels.interpreted import enabled

    if find_spec("triton") is None:
        return "triton is not installed"
    if device == "cpu" and not enabled():
        return "on a CPU Triton kernels need the interpreter: set TRITON_INTERPRET=1"
    if device == "cuda" and enabled():
        return "TRITON_INTERPRET is set: kernels would be interpreted on the CPU; unset it to use the GPU"
    return None


def implementation(
    op: str,
    *,
    name: str = "triton",
    kernels: Kernels = own_kernels,
    source: str = "normcheck/impls/kernels",
    **fields: Any,
) -> Implementation:
    """An op computed by ``kernels``; ``fields`` are Implementation's."""
    facts = OPS[op]
    casting: dict[str, Any] = {"zero_centered": facts.zero_centered, "rounds_xhat": facts.rounds_xhat}
    if facts.adds_residual:
        own = {"model": {"sum": "rounded"}, "residual_dtypes": ("io", "fp32"), "weights": (False, True)}
        fields = {**own, **fields}
    return Implementation(
        name=name,
        op=op,
        forward=partial(forward, centered=facts.centered, kernels=kernels, **casting),
        backward=partial(backward, kernels=kernels, **casting),
        unavailable=unavailable,
        ranks=(2, 3),
        source=source,
        **fields,
    )


def quantising(
    op: str,
    *,
    name: str,
    coded: str = "",
    kernels: Kernels = own_kernels,
    source: str = "normcheck/impls/kernels",
) -> Implementation:
    """An op that returns codes, as ``coded`` of ``CODED`` does, or else ``name``."""
    fmt, scale, columns = CODED[coded or name]
    given, adds = scale == "given", OPS[op].adds_residual
    return Implementation(
        name=name,
        op=op,
        forward=partial(quantise, fmt=fmt, columns=columns, kernels=kernels),
        unavailable=unavailable,
        ranks=(2, 3),
        weights=(False, True),
        residual_dtypes=("io", "fp32") if adds else ("io",),
        model={
            "scale": scale,
            "round_before_quant": "none",
            "scaling": "reciprocal",
            **({} if given else {"scale_limit": True, "scale_floor": LEAST_SCALE}),
            **({"sum": "rounded"} if adds else {}),
        },
        by_default=ON_GPUS if given else (),
        source=source,
    )


def gated(op: str, *, name: str, kernels: Kernels = own_kernels) -> Implementation:
    """A gated op, as ``name`` of ``GATES`` gates."""
    before, sigmoid = GATES[name]
    own: dict[str, Any] = {"before": before, "sigmoid": sigmoid, "kernels": kernels}
    return Implementation(
        name=name,
        op=op,
        forward=partial(gate_forward, **own),
        backward=partial(gate_backward, **own),
        unavailable=unavailable,
        ranks=(2, 3),
        weights=(False, True),
        model={
            "gate": "before" if before else "after",
            "activation": "sigmoid" if sigmoid else "silu",
            "rounding": "once",
            "group": 0,
        },
        by_default=ON_GPUS if name == "triton" else (),
        source="normcheck/impls/kernels/gated.py",
    )


def length(op: str, *, name: str, kernels: Kernels = own_kernels) -> Implementation:
    """An op that divides by the length of x, with eps as ``name`` of ``EPS_OF`` has it."""
    own: dict[str, Any] = {"how": EPS_OF[name], "kernels": kernels}
    return Implementation(
        name=name,
        op=op,
        forward=partial(length_forward, **own),
        backward=partial(length_backward, **own),
        unavailable=unavailable,
        ranks=(2, 3),
        model={"eps": EPS_OF[name]},
        by_default=ON_GPUS if name == "triton" else (),
        source="normcheck/impls/kernels/l2norm.py",
    )


def modulated(
    op: str,
    *,
    name: str = "triton",
    kernels: Kernels = own_kernels,
    source: str = "normcheck/impls/kernels/modulated.py",
) -> Implementation:
    """A modulated op."""
    facts = OPS[op]
    return Implementation(
        name=name,
        op=op,
        forward=partial(modulated_forward, centered=facts.centered, kernels=kernels),
        backward=partial(modulated_backward, kernels=kernels),
        unavailable=unavailable,
        model={
            "rounding": "once",
            "round_factor": "none",
            **({"sum": "rounded", "round_gated": "none"} if facts.adds_residual else {}),
        },
        residual_dtypes=("io", "fp32") if facts.adds_residual else ("io",),
        by_default=ON_GPUS,
        source=source,
    )


def grouped(op: str, *, name: str, kernels: Kernels = own_kernels) -> Implementation:
    """An op that norms groups of channels, with what ``name`` of ``AFTER`` applies to them."""
    own: dict[str, Any] = {"silu": AFTER[name], "kernels": kernels}
    return Implementation(
        name=name,
        op=op,
        forward=partial(grouped_forward, **own),
        backward=partial(grouped_backward, **own),
        unavailable=unavailable,
        weights=(False, True),
        lone_bias=True,
        model={"activation": "silu", "rounding": "once"} if AFTER[name] else {"activation": "none"},
        by_default=ON_GPUS if name == "triton" else (),
        source="normcheck/impls/kernels/grouped.py",
    )


PAIRED: Mapping[str, bool] = MappingProxyType({"triton": False, "triton_interleaved": True})
"""Name -> whether the columns of a pair lie side by side."""


def rotary(op: str, *, name: str, kernels: Kernels = own_kernels) -> Implementation:
    """An op that rotates heads, with the pairs that ``name`` of ``PAIRED`` has."""
    own: dict[str, Any] = {"interleaved": PAIRED[name], "kernels": kernels}
    return Implementation(
        name=name,
        op=op,
        forward=partial(rotary_forward, **own),
        backward=partial(rotary_backward, **own),
        unavailable=unavailable,
        model={"pairs": "interleaved" if PAIRED[name] else "neox", "rounding": "once"},
        by_default=ON_GPUS if name == "triton" else (),
        source="normcheck/impls/kernels/rotary.py",
    )


IMPLEMENTATIONS = (
    *(implementation(op.name) for op in TABLE),
    *(implementation(op.name, by_default=ON_GPUS) for op in FUSED_ADD),
    *(quantising(op.name, name=name) for op in QUANTISED for name in CODED),
    *(gated(op.name, name=name) for op in GATED for name in GATES),
    *(length(op.name, name=name) for op in LENGTHS for name in EPS_OF),
    *(modulated(op.name) for op in (*MODULATED, *MODULATED_ADD)),
    *(grouped(op.name, name=name) for op in GROUPED for name in AFTER),
    *(rotary(op.name, name=name) for op in ROTARY for name in PAIRED),
)
