"""What a report says of each cell, in words: `python tests/quality/told.py REPORT.json RECORD.json`, for golden/gpu."""

from __future__ import annotations

import json
import sys
from pathlib import Path

KEPT = ("op", "implementation", "dtype", "status", "cases", "shapes", "notes", "model")

if __name__ == "__main__":
    report, record = map(Path, sys.argv[1:])
    run = json.loads(report.read_text(encoding="utf-8"))
    cells = [{name: verdict[name] for name in KEPT} for verdict in run["verdicts"]]
    kept = {"schema": "normcheck-told/1", "argv": run["argv"], "environment": run["environment"], "cells": cells}
    record.write_text(json.dumps(kept, separators=(",", ":")) + "\n", encoding="utf-8")
