"""Claims: the cases that an implementation declares to take, without the values that it has refused so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from normcheck.cases.case import GIVEN_SCALES, LIMITED, RETURNED, SAMPLES, Case
from normcheck.cases.declared import WEIGHT_LAYOUTS, Declared
from normcheck.cases.layouts import (
    CHANNELS_LAST,
    EXPANDED,
    HEAD_SIZES,
    HEADS,
    OF_CHANNELS,
    OF_TOKENS,
    OF_WEIGHTS,
    RANK4,
    SAMPLES_STRIDED,
    STRIDED,
    TRAILING,
    WEIGHT_STRIDED,
    head_size_near,
)
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.cases.parameters import Parameters
from normcheck.cases.split import CHANNEL_COUNTS, GROUP_COUNTS, HEAD_COLUMNS, HEADS_SPAN, KV_HEADS, ROTARY_PARTS

_GAP = 8

_MULTIPLES = (1, 2, 3, 4, 5, 7, 8, 12, 16, 32, 64, 128)

REFUSABLE = ("weight", "bias", "weight_dtype", "layout", "residual_dtype")
"""The axes of a case, beside its size, whose values an implementation may refuse one by one."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """The values that cases for an implementation may have, each tuple simplest first.

    ``weights``: whether there is a weight, True first. ``biases``, ``weight_dtypes``: of the cases with one, if any;
    ``lone_bias``: whether those without one may have a bias. ``scales``: those of ``Case.scale``. ``shapes``: the
    (M, N) to use, () for any; ``epsilons``: the eps, () for any; ``columns``: N is a multiple of it.
    ``channels``, ``groups``: those of ``Case``, of a grouped op.
    ``batch_invariant``: it is declared. ``refused``: pairs of an axis ("M", "N" or one of REFUSABLE) and a value that
    the implementation refused.
    """

    op: Op
    dtype: str
    biases: tuple[bool, ...]
    weight_dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    weights: tuple[bool, ...] = (True,)
    lone_bias: bool = False
    residual_dtypes: tuple[str, ...] = ("same",)
    scales: tuple[str, ...] = (RETURNED,)
    shapes: tuple[tuple[int, int], ...] = ()
    batch_invariant: bool = False
    epsilons: tuple[float, ...] = ()
    columns: int = 1
    channels: tuple[str, ...] = CHANNEL_COUNTS
    groups: tuple[str, ...] = GROUP_COUNTS
    refused: frozenset[tuple[str, Any]] = field(default_factory=frozenset)

    def without(self, axis: str, value: Any) -> Claims:
        """These claims with one more value that was refused."""
        return replace(self, refused=self.refused | {(axis, value)})

    def without_shape(self, shape: tuple[int, int]) -> Claims:
        """These claims without an (M, N) that was refused; the last one stays, because () means any."""
        left = tuple(own for own in self.shapes if own != shape)
        return replace(self, shapes=left or self.shapes)

    def admits(self, axis: str, value: Any) -> bool:
        """Whether this value was not refused, and an N can be cut into groups."""
        return (axis, value) not in self.refused and not (axis == "N" and value % self.columns)

    @property
    def multiples(self) -> tuple[int, ...]:
        """The N that only these claims have, if N is a multiple of something."""
        return tuple(self.columns * k for k in _MULTIPLES) if self.columns > 1 else ()

    def fits(self, layout: str, columns: int) -> bool:
        """Whether cases of this layout have this N: heads are of HEAD_SIZES, unless the shapes are declared."""
        return layout != HEADS or bool(self.shapes) or columns in HEAD_SIZES

    @property
    def only_heads(self) -> bool:
        """Whether every case has heads."""
        return self.layouts == (HEADS,)

    def nearest(self, case: Case) -> Case:
        """``case``, in the simplest layout of these claims if they have not its own, with their first eps if they have
        not its own, and with an N that fits.
        """
        if self.epsilons and case.eps not in self.epsilons:
            case = replace(case, eps=self.epsilons[0])
        if case.layout not in self.layouts:
            layout = self.layouts[0]
            dy = "normal" if layout in EXPANDED else case.dy
            case = replace(case, layout=layout, gap=_GAP if layout in STRIDED else 0, dy=dy)
        if case.N % self.columns:
            case = replace(case, N=-(-case.N // self.columns) * self.columns)
        return case if self.fits(case.layout, case.N) else replace(case, N=head_size_near(case.N))

    def values(self, axis: str) -> tuple[Any, ...]:
        """The values of one of REFUSABLE that were not refused; the simplest one if all were."""
        declared = {
            "weight": self.weights,
            "bias": self.biases,
            "weight_dtype": self.weight_dtypes,
            "layout": self.layouts,
            "residual_dtype": self.residual_dtypes,
        }
        every = declared[axis]
        return tuple(value for value in every if self.admits(axis, value)) or every[:1]

    @property
    def own(self) -> dict[str, tuple[Any, ...]]:
        """Each of ``Op.axes`` with its values."""
        from normcheck.cases.data_kinds import (
            ANGLE_KINDS,
            GATE_KINDS,
            RESIDUAL_KINDS,
        )  # torch, which a command line does without

        every = {
            "residual": RESIDUAL_KINDS,
            "residual_dtype": self.values("residual_dtype"),
            "scale": self.scales,
            "gate": GATE_KINDS,
            "samples": SAMPLES,
            "channels": self.channels,
            "groups": self.groups,
            "head": HEAD_COLUMNS,
            "kv_heads": KV_HEADS,
            "rotary": ROTARY_PARTS,
            "angles": ANGLE_KINDS,
        }
        return {axis: every[axis] for axis in self.op.axes}

    @property
    def lone_biases(self) -> tuple[bool, ...]:
        """The values of ``Case.bias`` without a weight."""
        return (False, True)[: 1 + self.lone_bias]

    @property
    def parameters(self) -> tuple[Parameters, ...]:
        """The parameters that cases may have, those with a weight first."""
        of_weight = [
            *product((True,) * (True in self.values("weight")), self.values("bias"), self.values("weight_dtype")),
            *[(False, bias, "same") for bias in self.lone_biases if False in self.values("weight")],
        ]
        return tuple(Parameters(*own, residual) for own in of_weight for residual in self.values("residual_dtype"))

    def takes(self, case: Case) -> bool:
        """Whether no value of ``case`` was refused so far."""
        return all(self.admits(axis, value) for axis, value in refusable(case).items())


def refusable(case: Case) -> dict[str, Any]:
    """Axis -> value, for the axes of a case of which an implementation may refuse a value."""
    of_weight = {"bias": case.bias, "weight_dtype": case.weight_dtype} if case.weight else {}
    of_residual = {"residual_dtype": case.residual_dtype} if OPS[case.op].adds_residual else {}
    return {"weight": case.weight, **of_weight, "layout": case.layout, **of_residual, "N": case.N, "M": case.M}


def claims_of(op: Op, implementation: Declared, dtype: str, only: Sequence[str] = ()) -> Claims:
    """The claims of ``implementation`` for ``op`` in ``dtype``, before it refuses anything.

    ``only``: the layouts that are asked for, of which ``layouts_of`` has one at least; () for all.
    """
    biases = tuple(bias for bias in op.biases if bias in implementation.biases) or op.biases
    weight_dtypes = _relative(implementation.weight_dtypes, dtype)
    layouts = layouts_of(op, implementation, only)
    weights = op.weights_of(implementation.weights)
    if True not in weights:
        biases, weight_dtypes = (False,), ("same",)
    return Claims(
        op=op,
        dtype=dtype,
        biases=biases,
        weight_dtypes=weight_dtypes,
        layouts=layouts,
        weights=tuple(weight for weight in (True, False) if weight in weights),
        lone_bias=implementation.lone_bias and op.takes_bias,
        residual_dtypes=_relative(implementation.residual_dtypes, dtype) if op.adds_residual else ("same",),
        scales=scales_of(op, implementation),
        shapes=tuple(sorted(implementation.shapes or (), key=lambda shape: (shape[0] * shape[1], shape))),
        batch_invariant=bool(implementation.batch_invariant),
        epsilons=tuple(implementation.epsilons or ()),
        columns=columns_of(op, implementation),
        channels=channels_of(implementation),
        groups=(str(implementation.groups),) if implementation.groups else GROUP_COUNTS,
    )


def scales_of(op: Op, implementation: Declared) -> tuple[str, ...]:
    """The values of ``Case.scale``: kinds of given scales, unless the model declares that the scale is returned."""
    model = implementation.model
    declared = model if op.quantises and isinstance(model, Mapping) else {}
    if op.quantises and declared.get("scale", "given") == "given":
        return GIVEN_SCALES
    return (RETURNED, LIMITED) if declared.get("scale_limit") else (RETURNED,)


def _relative(declared: Sequence[str], dtype: str) -> tuple[str, ...]:
    """The values of ``Case.weight_dtype``, or of ``Case.residual_dtype``, for x in ``dtype``."""
    wide = dtype != "fp32" and "fp32" in declared
    return ((("same",) if "io" in declared or dtype == "fp32" else ()) + ("fp32",) * wide) or ("same",)


def columns_of(op: Op, implementation: Declared) -> int:
    """What N is a multiple of: the columns of a group, if a gated op declares them for all cases, or the channels that
    a grouped one declares, or has because of its groups; HEADS_SPAN of a rotary one, unless it
    declares its shapes.
    """
    if op.rotary:
        return 1 if implementation.shapes else HEADS_SPAN
    if op.grouped:
        return implementation.channels or _CHANNELS_A_GROUP * implementation.groups or 1
    declared = implementation.model
    group = declared.get("group", 0) if op.gated and isinstance(declared, Mapping) else 0
    return group if isinstance(group, int) and group > 0 else 1


_CHANNELS_A_GROUP = 2
"""In half of the cases of a number of groups that is declared; in the others a group is one channel."""


def channels_of(implementation: Declared) -> tuple[str, ...]:
    """The values of ``Case.channels``: a number that is declared, or multiples of the groups that are."""
    if implementation.channels:
        return (str(implementation.channels),)
    groups = implementation.groups
    return (str(_CHANNELS_A_GROUP * groups), str(groups)) if groups else CHANNEL_COUNTS


def layouts_of(op: Op, implementation: Declared, only: Sequence[str] = ()) -> tuple[str, ...]:
    """The layouts that ``implementation`` declares; those of ``only``, unless that is empty.

    No heads are made of an op that gets more inputs by name, and no dy is laid out if there is no backward.
    """
    layouts = ["contiguous", "misaligned"]
    if implementation.strided:
        of_codes = ["x_strided", *["strided"] * op.adds_residual]
        layouts += of_codes if op.quantises else ["x_strided", "dy_strided", "strided", *EXPANDED]
    if 3 in implementation.ranks:
        layouts += ["rank3", *["rank3_strided", SAMPLES_STRIDED] * implementation.strided]
    trailing = implementation.trailing and True in op.weights_of(implementation.weights)
    layouts += [RANK4] * (4 in implementation.ranks) + [TRAILING] * trailing
    if implementation.backward is not None and "dy_scalar" in layouts:
        layouts.remove("dy_scalar")  # an own backward is promised a dy whose last stride is 1
    if True in op.weights_of(implementation.weights):
        taken = [weight_layout(name) for name in WEIGHT_LAYOUTS if name in implementation.weight_layouts]
        layouts += [layout for layout in taken if op.of_row_groups or layout == WEIGHT_STRIDED]
    layouts += [HEADS] * (implementation.heads and not op.by_name)
    if op.modulated or op.rotary:
        of_samples = [SAMPLES_STRIDED] * (implementation.strided and op.modulated)
        layouts = [*(layout for layout in layouts if layout in OF_TOKENS), *of_samples]
    if op.grouped:
        of_channels = [CHANNELS_LAST] * implementation.strided
        layouts = [layout for layout in (*layouts, *of_channels) if layout in OF_CHANNELS]
    return tuple(layout for layout in layouts if not only or layout in only)


def weight_layout(name: str) -> str:
    """The layout that one of ``declared.WEIGHT_LAYOUTS`` stands for."""
    return f"weight_{name}"


def unclaimed(op: Op, implementation: Declared, case: Case) -> str:
    """The first value of ``case`` that ``implementation`` does not declare, in words; "" if it declares them all.

    A core has declared values only; a case line may have any.
    """
    if case.layout in (*STRIDED, *EXPANDED, CHANNELS_LAST) and not implementation.strided:
        return f"layout={case.layout}: strided=False is declared"
    if case.layout == "dy_scalar" and implementation.backward is not None:
        return "layout=dy_scalar: a backward of its own gets a dy whose last stride is 1"
    if implementation.epsilons and case.eps not in implementation.epsilons:
        return f"eps={case.eps!r}: epsilons={tuple(implementation.epsilons)} is declared"
    if case.weight not in op.weights_of(implementation.weights):
        return f"weights={case.weights}: weights={implementation.weights} is declared"
    if case.weight and case.bias not in implementation.biases:
        return f"bias={'yes' if case.bias else 'none'}: biases={implementation.biases} is declared"
    if case.bias and not (case.weight or implementation.lone_bias):
        return "bias=yes weights=none: lone_bias=False is declared"
    if case.layout == HEADS:
        if not implementation.heads:
            return f"layout={HEADS}: heads=False is declared"
    elif case.layout == TRAILING:
        if not implementation.trailing:
            return f"layout={TRAILING}: trailing=False is declared"
    elif case.layout in OF_WEIGHTS:
        if case.layout not in map(weight_layout, implementation.weight_layouts):
            return f"layout={case.layout}: weight_layouts={implementation.weight_layouts} is declared"
    elif case.rank not in implementation.ranks and not (case.samples or case.channels):
        return f"layout={case.layout}: ranks={implementation.ranks} is declared"
    if case.weight_dtype == "fp32" and "fp32" not in implementation.weight_dtypes:
        return 'weight_dtype=fp32: weight_dtypes=("io",) is declared'
    if case.residual_dtype == "fp32" and "fp32" not in implementation.residual_dtypes:
        return 'residual_dtype=fp32: residual_dtypes=("io",) is declared'
    for name, own in (("channels", implementation.channels), ("groups", implementation.groups)):
        if own and getattr(case.split, name) != own:
            return f"{name}={getattr(case, name)}: {name}={own} is declared"
    if case.N % columns_of(op, implementation) and not op.rotary:
        return f"N={case.N}: model declares groups of {columns_of(op, implementation)} columns"
    if case.scale not in scales_of(op, implementation):
        return f"scale={case.scale}: model declares that the scale is {_scale_in_words(op, implementation)}"
    return ""


def _scale_in_words(op: Op, implementation: Declared) -> str:
    scales = scales_of(op, implementation)
    if RETURNED not in scales:
        return "given"
    return "returned, with or without scale_ub" if LIMITED in scales else "returned, without scale_ub"
