"""Tensors that somebody gives, as a case and its inputs. Errors name the argument and what was expected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normcheck.cases.case import NO_WEIGHT, Case
from normcheck.cases.dtypes import DTYPES, FORMATS
from normcheck.cases.inputs import Inputs, format_of, inputs_of
from normcheck.cases.op import RELU6, Op
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import COS, GROUPS, HEAD_COUNTS, K_WEIGHT, Q_WEIGHT, RESIDUAL, SIN
from normcheck.errors import UsageError, one_of, shown
from normcheck.oracle.conventions import candidates, keys, plainest, with_convention
from normcheck.oracle.tolerances import Model, declared_model, table

_SIDES = ("weight", "bias")
_OF_SAMPLES = ("scale", "shift", "residual_gate")
_OF_HEADS = (Q_WEIGHT, K_WEIGHT, COS, SIN)


@dataclass(frozen=True)
class Given:
    """What is judged: ``case`` says how its ``inputs`` are made, ``shape`` is that of x, (..., N)."""

    op: Op
    case: Case
    inputs: Inputs
    model: Model
    shape: tuple[int, ...]


def given(
    op: str,
    tensors: Mapping[str, Tensor | None],
    *,
    eps: float,
    counts: Mapping[str, int | None],
    clips: tuple[float, float] | None,
    model: Mapping[str, Any] | None,
) -> Given:
    """``tensors``: x (..., N), and by name those of its shape, and weight and bias (N,); None is one that is not there.

    ``counts``: the numbers of ``Op.counts``, None for those that the op has not. Of norms of groups x is (B, C, ...),
    weight and bias are (C,).
    Raises UsageError, also if the op returns codes, and if what the kernel computes is open: see ``Model``.
    """
    if op not in OPS:
        raise UsageError(f"op={shown(op)}: expected {one_of(OPS)}")
    row, there = OPS[op], {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if row.quantises:
        raise UsageError(f"op={op}: expected one that returns y; codes are judged by normcheck verify")
    x = there["x"]
    _require_floats(there)
    groups = _counted(row, counts, x)
    wanted = {*row.by_name, "x", "dy", *_SIDES, *["dresidual_out"] * row.adds_residual}
    for name in [name for name in there if name not in wanted]:
        raise UsageError(f"{name}: expected none, as {op} has no {name}")
    for name in [name for name in row.by_name if name not in there]:
        raise UsageError(f"{name}=None: expected a tensor, as {op} takes one")
    if "weight" in there and (row.l2 or row.modulated or row.rotary):
        raise UsageError(f"weight: expected None, as {op} has no weight")
    if "bias" in there and not row.takes_bias:
        raise UsageError(f"bias: expected None, as {op} has no bias")
    if row.modulated and (x.dim() != 3 or not x.shape[0]):
        raise UsageError(f"x.shape={tuple(x.shape)}: expected (B, S, N) with B >= 1, as {op} modulates samples")
    heads = _heads(there, counts) if row.rotary else {}
    of_sides = x.shape[1:2] if row.grouped else x.shape[-1:]
    for name, tensor in there.items():
        if name in _OF_HEADS:
            continue
        shape = of_sides if name in _SIDES else (x.shape[0], x.shape[-1]) if name in _OF_SAMPLES else x.shape
        if tensor.shape != shape:
            raise UsageError(f"{name}.shape={tuple(tensor.shape)}: expected {tuple(shape)}")
        if not bool(torch.isfinite(tensor).all()):
            raise UsageError(f"{name}: expected finite numbers; normcheck verify judges NaN and infinities")
    weight = next((there[name] for name in ("weight", "bias", "scale", Q_WEIGHT) if name in there), None)
    io = format_of(x.dtype).name
    for name in _OF_SAMPLES[1:] if row.modulated else ():
        if name in there and there[name].dtype != there["scale"].dtype:
            raise UsageError(f"{name}.dtype={there[name].dtype}: expected that of scale, {there['scale'].dtype}")
    if "residual" in there and "dresidual_out" not in there:
        there["dresidual_out"] = torch.zeros_like(there["residual"])
    whole = (*_SIDES, *_OF_SAMPLES, *_OF_HEADS)
    weighted = "weight" in there or row.modulated or row.rotary
    rows = (*x.shape[:2], x.shape[2:].numel()) if row.grouped else (-1, x.shape[-1])
    flat = {name: t.detach() if name in whole else t.detach().reshape(rows) for name, t in there.items()}
    case = Case(
        op=op,
        dtype=io,
        M=flat["x"].shape[0],
        N=x.shape[1:].numel() if row.grouped else x.shape[-1],
        eps=eps,
        weights="normal" if weighted else NO_WEIGHT,
        weight_dtype=_relative(weight, x) if weighted else "same",
        samples=str(x.shape[0]) if row.modulated else "",
        channels=str(x.shape[1]) if row.grouped else "",
        groups=str(groups) if row.grouped else "",
        **heads,
        bias="bias" in there,
        residual_dtype=_relative(there.get(RESIDUAL), x),
        options=row.clips(clips or RELU6) if row.clamped else (),
    )
    base = declared_model(table().model, model or {}, "the caller")
    return Given(row, case, inputs_of(flat), closed(row, case, base), tuple(x.shape))


def _heads(there: Mapping[str, Tensor], counts: Mapping[str, int | None]) -> dict[str, Any]:
    """The fields of a case whose x (T, N) is so many heads. Raises UsageError unless all fit together."""
    x, size = there["x"], there[Q_WEIGHT].numel()
    q, k = (counts[name] or 0 for name in HEAD_COUNTS)
    if x.dim() != 2 or min(q, k) < 1 or x.shape[1] != (q + 2 * k) * size:
        expected = f"(T, (q_heads + 2 k_heads) D), as k and v have as many heads, with q_weight ({size},)"
        raise UsageError(f"x.shape={tuple(x.shape)}, q_heads={q}, k_heads={k}: expected {expected}")
    pairs = there[COS].shape[-1]
    shapes = {Q_WEIGHT: (size,), K_WEIGHT: (size,), COS: (x.shape[0], pairs), SIN: (x.shape[0], pairs)}
    for name, shape in shapes.items():
        own = there[name]
        if own.shape != shape or own.dtype != there[Q_WEIGHT].dtype or not bool(torch.isfinite(own).all()):
            expected = f"finite numbers {shape} in {there[Q_WEIGHT].dtype}"
            raise UsageError(f"{name}: {tuple(own.shape)} in {own.dtype}; expected {expected}")
    if not 1 <= pairs <= size // 2:
        raise UsageError(f"cos.shape={tuple(there[COS].shape)}: expected (T, pairs), up to half of {size} columns")
    return {"head": str(size), "kv_heads": str(k), "rotary": str(2 * pairs), "angles": "normal"}


def _counted(op: Op, counts: Mapping[str, int | None], x: Tensor) -> int | None:
    """How many groups there are. Raises UsageError for a number that the op has not, and unless that of groups divides
    the channels of x (B, C, ...).
    """
    for name, count in counts.items():
        if count is not None and name not in op.counts:
            raise UsageError(f"{name}={shown(count)}: expected None, as {op.name} has none")
    groups = counts[GROUPS]
    if not op.grouped:
        return None
    if x.dim() < 2 or not x.shape[1:].numel():
        raise UsageError(f"x.shape={tuple(x.shape)}: expected (B, C, ...) with elements, as {op.name} norms channels")
    if not isinstance(groups, int) or groups < 1 or x.shape[1] % groups:
        raise UsageError(f"groups={shown(groups)}: expected a divisor of the channels of x, {x.shape[1]}")
    return groups


def _relative(tensor: Tensor | None, x: Tensor) -> str:
    return "same" if tensor is None or tensor.dtype == x.dtype else "fp32"


def _require_floats(tensors: Mapping[str, Tensor]) -> None:
    """Raise UsageError unless each tensor is of a known dtype on the device of x, and no other than x's or fp32."""
    x = tensors["x"]
    known = [getattr(torch, FORMATS[name].torch_name) for name in DTYPES]
    if x.dtype not in known or x.dim() < 1 or not x.shape[-1]:
        expected = f"(..., N) with N >= 1, in {one_of(map(str, known))}"
        raise UsageError(f"x: expected {expected}; found {tuple(x.shape)} in {x.dtype}")
    for name, tensor in tensors.items():
        if tensor.dtype != x.dtype and not (tensor.dtype == torch.float32 and name != "dy"):
            raise UsageError(f"{name}.dtype={tensor.dtype}: expected that of x, {x.dtype}, or torch.float32")
        if tensor.device != x.device:
            raise UsageError(f"{name}.device={tensor.device}: expected that of x, {x.device}")


def closed(op: Op, case: Case, model: Model) -> Model:
    """``model``, if it leaves nothing open that makes a difference here, with what does not. Raises UsageError."""
    left = tuple(dict.fromkeys(plainest(each, case) for each in candidates(op, model)))
    if len(left) > 1:
        choices = ", ".join(f"{key!r}: {one_of(map(str, values))}" for key, values in keys(op).items())
        raise UsageError(f"model: {case.op} leaves open what is computed: expected a model that declares {choices}")
    return with_convention(model, left[0])
