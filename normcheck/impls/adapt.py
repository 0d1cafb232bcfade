"""Adapt a plain function, a module or the class of a module to the forward of an implementation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import BY_NAME, GROUPS, HEAD_COUNTS, SCALE, SHIFT
from normcheck.errors import UsageError, error_text, one_line
from normcheck.impls.call_signature import SHAPE, parameters_of, signature_of
from normcheck.impls.implementation import ONE_MODULE

if TYPE_CHECKING:
    from torch import Tensor

_OPTIONS = ("lower_clip", "upper_clip")
_SCALE_LIMIT = "scale_ub"
_NAMED = (*BY_NAME, GROUPS, *HEAD_COUNTS)
"""What a function takes by name if its op has it, and only then; a scale of codes may be returned instead, so one
counts beside a shift alone."""
_GROUP_COUNTS = ("num_groups", GROUPS)
"""What functions of torch, and the constructor of a module, call the number of groups."""
_TRIAL_COLUMNS = 8


class Adapted(NamedTuple):
    """``forward`` as an implementation has it, the ``biases`` and ``weights`` that it takes, and which inputs it takes
    by name, ``named``, without a scale. ``of_codes``: what it says of its scale, as a model, if its op quantises.
    """

    forward: Callable[..., Any]
    biases: tuple[bool, ...]
    weights: tuple[bool, ...] = (True,)
    named: tuple[str, ...] = ()
    of_codes: Mapping[str, Any] = MappingProxyType({})


def adapt(target: Callable[..., Any], spec: str = "", op: Op | None = None) -> Adapted:
    """Adapt what ``spec`` names: a function f(x, weight, bias, eps), without bias or without both, with any name for
    eps; an autograd.Function; a module with such a forward; or the class of a module, made by ITS_NAME(N, eps=...),
    that has weight and bias itself, or no parameter at all; of groups, by (groups, C, eps) with a parameter that says
    so. If the default of weight is None, it is also called without a weight. A function, or a module's forward, with a
    parameter named residual, gate, shift or groups is of an op that has it; if the parameter has a default, of others
    as well. If the op quantises, one named scale gets the scale; a function without it returns the scale, and gets its
    upper limit if it has a parameter named scale_ub.

    An option of the op is passed only to a parameter of its name. Raises UsageError for anything else, with the call
    that ``op``, if it is known, would be given by.
    """
    import torch  # not at the top: commands that look through this package start without torch

    spec = spec or one_line(str(getattr(target, "__name__", target)), 120)
    if inspect.isclass(target) and issubclass(target, torch.nn.Module):
        return _of_class(target, spec, op)
    if inspect.isclass(target) and issubclass(target, torch.autograd.Function):
        target = target.apply
    if inspect.isclass(target) or type(target).__module__.split(".")[0] == "triton":
        what = "a class" if inspect.isclass(target) else "a Triton kernel"
        raise UsageError(f"impl={spec}: {what}: expected {expected(target)}, which calls it")
    return _of_function(target, spec, op)


def expected(target: Any, op: Op | None = None) -> str:
    """The functions that can be adapted, in words, by the name of what is there; of an ``op`` with names the one."""
    name = one_line(str(getattr(target, "__name__", "f")), 60)
    if op is not None and op.l2:
        return f"a function {name}(x, eps) -> y"
    if op is not None and _wanted(op):
        return f"a function {_call(op, name)}"
    return f"a function {name}(x, weight, eps), {name}(x, weight, bias, eps) or, without a weight, {name}(x, eps)"


def _wanted(op: Op) -> tuple[str, ...]:
    """What a function of ``op`` must take by name."""
    return tuple(name for name in op.by_name if name != SCALE or op.modulated) + op.counts


def _call(op: Op, name: str) -> str:
    """How a function of ``op`` that is called ``name`` is called, and what it returns."""
    weight = "" if op.modulated or op.rotary else f", weight{', bias' * op.takes_bias}"
    returned = "(y, residual_out)" if op.adds_residual else "y"
    return f"{name}(x, {', '.join(_wanted(op))}{weight}, eps) -> {returned}"


def require_named(adapted: Adapted, target: Any, op: Op, spec: str) -> None:
    """Raise UsageError if what was adapted takes an input by name that the op has not, or the other way round; or must
    have a weight, and the op has none.
    """
    wanted = _wanted(op)
    name = one_line(str(getattr(target, "__name__", "f")), 60)
    if op.l2 and False not in adapted.weights:
        raise UsageError(f"impl={spec}: op={op.name}: expected {name}(x, eps) -> y, as {op.name} has no weight")
    if adapted.named == wanted:
        return
    if wanted:
        missing = [each for each in wanted if each not in adapted.named]
        other = [each for each in adapted.named if each not in wanted]
        named = [f"parameter{'s' * (len(missing) > 1)} named {' and '.join(missing)}"] if missing else []
        named += [f"no parameter named {' or '.join(other)}"] if other else []
        words = f"{'a ' * (len(missing) == 1)}{', and '.join(named)}: {_call(op, name)}"
    else:
        alike = [o for o in OPS.values() if o.quantises == op.quantises]
        having = (o.name for o in alike if {*adapted.named} <= {*o.by_name, *o.counts})
        words = f"no parameter named {' or '.join(adapted.named)}, or --op {'|'.join(having)}"
    raise UsageError(f"impl={spec}: op={op.name}: expected {words}")


def _of_function(function: Callable[..., Any], spec: str, op: Op | None) -> Adapted:
    import torch

    signature = signature_of(function.forward if isinstance(function, torch.nn.Module) else function)
    if signature is None:
        return Adapted(function, (False, True), (True,))
    names = signature.parameters
    besides = {*_OPTIONS, _SCALE_LIMIT, SHAPE, *_GROUP_COUNTS, *_NAMED}
    own = parameters_of(signature, besides)
    of_codes = op is not None and op.quantises
    if SCALE in names and not (SHIFT in names or of_codes or "weight" in own.tensors):  # others call it weight
        own = parameters_of(signature, besides - {SCALE})

    def arguments(tensors: Sequence[Any], eps: float, options: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        values = {_called(key, names): value for key, value in options.items()}
        values = {key: value for key, value in values.items() if own.any_name or key in names}
        if own.any_place:
            by_name = own.any_name or own.eps == "eps"
            return [*tensors, *[eps] * (not by_name)], values | ({"eps": eps} if by_name else {})
        values |= dict(zip(own.tensors.values(), tensors, strict=False)) | {own.eps or "eps": eps}
        return own.arguments(values | ({SHAPE: tensors[0].shape[-1:]} if SHAPE in names else {}))

    takes = [role for role in ("x", "weight", "bias") if own.any_place or role in own.tensors]
    try:
        if takes[:2] == ["x", "bias"]:
            raise TypeError("a bias without a weight")
        if not (own.any_place or own.any_name or own.eps):
            raise TypeError("no parameter for eps")
        given = dict.fromkeys((*_OPTIONS, *(name for name in _NAMED if _called(name, names) in names)), 0.0)
        places, by_name = arguments([torch.empty(0)] * len(takes), 0.0, given)
        signature.bind(*places, **by_name)
    except (IndexError, TypeError) as error:
        wrong = f"its parameters are {one_line(str(signature), 200)}: {one_line(str(error), 120)}"
        raise UsageError(f"impl={spec}: {wrong}; expected {expected(function, op)}") from None

    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, **options: Any) -> Any:
        places, by_name = arguments((x, weight, bias)[: len(takes)], eps, options)
        return function(*places, **by_name)

    forward.__wrapped__ = function  # type: ignore[attr-defined]  # for source_location
    optional = "weight" in own.tensors and names[own.tensors["weight"]].default is None
    weights = ((False, True) if optional else (True,)) if "weight" in takes else (False,)
    says = {} if SCALE in names else {SCALE: "any", "scale_limit": _SCALE_LIMIT in names}
    return Adapted(forward, (False, True) if "bias" in takes else (False,), weights, _named_in(names, op), says)


def _of_bare_layer(kind: type[Any], eps_name: str, has_bias: bool) -> Adapted:
    """A layer of the kernels hub, which has no constructor: the model that uses it has the attributes that it reads."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, **options: Any) -> Any:
        layer = kind()
        layer.weight = weight
        if has_bias:
            layer.bias = bias
        setattr(layer, eps_name, eps)
        return layer(x)

    forward.__wrapped__ = kind.forward  # type: ignore[attr-defined]  # for source_location
    return Adapted(forward, (False, True) if has_bias else (False,), (True,), ())


def _has_no_constructor(kind: type[Any]) -> bool:
    import torch

    return issubclass(kind, torch.nn.Module) and kind.__init__ is torch.nn.Module.__init__


def _annotated(kind: type[Any]) -> set[str]:
    """The attributes that a class says it has."""
    return {name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())}


def _of_class(kind: type[Any], spec: str, op: Op | None) -> Adapted:
    """Instances are made for each N and eps; the weight and the bias of a case stand in for their parameters."""
    import torch
    from torch.func import functional_call

    made_by = inspect.signature(kind).parameters
    eps_name = next((name for name in made_by if "eps" in name), "")
    said = _annotated(kind)
    eps_of_layer = next((name for name in ("variance_epsilon", "eps") if name in said), "")
    if _has_no_constructor(kind) and "weight" in said and eps_of_layer:
        return _of_bare_layer(kind, eps_of_layer, "bias" in said)
    has_bias, grouped = "bias" in made_by, next((name for name in made_by if name in _GROUP_COUNTS), "")
    makes = f"{kind.__name__}({', '.join(list(made_by)[:2]) if grouped else 'N'}, eps=...)"
    words = f"a class that is made by {makes} and has a parameter named weight, or none at all"

    @lru_cache(maxsize=8)
    def module(columns: int, eps: float, bias: bool, groups: int = 1) -> Any:
        options = {eps_name: eps} | ({"bias": bias} if has_bias else {})
        counts = (groups, columns) if grouped == next(iter(made_by)) else (columns, groups)[: 1 + bool(grouped)]
        return kind(*counts, **options)

    try:
        if not eps_name:
            raise TypeError("no parameter for eps")
        found = {flag: dict(module(_TRIAL_COLUMNS, 1e-5, flag).named_parameters()) for flag in (False, True)}
    except Exception as error:
        raise UsageError(f"impl={spec}: {one_line(error_text(error), 200)}; expected {words}") from None
    names = set(found[True])
    if names and not {"weight"} <= names <= {"weight", "bias"}:
        raise UsageError(f"impl={spec}: its parameters are {', '.join(sorted(names))}; expected {words}")

    named = _named_in(inspect.signature(kind.forward).parameters, op)
    taken = (*named, GROUPS) if grouped and GROUPS not in named else named

    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, **options: Any) -> Any:
        own = {name: t for name, t in (("weight", weight), ("bias", bias)) if t is not None}
        given = {name: options[name] for name in named}
        counts = (
            (x.shape[1], eps, bias is not None, options[GROUPS]) if grouped else (x.shape[-1], eps, bias is not None)
        )
        called = module(*counts)
        called.train(torch.is_grad_enabled())  # without gradients it is in eval(), as where it serves
        return functional_call(called, own, (x,), given)

    forward.__wrapped__ = kind.forward  # type: ignore[attr-defined]  # for source_location
    setattr(forward, ONE_MODULE, True)
    if not names:
        return Adapted(forward, (False,), (False,), taken)
    biases = tuple(flag for flag in (False, True) if ("bias" in found[flag]) == flag)
    return Adapted(forward, biases, (True,), taken)


def _named_in(parameters: Mapping[str, inspect.Parameter], op: Op | None) -> tuple[str, ...]:
    """What a function takes by name: what it must be given, or its ``op``, if that is known, has; all, if it is not."""
    own = {name: parameters[_called(name, parameters)] for name in _NAMED if _called(name, parameters) in parameters}
    taken = [name for name, one in own.items() if op is None or one.default is one.empty or name in _wanted(op)]
    return tuple(name for name in taken if name != SCALE or SHIFT in own)


def _called(name: str, parameters: Container[str]) -> str:
    """What a function of these parameters calls an input."""
    return next((other for other in _GROUP_COUNTS if other in parameters), name) if name == GROUPS else name
