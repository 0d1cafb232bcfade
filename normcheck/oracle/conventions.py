"""The contracts that an op leaves open: several ways to compute it are right, but a kernel must keep to one.

Each is a key of a model: the sum that is normed (``residual.py``), what codes are made of, and how (``quantised.py``),
when a gate is applied, and what of it (``gated.py``), what eps does (``l2norm.py``), which steps of a modulation are
rounded (``modulated.py``), what follows a norm of groups (``grouped.py``), and which columns of a head are rotated
together (``rotary.py``).
A kernel that declares one is judged by that. Of one that declares none, every case says which ways it fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any

from normcheck.cases.case import Case
from normcheck.cases.data_kinds import NOT_FINITE
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.errors import UsageError, one_of
from normcheck.errors import shown as shown_value
from normcheck.oracle import modulated, residual, rotary
from normcheck.oracle.activation import (
    ACTIVATIONS,
    AFTER_NORM,
    BEFORE,
    EACH,
    GATES,
    GROUPS,
    NORMED,
    ROUND_GATED,
    ROUNDINGS,
)
from normcheck.oracle.gated_sum import ROUND_PRODUCT
from normcheck.oracle.l2norm import EPS, MEAN, SUM
from normcheck.oracle.modulated import ROUND_FACTOR
from normcheck.oracle.quantised import ROUNDS, SCALINGS
from normcheck.oracle.tolerances import Model

Convention = tuple[tuple[str, str | int], ...]
"""Keys of a model and a value of each: one way to compute an op. () if nothing is left open."""

OPEN = "any"
"""The value of a key that a kernel does not declare."""

_SUM, _ROUND, _SCALING = "sum", "round_before_quant", "scaling"
_GATE, _ACTIVATION, _ROUNDING, _ROUND_GATED = "gate", "activation", "rounding", "round_gated"
_GROUP, _EPS, _ROUND_FACTOR, _PAIRS = "group", "eps", "round_factor", "pairs"

IN_WORDS: Mapping[str, Mapping[Any, str]] = MappingProxyType(
    {
        _SUM: residual.IN_WORDS,
        _ROUND: MappingProxyType(
            {
                "none": "quantises y in fp32, as flashinfer does",
                "io": "rounds y to the dtype of x before it quantises it, as a norm that is not fused does",
                "xhat": "rounds xhat, and its product with the weight, before it quantises that, as vLLM does",
            }
        ),
        _SCALING: MappingProxyType(
            {
                "division": "divides by the scale",
                "reciprocal": "multiplies by the reciprocal of the scale",
                OPEN: "multiplies by a factor that is not the rounded reciprocal of the scale",
            }
        ),
        _GATE: MappingProxyType(
            {
                "after": "gates after the norm, as Qwen3-Next and fla do",
                "before": "gates before the norm, as Mamba2 and Nemotron-H do",
            }
        ),
        _ACTIVATION: MappingProxyType({"silu": "gates by silu", "sigmoid": "gates by sigmoid"}),
        _ROUNDING: MappingProxyType(
            {
                "once": "rounds y alone, as fla does",
                "each": "rounds xhat and each product, as Hugging Face does",
            }
        ),
        _GROUP: MappingProxyType(
            {n: f"takes the mean over groups of {n} columns" if n else "takes the mean over the row" for n in GROUPS}
        ),
        _EPS: MappingProxyType(
            {
                "sum": "adds eps to the sum of squares, as fla does",
                "max": "divides by |x|, or by eps if that is larger, as torch.nn.functional.normalize does",
                "mean": "adds eps to the mean of squares, as an RMSNorm over sqrt(N) does",
            }
        ),
        _ROUND_GATED: MappingProxyType(
            {
                "io": "rounds x times the activation before it norms that",
                "none": "norms x times the activation in fp32, as Hugging Face's Mamba2 does",
            }
        ),
    }
)
"""Key -> value -> what a kernel does that has it."""

OF_MODULATIONS: Mapping[str, Mapping[Any, str]] = MappingProxyType(
    {
        _ROUNDING: MappingProxyType(
            {
                "once": "rounds y alone, as a fused kernel does",
                NORMED: "rounds xhat, and modulates that in fp32, as torch.compile of eager code does",
                "each": "rounds xhat, its product and the sum, as eager torch does",
            }
        ),
        _ROUND_FACTOR: MappingProxyType(
            {
                "none": "computes 1 + scale in fp32",
                "io": "rounds 1 + scale to the dtype of scale",
                modulated.APART: "adds xhat to its rounded product with scale, as x + x * scale of eager torch",
            }
        ),
        _ROUND_GATED: MappingProxyType(
            {
                "none": "adds residual_gate times x in fp32",
                "io": "rounds residual_gate times x before it adds that, as eager torch does",
            }
        ),
        _SUM: residual.IN_WORDS,
    }
)
"""The same for the keys of modulated ops."""

OF_GROUPS: Mapping[str, Mapping[Any, str]] = MappingProxyType(
    {
        _ACTIVATION: MappingProxyType(
            {"none": "applies nothing to what it norms", "silu": "applies silu to what it norms"}
        ),
        _ROUNDING: MappingProxyType(
            {
                "once": "rounds y alone, as a fused kernel does",
                "each": "rounds the norm before it applies silu, as two modules of torch do",
            }
        ),
    }
)
"""The same for the keys of ops that norm groups of channels."""


OF_ROTATIONS: Mapping[str, Mapping[Any, str]] = MappingProxyType(
    {
        _PAIRS: MappingProxyType(
            {
                rotary.NEOX: "rotates column j with the one half of the rotated ones behind it, as GPT-NeoX does",
                rotary.INTERLEAVED: "rotates columns 2 j and 2 j + 1, as GPT-J does",
            }
        ),
        _ROUNDING: MappingProxyType(
            {
                "once": "rounds y alone, as vLLM does",
                NORMED: "rounds the normed heads before it rotates them, as two kernels do",
                rotary.ROTATED: "rounds the normed heads, both products and y, as a fused norm before eager code does",
                "each": "rounds xhat, its product, both products of the rotation and y, as Hugging Face does",
            }
        ),
    }
)
"""The same for the keys of ops that rotate heads."""

_WORDS = (IN_WORDS, OF_MODULATIONS, OF_GROUPS, OF_ROTATIONS)


def words_of(op: Op) -> Mapping[str, Mapping[Any, str]]:
    """Key -> value -> what a kernel of ``op`` does that has it."""
    other = OF_GROUPS if op.grouped else OF_ROTATIONS if op.rotary else IN_WORDS
    return OF_MODULATIONS if op.modulated else other


def keys(op: Op) -> Mapping[str, Sequence[str | int]]:
    """The keys that ``op`` leaves open, and the values of each, the most common or the tightest first."""
    of_sum: dict[str, Sequence[str | int]] = {_SUM: residual.SUMS} if op.adds_residual else {}
    of_gate: dict[str, Sequence[str | int]] = {_GATE: GATES, _ACTIVATION: ACTIVATIONS, _ROUNDING: ROUNDINGS}
    of_gate |= {_ROUND_GATED: ROUND_GATED, _GROUP: GROUPS}
    if op.grouped:
        return {_ACTIVATION: AFTER_NORM, _ROUNDING: ROUNDINGS}
    if op.rotary:
        return {_PAIRS: rotary.PAIRS, _ROUNDING: rotary.ROUNDINGS}
    if op.modulated:
        of_product: dict[str, Sequence[str | int]] = {_ROUND_GATED: ROUND_PRODUCT} if op.gates_residual else {}
        return of_sum | of_product | {_ROUNDING: modulated.ROUNDINGS, _ROUND_FACTOR: ROUND_FACTOR}
    of_length: dict[str, Sequence[str | int]] = {_EPS: EPS} if op.l2 else {}
    of_codes: dict[str, Sequence[str | int]] = {_ROUND: ROUNDS, _SCALING: SCALINGS} if op.quantises else {}
    return of_sum | of_codes | (of_gate if op.gated else {}) | of_length


def require_values(op: Op, declared: Mapping[str, Any], who: str) -> None:
    """Raise UsageError if ``who`` declares a key that other ops alone leave open, or a value that others alone have."""
    own = keys(op)
    for key in [key for key in declared if key not in own and any(key in of_op for of_op in _WORDS)]:
        has = f"one of the keys {', '.join(own)}" if own else "none of a convention"
        raise UsageError(f"model.{key} of {who}: op={op.name} has no such key; expected {has}")
    for key, values in own.items():
        value = declared.get(key, OPEN)
        if key != _GROUP and value not in (*values, OPEN):
            expected = f"{one_of(map(str, dict.fromkeys((*values, OPEN))))}, as op={op.name} has them"
            raise UsageError(f"model.{key}={shown_value(value)} of {who}: expected {expected}")


@lru_cache(maxsize=64)
def candidates(op: Op, model: Model) -> tuple[Convention, ...]:
    """Every convention that a kernel of this ``model`` may have; one, (), if it leaves nothing open."""
    left = {key: values for key, values in keys(op).items() if getattr(model, key) == OPEN}
    every = (tuple(zip(left, values, strict=True)) for values in product(*left.values()))
    if op.modulated:
        return tuple(each for each in every if not _is_idle(with_convention(model, each)))
    return tuple(dict.fromkeys(each if op.rotary else _without_idle(each, model) for each in every))


def _is_idle(model: Model) -> bool:
    """Whether a modulated norm leaves out 1 + scale, and does not round each step: then nothing tells that."""
    return model.round_factor == modulated.APART and model.rounding != EACH


def _without_idle(convention: Convention, model: Model) -> Convention:
    """``convention`` without what says something of a product that is not rounded by its other values."""
    chosen = with_convention(model, convention)
    if chosen.activation == AFTER_NORM[0]:  # nothing is applied to what might be rounded
        return tuple(pair for pair in convention if pair[0] != _ROUNDING)
    if (chosen.gate, chosen.rounding) == (BEFORE, EACH):
        return convention
    return tuple(pair for pair in convention if pair[0] != _ROUND_GATED)


def plainest(convention: Convention, case: Case) -> Convention:
    """The first convention that is the same as this one in ``case``: in fp32 some do not differ."""
    fp32, group = case.dtype == "fp32", dict(convention).get(_GROUP)
    first = {_SUM: residual.are_one(case), _ROUND: fp32, _ROUNDING: fp32, _ROUND_GATED: fp32}
    gates_residual = OPS[case.op].gates_residual
    values: dict[str, str | int] = {_SUM: residual.SUMS[0], _ROUND: ROUNDS[0], _ROUNDING: ROUNDINGS[0]}
    values |= {_ROUND_GATED: ROUND_GATED[0], _GROUP: GROUPS[0], _ROUND_FACTOR: ROUND_FACTOR[0]}
    wide = case.weight_format == "fp32"
    first[_ROUND_FACTOR] = fp32 or (wide and dict(convention).get(_ROUND_FACTOR) != modulated.APART)
    if gates_residual:
        first[_ROUND_GATED], values[_ROUND_GATED] = wide, ROUND_PRODUCT[0]
    if (dict(convention).get(_EPS) == MEAN and case.N == 1) or case.eps == 0:  # nothing is added, or as much
        first[_EPS], values[_EPS] = True, SUM
    still = case.angles == "zero" and case.rows not in NOT_FINITE  # infinity times 0 is NaN in the other column
    if case.rotates and (case.of_heads.pairs == 1 or still):
        first[_PAIRS], values[_PAIRS] = True, rotary.NEOX
    if isinstance(group, int) and group and (case.N % group or group == case.N):  # there is no other group in a row
        first[_GROUP] = True
    plain = ((key, values[key] if first.get(key) else value) for key, value in convention)
    return tuple(pair for pair in plain if gates_residual or not (fp32 and pair[0] == _ROUND_GATED))


def with_convention(model: Model, convention: Convention) -> Model:
    """``model`` as if it declared this convention."""
    return replace(model, **dict(convention))  # type: ignore[arg-type]


def shown(convention: Convention) -> str:
    """A convention as a dict that an implementation may declare."""
    return "{" + ", ".join(f"{key!r}: {value!r}" for key, value in convention) + "}"


def in_words(op: Op, left: Iterable[Convention]) -> list[str]:
    """What the conventions that are ``left`` say of a kernel of ``op``, key by key."""
    words = words_of(op)
    values: dict[str, dict[str | int, None]] = {}
    for convention in left:
        for key, value in convention:
            values.setdefault(key, {})[value] = None
    said = (_of_key(words, key, [value for value in words[key] if value in own]) for key, own in values.items())
    return list(filter(None, said))


def told_in_fp32(left: Iterable[Convention]) -> tuple[Convention, ...]:
    """The conventions that are ``left``, without what fp32 cannot tell apart: roundings, and stored sums."""
    return tuple(tuple(pair for pair in each if pair[0] in (_GATE, _ACTIVATION, _GROUP, _EPS, _PAIRS)) for each in left)


def _of_key(words: Mapping[str, Mapping[Any, str]], key: str, left: list[str | int]) -> str:
    """What one key says; "" of how codes are made, if nothing tells: y in fp32 is seldom exactly between two codes."""
    exact = [value for value in left if value != OPEN] or left  # what divides, or multiplies, fits the loosest as well
    if len(exact) == 1:
        return words[key][exact[0]]
    what = {_SUM: "the sums", _ROUND: "the values of round_before_quant", _ROUNDING: "the values of rounding"}
    what |= {_GATE: "a gate", _ACTIVATION: "the activations", _EPS: "the values of eps"}
    what[_PAIRS] = "the values of pairs"
    what |= {_ROUND_FACTOR: "the values of round_factor", _ROUND_GATED: "the values of round_gated"}
    return f"no case tells {what[key]} {', '.join(map(str, exact))} apart" if key in what else ""


def disagreeing(notes: Iterable[str]) -> list[str]:
    """Of several cells' ``notes``, those that say of one key what only one of them can be; [] if there are none."""
    said = set(notes)
    for words in (of_key for table in _WORDS for of_key in table.values()):
        both = [text for text in words.values() if text in said]
        if len(both) > 1:
            return both
    return []
