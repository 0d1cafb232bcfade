"""cuDNN through the frontend's ``cudnn.Graph``, beside ``cudnn``, which uses ``pygraph``: the same ops, both ways.

The same nodes reach the same backend, so what is known of ``cudnn`` holds here: which cases run, packed rows, y and the
saved mean at N not a multiple of 16, bits that follow the stored y. Beyond it, this checks the wrapper: which tensor it
takes for which input, what it allocates for the outputs, in which order it returns them. The wrapper needs backend
9.12, a newer op its own version.
"""

from __future__ import annotations

from normcheck.impls import _cudnn_wrapper
from normcheck.impls.cudnn import implementations

IMPLEMENTATIONS = implementations("cudnn_graph", _cudnn_wrapper, oldest=_cudnn_wrapper.OLDEST, by_default=("cuda",))
