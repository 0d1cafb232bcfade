"""What an implementation declares about the cases that it takes, as data: each field once, with its rule.

A field with a ``Rule`` is checked, sent to another process and read there by what stands here, and by nothing else.
Nothing is imported that a process in another environment may not have, so no pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from os import PathLike
from typing import Annotated, Any, get_type_hints

from normcheck.cases.case import MAX_ELEMENTS, Case
from normcheck.cases.dtypes import DTYPES, named
from normcheck.errors import one_of
from normcheck.result import SUMS

DEVICES = ("cpu", "cuda")
"""Devices on which implementations run."""

WEIGHT_DTYPES = ("io", "fp32")
"""Dtypes of weight and bias, or of a residual: that of x ("io"), or fp32 beside x in half precision."""

CONTEXT_NAMES = (
    *("inference", "frozen", "again", "thread", "threads", "autocast"),
    *("compile", "stream", "device", "profiler", "graph"),
)
"""The contexts that an implementation may declare to hold in, see ``contexts.catalogue``."""

WEIGHT_LAYOUTS = ("strided", "stacked", "interleaved")
"""How weight and bias may come beside packed (N,), if that is declared: the layouts ``weight_strided`` and so on."""

OVERWRITABLE = ("x", "dy", "residual")
"""The inputs that an implementation may declare to overwrite."""


INVARIANT = ("y", "residual_out", "mean", "rstd", "bitmask", "q", "dx", "dresidual", "dgate", "dw", "db")
"""The outputs that an implementation may declare to be batch invariant."""


@dataclass(frozen=True)
class Rule:
    """The values that a field may have: those for which ``holds`` is true, whatever was given; ``words`` name them.

    ``read`` makes what the field has of such a value.
    """

    words: str
    holds: Callable[[Any], bool]
    read: Callable[[Any], Any] = lambda value: value


def _tuple_of(allowed: Callable[[Any], bool], least: int = 0) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and len(value) >= least and all(map(allowed, value))


def _few(allowed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or (isinstance(value, tuple | list) and all(map(allowed, value)))


def _each(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else tuple(map(read, value))


def _one_of(*choices: object) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str | tuple) and value in choices


def _is_flag(value: object) -> bool:
    return value is True or value is False


def _is_shape(shape: object) -> bool:
    if not isinstance(shape, tuple) or len(shape) != 2 or not all(isinstance(n, int) and n >= 1 for n in shape):
        return False
    return bool(shape[0] * shape[1] <= MAX_ELEMENTS)


def _is_eps(eps: object) -> bool:
    return type(eps) in (int, float) and (eps == 0 or 1e-37 <= eps <= 1e37)  # type: ignore[operator]


_NOT_A_KERNELS = ("PATH", "HOME", "TMPDIR", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
_NOT_A_KERNELS_PREFIX = ("LD_", "PYTHON", "NORMCHECK")


def _is_variable(name: object) -> bool:
    """Whether a kernel may have this variable set: not one by which its process is started, found or watched."""
    if not isinstance(name, str) or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]{0,99}", name):
        return False
    return name not in _NOT_A_KERNELS and not name.startswith(_NOT_A_KERNELS_PREFIX)


def _is_environment(value: object) -> bool:
    if not isinstance(value, Mapping) or len(value) > 20 or not all(map(_is_variable, value)):
        return False
    return all(isinstance(text, str) and len(text) <= 1000 and "\0" not in text for text in value.values())


def _are_variants(value: object) -> bool:
    if not isinstance(value, Mapping) or not all(map(_is_environment, value.values())):
        return False
    return all(isinstance(name, str) and re.fullmatch(r"[\w.+-]{1,60}", name) for name in value)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_ELEMENTS


def _is_source(value: object) -> bool:
    return value is None or isinstance(value, str | PathLike)


_LONGEST_PATTERN = 200


def _is_pattern(value: object) -> bool:
    if not isinstance(value, str) or len(value) > _LONGEST_PATTERN:
        return False
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


_are_outputs = _tuple_of(_one_of(*INVARIANT))

_FLAG = Rule("True or False", _is_flag)
_FLAGS = Rule("a tuple with False, True or both", _tuple_of(_is_flag, least=1))
_DTYPES = Rule(f"a tuple with {one_of(DTYPES)}", _tuple_of(lambda dtype: True, least=1), _each(named))
_RANKS = Rule("(2,), (2, 3) or (2, 3, 4)", _one_of((2,), (2, 3), (2, 3, 4)))
_IO_OR_WIDER = Rule(f"{WEIGHT_DTYPES[:1]} or {WEIGHT_DTYPES}", _one_of(WEIGHT_DTYPES[:1], WEIGHT_DTYPES))
_LAYOUTS_OF_WEIGHTS = Rule(f"a tuple with {one_of(WEIGHT_LAYOUTS)}, or ()", _tuple_of(_one_of(*WEIGHT_LAYOUTS)))
_INPUTS = Rule(f"a tuple with {one_of(OVERWRITABLE)}, or ()", _tuple_of(_one_of(*OVERWRITABLE)))
_OUTPUTS = Rule(f"True, False or a tuple with {one_of(INVARIANT)}", lambda v: _is_flag(v) or _are_outputs(v))
_DEVICES = Rule(f"a tuple with {one_of(DEVICES)}, or ()", _tuple_of(_one_of(*DEVICES)))
_CONTEXTS = Rule(f"a tuple with {one_of(CONTEXT_NAMES)}, or ()", _tuple_of(_one_of(*CONTEXT_NAMES)))
_SHAPES = Rule(f"(M, N) pairs of integers >= 1, at most {MAX_ELEMENTS} elements", _few(_is_shape), _each(tuple))
_EPSILONS = Rule("numbers, each 0 or from 1e-37 to 1e37", _few(_is_eps), _each(float))
_COUNT = Rule("an integer >= 0, of which 0 stands for any", _is_count)
_PATTERN = Rule(f"a regular expression of at most {_LONGEST_PATTERN} characters, or ''", _is_pattern)
_WORDS = "a dict of variables to text, without those of Python, the loader and normcheck, such as PATH or LD_PRELOAD"
_ENVIRONMENT = Rule(_WORDS, _is_environment, dict)
_VARIANTS = Rule(f"a dict of names to environments, each {_WORDS}", _are_variants, dict)
_SOURCE = Rule("a link or a path", _is_source, lambda value: str(value or ""))


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What an implementation declares; ``impls.Implementation``, which adds name, op and forward, explains each."""

    backward: Callable[..., Any] | None = None
    supports: Callable[[Case], str | None] | None = None
    unavailable: Callable[[str], str | None] | None = None
    dtypes: Annotated[tuple[str, ...], _DTYPES] = DTYPES
    ranks: Annotated[tuple[int, ...], _RANKS] = (2,)
    biases: Annotated[tuple[bool, ...], _FLAGS] = (False, True)
    weights: Annotated[tuple[bool, ...], _FLAGS] = (True,)
    lone_bias: Annotated[bool, _FLAG] = False
    strided: Annotated[bool, _FLAG] = True
    heads: Annotated[bool, _FLAG] = False
    trailing: Annotated[bool, _FLAG] = False
    weight_layouts: Annotated[tuple[str, ...], _LAYOUTS_OF_WEIGHTS] = ()
    weight_dtypes: Annotated[tuple[str, ...], _IO_OR_WIDER] = WEIGHT_DTYPES
    residual_dtypes: Annotated[tuple[str, ...], _IO_OR_WIDER] = WEIGHT_DTYPES[:1]
    overwrites: Annotated[tuple[str, ...], _INPUTS] = ()
    model: Mapping[str, Any] | Callable[[Case], Mapping[str, Any]] = field(default_factory=dict)
    shapes: Annotated[tuple[tuple[int, int], ...] | None, _SHAPES] = None
    epsilons: Annotated[tuple[float, ...] | None, _EPSILONS] = None
    channels: Annotated[int, _COUNT] = 0
    groups: Annotated[int, _COUNT] = 0
    deterministic: Annotated[bool, _FLAG] = True
    batch_invariant: Annotated[bool | tuple[str, ...], _OUTPUTS] = False
    by_default: Annotated[tuple[str, ...], _DEVICES] = DEVICES
    builds: Annotated[bool, _FLAG] = True
    contexts: Annotated[tuple[str, ...], _CONTEXTS] = ()
    expects_kernel: Annotated[str, _PATTERN] = ""
    environment: Annotated[Mapping[str, str], _ENVIRONMENT] = field(default_factory=dict)
    variants: Annotated[Mapping[str, Mapping[str, str]], _VARIANTS] = field(default_factory=dict)
    source: Annotated[str, _SOURCE] = ""

    def holds_among_rows(self, output: str) -> bool:
        """Whether ``output`` is declared to be batch invariant; True declares all but the sums over rows."""
        declared = self.batch_invariant
        return output in declared if isinstance(declared, tuple) else declared and output not in SUMS


def rules(kind: type) -> Mapping[str, Rule]:
    """Name -> ``Rule``, for each field of ``kind`` that is data."""
    return _rules(kind)


@cache
def _rules(kind: type) -> Mapping[str, Rule]:
    """Kept: to evaluate the hints takes milliseconds, and a file may declare a hundred implementations."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: rule for name, hint in hints.items() for rule in getattr(hint, "__metadata__", ())}


def of_message(kind: type, message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are data, as JSON has left them, with tuples again; not checked.

    Raises KeyError if one is missing, RecursionError if one is nested too deep.
    """
    return {name: _with_tuples(message[name]) for name in rules(kind)}


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
