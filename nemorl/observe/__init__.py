"""The run folder, metrics, console, timeline and report of a run."""
