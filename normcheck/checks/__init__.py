"""One case on one kernel: judged, probed, explained."""
