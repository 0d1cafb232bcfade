"""normcheck: is this normalisation kernel right?

The public Python interface: the names for a file that declares an implementation, ``verify`` and ``assert_conforms``
for a test suite, ``cells`` for one in pytest, ``bound``, ``assert_within`` and ``ulps`` for tests that have outputs of
their own, and ``reward`` for a training loop. Naming one of these imports torch, but ``cells`` and ``reward`` do not.
"""

from typing import TYPE_CHECKING, Any

from normcheck.cases.case import Case
from normcheck.errors import NormcheckError, UnsupportedCase
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from normcheck.api import assert_conforms, verify
    from normcheck.bounds.expected import Expected, bound
    from normcheck.bounds.within import assert_within, ulps
    from normcheck.pytest_plugin import cells
    from normcheck.training.reward import reward
    from normcheck.training.score import Reward

__all__ = [
    "Case",
    "Expected",
    "Implementation",
    "NormcheckError",
    "Reward",
    "UnsupportedCase",
    "__version__",
    "assert_conforms",
    "assert_within",
    "bound",
    "cells",
    "reward",
    "ulps",
    "verify",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("assert_conforms", "verify"):
        from normcheck import api

        return getattr(api, name)
    if name in ("Expected", "bound"):
        from normcheck.bounds import expected

        return getattr(expected, name)
    if name in ("assert_within", "ulps"):
        from normcheck.bounds import within

        return getattr(within, name)
    if name == "cells":
        from normcheck import pytest_plugin

        return pytest_plugin.cells
    if name in ("Reward", "reward"):
        from normcheck.training import reward, score

        return reward.reward if name == "reward" else score.Reward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
