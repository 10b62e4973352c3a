"""What a run leaves behind and what a person sees of it: run folder, figures, console, timeline, report."""
