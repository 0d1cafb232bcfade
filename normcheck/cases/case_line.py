"""The parser of case lines."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields

from normcheck.cases.case import GIVEN_SCALES, LIMITED, MAX_ELEMENTS, NO_WEIGHT, RETURNED, SAMPLES, Case
from normcheck.cases.data_kinds import ANGLE_KINDS, DY_KINDS, GATE_KINDS, RESIDUAL_KINDS, ROW_KINDS, weight_kinds
from normcheck.cases.dtypes import DTYPES, FORMATS
from normcheck.cases.layouts import (
    CHANNELS_LAST,
    HEADS,
    LAYOUTS,
    OF_CHANNELS,
    OF_ROW_GROUPS,
    OF_SAMPLES,
    OF_TOKENS,
    STRIDED,
    TRAILING,
    WEIGHT_STRIDED,
)
from normcheck.cases.ops import OPS
from normcheck.cases.split import CHANNEL_COUNTS, GROUP_COUNTS, HEAD_COLUMNS, KV_HEADS, ROTARY_PARTS
from normcheck.errors import UsageError, one_line, one_of, shown

_REQUIRED = ("M", "N")


def parsed(line: str) -> Case:
    """The case of ``line``. Raises UsageError with a message of one line if that is no case of a known op."""
    case = parse(line)
    if case.bias and not OPS[case.op].takes_bias:
        raise UsageError(f"bias=yes in the case line: {case.op} has none, expected bias=none")
    return case


def parse(line: str) -> Case:
    """As ``parsed``, also with a bias of an op that has none. Without a weight there is a bias only if it is said."""
    if len(line) > 1000:
        raise UsageError(f"case line has {len(line)} characters; expected at most 1000")
    words = line.split()
    if len(words) < 2 or "=" in words[0] or "=" in words[1]:
        raise UsageError(f"case={shown(line, 60)}: expected 'OP DTYPE M=... N=... name=value ...'")
    op, dtype = words[0], words[1]
    if op not in OPS:
        raise UsageError(f"op={shown(op, 60)} in the case line: expected {one_of(OPS)}")
    if dtype not in DTYPES:
        raise UsageError(f"dtype={shown(dtype, 60)} in the case line: expected {one_of(DTYPES)}")
    named = _pairs(words[2:])
    own = OPS[op].options
    _expect_names(named, op, own)
    weighted = True in OPS[op].weights_of((True, False))
    weights = _choice(named, "weights", (*weight_kinds(OPS[op]), NO_WEIGHT) if weighted else (NO_WEIGHT,))
    if weights == NO_WEIGHT:
        if _choice(named, "weight_dtype", ("same", "fp32")) != "same":
            raise UsageError(
                "weight_dtype=fp32 weights=none in the case line: expected one of the two, there is no weight"
            )
        named = {"bias": "none", **named}
    case = Case(
        op=op,
        dtype=dtype,
        M=_integer(named, "M", 0),
        N=_integer(named, "N", 1),
        eps=_number(named, "eps", 1e-5),
        rows=_choice(named, "rows", ROW_KINDS),
        dy=_choice(named, "dy", DY_KINDS),
        weights=weights,
        layout=_choice(named, "layout", LAYOUTS),
        seed=_integer(named, "seed", 0),
        weight_dtype=_choice(named, "weight_dtype", ("same", "fp32")),
        bias=_choice(named, "bias", ("yes", "none")) == "yes",
        gap=_integer(named, "gap", 0),
        options=tuple((name, _number(named, name, 0.0)) for name in sorted(own)),
        residual=_choice(named, "residual", RESIDUAL_KINDS),
        residual_dtype=_choice(named, "residual_dtype", ("same", "fp32")),
        scale=_choice(named, "scale", (RETURNED, LIMITED, *GIVEN_SCALES)),
        gate=_choice(named, "gate", GATE_KINDS),
        samples=_part(named, "samples", SAMPLES) if OPS[op].modulated else "",
        channels=_part(named, "channels", CHANNEL_COUNTS) if OPS[op].grouped else "",
        groups=_part(named, "groups", GROUP_COUNTS) if OPS[op].grouped else "",
        head=_part(named, "head", HEAD_COLUMNS) if OPS[op].rotary else "",
        kv_heads=_part(named, "kv_heads", KV_HEADS) if OPS[op].rotary else "",
        rotary=_part(named, "rotary", ROTARY_PARTS) if OPS[op].rotary else "",
        angles=_choice(named, "angles", ANGLE_KINDS) if OPS[op].rotary else "",
        weight_groups=_integer(named, "weight_groups", 0),
    )
    _validate(case)
    return case


def _validate(case: Case) -> None:
    """Raise UsageError for values that no implementation may be called with."""
    if case.room > MAX_ELEMENTS:
        raise UsageError(f"M={case.M} N={case.N} gap={case.gap}: expected at most {MAX_ELEMENTS} elements")
    fp32 = FORMATS["fp32"]
    if case.eps and not 2.0**fp32.emin <= case.eps <= fp32.max:
        raise UsageError(f"eps={case.eps!r}: expected 0 or a normal fp32 number > 0, kernels take it as one")
    if case.weight_dtype == "fp32" and case.dtype == "fp32":
        raise UsageError("weight_dtype=fp32: expected only under fp16 or bf16, for fp32 it is the same")
    if case.residual_dtype == "fp32" and case.dtype == "fp32":
        raise UsageError("residual_dtype=fp32: expected only under fp16 or bf16, for fp32 it is the same")
    if case.layout == HEADS and OPS[case.op].by_name:
        raise UsageError(f"layout={HEADS}: expected another one for {case.op}, of which no heads are made")
    if case.samples and case.layout not in OF_SAMPLES:
        raise UsageError(f"layout={case.layout}: expected {one_of(OF_SAMPLES)} for {case.op}, whose x is (B, S, N)")
    if case.samples and not case.weight:
        raise UsageError(f"weights=none: expected a kind of data, of the scale and the shift of {case.op}")
    if case.samples.isdigit() and case.M % int(case.samples):
        raise UsageError(f"samples={case.samples}: expected {one_of(SAMPLES)}, or a number that divides M={case.M}")
    if case.channels:
        _validate_channels(case)
    elif case.layout == CHANNELS_LAST:
        raise UsageError(f"layout={case.layout}: expected another one for {case.op}, whose x has no channels")
    if case.head:
        _validate_heads(case)
    _validate_weights(case)
    if case.layout == TRAILING and not case.weight:
        raise UsageError(f"weights=none layout={TRAILING}: expected one of the two, the weight says what is normed")
    if bool(case.gap) != (case.layout in STRIDED) and case.layout != HEADS:
        raise UsageError(
            f"gap={case.gap} layout={case.layout}: expected gap > 0 exactly for a strided layout; {HEADS} may have one"
        )
    clips = dict(case.options)
    if any(abs(clip) > fp32.max for clip in clips.values()):
        raise UsageError(f"lower_clip, upper_clip={list(clips.values())}: expected fp32 numbers")
    if "lower_clip" in clips and not clips["lower_clip"] < clips["upper_clip"]:
        raise UsageError(f"lower_clip={clips['lower_clip']!r}: expected less than upper_clip={clips['upper_clip']!r}")


def _validate_weights(case: Case) -> None:
    """Raise UsageError if weight and bias cannot lie as the layout says."""
    op = OPS[case.op]
    if case.layout == WEIGHT_STRIDED and True not in op.weights_of((True, False)):
        raise UsageError(f"layout={case.layout}: expected another one for {case.op}, which has no weight")
    if case.layout in OF_ROW_GROUPS and not op.of_row_groups:
        raise UsageError(f"layout={case.layout}: expected another one for {case.op}, of which no row groups are made")
    if case.weight_groups and case.layout not in OF_ROW_GROUPS:
        raise UsageError(f"weight_groups={case.weight_groups} layout={case.layout}: expected {one_of(OF_ROW_GROUPS)}")
    if case.weight_groups and case.M % case.weight_groups:
        raise UsageError(f"weight_groups={case.weight_groups}: expected a number that divides M={case.M}")


def _validate_channels(case: Case) -> None:
    """Raise UsageError unless the columns of a case are so many channels in so many groups."""
    if case.layout not in OF_CHANNELS:
        raise UsageError(f"layout={case.layout}: expected {one_of(OF_CHANNELS)} for {case.op}, whose x is (B, C, L)")
    if case.channels.isdigit() and case.N % int(case.channels):
        expected = f"{one_of(CHANNEL_COUNTS)}, or a number that divides N={case.N}"
        raise UsageError(f"channels={case.channels}: expected {expected}")
    count = case.split.channels
    if case.groups.isdigit() and count % int(case.groups):
        expected = f"{one_of(GROUP_COUNTS)}, or a number that divides the {count} channels"
        raise UsageError(f"groups={case.groups}: expected {expected}")


def _validate_heads(case: Case) -> None:
    """Raise UsageError unless the columns of a case are heads of q, of k and of v, and a head has what is rotated."""
    own = case.of_heads
    if case.layout not in OF_TOKENS:
        raise UsageError(f"layout={case.layout}: expected {one_of(OF_TOKENS)} for {case.op}, whose x is (T, N)")
    if not case.weight:
        raise UsageError(f"weights=none: expected a kind of data, of the weights of q and k of {case.op}")
    if own.columns % 2 or 3 * own.columns > case.N or int(case.head) % 2:
        raise UsageError(f"head={case.head} N={case.N}: expected an even number of columns, and three heads or more")
    if case.kv_heads.isdigit() and own.k != int(case.kv_heads):
        most = (case.N // own.columns - 1) // 2
        raise UsageError(f"kv_heads={case.kv_heads}: expected {one_of(KV_HEADS)}, or a number up to {most}")
    if case.rotary.isdigit() and 2 * own.pairs != int(case.rotary):
        expected = f"{one_of(ROTARY_PARTS)}, or an even number up to {own.columns}"
        raise UsageError(f"rotary={case.rotary}: expected {expected}, the columns of a head")


def _expect_names(named: Mapping[str, str], op: str, own: tuple[str, ...]) -> None:
    """Raise UsageError if a required name is missing, or a name is none of a case of this ``op``."""
    for name in _REQUIRED:
        if name not in named:
            raise UsageError(f"{name} is missing in the case line: expected {name}=<integer>")
    for name in own:
        if name not in named:
            raise UsageError(f"{name} is missing in the case line: {op} has it, expected {name}=<number>")
    known = {f.name for f in fields(Case)} - {"op", "dtype", "options"}
    known -= {axis for other in OPS.values() for axis in other.axes} - {*OPS[op].axes}
    for name in named:
        if name not in known and name not in own:
            raise UsageError(f"{_said(name, named[name])}: expected {one_of(sorted({*known, *own}))} for {op}")


def _pairs(words: list[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{shown(word, 60)} in the case line: expected name=value")
        if name in named:
            raise UsageError(f"{_said(name, value)}: {one_line(name, 60)} is given twice, expected once")
        named[name] = value
    return named


def _integer(named: Mapping[str, str], name: str, least: int) -> int:
    text = named.get(name, "0")
    if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < least:
        raise UsageError(f"{_said(name, text)}: expected an integer >= {least}, up to 12 digits")
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
        raise UsageError(f"{_said(name, text)}: expected a finite number")
    return value


def _choice(named: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = named.get(name, choices[0])
    if value not in choices:
        raise UsageError(f"{_said(name, value)}: expected {one_of(choices)}")
    return value


def _part(named: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    text = named.get(name, "")
    return text if re.fullmatch("[1-9][0-9]{0,11}", text) else _choice(named, name, choices)


def _said(name: str, value: str) -> str:
    return f"{one_line(name, 60)}={one_line(value, 60)} in the case line"
