"""The signature of a definition: the role of each input and output, and the (M, N) of each workload."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from normcheck.cases.axes import EPS
from normcheck.cases.case import MAX_ELEMENTS
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.errors import UsageError, shown
from normcheck.loaders.documents import Definition, Tensor, Workload

DTYPES: Mapping[str, str] = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
"""The dtype of a document -> ours."""

SMALL_ROWS = (1, 2, 5, 33)
"""The M of a variable axis beside those of workloads."""

_MOST_EPS = 12
_BIAS, _RESIDUAL, _EPS = ("bias", "beta", "shift"), ("residual", "skip", "sum"), ("eps",)
_GATE = ("gate",)

Shape = tuple[int, int]
"""M, N."""


@dataclass(frozen=True)
class Signature:
    """``inputs``, ``outputs``: (name, role, dtype of torch) in the order of a call. Roles are x, residual, gate,
    weight, bias, eps; y, residual_out. ``dtype``: ours, of x. ``axes``: those of x; ``const``: the fixed lengths.
    """

    inputs: tuple[tuple[str, str, str], ...]
    outputs: tuple[tuple[str, str, str], ...]
    dtype: str
    axes: tuple[str, ...]
    const: Mapping[str, int]

    @property
    def roles(self) -> frozenset[str]:
        """The roles of its inputs."""
        return frozenset(role for _, role, _ in self.inputs)

    def full(self, lengths: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of x. Raises UsageError if an axis has no length."""
        for axis in self.axes:
            if axis not in self.const and axis not in lengths:
                raise UsageError(f"workload: axis {shown(axis)} has no length; expected one for each variable axis")
        return tuple(self.const[axis] if axis in self.const else lengths[axis] for axis in self.axes)

    def small(self, columns: int) -> dict[Shape, tuple[int, ...]]:
        """(M, N) -> shape of x, for small M, as far as axes of rows are variable."""
        free = [axis for axis in self.axes[:-1] if axis not in self.const]
        found = {}
        for rows in SMALL_ROWS if free else ():
            lengths = {axis: rows if axis == free[-1] else 1 for axis in free} | {self.axes[-1]: columns}
            full = self.full(lengths)
            found[rows_and_columns(full)] = full
        return found

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops that have such inputs, the plain ones first."""
        return tuple(op.name for op in OPS.values() if self._has_inputs_of(op))

    def _has_inputs_of(self, op: Op) -> bool:
        weight, bias = "weight" in self.roles, "bias" in self.roles
        by_name = tuple(name for name in ("residual", "gate") if name in self.roles)
        if op.clamped or op.grouped or op.by_name != by_name:
            return False
        if (bias and not weight) or weight not in op.weights_of((weight,)):
            return False
        return bias in op.biases if weight else not op.zero_centered


def signature_of(definition: Definition) -> Signature:
    """The signature of ``definition``. Raises UsageError if no op has such inputs and outputs."""
    where = f"definition={shown(definition.name)}"
    out = next(iter(definition.outputs.values()))
    axes = tuple(out.shape or ())
    if len(axes) < 2 or out.dtype not in DTYPES:
        raise UsageError(f"{where}: expected an output of two axes or more in {', '.join(DTYPES)}")
    inputs: list[tuple[str, str, str]] = []
    seen: set[str] = set()
    for name, tensor in definition.inputs.items():
        role = _role(name, tensor, axes, seen)
        if not role:
            raise UsageError(
                f"{where}: input {shown(name)}: expected x, a residual or a gate of its shape, weight, bias or eps"
            )
        seen.add(role)
        inputs.append((name, role, tensor.dtype))
    outputs = []
    for number, (name, tensor) in enumerate(definition.outputs.items()):
        role = "residual_out" if _named(name, _RESIDUAL) or number else "y"
        if tuple(tensor.shape or ()) != axes or (role == "residual_out" and "residual" not in seen):
            raise UsageError(
                f"{where}: output {shown(name)}: expected y and, with a residual, their sum, of the shape of x"
            )
        outputs.append((name, role, tensor.dtype))
    roles = [role for _, role, _ in outputs]
    if sorted(roles) not in (["y"], ["residual_out", "y"]) or "x" not in seen:
        raise UsageError(f"{where}: expected an input x, and outputs y and, with a residual, their sum")
    dtypes = {dtype for _, role, dtype in (*inputs, *outputs) if role in ("x", "y", "residual", "residual_out")}
    narrow = [n for n, role, d in inputs if role in ("weight", "bias") and d not in (out.dtype, "float32")]
    if len(dtypes) > 1 or narrow:
        raise UsageError(f"{where}: expected one dtype of x, residual and outputs, and that or float32 of the weight")
    const = {name: axis.value for name, axis in definition.axes.items() if axis.value is not None}
    return Signature(tuple(inputs), tuple(outputs), DTYPES[out.dtype], axes, const)


def asked_shapes(signature: Signature, workloads: Sequence[Workload]) -> tuple[tuple[int, ...], ...]:
    """The shape of x of each workload. Raises UsageError for one that is too large for any machine."""
    found = tuple(signature.full(workload.axes) for workload in workloads)
    for full in found:
        if math.prod(full) > MAX_ELEMENTS:
            raise UsageError(f"workload: x of {full}: expected at most {MAX_ELEMENTS:,} elements")
    return found


def given_eps(signature: Signature, workloads: Sequence[Workload]) -> tuple[float, ...]:
    """The eps that workloads give by value, if eps is an input; () if none does."""
    names = [name for name, role, _ in signature.inputs if role == "eps"]
    values = [w.inputs[name].value for w in workloads for name in names if name in w.inputs]
    return tuple(dict.fromkeys(float(v) for v in values if v is not None and _may_be_eps(float(v))))[:_MOST_EPS]


def written_eps(source: str) -> tuple[float, ...]:
    """The eps that a reference may have: the numbers below 1 that are written in it, then the usual ones."""
    written = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    numbers = [v for v in written if isinstance(v, float) and 0 < v < 1 and _may_be_eps(v)]
    return tuple(dict.fromkeys((*numbers[:_MOST_EPS], *sorted(EPS, key=lambda eps: abs(math.log10(eps) + 5.4)))))


def rows_and_columns(full: Sequence[int]) -> Shape:
    """(M, N) of x of this shape, whose last dimension is normed."""
    return math.prod(full[:-1]), full[-1]


def _may_be_eps(value: float) -> bool:
    return value == 0 or 1e-30 <= value <= 1e30


def _named(name: str, words: Sequence[str]) -> bool:
    return any(word in name.lower() for word in words)


def _role(name: str, tensor: Tensor, axes: tuple[str, ...], seen: set[str]) -> str:
    """The role of an input, "" if it has none. Which of two summands is the residual does not matter: they add up."""
    shape = None if tensor.shape is None else tuple(tensor.shape)
    if shape is None:
        return "eps" if _named(name, _EPS) and "eps" not in seen else ""
    if shape == axes:
        if _named(name, _GATE):
            return "gate" if "gate" not in seen else ""
        first, second = ("residual", "x") if _named(name, _RESIDUAL) else ("x", "residual")
    elif shape == axes[-1:]:
        first, second = ("bias", "weight") if _named(name, _BIAS) else ("weight", "bias")
    else:
        return ""
    return first if first not in seen else second if second not in seen else ""
