"""`nemorl eval`: measure a model on the validation tasks of an experiment."""

from argparse import ArgumentParser, Namespace

from nemorl.commands.terminal import output, say, table
from nemorl.plan.machine import read_machine

from .check import prepare
from .terminal import add_experiment

HELP = "measure the model of an experiment on its validation tasks"


def add_arguments(parser: ArgumentParser) -> None:
    """The command's own arguments."""
    add_experiment(parser)


def run(arguments: Namespace) -> int:
    """Raises NemorlError."""
    ready = prepare(arguments.config, arguments.overrides, read_machine(), training=False)
    from nemorl.run.train import evaluate  # Ray and the engine: not before the checks
    from nemorl.run.validation import with_intervals

    evaluation = evaluate(ready.experiment)
    metrics = table("", ["metric", "value", "95 % interval"])
    for name, value, interval in with_intervals(evaluation.metrics):
        between = "" if interval is None else f"{interval.low:.4g} to {interval.high:.4g}"
        metrics.add_row(name, f"{value:.6g}", between)
    origin = f" ({evaluation.origin})" if evaluation.origin else ""
    say(f"model: {evaluation.model}{origin}")
    output().print(metrics)
    say(f"samples: {evaluation.samples}")
    return 0
