"""Reports of a run: one file per format, each declaring ``REPORT``. They read ``result.py`` and compute nothing."""
