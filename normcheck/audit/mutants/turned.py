"""Heads that are normed and rotated: correct kernels of several makes; faults are in ``rotary.py``.

``Turned`` is a kernel of steps, as ``kernel.py`` has them for plain norms. A variant states those that it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from normcheck.audit.mutants.correct import pairwise, sequential
from normcheck.audit.mutants.kernel import rounded
from normcheck.cases import ops as table
from normcheck.impls.implementation import Implementation

OPS = tuple(op.name for op in table.ROTARY)


@dataclass(kw_only=True)
class Call:
    """One call: the inputs as stored, and every step's result under its name.

    Shapes: x, xh, n, g, dy (T, G, D) of the G heads of q and k; r (T, G, 1); w (G, D); cos, sin (T, 1, P) or (T, G, P).
    """

    kernel: Turned
    x_io: Tensor
    Q: int
    K: int
    weights: tuple[Tensor, Tensor]
    tables: tuple[Tensor, Tensor]
    eps: float
    dy_io: Tensor | None = None

    x: Tensor = field(init=False)
    r: Tensor = field(init=False)
    xh: Tensor = field(init=False)
    w: Tensor = field(init=False)
    n: Tensor = field(init=False)
    cos: Tensor = field(init=False)
    sin: Tensor = field(init=False)
    dy: Tensor = field(init=False)
    g: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.T, self.G = self.x_io.shape[0], self.Q + self.K
        self.D, self.P = self.weights[0].shape[0], self.tables[0].shape[1]
        self.x = self.heads(self.x_io)
        self.w = self.kernel.weight(self)
        self.cos, self.sin = self.kernel.angles(self)

    def heads(self, t: Tensor) -> Tensor:
        """The heads of q and k, (T, G, D), in the dtype of the work."""
        return t[:, : self.G * self.D].reshape(self.T, self.G, self.D).to(self.kernel.work)

    def rest(self, t: Tensor) -> Tensor:
        """The heads of v, (T, V, D), as stored."""
        return t[:, self.G * self.D :].reshape(self.T, -1 if self.T else t.shape[1] // self.D - self.G, self.D)

    def of_heads(self, q: Tensor, k: Tensor) -> Tensor:
        """(D,) of q and of k -> (G, D)."""
        return torch.cat((q.expand(self.Q, -1), k.expand(self.K, -1))).to(self.kernel.work)

    def table(self, t: Tensor) -> Tensor:
        """(T, P) -> (T, 1, P) in the dtype of the work."""
        return t[:, None].to(self.kernel.work)

    def both_tables(self, change: Callable[[Tensor], Tensor] = lambda t: t) -> tuple[Tensor, Tensor]:
        """cos and sin, each changed as it is stored."""
        cos, sin = self.tables
        return self.table(change(cos)), self.table(change(sin))

    def narrow(self, t: Tensor, *conventions: str) -> Tensor:
        """``t``, rounded to the dtype of x if the rounding is one of these."""
        return rounded(t, self.x_io.dtype) if self.kernel.rounding in conventions else t

    def mean_of(self, t: Tensor) -> Tensor:
        """(T, G, D) -> (T, G, 1)."""
        return self.kernel.reduce(t.reshape(-1, t.shape[-1]).t()).reshape(*t.shape[:-1], 1) / t.shape[-1]

    def parts(self, t: Tensor, pairs: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """The first and the second columns of pairs, and the rest."""
        pairs = pairs or self.P
        if self.kernel.interleaved:
            return t[..., 0 : 2 * pairs : 2], t[..., 1 : 2 * pairs : 2], t[..., 2 * pairs :]
        return t[..., :pairs], t[..., pairs : 2 * pairs], t[..., 2 * pairs :]

    def joined(self, one: Tensor, two: Tensor, rest: Tensor) -> Tensor:
        """What ``parts`` took apart."""
        both = torch.stack((one, two), -1).flatten(-2) if self.kernel.interleaved else torch.cat((one, two), -1)
        return torch.cat((both, rest), -1)

    def product(self, t: Tensor, by: Tensor) -> Tensor:
        """A product of the rotation."""
        return self.narrow(t * by, "each", "rotated")


Step = Callable[[Call], Tensor]


def turn(c: Call, t: Tensor, sine: Tensor) -> Tensor:
    """``t`` (T, G, D), rotated."""
    a, b, rest = c.parts(t)
    first, second = c.product(a, c.cos) - c.product(b, sine), c.product(b, c.cos) + c.product(a, sine)
    return c.joined(first, second, rest)


def _dx(c: Call) -> Tensor:
    wd = c.g * c.w
    return (wd - c.xh * c.mean_of(c.xh * wd)) * c.r


@dataclass(frozen=True, kw_only=True)
class Turned:
    """The steps of a kernel that norms and rotates heads; the defaults are those of a clean one.

    ``interleaved`` and ``rounding`` are the convention.
    """

    interleaved: bool = False
    rounding: str = "once"
    work: torch.dtype = torch.float32
    in_place: bool = False
    reduce: Callable[[Tensor], Tensor] = lambda t: t.sum(0)
    weight: Step = lambda c: c.of_heads(*c.weights)
    angles: Callable[[Call], tuple[Tensor, Tensor]] = lambda c: c.both_tables()
    rstd: Step = lambda c: torch.rsqrt(c.mean_of(c.x * c.x) + c.eps)
    xhat: Step = lambda c: c.narrow(c.x * c.r, "each")
    norm: Step = lambda c: c.narrow(c.xh * c.w, "each", "normed", "rotated")
    output: Step = lambda c: turn(c, c.n, c.sin)
    values: Step = lambda c: c.rest(c.x_io)
    # Backward, in this order.
    cotangent: Step = lambda c: c.narrow(turn(c, c.dy, -c.sin), "each", "normed", "rotated")
    dx: Step = _dx
    dvalues: Step = lambda c: c.rest(c.dy_io if c.dy_io is not None else c.x_io)

    def forward(
        self, x: Tensor, weight: None, bias: None, *, eps: float, q_heads: int, k_heads: int,
        q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    ) -> dict[str, Tensor]:  # fmt: skip
        """The forward of a rotary op, as ``Implementation.forward``."""
        both = (q_weight, k_weight), (cos, sin)
        c = Call(kernel=self, x_io=x, Q=q_heads, K=k_heads, weights=both[0], tables=both[1], eps=eps)
        c.r = self.rstd(c)
        c.xh = self.xhat(c)
        c.n = self.norm(c)
        rotated, rest = self.output(c).to(x.dtype), self.values(c).to(x.dtype)
        saved = {"rstd": c.r.float().reshape(c.T, -1)} if c.r.shape[1] == c.G else {}
        if self.in_place:
            x[:, : c.G * c.D] = rotated.reshape(c.T, c.G * c.D)
            return {"y": x, **saved}
        return {"y": torch.cat((rotated, rest), 1).reshape(x.shape), **saved}

    def backward(
        self, dy: Tensor, x: Tensor, weight: None, bias: None, saved: Mapping[str, Tensor], *, eps: float,
        q_heads: int, k_heads: int, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    ) -> dict[str, Tensor]:  # fmt: skip
        """The backward of a rotary op, as ``Implementation.backward``."""
        both = (q_weight, k_weight), (cos, sin)
        c = Call(kernel=self, x_io=x, Q=q_heads, K=k_heads, weights=both[0], tables=both[1], eps=eps, dy_io=dy)
        c.r = saved["rstd"].reshape(c.T, c.G, 1).to(self.work) if "rstd" in saved else self.rstd(c)
        c.xh = c.x * c.r
        c.dy = c.heads(dy)
        c.g = self.cotangent(c)
        dx = torch.cat((self.dx(c).to(x.dtype), self.dvalues(c).to(x.dtype)), 1)
        return {"dx": dx.reshape(x.shape)}

    @property
    def declared(self) -> dict[str, Any]:
        """The convention as a model."""
        return {"pairs": "interleaved" if self.interleaved else "neox", "rounding": self.rounding}

    def implementation(self, name: str, op: str, **fields: Any) -> Implementation:
        """This kernel as an implementation of ``op``; it declares its convention unless ``fields`` say another."""
        own = {"model": self.declared, **fields}
        if self.in_place:
            own = {"overwrites": ("x",), **own}
        return Implementation(name=name, op=op, forward=self.forward, backward=self.backward, **own)


# --- Correct kernels.


def _turned_first(c: Call) -> Tensor:
    """Rotated before it is multiplied by rstd, which is the same for both columns."""
    return turn(c, c.x * c.w, c.sin) * c.r


def _by_complex(c: Call) -> Tensor:
    """A pair as a complex number, times that of its angle."""
    a, b, rest = c.parts(c.n)
    both = torch.complex(a.contiguous(), b.contiguous()) * torch.complex(c.cos, c.sin)
    return c.joined(both.real, both.imag, rest)


def _by_halves(c: Call) -> Tensor:
    """n * cos + rotate_half(n) * sin, with both tables as wide as what is rotated."""
    turned, rest = c.n[..., : 2 * c.P], c.n[..., 2 * c.P :]
    half = torch.cat((-turned[..., c.P :], turned[..., : c.P]), -1)
    wide = (torch.cat((t, t), -1) for t in (c.cos, c.sin))
    cos, sin = wide
    return torch.cat((c.product(turned, cos) + c.product(half, sin), rest), -1)


def _fused(c: Call) -> Tensor:
    """Each sum with its first product by one multiply-add of half precision, which rounds the other product alone."""
    a, b, rest = c.parts(c.n)
    first, second = a * c.cos - c.product(b, c.sin), b * c.cos + c.product(a, c.sin)
    return c.joined(first, second, rest)


_RIGHT: Mapping[str, Turned] = {
    "turned": Turned(),
    "turned_interleaved": Turned(interleaved=True),
    "turned_normed": Turned(rounding="normed"),
    "turned_each": Turned(rounding="each"),
    "turned_rotated": Turned(rounding="rotated"),
    "turned_interleaved_normed": Turned(interleaved=True, rounding="normed"),
    "turned_interleaved_each": Turned(interleaved=True, rounding="each"),
    "turned_pairwise": Turned(reduce=pairwise),
    "turned_sequential": Turned(reduce=sequential),
    "turned_in_fp64": Turned(work=torch.float64),
    "turned_normed_in_fp64": Turned(rounding="normed", work=torch.float64),
    "turned_before_rstd": Turned(output=_turned_first),
    "turned_rstd_in_weight": Turned(norm=lambda c: c.x * (c.r * c.w)),
    "turned_as_complex": Turned(output=_by_complex),
    "turned_by_halves": Turned(output=_by_halves),
    "turned_by_halves_each": Turned(rounding="each", output=_by_halves),
    "turned_fused_each": Turned(rounding="each", output=_fused),
    "turned_interleaved_fused_each": Turned(interleaved=True, rounding="each", output=_fused),
    "turned_in_place": Turned(in_place=True),
    "turned_interleaved_in_place": Turned(interleaved=True, in_place=True),
}

_OPEN = (
    "turned",
    "turned_interleaved",
    "turned_normed",
    "turned_each",
    "turned_interleaved_normed",
    "turned_interleaved_each",
    "turned_fused_each",
)


def _eager(
    x: Tensor, weight: None, bias: None, *, eps: float, q_heads: int, k_heads: int,
    q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
) -> Tensor:  # fmt: skip
    """As a model has it: q and k normed by a module each, whose output is rounded, then rotated in the dtype of x."""
    size, pairs = q_weight.shape[0], cos.shape[1]
    of_q, of_k, of_v = x.tensor_split((q_heads * size, (q_heads + k_heads) * size), dim=1)
    done = []
    for heads, own in ((of_q, q_weight), (of_k, k_weight)):
        wide = heads.reshape(x.shape[0], heads.shape[1] // size, size).float()
        normed = own * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
        turned, rest = normed[..., : 2 * pairs], normed[..., 2 * pairs :]
        half = torch.cat((-turned[..., pairs:], turned[..., :pairs]), -1)
        c, s = (torch.cat((t, t), -1)[:, None] for t in (cos, sin))
        done.append(torch.cat((turned * c + half * s, rest), -1).to(x.dtype).reshape(heads.shape))
    return torch.cat((*done, of_v), 1)


CONTROLS = (
    *(kernel.implementation(name, op) for name, kernel in _RIGHT.items() for op in OPS),
    *(_RIGHT[name].implementation(f"{name}_open", op, model={}) for name in _OPEN for op in OPS),
    *(Implementation(name="turned_eager", op=op, forward=_eager) for op in OPS),
)

IMPLEMENTATIONS = CONTROLS
