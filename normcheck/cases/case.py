"""A case: one point of the sweep, plain data, printed and parsed as one line.

``parse(str(case)) == case`` for every case. A line is readable and complete: the tensors that it stands for are the
same bits on every machine (see ``inputs.py``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from normcheck.cases.dtypes import DTYPES, FORMATS
from normcheck.errors import UsageError, one_of

EXPANDED = ("dy_expanded", "dy_scalar")
"""Layouts in which all rows of dy share one memory."""

LAYOUTS = ("contiguous", "misaligned", "x_strided", "dy_strided", "strided", "rank3", *EXPANDED, "rank3_strided")
"""Simplest first. ``misaligned``: every tensor begins one element behind an aligned address; ``strided``: ``gap``
elements behind each row of x and dy are not theirs; ``rank3``: (B, S, N), ``rank3_strided``: both; ``dy_expanded``: dy
has row stride 0; ``dy_scalar``: dy is one 1.0 with no strides, as from ``y.sum().backward()``."""

STRIDED = ("x_strided", "dy_strided", "strided", "rank3_strided")
"""Layouts with a ``gap``."""

MAX_ELEMENTS = 2**34
"""The largest M*N that a case line may ask for; it bounds what a hostile line can make this process allocate."""

_REQUIRED = ("M", "N")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the sweep.

    ``M`` rows of ``N`` elements; ``eps`` is the op's epsilon; ``rows``, ``dy`` and ``weights`` are kinds of data
    (``data_kinds.py`` lists them); ``weight_dtype`` is ``same`` or ``fp32``; ``bias`` is False where the op is called
    without one; ``gap`` counts the elements behind each row of a strided tensor; ``options`` are the op's own numbers
    (``lower_clip``, ``upper_clip``) as pairs sorted by name.
    """

    op: str
    dtype: str
    M: int
    N: int
    eps: float = 1e-5
    rows: str = "normal"
    dy: str = "normal"
    layout: str = "contiguous"
    seed: int = 0
    weights: str = "normal"
    weight_dtype: str = "same"
    bias: bool = True
    gap: int = 0
    options: tuple[tuple[str, float], ...] = ()

    @property
    def rank(self) -> int:
        """Rank of x: 2 for (M, N), 3 for (B, S, N) with B*S == M."""
        return 3 if self.layout in ("rank3", "rank3_strided") else 2

    @property
    def weight_format(self) -> str:
        """The name of the dtype of weight and bias."""
        return self.dtype if self.weight_dtype == "same" else self.weight_dtype

    @property
    def unusual(self) -> tuple[str, ...]:
        """What of it many kernels do not take, as in its line: for these a clear refusal is as good as an answer."""
        asked = {
            "M=0": self.M == 0,
            f"layout={self.layout}": self.layout == "misaligned" or self.layout in EXPANDED,
            "weight_dtype=fp32": self.weight_dtype == "fp32" and self.dtype != "fp32",
        }
        return tuple(words for words, unusual in asked.items() if unusual)

    @property
    def batch(self) -> int:
        """B of a rank-3 x: the largest divisor of M that is not above its square root."""
        return next(b for b in range(max(math.isqrt(self.M), 1), 0, -1) if self.M % b == 0)

    @property
    def option_values(self) -> Mapping[str, float]:
        """The op's own numbers by name, as they are passed to forward and backward."""
        return MappingProxyType(dict(self.options))

    def __str__(self) -> str:
        words = [self.op, self.dtype, f"M={self.M}", f"N={self.N}", f"eps={self.eps!r}", f"rows={self.rows}"]
        words += [f"dy={self.dy}", f"layout={self.layout}", f"seed={self.seed}"]
        if self.gap:
            words.append(f"gap={self.gap}")
        if self.weights != "normal":
            words.append(f"weights={self.weights}")
        if self.weight_dtype != "same":
            words.append(f"weight_dtype={self.weight_dtype}")
        if not self.bias:
            words.append("bias=none")
        words += [f"{name}={value!r}" for name, value in self.options]
        return " ".join(words)


def parse(line: str, *, options: Mapping[str, tuple[str, ...]], kinds: Mapping[str, tuple[str, ...]]) -> Case:
    """Read a case line.

    ``options``: op name -> names of its own numbers; ``kinds``: ``rows``, ``dy``, ``weights`` -> allowed names.
    Raises UsageError, in one line, for anything that is not a case.
    """
    if len(line) > 1000:
        raise UsageError(f"case line has {len(line)} characters; expected at most 1000")
    words = line.split()
    if len(words) < 2 or "=" in words[0] or "=" in words[1]:
        raise UsageError(f"case={_cut(line)!r}: expected 'OP DTYPE M=... N=... name=value ...'")
    op, dtype = words[0], words[1]
    if op not in options:
        raise UsageError(f"op={_cut(op)!r} in the case line: expected {one_of(options)}")
    if dtype not in DTYPES:
        raise UsageError(f"dtype={_cut(dtype)!r} in the case line: expected {one_of(DTYPES)}")
    named = _pairs(words[2:])
    own = options[op]
    _expect_names(named, op, own)
    case = Case(
        op=op,
        dtype=dtype,
        M=_integer(named, "M", 0),
        N=_integer(named, "N", 1),
        eps=_number(named, "eps", 1e-5),
        rows=_choice(named, "rows", kinds["rows"]),
        dy=_choice(named, "dy", kinds["dy"]),
        weights=_choice(named, "weights", kinds["weights"]),
        layout=_choice(named, "layout", LAYOUTS),
        seed=_integer(named, "seed", 0),
        weight_dtype=_choice(named, "weight_dtype", ("same", "fp32")),
        bias=_choice(named, "bias", ("yes", "none")) == "yes",
        gap=_integer(named, "gap", 0),
        options=tuple((name, _number(named, name, 0.0)) for name in sorted(own)),
    )
    _validate(case)
    return case


def _validate(case: Case) -> None:
    """Refuse what no implementation may be called with."""
    if max(case.M, 1) * (case.N + case.gap) > MAX_ELEMENTS:
        raise UsageError(f"M={case.M} N={case.N} gap={case.gap}: expected at most {MAX_ELEMENTS} elements")
    fp32 = FORMATS["fp32"]
    if case.eps and not 2.0**fp32.emin <= case.eps <= fp32.max:
        raise UsageError(f"eps={case.eps!r}: expected 0 or a normal fp32 number > 0, kernels take it as one")
    if case.weight_dtype == "fp32" and case.dtype == "fp32":
        raise UsageError("weight_dtype=fp32: expected only under fp16 or bf16, for fp32 it is the same")
    if bool(case.gap) != (case.layout in STRIDED):
        raise UsageError(f"gap={case.gap} layout={case.layout}: expected gap > 0 exactly for a strided layout")
    clips = dict(case.options)
    if any(abs(clip) > fp32.max for clip in clips.values()):
        raise UsageError(f"lower_clip, upper_clip={list(clips.values())}: expected fp32 numbers")
    if "lower_clip" in clips and not clips["lower_clip"] < clips["upper_clip"]:
        raise UsageError(f"lower_clip={clips['lower_clip']!r}: expected less than upper_clip={clips['upper_clip']!r}")


def _expect_names(named: Mapping[str, str], op: str, own: tuple[str, ...]) -> None:
    """Refuse a line without what it has to say, or with what is no part of a case."""
    for name in _REQUIRED:
        if name not in named:
            raise UsageError(f"{name} is missing in the case line: expected {name}=<integer>")
    for name in own:
        if name not in named:
            raise UsageError(f"{name} is missing in the case line: {op} has it, expected {name}=<number>")
    known = {f.name for f in fields(Case)} - {"op", "dtype", "options"}
    for name in named:
        if name not in known and name not in own:
            raise UsageError(
                f"{_cut(name)}={_cut(named[name])} in the case line: expected {one_of(sorted({*known, *own}))} for {op}"
            )


def _pairs(words: list[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{_cut(word)!r} in the case line: expected name=value")
        if name in named:
            raise UsageError(f"{_cut(name)}={_cut(value)} in the case line: {_cut(name)} is given twice, expected once")
        named[name] = value
    return named


def _integer(named: Mapping[str, str], name: str, least: int) -> int:
    text = named.get(name, "0")
    if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < least:
        raise UsageError(f"{name}={_cut(text)} in the case line: expected an integer >= {least}, up to 12 digits")
    return int(text)


def _number(named: Mapping[str, str], name: str, default: float) -> float:
    text = named.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or "_" in text:
        raise UsageError(f"{name}={_cut(text)} in the case line: expected a finite number")
    return value


def _choice(named: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = named.get(name, choices[0])
    if value not in choices:
        raise UsageError(f"{name}={_cut(value)} in the case line: expected {one_of(choices)}")
    return value


def _cut(text: str, most: int = 60) -> str:
    """Foreign text for a one-line message: printable characters only, and not too many of them."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return clean if len(clean) <= most else clean[: most - 3] + "..."
