"""The signature of a kernel, and which of its parameters are x, the weight, the bias and eps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

SHAPE = "normalized_shape"
"""What torch calls the dimensions over which it norms."""

_ROLES = MappingProxyType(
    {
        "x": "x",
        **dict.fromkeys(("weight", "gamma", "scale", "w"), "weight"),
        **dict.fromkeys(("bias", "beta", "b"), "bias"),
    }
)
"""The name of a parameter -> the tensor that it has."""

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function; of an operator of torch as its schema has it; of the ``apply`` of an
    autograd.Function as its forward has it. None if it does not say.
    """
    import torch

    own = getattr(function, "__self__", None)
    try:
        if inspect.isclass(own) and issubclass(own, torch.autograd.Function) and function == own.apply:
            of_forward = inspect.signature(own.forward)
            has_context = own.setup_context is torch.autograd.Function.setup_context
            return of_forward.replace(parameters=list(of_forward.parameters.values())[has_context:])
        operator = getattr(function, "_opoverload", getattr(function, "default", function))  # of custom_op, torch.ops
        schema = getattr(operator, "_schema", None) or getattr(operator, "schema", None)  # torch.jit.script has this
        if schema is None or not type(function).__module__.startswith("torch"):
            return inspect.signature(function)
    except (TypeError, ValueError):
        return None
    kinds = {False: inspect.Parameter.POSITIONAL_OR_KEYWORD, True: inspect.Parameter.KEYWORD_ONLY}
    defaults = {one.name: one.default_value for one in schema.arguments if one.has_default_value()}
    taken = [(one.name, kinds[one.kwarg_only]) for one in schema.arguments]
    return inspect.Signature(
        [inspect.Parameter(*one, default=defaults.get(one[0], inspect.Parameter.empty)) for one in taken]
    )


class Parameters(NamedTuple):
    """The parameters of a function: those of the ``tensors``, by role, x, weight and bias, and of ``eps``, or ""; and
    whether it takes any others, by ``any_place`` or ``any_name``.
    """

    signature: inspect.Signature
    tensors: Mapping[str, str]
    eps: str
    any_place: bool
    any_name: bool

    def arguments(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """What is given by place, with defaults between, and by name; ``values``: of parameters, in this order."""
        given, rest = list[Any](), dict(values)
        for name, one in self.signature.parameters.items():
            left = any(other in rest for other in self.signature.parameters)
            if one.kind not in _BY_PLACE or not left or (name not in rest and one.default is one.empty):
                break
            given.append(rest.pop(name, one.default))
        return given, rest


def parameters_of(signature: inspect.Signature, besides: Collection[str]) -> Parameters:
    """A parameter whose name says so has eps, a weight or a bias, whatever its place. Else tensors come before eps."""
    every = signature.parameters.values()
    kinds = {one.kind for one in every}
    any_place, any_name = inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds
    own = [one for one in every if one.kind in (*_BY_PLACE, inspect.Parameter.KEYWORD_ONLY)]
    own = [one for one in own if one.name not in besides]
    plain = [one for one in own if one.kind in _BY_PLACE and (one.default is one.empty or one.default is None)]
    eps = min((one.name for one in own if "eps" in one.name), key=len, default="")
    if not eps and not any_name and len(plain) > 1 and plain[-1].name not in _ROLES:
        eps = plain[-1].name
    names = list(signature.parameters)
    end = names.index(eps) if eps and signature.parameters[eps].kind in _BY_PLACE else len(names)
    before = [one.name for one in plain if names.index(one.name) < end]
    said = {_ROLES[one.name]: one.name for one in own if one.name in _ROLES}
    others = iter([name for name in before if name not in said.values()])
    roles = ((role, said.get(role) or next(others, "")) for role in ("x", "weight", "bias"))
    return Parameters(signature, {role: name for role, name in roles if name}, eps, any_place, any_name)
