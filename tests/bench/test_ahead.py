"""Compiling ahead: every point is called once in another process, and what fails there stops nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from normcheck.bench import ahead
from normcheck.bench.ahead import FEWEST, Job, compile_all, jobs_of
from normcheck.bench.speed import Point
from normcheck.bench.verified import case_of
from normcheck.cases.case_line import parsed
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.impls._cudnn_shelf import FOLDER, shelf
from normcheck.impls.discovery import select

KERNEL = """
import os, pathlib, torch

def rmsnorm(x, weight, eps):
    if x.shape[1] == 7:
        raise ValueError("seven")
    if x.shape[1] == 9:
        os._exit(1)
    made = pathlib.Path(__file__).with_name(f"{x.shape[1]}-{os.getpid()}")
    made.write_text(os.environ.get("NORMCHECK_CUDNN_PLANS", ""))
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
"""


def jobs(folder: Path, columns: range) -> list[Job]:
    file = folder / "mine.py"
    file.write_text(KERNEL)
    (mine,) = select(f"{file}:rmsnorm", ("rmsnorm",))
    points = [Point(op="rmsnorm", dtype="fp16", M=2, N=n, bias=False) for n in columns]
    return jobs_of(points, {("rmsnorm", "fp16"): [Cell(OPS["rmsnorm"], mine, "fp16", f"{file}:rmsnorm")]}, "cpu")


@pytest.mark.slow
def test_every_point_is_called_in_another_process(tmp_path: Path) -> None:
    with shelf():
        folder = os.environ[FOLDER]
        assert compile_all(jobs(tmp_path, range(1, 9)), 2) == 7  # N = 7 raises
    assert {path.read_text() for path in tmp_path.glob("*-*")} == {folder}  # the shelf of this process
    made = [path.name.split("-") for path in tmp_path.glob("*-*")]
    assert {int(n) for n, _ in made} == {1, 2, 3, 4, 5, 6, 8}
    assert str(os.getpid()) not in {process for _, process in made}


@pytest.mark.slow
def test_what_lives_in_its_process_is_built_in_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = jobs(tmp_path, range(1, 7)) + [replace(job, name="here") for job in jobs(tmp_path, range(10, 13))]
    called: list[Job] = []
    monkeypatch.setattr(ahead, "IN_PROCESS", ("here",))
    monkeypatch.setattr(ahead, "_call", lambda job: called.append(job) or True)  # of this process alone
    monkeypatch.setattr(ahead, "ProcessPoolExecutor", NoPool)
    assert compile_all(many, 2) == 9
    assert [job.name == "here" for job in called] == [False] * 6 + [True] * 3


class NoPool:
    """Calls at once, here."""

    def __init__(self, processes: int, mp_context: object) -> None:
        assert processes == 2

    def __enter__(self) -> NoPool:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, call: Callable[[Job], object], jobs: list[Job]) -> list[object]:
        return [call(job) for job in jobs]


@pytest.mark.slow
def test_a_process_that_dies_stops_nothing(tmp_path: Path) -> None:
    assert compile_all(jobs(tmp_path, range(9, 9 + FEWEST)), 2) < FEWEST


def test_few_points_are_not_worth_a_process(tmp_path: Path) -> None:
    assert compile_all(jobs(tmp_path, range(1, FEWEST)), 2) == 0
    assert not list(tmp_path.glob("*-*"))


def test_nothing_that_is_not_declared_is_called(tmp_path: Path) -> None:
    """cuDNN's graph, which declares that it needs a bias, read one that was not there: the whole bench was lost."""
    (graph,) = (i for i in select("cudnn_graph", ("layernorm",)) if i.op == "layernorm")
    point = Point(op="layernorm", dtype="fp16", M=2, N=8, bias=False)
    (job,) = jobs_of([point], {("layernorm", "fp16"): [Cell(OPS["layernorm"], graph, "fp16", "cudnn_graph")]}, "cuda")
    assert parsed(job.line) == case_of(replace(point, bias=True))
    never = replace(graph, epsilons=(0.5,))
    assert not jobs_of([point], {("layernorm", "fp16"): [Cell(OPS["layernorm"], never, "fp16", "cudnn_graph")]}, "cuda")
