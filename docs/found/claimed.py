"""``python claimed.py ADAPTER.py DEVICE``: the cells that an adapter has there, as JSON, in a process of its own."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Write [op, name, dtypes] of each implementation that is available to standard output, as its last line."""
    adapter, device = sys.argv[1:]
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # as normcheck verify sets it there
    sys.path.insert(0, str(Path(adapter).parent))  # as normcheck does
    found = runpy.run_path(adapter)["IMPLEMENTATIONS"]
    there = [one for one in found if one.unavailable is None or one.unavailable(device) is None]
    print(json.dumps([[one.op, one.name, one.dtypes] for one in there]))


if __name__ == "__main__":
    main()
