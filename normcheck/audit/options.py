"""The options of ``normcheck audit``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from normcheck.gate.options import Device, Dtypes, JudgeName, Ops, Profile
from normcheck.options import Option, several, within

ALL = "all"
"""The word for all regimes."""

EVERY = "every"
"""The word for every op and dtype of a mutant."""


def _regimes() -> Iterable[str]:
    from normcheck.audit.mutants.regimes import REGIMES

    return *REGIMES, ALL


def _cells() -> Iterable[str]:
    return EVERY, "turns"


def _regime_cells() -> Iterable[str]:
    return "one", EVERY


def _formats() -> Iterable[str]:
    return ("json:", "html:")


def _recipes() -> Iterable[str]:
    from normcheck.audit.recipes import RECIPES

    return RECIPES


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """The options of ``normcheck audit``, in the order of its help.

    ``cells``: run each plain mutant in each op and every dtype, or in each op and one dtype by turns. ``regime``: run
    only mutants under these regimes. ``regime_cells``: run each pair of mutant and regime in one op and dtype, or in
    every one that has the fault. ``workers``: number of processes; None: as many as there are cores.
    """

    op: Ops = ()
    dtype: Dtypes = ()
    cells: Annotated[
        str,
        Option(help="every or turns: each op of a kernel in every dtype, or in one dtype by turns.", names=_cells),
    ] = EVERY
    profile: Annotated[Profile, Option(help="quick, ci or deep: what is put to the test.")] = "quick"
    mutant: Annotated[
        tuple[str, ...], Option(help="Planted fault to run, without correct kernels; may repeat.", read=several)
    ] = ()
    recipe: Annotated[
        str,
        Option(help="Judge by a fixed tolerance instead: a name, or atol=1e-2,rtol=1e-2.", names=_recipes, open=True),
    ] = ""
    regime: Annotated[
        tuple[str, ...],
        Option(
            help="Only faults that are there in some calls alone, such as tall or one_n:768, or all; may repeat.",
            names=_regimes,
            read=several,
        ),
    ] = ()
    regime_cells: Annotated[
        str,
        Option(help="one or every: the ops and dtypes that a fault under a regime is run in.", names=_regime_cells),
    ] = "one"
    seed: Annotated[int, Option(help="Another seed draws other cases.")] = 0
    judge: JudgeName = "fused"
    device: Device = "auto"
    report: Annotated[
        tuple[str, ...],
        Option(help="json:PATH or html:PATH; - is standard output.", names=_formats, open=True, read=several),
    ] = ()
    workers: Annotated[
        int | None, Option(help="Processes; by default one a core, at most 8.", check=within(1, 256))
    ] = None
