"""normcheck: is this normalisation kernel right?

The public Python interface is what a file needs that declares an implementation.
"""

from normcheck.case import Case
from normcheck.errors import NormcheckError, UnsupportedCase
from normcheck.implementation import Implementation

__all__ = ["Case", "Implementation", "NormcheckError", "UnsupportedCase", "__version__"]

__version__ = "0.1.0"
