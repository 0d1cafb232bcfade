"""Find planted faults and correct kernels: the modules of ``audit/mutants`` declare them, and no list is edited."""

from __future__ import annotations

from functools import cache

from normcheck.audit.mutants.mutant import Mutant
from normcheck.impls.discovery import modules
from normcheck.impls.implementation import Implementation

_PACKAGE = "normcheck.audit.mutants"


@cache
def mutants() -> dict[str, Mutant]:
    """Id -> planted fault, module by module. Raises ValueError if two have the same id."""
    found: dict[str, Mutant] = {}
    for module in modules(_PACKAGE):
        for mutant in getattr(module, "MUTANTS", ()):
            if mutant.id in found:
                raise ValueError(f"id={mutant.id!r} in {module.__name__}: another mutant has it")
            found[mutant.id] = mutant
    return found


@cache
def controls() -> tuple[Implementation, ...]:
    """The correct kernels, in which an audit must find nothing."""
    return tuple(control for module in modules(_PACKAGE) for control in getattr(module, "CONTROLS", ()))
