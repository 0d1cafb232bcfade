"""The options of ``normcheck compare``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from normcheck.gate.options import Contexts, Device, Dtypes, Ops, Profile, Sandboxed, Seed, Timeout, VerifyOptions
from normcheck.options import Option, count, several

FORMATS = ("json",)
"""The formats of ``--report FORMAT:PATH``."""


def _formats() -> Iterable[str]:
    return (f"{name}:" for name in FORMATS)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The options of ``normcheck compare``, in the order of its help. ``interpreter``: that of B, "" for this one."""

    op: Annotated[Ops, Option(help="Op to compare; may repeat. Default: all that both have.")] = ()
    dtype: Annotated[Dtypes, Option(help="fp16, bf16 or fp32; may repeat. Default: all that both have.")] = ()
    interpreter: Annotated[
        str, Option(help="Python of another environment, in which B runs; it needs torch and numpy.", flags=("--with",))
    ] = ""
    case: Annotated[
        tuple[str, ...],
        Option(help="Case line, quoted, to compare on instead of drawn cases; may repeat.", read=several),
    ] = ()
    same_bits: Annotated[
        bool,
        Option(
            help="Exit code 1 if a bit of any output or gradient differs; says which rounding does.",
            flags=("--same-bits",),
        ),
    ] = False
    context: Annotated[
        Contexts, Option(help="Also compare both in this context, such as graph; may repeat. Default: none.")
    ] = ()
    profile: Profile = "quick"
    max_examples: Annotated[int | None, Option(help="Cases per op and dtype.", check=count)] = None
    seed: Seed = 0
    device: Device = "auto"
    report: Annotated[
        tuple[str, ...],
        Option(help="json:PATH; - is standard output.", names=_formats, open=True, read=several),
    ] = ()
    timeout: Timeout = 120.0
    sandbox: Sandboxed = True

    def as_verify(self) -> VerifyOptions:
        """The options of a verify that draws the same cases, for what makes a plan of them."""
        shared = ("op", "dtype", "profile", "max_examples", "seed", "device", "timeout", "sandbox")
        return VerifyOptions(**{name: getattr(self, name) for name in shared})
