"""Faults of kernels whose weight is strided, or that have a weight for each group of rows, (G, N); and right ones.

With a packed weight (N,) each of them is the clean kernel. Stacked, x is (G, S, N) and row (g, s) has weight g; if
groups take turns, x is (S, G, N) and row (s, g) has weight g.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from normcheck.audit.mutants.correct import by_functional, by_var
from normcheck.audit.mutants.kernel import CLEAN, TILE, Kernel, KernelCall, only, packed
from normcheck.audit.mutants.mutant import READ_BEYOND, UNWRITTEN, Mutant, implementations, mutant
from normcheck.cases.ops import OPS, names_of
from normcheck.impls.implementation import Implementation

_OPS = ("layernorm", "rmsnorm")
_ALL = names_of(lambda op: op.of_row_groups)
_STRIDED, _STACKED, _INTERLEAVED = ("strided",), ("stacked",), ("interleaved",)

At = Callable[[Tensor, int, int], Tensor]
"""The weight that a kernel takes for these rows, of so many groups of so many rows each."""


def _in_turn(r: Tensor, groups: int, each: int) -> Tensor:
    return r % groups


def _behind(r: Tensor, groups: int, each: int) -> Tensor:
    return r // each


def _first(r: Tensor, groups: int, each: int) -> Tensor:
    return r * 0


def _of_tile(r: Tensor, groups: int, each: int) -> Tensor:
    return r // TILE * TILE // each


def _of_rows(c: KernelCall, t: Tensor, at: At) -> Tensor:
    """What weights or biases ``t`` are for each row, (M, N); ``t`` itself if it is (N,)."""
    return t if t.dim() == 1 else t[_groups(c, len(t), at)]


def _groups(c: KernelCall, count: int, at: At) -> Tensor:
    return at(torch.arange(c.M, device=c.x.device), count, max(c.M // count, 1))


def _sums(c: KernelCall, t: Tensor, at: At) -> Tensor:
    """The sum of ``t`` (M, N) over all rows, or over those of each group, (G, N)."""
    if c.w.dim() == 1:
        return c.sum_m(t)
    group = _groups(c, len(c.w), at)
    return torch.stack([c.sum_m(t[group == number]) for number in range(len(c.w))])


def _grouped(
    at: At, *, of_bias: At | None = None, of_dx: At | None = None, of_dw: At | None = None, **steps: Any
) -> Kernel:
    """A kernel that takes the weight ``at`` each row, but where another place is given. ``steps``: in place of its."""
    own: dict[str, Any] = {
        "gamma": lambda c: c.one_plus(_of_rows(c, c.w, at)),
        "preact": lambda c: c.xh * c.g + (0 if c.b is None else _of_rows(c, c.b, of_bias or at)),
        "gamma_b": lambda c: c.one_plus(_of_rows(c, c.w, of_dx or at)),
        "dw": lambda c: _sums(c, c.dy * c.cast(c.xh), of_dw or at),
        "db": lambda c: _sums(c, c.dy, at),
    }
    return Kernel(**{**own, **steps})


def _gamma_read_as_packed(c: KernelCall) -> Tensor:
    return CLEAN.gamma(c) if c.w_io is None else c.one_plus(packed(c.w_io).to(c.w.dtype))


def _bias_read_as_packed(c: KernelCall) -> Tensor:
    return c.xh * c.g + (0 if c.b_io is None else packed(c.b_io).to(c.g.dtype))


def _dw_with_its_stride(c: KernelCall, t: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    stored = t.to(dtype)
    return (
        only(stored, slice(None, None, 2)) if name == "dw" and c.w_io is not None and c.w_io.stride(0) == 2 else stored
    )


def _without_last_tile(c: KernelCall) -> Tensor:
    """dw without the rows of a group behind its last whole tile, if it has one."""
    each = c.M // len(c.w) if c.w.dim() > 1 else 0
    t = c.dy * c.cast(c.xh)
    if each > TILE:
        t = torch.where((torch.arange(c.M, device=t.device) % each < each // TILE * TILE)[:, None], t, 0)
    return _sums(c, t, _behind)


_STRIDE, _STACK, _TURN = (
    partial(mutant, ops=_OPS, weight_layouts=layouts, when=when)
    for layouts, when in (
        (_STRIDED, "a strided weight"),
        (_STACKED, "several groups of rows"),
        (_INTERLEAVED, "several groups of rows"),
    )
)
_Y = ("y", "dx", "dw")

MUTANTS: tuple[Mutant, ...] = (
    _STRIDE(
        id="mT01",
        what="the stride of the weight is ignored: it is read as if it were packed",
        source="flashinfer-ai/flashinfer#4060",
        kernel=Kernel(gamma=_gamma_read_as_packed, gamma_b=_gamma_read_as_packed),
        outputs=("y", "dx"),
        kinds=READ_BEYOND,
    ),
    _STRIDE(
        id="mT02",
        what="the backward ignores the stride of the weight",
        source="invented",
        kernel=Kernel(gamma_b=_gamma_read_as_packed),
        outputs=("dx",),
        kinds=READ_BEYOND,
    ),
    _STRIDE(
        id="mT03",
        what="the stride of the bias is ignored, that of the weight is not",
        source="invented",
        kernel=Kernel(preact=_bias_read_as_packed),
        outputs=("y",),
        kinds=READ_BEYOND,
    ),
    _STRIDE(
        id="mT04",
        what="dw is stored with the stride of the weight: every second element stays as torch.empty made it",
        source="invented",
        kernel=Kernel(store=_dw_with_its_stride),
        outputs=("dw",),
        kinds=UNWRITTEN,
    ),
    _STACK(
        id="mT05",
        what="every row has the weight of group 0",
        source="vllm-project/vllm-xpu-kernels#579",
        kernel=_grouped(_first),
        outputs=_Y,
    ),
    _STACK(
        id="mT06",
        what="the last row of a group has the weight of the next one",
        source="invented",
        kernel=_grouped(lambda r, groups, each: ((r + 1) // each).clamp(max=groups - 1)),
        outputs=_Y,
    ),
    _STACK(
        id="mT07",
        what="groups are taken to take turns, as if x were (S, G, N)",
        source="invented",
        kernel=_grouped(_in_turn),
        outputs=_Y,
    ),
    _STACK(
        id="mT08",
        what="a tile of rows has the weight of its first row, though a group may end within it",
        source="invented",
        kernel=_grouped(_of_tile, of_dx=_behind, of_dw=_behind),
        outputs=("y",),
    ),
    _STACK(
        id="mT09",
        what="every row has the bias of group 0",
        source="invented",
        kernel=_grouped(_behind, of_bias=_first),
        outputs=("y",),
    ),
    _STACK(
        id="mT10",
        what="dx takes the weight of group 0 for every row",
        source="invented",
        kernel=_grouped(_behind, of_dx=_first),
        outputs=("dx",),
    ),
    _STACK(
        id="mT11",
        what="dw of each group is the sum over all rows",
        source="invented",
        kernel=_grouped(_behind, dw=lambda c: CLEAN.dw(c).expand(c.w.shape).contiguous()),
        outputs=("dw",),
    ),
    _STACK(
        id="mT12",
        what="dw adds a tile of rows to the group of its first row, though a group may end within it",
        source="invented",
        kernel=_grouped(_behind, of_dw=_of_tile),
        outputs=("dw",),
    ),
    _STACK(
        id="mT13",
        what="dw leaves out the rows of a group behind its last whole tile",
        source="invented",
        kernel=_grouped(_behind, dw=_without_last_tile),
        outputs=("dw",),
        when="groups of M > 8 rows",
    ),
    _TURN(
        id="mT14",
        what="every row has the weight of group 0, as the weight has fewer dimensions than x",
        source="microsoft/onnxruntime#28971",
        kernel=_grouped(_first),
        outputs=_Y,
    ),
    _TURN(
        id="mT15",
        what="groups are taken to lie one behind the other, as if x were (G, S, N)",
        source="invented",
        kernel=_grouped(_behind),
        outputs=_Y,
    ),
    _TURN(
        id="mT16",
        what="the group is the row's last bits, as if there were a power of two of groups",
        source="invented",
        kernel=_grouped(lambda r, groups, each: r & (groups - 1)),
        outputs=_Y,
        when="a number of groups that is no power of two",
    ),
)

# --- Right kernels.


def _eager(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, op: str, stacked: bool) -> Tensor:
    """As a model is written, for autograd: with a weight that is broadcast."""
    shape = (len(weight), 1, -1) if stacked and weight.dim() > 1 else weight.shape
    return by_var(OPS[op], x, weight.reshape(shape), None if bias is None else bias.reshape(shape), eps=eps)


def _each_group(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, op: str) -> Tensor:
    """torch's own norm of the rows of each group by itself."""

    normed = partial(by_functional, OPS[op], eps=eps)
    if weight.dim() == 1:
        return normed(x, weight, bias)
    biases = [None] * len(weight) if bias is None else bias.unbind()
    return torch.stack([normed(*own) for own in zip(x.unbind(), weight.unbind(), biases, strict=True)])


def _gathered(t: Tensor) -> Tensor:
    """A strided weight, read from its buffer element by element."""
    at = torch.arange(t.shape[0], device=t.device) * t.stride(0)
    return t.as_strided(((t.shape[0] - 1) * t.stride(0) + 1,), (1,), t.storage_offset())[at]


def _through_gather(x: Tensor, weight: Tensor, bias: Tensor | None, **named: Any) -> Tensor:
    return _eager(x, _gathered(weight), None if bias is None else _gathered(bias), stacked=False, **named)


def _added_up(c: KernelCall, t: Tensor) -> Tensor:
    """(M, N) -> (G, N), row by row into the sum of its group."""
    if c.w.dim() == 1:
        return c.sum_m(t)
    return torch.zeros_like(c.w).index_add_(0, _groups(c, len(c.w), _behind), t)


def _right(name: str, kernel: Kernel, layouts: tuple[str, ...]) -> tuple[Implementation, ...]:
    return tuple(kernel.implementation(name, op, weight_layouts=layouts) for op in _ALL)


def _by_autograd(name: str, forward: Callable[..., Tensor], layouts: tuple[str, ...]) -> tuple[Implementation, ...]:
    return tuple(
        Implementation(name=name, op=op, forward=partial(forward, op=op), weight_layouts=layouts) for op in _OPS
    )


CONTROLS: tuple[Implementation, ...] = (
    *_right("weight_strided", CLEAN, _STRIDED),
    *_by_autograd("weight_gathered", _through_gather, _STRIDED),
    *_by_autograd("weight_strided_eager", partial(_eager, stacked=False), _STRIDED),
    *_right("weight_stacked", _grouped(_behind), _STACKED),
    *_right(
        "weight_stacked_added_up",
        _grouped(
            _behind,
            dw=lambda c: _added_up(c, c.dy * c.cast(c.xh)),
            db=lambda c: _added_up(c, c.dy),
        ),
        _STACKED,
    ),
    *_by_autograd("weight_stacked_eager", partial(_eager, stacked=True), _STACKED),
    *_by_autograd("weight_stacked_each", _each_group, _STACKED),
    *_right("weight_interleaved", _grouped(_in_turn), _INTERLEAVED),
    *_by_autograd("weight_interleaved_eager", partial(_eager, stacked=False), ("interleaved", "strided")),
)

IMPLEMENTATIONS = (*implementations(MUTANTS), *CONTROLS)
