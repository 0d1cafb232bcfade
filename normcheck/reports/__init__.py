"""How a run is told: one file per format, each declaring ``REPORT``. Reports read ``result.py`` and nothing else."""
