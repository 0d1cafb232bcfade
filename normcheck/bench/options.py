"""The options of ``normcheck bench``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from normcheck.gate.options import Device, Dtypes, Impls, Ops, TimeBudget, Timeout
from normcheck.options import Option, several

FORMATS = ("csv", "json", "png", "html")
"""The formats of ``--report FORMAT:PATH``."""


def _formats() -> Iterable[str]:
    return (f"{name}:" for name in FORMATS)


def _suites() -> Iterable[str]:
    from normcheck.bench.suites import SUITES

    return (*SUITES, "judge")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of ``normcheck bench``, in the order of its help."""

    op: Ops = ()
    impl: Impls = ()
    dtype: Annotated[Dtypes, Option(help="fp16, bf16 or fp32; may repeat. Default: bf16.")] = ()
    suite: Annotated[
        str | None,
        Option(
            help="triton-tutorial or pytorch-layernorm-backward: their shapes and bytes; judge: what judging costs.",
            names=_suites,
        ),
    ] = None
    sizes: Annotated[tuple[str, ...], Option(help="M,N such as 4096,1024; may repeat.", read=several)] = ()
    device: Device = "auto"
    report: Annotated[
        tuple[str, ...],
        Option(
            help="csv:PATH, json:PATH, png:PATH or html:PATH; - is standard output.",
            names=_formats,
            open=True,
            read=several,
        ),
    ] = ()
    time_budget: Annotated[TimeBudget, Option(help="Seconds after which nothing new is begun.")] = None
    timeout: Timeout = 120.0
