"""normcheck: is this normalisation kernel right?

The public Python interface: the names for a file that declares an implementation, and ``verify`` and
``assert_conforms`` for a test suite. Naming one of these two imports torch.
"""

from typing import TYPE_CHECKING, Any

from normcheck.cases.case import Case
from normcheck.errors import NormcheckError, UnsupportedCase
from normcheck.impls.implementation import Implementation

if TYPE_CHECKING:
    from normcheck.api import assert_conforms, verify

__all__ = ["Case", "Implementation", "NormcheckError", "UnsupportedCase", "__version__", "assert_conforms", "verify"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("assert_conforms", "verify"):
        from normcheck import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
