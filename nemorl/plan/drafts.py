"""Draft models, heads and layers for further tokens (MTP) that draft, with the policy's model."""

import math
from pathlib import Path

from nemorl.config.experiment import Experiment
from nemorl.config.generation import Eagle3Config
from nemorl.errors import Problem, Problems
from nemorl.models.eagle3_shape import ANY_LAYERS, Eagle3Shape
from nemorl.models.hf_config import BrokenModelFolder, UnsupportedModel, read_json_object
from nemorl.models.layout import hf_tensors, mtp_tensors
from nemorl.models.registry import family_of, load_shape
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
    speculation = getattr(config, "speculation", None)
    if isinstance(speculation, Eagle3Config):
        yield from _head_problems(speculation.model_path, shape)
        draft = experiment.policy.draft
        if draft is not None and draft.model_path != speculation.model_path:
            fix = f"engines draft by the head in {speculation.model_path}, and updates bring the trained one"
            yield Problem("policy.draft.model_path", draft.model_path, f"{fix}: name the same folder in both")
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


def _head_problems(folder: Path, shape: ModelShape) -> Problems:
    field = f"{_SECTION}.model_path"
    try:
        fields = read_json_object(folder / "config.json")
    except BrokenModelFolder as error:
        fix = str(error) if folder.is_dir() else "there is no such folder: name one with config.json"
        yield Problem(field, str(folder), fix)
        return
    if not family_of(shape).drafts_by_heads:
        fix = f"vLLM 0.32 returns no hidden states of {shape.family}: use another method"
        yield Problem(f"{_SECTION}.method", "eagle3", fix)
    for name, expected in (("hidden_size", shape.hidden_size), ("vocab_size", shape.vocab_size)):
        if fields.get(name) != expected:
            fix = f"its {name} is {fields.get(name)} and the policy's {expected}: name a head of this model"
            yield Problem(field, str(folder), fix)


def names_mtp_layers(folder: Path) -> bool:
    """True if the model in a folder has layers for further tokens."""
    fields = read_json_object(folder / "config.json")
    return any(fields.get(name) for name in _MTP_FIELDS)


def draft_elements(experiment: Experiment) -> int:
    """Weights of a draft model, of layers that draft or of a head; 0 without, or if unknown here."""
    config = experiment.generation
    speculation = getattr(config, "speculation", None)
    try:
        if isinstance(speculation, Eagle3Config):
            return Eagle3Shape.read(speculation.model_path, ANY_LAYERS).num_parameters()
        if config.drafts_by_mtp:
            sizes = mtp_tensors(load_shape(experiment.policy.model_path, with_mtp=True))
        elif (shape := draft_shape(experiment)) is not None:
            sizes = hf_tensors(shape)
        else:
            return 0
    except (BrokenModelFolder, UnsupportedModel):  # vLLM may know it
        return 0
    return sum(map(math.prod, sizes.values()))


def draft_shape(experiment: Experiment) -> ModelShape | None:
    """The shape of a draft model; None without one, or if it is unknown here."""
    draft_model = experiment.generation.draft_model
    try:
        return None if draft_model is None else load_shape(draft_model.model_path)
    except (BrokenModelFolder, UnsupportedModel):
        return None
