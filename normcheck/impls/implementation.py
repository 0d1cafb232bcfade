"""``Implementation``: a kernel that computes an op, as two functions and data about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normcheck.cases.declared import Declared
from normcheck.errors import ImportFailed

if TYPE_CHECKING:
    from torch import Tensor

ONE_MODULE = "one_module"
"""The attribute of a forward that is True if it puts the weight of each call into one module: such calls have turns."""

Outputs = Mapping[str, "Tensor"]
"""Output name -> tensor, as forward and backward return them."""


@dataclass(frozen=True)
class NotImported:
    """Stand-in for the functions of a file that cannot be imported."""

    error: ImportFailed

    def __call__(self, *arguments: object, **options: object) -> Any:
        """Raise that error."""
        raise self.error


@dataclass(frozen=True, kw_only=True)
class Implementation(Declared):
    """A kernel that computes an op.

    ``forward(x, weight, bias, *, eps, **options)`` returns y, or a dict with ``y`` and any of ``mean``, ``rstd``,
    ``bitmask`` that the op has. ``backward(dy, x, weight, bias, saved, *, eps, **options)`` returns a dict with ``dx``,
    ``dw`` and, with a bias, ``db``; ``saved`` is what forward returned (its statistics and bitmask may be the
    reference's), numbers, text and None included, which are not checked. Without ``backward`` the gradients come from
    torch autograd through y.

    An op that adds a residual: forward also gets ``residual`` by name, and returns a dict with ``y`` and
    ``residual_out``, or the two as a tuple; backward also gets ``residual`` and ``dresidual_out`` by name, and returns
    ``dresidual`` as well. All four have the shape of x. Without ``backward``, autograd goes through both outputs.

    Shapes: x, dy, y, dx (M, N), last stride 1, row stride N or more; or (B, S, N) if ``ranks`` has 3, (B, S, T, N) if
    it has 4, (T, H, N) with ``heads``; weight, bias, dw, db (N,). bias may be None, and so may weight if ``weights``
    has False. mean, rstd: fp32, M elements in any shape. bitmask: uint8 (M, ceil(N/8)), least significant bit first,
    or bool (M, N).

    ``supports(case)`` returns None, or why this case cannot run. ``unavailable(device)`` returns None, or why nothing
    can run on ``cpu`` or ``cuda`` here. ``dtypes``, ``ranks``, ``biases`` (without, with one, or both, as far as the op
    has them) and ``strided`` say what is claimed. ``model`` declares facts about the arithmetic (keys of ``[model]`` in
    tolerances.toml), as a dict or as a function of the case. ``shapes``: if every new (M, N) is expensive, the few that
    a sweep may use. ``epsilons``: if eps is a constant of the kernel, the few that it has. ``channels``, ``groups``: of
    an op that norms groups of channels, if it has one number of them alone. ``heads``: x also comes as heads, (T, H, N)
    with a row stride and a head stride of its own, as q in a fused projection to q, k and v.
    ``trailing``: x also comes as (M, A, B), with weight, bias, dw and db (A, B).
    Their shape says that both dimensions are normed, so there is always a weight. ``weight_layouts``: weight and bias
    also come as every second element of a buffer (``strided``), or (G, N) for groups of rows: beside an x (G, S, N), of
    which row (g, s) has weight g (``stacked``), or (S, G, N), of which row (s, g) has it (``interleaved``). dw and db
    are (G, N) then. ``source`` is a link or a path.

    ``weights``: with a weight, or without one (False), or both. Without one weight and bias are None, the factor of
    xhat is 1, and a backward returns no dw; ``biases`` is about cases with a weight. ``lone_bias``: without a weight
    there may be a bias all the same, and a backward then returns its db.

    ``weight_dtypes``: ``("io",)`` if weight and bias must have the dtype of x. ``residual_dtypes``: with ``fp32``, the
    residual may be fp32 beside x in half precision. ``overwrites``: which of ``x``, ``dy`` and ``residual`` a call may
    write into (y in the memory of x, dx in that of dy, residual_out in that of residual), but not around them. Each
    call gets them as if nothing had been written: a backward gets the x that its forward overwrote.

    ``deterministic=False``: the same inputs may give other bits, which are then measured and reported, not failed.
    ``batch_invariant=True``: a row's y, statistics and dx do not depend on the other rows, bit for bit; with a tuple of
    outputs, those do not. ``dw`` and ``db``, which only a tuple declares, are sums over rows: rows with dy = 0,
    wherever they stand, do not change a bit of them. What is not declared is measured and shown.

    ``by_default``: the devices on which a known implementation is checked if ``--impl`` names none. On others, and
    with () on all, it is checked only if ``--impl`` names it. ``builds=False``: a known one that compiles, tunes and
    plans nothing, so that a run may begin with it, when all processes start, and slow calls then are no first calls.

    ``contexts``: those that it promises to hold in, such as ``("graph",)``. It is a finding if it prevents one of them,
    as a kernel does that waits for the GPU while a graph is captured. ``expects_kernel``: a regular expression that the
    name of a kernel must have which runs on a GPU, such as ``"_rms_norm_fwd"``. If it never does, that is a finding.

    ``environment``: variables that its process has before its code is imported. ``variants``: name -> environment; for
    each there is one more implementation, ``name[variant]``, judged in a process of its own that has it.
    """

    name: str
    op: str
    forward: Callable[..., Any]
