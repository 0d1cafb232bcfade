"""What an implementation is: who computes an op, as data and two functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from normcheck.case import Case
from normcheck.formats import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

DEVICES = ("cpu", "cuda")
"""Where implementations run."""

Outputs = Mapping[str, "Tensor"]
"""Output name -> tensor, as forward and backward return them."""


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """Who computes an op.

    ``forward(x, weight, bias, *, eps, **options)`` returns y, or a dict with ``y`` and whatever of ``mean``, ``rstd``,
    ``bitmask`` the op has. ``backward(dy, x, weight, bias, saved, *, eps, **options)`` returns a dict with ``dx``,
    ``dw`` and, with a bias, ``db``; ``saved`` is what forward returned (its statistics and bitmask may be the
    reference's). Without ``backward`` the gradients come from torch autograd through y.

    Shapes: x, dy, y, dx (M, N), last stride 1, row stride N or more, or (B, S, N) where ``ranks`` has 3; weight, bias,
    dw, db (N,); bias may be None. mean, rstd: fp32, M elements in any shape. bitmask: uint8 (M, ceil(N/8)), least
    significant bit first, or bool (M, N).

    ``supports(case)`` returns None, or why this case cannot run. ``unavailable(device)`` returns None, or why nothing
    can run on ``cpu`` or ``cuda`` here. ``dtypes``, ``ranks``, ``biases`` (without, with one, or both, as far as the op
    has them) and ``strided`` say what is claimed. ``model`` declares
    facts about the arithmetic (keys of ``[model]`` in tolerances.toml), as a dict or as a function of the case.
    ``shapes``: where every new (M, N) is expensive, the few that a sweep may use. ``source`` is a link or a path.

    ``deterministic=False``: the same inputs may give other bits, which are then measured and reported, not failed.
    ``batch_invariant=True``: a row's y, statistics and dx do not depend on the other rows, bit for bit; without it that
    is measured and shown.

    ``by_default``: the devices on which a known implementation is checked where ``--impl`` names none; on others, and
    with () on all, it is checked only when it is asked for.
    """

    name: str
    op: str
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    supports: Callable[[Case], str | None] | None = None
    unavailable: Callable[[str], str | None] | None = None
    dtypes: tuple[str, ...] = DTYPES
    ranks: tuple[int, ...] = (2,)
    biases: tuple[bool, ...] = (False, True)
    weight_dtypes: tuple[str, ...] = ("io", "fp32")
    strided: bool = True
    model: Mapping[str, Any] | Callable[[Case], Mapping[str, Any]] = field(default_factory=dict)
    shapes: tuple[tuple[int, int], ...] | None = None
    deterministic: bool = True
    batch_invariant: bool = False
    by_default: tuple[str, ...] = DEVICES
    source: str = ""
