"""The ways in which reward functions of other projects are called, and what they answer.

trl        `f(completions, prompts, **columns) -> [number or None]`, once for a group
openrlhf   `f(queries, prompts, labels) -> [number], a tensor, or {"rewards": ...}`, once for a group
verl       `f(data_source, solution_str, ground_truth, extra_info) -> number or {"score": ...}`, per answer

All are called by keyword, and each gets those columns of the task too that it has parameters for.
"""

from nemorl.config.environment import Signature

# What a signature gives beside the task's own columns.
GIVEN: dict[Signature, frozenset[str]] = {
    "trl": frozenset({"completions", "prompts", "completion_ids", "sampled_ids", "answer"}),
    "openrlhf": frozenset({"queries", "prompts", "labels"}),
    "verl": frozenset({"solution_str", "ground_truth", "extra_info"}),
}
FORMS: dict[Signature, str] = {
    "trl": "(completions, **columns)",
    "openrlhf": "(queries, prompts, labels)",
    "verl": "(data_source, solution_str, ground_truth, extra_info)",
}


def fits(signature: Signature, parameters: frozenset[str]) -> bool:
    """Whether a function with these parameters looks at answers as this signature gives them."""
    match signature:
        case "trl":
            return bool(parameters & {"completions", "completion_ids", "sampled_ids"})
        case "openrlhf":
            return parameters >= {"queries", "prompts", "labels"}
        case "verl":
            return parameters >= {"solution_str", "ground_truth"}


def signature_of(parameters: frozenset[str]) -> Signature:
    """Told from the names: `solution_str` is verl's, `queries` OpenRLHF's; all else is TRL's."""
    if "solution_str" in parameters:
        return "verl"
    return "openrlhf" if "queries" in parameters else "trl"
