"""A known fault as data, and what several of them are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from normcheck.cases.dtypes import FORMATS, Format
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.diagnosis.formula import Call, Formula, stored

BF16, FP16 = FORMATS["bf16"], FORMATS["fp16"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that is known.

    ``name`` is for programs, ``words`` say what the kernel does; faults that differ in what nobody would call another
    fault have one name. ``takes``: the ops that can have it. ``narrow``: only if the io dtype is narrower than fp32.
    ``but``: an io dtype in which it has another name. ``facts``: those of an op that such a kernel computes, if it
    does all of it so. ``sometimes``: it is another fault in some calls, and the textbook in the others. ``block``: it
    is one of the last N mod ``block`` columns, so shorter rows do not show it.
    """

    name: str
    words: str
    formula: Formula
    takes: Callable[[Op], bool]
    narrow: bool = False
    but: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    sometimes: bool = False
    block: int = 0

    def instead(self, op: Op) -> str:
        """The op that a kernel with this fault computes in place of ``op``: the one that has ``facts``, or ""."""
        wanted = {**_facts(op), **self.facts}
        alike = (each for each in OPS.values() if _facts(each) == wanted and set(op.biases) & set(each.biases))
        return next((each.name for each in alike), "") if self.facts else ""


def _facts(op: Op) -> dict[str, bool]:
    names = ("centered", "zero_centered", "clamped", "rounds_xhat", "adds_residual", "quantises")
    return {name: getattr(op, name) for name in names}


def any_op(op: Op) -> bool:
    """Every op."""
    return True


def centered_ops(op: Op) -> bool:
    """Ops that subtract a mean."""
    return op.centered


def raw_ops(op: Op) -> bool:
    """Ops that subtract none."""
    return not op.centered


def zero_centered_ops(op: Op) -> bool:
    """Ops that add 1 to the weight."""
    return op.zero_centered


def plain_scale_ops(op: Op) -> bool:
    """Ops that take the weight as it is."""
    return not op.zero_centered


def clamped_ops(op: Op) -> bool:
    """Ops that clip y and save bits."""
    return op.clamped


def biased_ops(op: Op) -> bool:
    """Ops that may have a bias."""
    return op.takes_bias


def rounding_ops(op: Op) -> bool:
    """Ops that round xhat."""
    return op.rounds_xhat


def not_rounding_ops(op: Op) -> bool:
    """Ops that do not round xhat, and do not leave that open."""
    return not (op.rounds_xhat or op.quantises)


def adding_ops(op: Op) -> bool:
    """Ops that add a residual."""
    return op.adds_residual


def quantising_ops(op: Op) -> bool:
    """Ops that return codes."""
    return op.quantises


def fault(
    name: str,
    words: str,
    *,
    takes: Callable[[Op], bool] = any_op,
    narrow: bool = False,
    but: str = "",
    facts: Mapping[str, Any] = MappingProxyType({}),
    sometimes: bool = False,
    block: int = 0,
    **steps: Any,
) -> Fault:
    """A fault that differs from the textbook in ``steps``."""
    formula = Formula(**steps)
    return Fault(
        name=name,
        words=words,
        formula=formula,
        takes=takes,
        narrow=narrow,
        but=but,
        facts=facts,
        sometimes=sometimes,
        block=block,
    )


def sum_n(t: Tensor) -> Tensor:
    """(M, N) -> (M, 1): the sum over a row."""
    return t.sum(1, keepdim=True)


def by_tile(t: Tensor, height: int) -> Tensor:
    """(M, 1) -> (M, 1): the sum over each tile of rows, in every row of it."""
    tile = torch.arange(len(t)) // height
    return torch.zeros(len(t), dtype=torch.float64).index_add_(0, tile, t[:, 0])[tile][:, None]


def whole_blocks(n: int, k: int) -> int:
    """The columns that a loop over whole blocks of ``k`` reads, if a row of at most ``k`` is no loop."""
    return n if n <= k else n // k * k


def chain(terms: Tensor, fmt: Format) -> Tensor:
    """(K, L) fp32 -> (L,) fp64: the terms added one by one, every partial sum rounded. In fp32, since a term that lies
    between two numbers of the format goes with its last bit."""
    dtype: torch.dtype = getattr(torch, fmt.torch_name)
    total = torch.zeros(terms.shape[1:])
    for term in terms.float().unbind(0):
        total = (total + term).to(dtype).float()
    return total.double()


def chain_n(t: Tensor, fmt: Format) -> Tensor:
    """(M, N) -> (M, 1): ``chain`` over the columns."""
    return chain(t.t(), fmt)[:, None]


def storing(names: str, how: Callable[[Tensor, Format], Tensor]) -> Callable[[Call, Tensor, Format, str], Tensor]:
    """A store that does ``how`` to the outputs ``names``, and rounds the others to nearest."""
    return lambda c, t, fmt, name: how(t, fmt) if name in names.split() else stored(t, fmt)


def reads_as_packed(names: str) -> Callable[[Tensor, str], Tensor]:
    """A step that reads the rows of a tensor as if nothing lay between them, as far as its storage goes."""

    def read(t: Tensor, name: str) -> Tensor:
        if name not in names.split() or t.is_contiguous() or t.stride(-1) != 1 or not t.numel():
            return t
        rest = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
        if rest < t.numel():
            return t
        return t.as_strided((t.numel(),), (1,)).reshape(t.shape)

    return read
