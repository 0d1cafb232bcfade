"""dw and db keep their bits whatever padding stands between the rows: measured, and judged if it is declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.audit.mutants.kernel import CLEAN, Kernel, KernelCall, chain_in
from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.check import Result, check
from normcheck.errors import ExitCode
from normcheck.impls.implementation import Implementation
from normcheck.runner.call import poisoned_memory
from tests.command_line import Cli, KernelFile

CASE = Case(op="layernorm", dtype="fp32", M=40, N=24, rows="shifted", seed=2)
DECLARED = ("y", "dx", "dw", "db")


@pytest.fixture(autouse=True)
def _as_in_a_sweep() -> Iterator[None]:
    torch.set_num_threads(1)
    with poisoned_memory():
        yield


def result_of(kernel: Kernel, case: Case = CASE, **fields: Any) -> Result:
    mine: Implementation = kernel.implementation("mine", case.op, **fields)
    return check(mine, OPS[mine.op], case, "cpu", Ask(Depth.ROWS))


def products(c: KernelCall) -> Tensor:
    assert c.dy_io is not None
    return c.dy_io.float() * c.xh.float()


def chained(t: Tensor) -> Tensor:
    """One accumulator, a row at a time."""
    return chain_in(t, torch.float32)


def in_tiles(t: Tensor) -> Tensor:
    """Eight rows per program, and then the programs' sums one by one: two orders of the same numbers."""
    return chained(torch.stack([chained(tile) for tile in t.split(8)]))


def only_counting(t: Tensor) -> Tensor:
    """Rows of zeros are left out first; then any order is one of the rows that count."""
    kept = t[(t != 0).any(1)]
    return torch.stack([chained(tile) for tile in kept.split(8)]).sum(0) if len(kept) else t.sum(0)


def in_halves(t: Tensor) -> Tensor:
    """Two programs, each with half of the rows, however many there are."""
    return chained(torch.stack([chained(half) for half in t.chunk(2)]))


def backwards(t: Tensor) -> Tensor:
    return chained(t.flip(0))


def summing(how: Any, **steps: Any) -> Kernel:
    both = {"dw": lambda c: how(products(c)), "db": lambda c: how(c.dy_io.float())}
    return Kernel(**{**both, **steps})


RIGHT = {"chained": chained, "only counting": only_counting, "backwards": backwards}
WRONG = {"tiles": in_tiles, "halves": in_halves, "torch": lambda t: t.sum(0)}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("changes", [{}, {"M": 257, "N": 5}, {"M": 5}, {"layout": "dy_expanded"}, {"dtype": "bf16"}])
def test_a_right_sum_is_not_accused(name: str, changes: dict[str, Any]) -> None:
    result = result_of(summing(RIGHT[name]), replace(CASE, **changes), batch_invariant=DECLARED)
    assert not result.failed, result.problems
    assert result.probed is not None
    assert (result.probed.invariant["dw"], result.probed.invariant["db"]) == (True, True)


@pytest.mark.parametrize("name", WRONG)
def test_a_sum_in_another_order_is_found_if_it_is_declared(name: str) -> None:
    measured = result_of(summing(WRONG[name]))
    assert not measured.failed and measured.probed is not None
    assert measured.probed.invariant["dw"] is False
    found = result_of(summing(WRONG[name]), batch_invariant=DECLARED).problems
    assert [(p.kind, p.output, p.check) for p in found] == [("not_repeatable", "dw", "among other rows")]
    assert "padding rows (dy = 0)" in found[0].message and "batch_invariant='dw' is declared" in found[0].message


def test_only_what_is_declared_is_judged() -> None:
    wrong = summing(in_tiles)
    for declared in (True, ("y", "dx"), ()):
        assert not result_of(wrong, batch_invariant=declared).failed
    only_db = summing(chained, db=lambda c: in_tiles(c.dy_io.float()))
    assert not result_of(only_db, batch_invariant=("dw",)).failed
    (problem,) = result_of(only_db, batch_invariant=("dw", "db")).problems
    assert problem.output == "db"
    of_rows = summing(chained, rstd=lambda c: CLEAN.rstd(c) * (1 + 2.0**-23 * (c.M > 1)))
    assert not result_of(of_rows, batch_invariant=("dw", "db")).failed


def test_a_sum_that_depends_on_how_many_rows_there_are() -> None:
    """Wherever the padding stands, it has the same bits; without it, others."""

    def by_count(c: KernelCall) -> Tensor:
        return chained(products(c)) * (1 + 2.0**-23 * (len(c.x_io) > 30))

    (problem,) = result_of(summing(chained, dw=by_count), batch_invariant=DECLARED).problems
    assert "with these left out" in problem.message


def test_dx_by_itself_is_judged() -> None:
    by_batch = summing(chained, dx=lambda c: CLEAN.dx(c) * (1 + 2.0**-23 * (len(c.x_io) > 1)))
    (problem,) = result_of(by_batch, batch_invariant=("dx",)).problems
    assert (problem.output, problem.kind) == ("dx", "not_repeatable")
    assert not result_of(by_batch, batch_invariant=("y", "dw", "db")).failed


KERNEL = """
import torch
from normcheck import Implementation


def forward(x, weight, bias, *, eps):
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return {{"y": (x.float() * rstd * weight.float()).to(x.dtype), "rstd": rstd}}


def backward(dy, x, weight, bias, saved, *, eps):
    wdy, xhat = dy.float() * weight.float(), x.float() * saved["rstd"]
    dx = (wdy - xhat * (xhat * wdy).mean(-1, keepdim=True)) * saved["rstd"]
    products = dy.float() * xhat
    dw = torch.zeros(x.shape[1])
    {sum}
    return {{"dx": dx.to(x.dtype), "dw": dw.to(weight.dtype)}}


IMPLEMENTATIONS = (
    Implementation(
        name="mine", op="rmsnorm", forward=forward, backward=backward, biases=(False,), batch_invariant={declared}
    ),
)
"""
CHAIN = "for row in products: dw = dw + row"


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_a_sweep_finds_it_and_accuses_no_chain(cli: Cli, kernel_file: KernelFile) -> None:
    def swept(sum: str, declared: str) -> Any:
        path = str(kernel_file(KERNEL.format(sum=sum, declared=declared)))
        return cli("verify", "--impl", path, "--dtype", "fp32", "--no-contexts", "--max-examples", "12", "--allow-thin")

    found = swept("dw = products.sum(0)", '("y", "dx", "dw")')
    assert found.code == ExitCode.FOUND
    assert "dw depends on the other rows" in found.out and "padding rows" in found.out
    measured = swept("dw = products.sum(0)", "True")
    assert measured.code == 0 and "other bits with padding rows: dw in" in measured.out
    right = swept(CHAIN, '("y", "dx", "dw")')
    assert right.code == 0 and "same dw with padding rows in" in right.out
