"""Draft models and layers for further tokens (MTP) of `generation.speculation`, with the policy's model."""

import math
from pathlib import Path

from nemorl.config.experiment import Experiment
from nemorl.errors import Problem, Problems
from nemorl.models.hf_config import BrokenModelFolder, UnsupportedModel, read_json_object
from nemorl.models.layout import hf_tensors, mtp_tensors
from nemorl.models.registry import load_shape
from nemorl.models.shape import ModelShape

from .problems import tokenizer_problems, weight_problems

_SECTION = "generation.speculation"
# Fields of config.json with the number of these layers, by which vLLM and TensorRT-LLM find them.
_MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def draft_problems(experiment: Experiment, shape: ModelShape) -> Problems:
    """A draft must be of the policy's tokens; `shape` is the policy's."""
    config, model_path = experiment.generation, experiment.policy.model_path
    if config.drafts_by_mtp and not names_mtp_layers(model_path):
        names = " or ".join(_MTP_FIELDS)
        fix = f"config.json of {model_path} names no layers for further tokens ({names})"
        yield Problem(f"{_SECTION}.method", "mtp", f"{fix}: use prompt_lookup or draft_model")
    if (draft_model := config.draft_model) is None:
        return
    field, folder = f"{_SECTION}.model_path", draft_model.model_path
    try:
        vocabulary = read_json_object(folder / "config.json").get("vocab_size")
    except BrokenModelFolder as error:
        fix = str(error) if folder.is_dir() else "there is no such folder: name one with config.json"
        yield Problem(field, str(folder), fix)
        return
    if folder == model_path:
        fix = "a draft of the policy's own model takes as long as its tokens: name a smaller model"
        yield Problem(field, str(folder), fix)
    elif vocabulary != shape.vocab_size:
        fix = f"its vocabulary has {vocabulary} tokens and the policy's {shape.vocab_size}"
        yield Problem(field, str(folder), f"{fix}: name a model with the policy's tokens")
    else:
        yield from tokenizer_problems(experiment, _SECTION, folder)
        yield from weight_problems(folder, section=_SECTION)


def names_mtp_layers(folder: Path) -> bool:
    """True if the model in a folder has layers for further tokens."""
    fields = read_json_object(folder / "config.json")
    return any(fields.get(name) for name in _MTP_FIELDS)


def draft_elements(experiment: Experiment) -> int:
    """Weights of the draft model, or of layers that draft; 0 without, or if the family is unknown here."""
    config = experiment.generation
    try:
        if config.draft_model is not None:
            sizes = hf_tensors(load_shape(config.draft_model.model_path))
        elif config.drafts_by_mtp:
            sizes = mtp_tensors(load_shape(experiment.policy.model_path, with_mtp=True))
        else:
            return 0
    except (BrokenModelFolder, UnsupportedModel):  # vLLM may know it
        return 0
    return sum(map(math.prod, sizes.values()))
