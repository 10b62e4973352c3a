"""Checks between sections of an experiment, one module a topic.

A check takes the sections that it needs, by their names in `Experiment`, and yields their problems; it runs
when all of these are valid. `auxiliary` are the models that have a section, by its path; `sections` are all
that are valid. Checks of one section are methods of its class. None looks outside the
configuration: `nemorl.plan.problems` has the checks that need the model or the machine.
"""

from collections.abc import Mapping

from nemorl.config.auxiliary import auxiliary_models
from nemorl.config.base import problems_in, run_checks
from nemorl.errors import Problem

from . import batches, processes, tasks


def check_sections(sections: Mapping[str, object]) -> list[Problem]:
    """All problems of these sections and between them; others of the experiment are not valid."""
    problems = [
        problem for name, section in sections.items() for problem in problems_in(section, name, sections)
    ]
    known = {**sections, "sections": sections}
    if {"critic", "reference", "teachers", "rewards"} <= sections.keys():
        known["auxiliary"] = auxiliary_models(sections)
    for module in (batches, tasks, processes):
        problems += run_checks(module, known)
    return problems
