"""torch.compile in a kernel's process: its limit of recompilations, and the functions that it ran as they are.

After eight recompilations of a function torch runs it without compiling it, and says so in a log alone: what is judged
then is not what was compiled. Nothing here imports torch._dynamo, which takes seconds: a kernel that compiles has.
"""

from __future__ import annotations

import sys

_MOST = 1 << 20  # more than a process has cases


def raise_limits() -> None:
    """Let torch.compile recompile a function as often as its calls need, if this process has it imported."""
    config = sys.modules.get("torch._dynamo.config")
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        if config is not None and 0 <= getattr(config, name, -1) < _MOST:
            setattr(config, name, _MOST)


def graphs() -> int:
    """How many graphs torch.compile has compiled in this process, those of ``fullgraph=True`` as well."""
    return _counted("stats", "unique_graphs")


def eager_calls() -> int:
    """How often torch.compile was to compile a function in this process, and ran it as it is."""
    return _counted("frames", "total") - _counted("frames", "ok")


def _counted(of: str, what: str) -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    return int(getattr(utils, "counters", {}).get(of, {}).get(what, 0))
