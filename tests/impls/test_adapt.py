"""What may stand for a kernel: functions, modules and their classes; and what is said of anything else."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, library

from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.checks.check import check
from normcheck.errors import UsageError
from normcheck.impls import discovery
from normcheck.impls.adapt import adapt
from normcheck.impls.implementation import Implementation
from normcheck.impls.kernels import interpreter


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class RMSNorm(torch.nn.Module):
    """As in published models."""

    def __init__(self, hidden_size: int, variance_epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(hidden_size)), variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return reference(x, self.weight, self.eps)


class Gated(RMSNorm):
    """With one parameter more."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        self.gate = torch.nn.Parameter(torch.ones(hidden_size))


class NoEps(RMSNorm):
    """Its eps cannot be chosen."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size)


class Plain:
    """No module."""


def no_eps(x: Tensor, weight: Tensor) -> Tensor:
    return x


def one_more(x: Tensor, weight: Tensor, bias: Tensor, temperature: Tensor, eps: float) -> Tensor:
    return x


def lone_bias(x: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x


FORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "eps by name alone": (lambda x, weight, bias=None, *, epsilon: (x, weight, bias, epsilon), "xwbe"),
    "other names": (lambda hidden_states, gain, variance_epsilon: (hidden_states, gain, variance_epsilon), "xwe"),
    "any name of eps": (lambda x, w, tiny: (x, w, tiny), "xwe"),
    "weight first": (lambda weight, x, eps: (x, weight, eps), "xwe"),
    "scale": (lambda x, scale, eps: (x, scale, eps), "xwe"),
    "scale first": (lambda scale, hidden, eps: (hidden, scale, eps), "xwe"),
    "scale and bias": (lambda x, scale, bias, eps: (x, scale, bias, eps), "xwbe"),
    "bias first": (lambda x, beta, gamma, eps: (x, gamma, beta, eps), "xwbe"),
    "bias after eps": (lambda x, weight, eps=1e-6, bias=None: (x, weight, bias, eps), "xwbe"),
    "what has a default": (lambda x, weight, eps=1e-6, block=128, out=None: (x, weight, eps, block, out), "xwe"),
    "a default between": (lambda x, weight, block=128, eps=1e-6: (x, weight, eps, block), "xwe"),
    "a residual for others": (lambda x, weight, residual=None, eps=1e-6: (x, weight, eps, residual), "xwe"),
    "as torch": (lambda input, normalized_shape, weight=None, eps=None: (input, weight, eps, normalized_shape), "xwe"),
    "without a weight": (lambda x, eps: (x, eps), "xe"),
    "anything": (lambda *args, **options: (*args, options["eps"]), "xwbe"),
    "any place": (lambda *args: args, "xwbe"),
}


@pytest.mark.parametrize("form", FORMS)
def test_parameters_get_what_their_names_say_else_what_their_place_says(form: str) -> None:
    function, gets = FORMS[form]
    adapted = adapt(function, "mine.py:f", OPS["rmsnorm"])
    returned = adapted.forward("x", "w", "b", eps="e") if form != "as torch" else None
    assert (adapted.weights[-1], adapted.biases[-1]) == ("w" in gets, "b" in gets)
    if returned is not None:
        rest = {None, 128} & {*returned[len(gets) :]}
        assert (returned[: len(gets)], rest) == (tuple(gets), {*returned[len(gets) :]})
    x = torch.randn(2, 3, 8)
    if form == "as torch":
        assert adapted.forward(x, None, None, eps=1e-6) == (x, None, 1e-6, (8,))


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (
            no_eps,
            "its parameters are .*: no parameter for eps; expected a function no_eps.x, weight",
        ),
        (one_more, "missing a required argument: 'temperature'; expected a function one_more"),
        (
            lone_bias,
            "a bias without a weight; expected a function lone_bias.x, weight, eps., lone_bias.x, weight, bias, eps. "
            "or, without a weight, lone_bias.x, eps.",
        ),
        (Plain, "a class: expected a function Plain.x, weight, eps"),
        (Gated, "its parameters are gate, weight; expected a class that is made by Gated.N, eps=...."),
        (NoEps, "no parameter for eps; expected a class that is made by NoEps"),
    ],
)
def test_another_signature_is_told_with_the_expected_one(target: Callable[..., Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        adapt(target, "mine.py:f")


@cache
def operator() -> Any:
    """An operator without a formula of gradients."""
    interpreter.enable()  # torch imports triton to make one
    return library.custom_op("normcheck_tests::rmsnorm", _copied, mutates_args=())


def _copied(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return reference(x, weight, eps)


OPERATORS: dict[str, Callable[[], Any]] = {
    "custom_op": operator,
    "torch.ops": lambda: torch.ops.normcheck_tests.rmsnorm,
    "overload": lambda: torch.ops.normcheck_tests.rmsnorm.default,
    "torch.jit.script": lambda: torch.jit.script(reference),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_of_torch_is_called_by_its_schema(name: str) -> None:
    operator()
    x, weight = torch.randn(3, 8), torch.randn(8)
    adapted = adapt(OPERATORS[name](), "mine.py:f")
    assert (adapted.weights, adapted.biases) == ((True,), (False,))
    assert torch.equal(adapted.forward(x, weight, None, eps=1e-3), reference(x, weight, 1e-3))


def raises(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    y = reference(x, weight, eps)
    y.register_hook(no_formula)
    return y


def no_formula(dy: Tensor) -> Tensor:
    raise RuntimeError("no formula")


def right(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Any:
    return operator()(x, weight, eps)


def twice(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Any:
    return 2 * right(x, weight, bias, eps=eps)


@pytest.mark.parametrize(
    ("forward", "has_graph", "fails"), [(right, False, False), (twice, False, True), (raises, None, True)]
)
def test_an_operator_without_a_formula_of_gradients_is_held_to_its_y(
    forward: Callable[..., Any], has_graph: bool | None, fails: bool
) -> None:
    mine = Implementation(name="mine", op="rmsnorm", forward=forward, weights=(True,))
    case = Case(op="rmsnorm", dtype="fp32", M=5, N=24, bias=False)
    result = check(mine, OPS["rmsnorm"], case, "cpu")
    assert (result.has_graph, result.failed) == (has_graph, fails)


def test_a_triton_kernel_is_not_called_by_itself() -> None:
    interpreter.enable()
    triton = pytest.importorskip("triton")

    @triton.jit
    def kernel(x: Any) -> None:
        pass

    with pytest.raises(UsageError, match="a Triton kernel: expected a function"):
        adapt(kernel)


def test_the_class_of_a_module_gets_the_weight_and_eps_of_the_case() -> None:
    forward, biases, weights, named, _ = adapt(RMSNorm)
    assert (biases, weights, named) == ((False,), (True,), ())
    x, weight = torch.randn(3, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    for eps in (1e-6, 0.5):
        y = forward(x, weight, None, eps=eps)
        torch.testing.assert_close(y, reference(x, weight, eps))
        (dw,) = torch.autograd.grad(y.sum(), weight)
        assert dw.abs().sum() > 0


def test_the_class_of_torch_has_a_bias_or_none() -> None:
    forward, biases, weights, named, _ = adapt(torch.nn.LayerNorm)
    assert (biases, weights, named) == ((False, True), (True,), ())
    x, weight, bias = torch.randn(3, 5), torch.randn(5), torch.randn(5)
    for b in (bias, None):
        expected = torch.nn.functional.layer_norm(x, (5,), weight, b, 0.25)
        torch.testing.assert_close(forward(x, weight, b, eps=0.25), expected)


def normalised(x: Tensor, eps: float) -> Tensor:
    return reference(x, torch.ones(x.shape[-1]), eps)


def by_another_name(x: Tensor, variance_epsilon: float) -> Tensor:
    return normalised(x, variance_epsilon)


def by_keyword(x: Tensor, *, eps: float) -> Tensor:
    return normalised(x, eps)


def optional(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return normalised(x, eps) if weight is None else reference(x, weight, eps)


def optional_gain(x: Tensor, gain: Tensor | None = None, *, eps: float) -> Tensor:
    return optional(x, gain, eps)


def both_optional(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return optional(x, weight, eps) + (0 if bias is None else bias)


class Parameterless(torch.nn.Module):
    """As in diffusion transformers."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[-1] == self.hidden_size
        return normalised(x, self.eps)


@pytest.mark.parametrize(
    ("target", "biases", "weights"),
    [
        (reference, (False,), (True,)),
        (normalised, (False,), (False,)),
        (by_another_name, (False,), (False,)),
        (by_keyword, (False,), (False,)),
        (Parameterless, (False,), (False,)),
        (optional, (False,), (False, True)),
        (optional_gain, (False,), (False, True)),
        (both_optional, (False, True), (False, True)),
    ],
)
def test_what_takes_no_weight_is_called_without_one(
    target: Callable[..., Any], biases: tuple[bool, ...], weights: tuple[bool, ...]
) -> None:
    adapted = adapt(target)
    assert (adapted.biases, adapted.weights) == (biases, weights)
    x, weight = torch.randn(3, 5), torch.randn(5)
    if False in weights:
        torch.testing.assert_close(adapted.forward(x, None, None, eps=0.25), normalised(x, 0.25))
    if True in weights:
        torch.testing.assert_close(adapted.forward(x, weight, None, eps=0.25), reference(x, weight, 0.25))


@pytest.mark.parametrize("weights", [(), [True], ("yes",), True])
def test_weights_is_a_tuple_of_flags(weights: Any) -> None:
    mine = Implementation(name="mine", op="rmsnorm", forward=optional, weights=weights)
    with pytest.raises(
        UsageError, match=r"weights=.* of 'mine' in impl=f.py: expected a tuple with False, True or both"
    ):
        discovery.validated(mine, "f.py")


def test_a_function_named_as_an_op_needs_no_op(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def rmsnorm(x, weight, eps):\n    return x\n\ndef layernorm(x, weight, bias, eps):\n    return x\n"
    )
    assert {(i.op, i.name) for i in discovery.select(str(file), ())} == {
        ("layernorm", "mine.py:layernorm"),
        ("rmsnorm", "mine.py:rmsnorm"),
    }
    assert [i.op for i in discovery.select(str(file), ("rmsnorm",))] == ["rmsnorm"]
    assert [i.op for i in discovery.select(f"{file}:layernorm", ())] == ["layernorm"]
    with pytest.raises(UsageError, match="op=rmsnorm_llama: expected one of layernorm, rmsnorm, which"):
        discovery.select(str(file), ("rmsnorm_llama",))


def test_a_file_with_nothing_of_that_kind_is_told_so(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def norm(x, weight, eps):\n    return x\n")
    with pytest.raises(UsageError, match="expected IMPLEMENTATIONS in it, a function named as an op, or "):
        discovery.select(str(file), ())
