"""NeMo-RL's sections `data` and `env`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemorl.config.base import counted

from . import nemo_rl_gym as gym
from .nemo_rl_sections import WEIGHTS, aligns, get, is_online, kind, of_online, reward_weights
from .rules import CannotImport, Fields, Ignored, Lost, Origin, Part, Rule, not_imported
from .shared import PUBLIC, PublicData
from .sources import read_text

_PREPARED = "write it into this file with the keys of the section; NeMo-RL formats the dataset in its code"
# Rows of training data that NeMo-RL formats in its code, from the datasets' cards.
_ROWS = {"HelpSteer3": 38_459, "gsm8k": 7_473, "squad": 87_599, "tulu3_sft_mixture": 939_343}
_MATH = ("math", "dapo")
_ENVIRONMENTS = (*_MATH, "math_multi_reward", "sliding_puzzle_game", "reward_model")
# Of math_multi_reward, in the order of the weights, which is that of the names.
_SEVERAL: tuple[dict[str, Any], ...] = (
    {"name": "correctness", "function": "exact_match", "arguments": {"tag": "answer"}},
    {
        "name": "format",
        "function": "pattern",
        "arguments": {"regex": r"<think>((?!</?answer>).)*</think>\n<answer>((?!</?answer>).)*</answer>\n?"},
    },
    {"name": "integer", "function": "pattern", "arguments": {"regex": r"\d+", "tag": "answer"}},
)
_LOADERS, _DRAWN = "data.use_multiple_dataloader", "data.custom_dataloader"
_PER_LOADER = "data.num_prompts_per_dataloader"
_TEXTS = "arrow_text"  # NeMo-RL's dataset of texts, in any format
_HUB = "hf://datasets/"
_OWN_FORMATS = (".jsonl", ".parquet", ".arrow", ".txt")  # that are read without the package datasets
_OF_TEXTS = ("data_files", "text_key", "characters_per_sample", "subset")
_IN_TURN = "example_custom_dataloader"  # NeMo-RL's function that takes a batch of each loader


def data_rows(x: Origin) -> int | None:
    """Rows that are trained on, as far as they are known."""
    total = 0
    for train in _trained_on(x):
        name, held_out = train.get("dataset_name"), train.get("split_validation_size", 0) or 0
        rows = PUBLIC[name].rows if name in PUBLIC else _ROWS.get(str(name))
        if rows is None:
            return None
        total += int(rows * (1 - held_out)) if held_out < 1 else rows - int(held_out)
    return total


def _datasets(x: Origin, key: str) -> list[dict[str, Any]]:
    """Those of `data.train` or `data.validation`, a section or a list of sections."""
    given = x.get(key)
    if isinstance(given, list):
        return [dict(one) for one in given]
    return [below] if (below := x.below(key)) else []


def _trained_on(x: Origin) -> list[dict[str, Any]]:
    return _datasets(x, "data.train") or [{"dataset_name": x.get("data.dataset_name")}]


def repeats(x: Origin) -> int:
    """How often each row of validation is sampled; 1 where its datasets are repeated differently."""
    found = {int(one.get("repeat") or 1) for one in _datasets(x, "data.validation")}
    return found.pop() if len(found) == 1 else 1


def _defaults(x: Origin) -> dict[str, Any]:
    return x.below("data.default")


def _env_name(x: Origin) -> str:
    return str(_trained_on(x)[0].get("env_name") or _defaults(x).get("env_name") or "math")


def has_loaders(x: Origin) -> bool:
    """True if each dataset has a data loader of its own, which begins again at its end."""
    return bool(x.get(_LOADERS, False))


def _weights(x: Origin, count: int) -> dict[str, Any]:
    """Fields of each source of a mixture of `count` datasets, which have their shares of each step.

    Raises CannotImport for several loaders where NeMo-RL has one, and for shares that do not make up a step.
    """
    if not has_loaders(x):
        x.lost(_LOADERS, "all datasets have one loader", changes_result=False)
        for key in (_DRAWN, _PER_LOADER):
            x.lost(key, f"read with {_LOADERS} only", changes_result=False)
        return {}
    if kind(x) != "grpo":
        raise CannotImport(f"{_LOADERS} = true: NeMo-RL has several loaders in GRPO alone; set it to false")
    if str(x.get(_DRAWN)).rpartition(".")[2] != _IN_TURN:
        x.lost(_DRAWN, "what a function of your own draws is not known; set weights of data.train.sources")
        return {}
    prompts, drawn = get(x, "num_prompts_per_step", 1), x.get(_PER_LOADER, 0)
    if drawn * count != prompts:
        problem = f"{counted(count, 'dataset')} of it are no step of {prompts} prompts, which NeMo-RL refuses"
        raise CannotImport(f"{_PER_LOADER} = {drawn}: {problem}, too; change one")
    return {"weight": 1}


def _data(x: Origin) -> Fields:
    of_texts = {"data.chat": False} if aligns(x) else {}
    weights = _weights(x, len(_trained_on(x)))
    if is_online(x) and _env_name(x) == "sliding_puzzle_game":
        size = get(x, "num_prompts_per_step", 1) * max(get(x, "max_num_steps", 1), 1)
        size = min(size, 100_000)
        return {"data.train": {"name": "seeds", "size": size}}
    given, where = _trained_on(x), "data.train" if "data.train" in x.values else "data.train.dataset_name"
    trained = [_without_held_out(x, one, where) for one in given]
    fields: dict[str, Any] = {"data.train": trained[0][0], **of_texts}
    if len(given) > 1:
        sections = zip(_names(given), trained, strict=True)
        sources = {name: {"dataset": section, **weights} for name, (section, _) in sections}
        fields["data.train"] = {"name": "mixture", "sources": sources}
        _remark_on_mixture(x, given)
    held_out = [(one, held) for one, (_, held) in zip(given, trained, strict=True) if held is not None]
    fields |= _validation(x, held_out)
    if "data.validation" not in fields and _validates(x):
        fields["data.validation"] = _of_file(x, trained[0][0], "data/validation.jsonl")
        how = "validation has no data in this config; give it in data/validation.jsonl"
        x.changed(where, how)
        x.note("data/validation.jsonl", "write the rows of validation here; the config has none")
    return fields


def _without_held_out(
    x: Origin, given: dict[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A dataset that is trained on, and the part of it that is held out."""
    section, name = _section(x, given, where), given.get("dataset_name")
    held_out = given.get("split_validation_size", 0) or 0
    if not held_out or (name not in PUBLIC and name != _TEXTS) or given.get("data_path"):
        return section, None
    share = f"{held_out * 100:g}%" if held_out < 1 else f"{held_out:g}"
    kept = f"{100 - held_out * 100:g}%" if held_out < 1 else f"-{held_out:g}"
    split = section["split"]
    key = "data.train" if "data.train" in x.values else "data.train.split_validation_size"
    before = ", before texts are joined," if section.get("min_characters") else ""
    x.changed(key, f"the last rows are held out{before} and not random ones")
    held = f"{split}[-{share}:]" if held_out >= 1 else f"{split}[{kept}:]"
    return section | {"split": f"{split}[:{kept}]"}, section | {"split": held}


def _validation(x: Origin, held_out: list[tuple[dict[str, Any], dict[str, Any]]]) -> Fields:
    """The datasets of validation: those that the config names, or else parts of those trained on.

    `held_out`: of each the dataset there, and the section here.
    """
    where = "data.validation" if "data.validation" in x.values else "data.validation.dataset_name"
    named = _datasets(x, "data.validation") if _validates(x) else []
    pairs = [(one, _section(x, one, where)) for one in named] or held_out
    if not pairs:
        return {}
    given, found = zip(*pairs, strict=True)
    fields: dict[str, Any] = {"data.validation": found[0]}
    if len(found) == 1:
        return fields
    where = where if named else "data.train"
    if not is_online(x):
        x.changed(where, "the first of several datasets; validation measures the loss on one")
        return fields
    fields["data.validation_sets"] = dict(zip(_names(given)[1:], found[1:], strict=True))
    how = "each dataset has metrics of its own, those of `validation/` being the first one's"
    if len({one.get("repeat") or 1 for one in given}) > 1:
        how += "; all rows are sampled once, as `repeat` is not the same"
    x.changed(where, how)
    return fields


def _remark_on_mixture(x: Origin, given: list[dict[str, Any]]) -> None:
    """NeMo-RL concatenates the datasets, and shuffles the rows, unless each has a loader of its own."""
    known, (before, differs) = _env_name(x), x.remarks.get("data.train", ("", False))
    hows = [before] if before else []
    if has_loaders(x):
        hows.append(
            "each row is in each epoch; there the last ones of a dataset that fill no batch are left out"
        )
    elif x.get("data.shuffle", True):
        hows.append("each step has the shares of the datasets; there they vary by chance")
    else:
        hows.append("each step has the shares of the datasets; there one follows the other")
        differs = True
    if any((one.get("env_name") or known) != known for one in given):
        hows.append(f"the environment of all is {known}")
        differs = True
    x.changed("data.train", "; ".join(hows), changes_result=differs)


def _names(given: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the sources of a mixture, or of sets of validation."""
    names = []
    for place, one in enumerate(given):
        shown = str(one.get("dataset_name") or Path(str(one.get("data_path", ""))).stem).lower()
        name = "".join(c if c.isascii() and c.isalnum() else "_" for c in shown)
        if not name[:1].isalpha() or name in names:
            name = f"source_{place}"
        names.append(name)
    return names


def _of_file(x: Origin, section: dict[str, Any], path: str) -> dict[str, Any]:
    """The same dataset in another file."""
    if gym.is_used(x):
        return gym.rows(path)
    of_folders = ("split", "subset", "revision", "files")
    kept = {name: value for name, value in section.items() if name not in of_folders}
    return kept | {"path": path}


def _validates(x: Origin) -> bool:
    return bool(get(x, "val_at_start", False) or get(x, "val_at_end", False) or get(x, "val_period", 0) > 0)


def _section(x: Origin, given: dict[str, Any], key: str) -> dict[str, Any]:
    """A dataset of ours for one of NeMo-RL's."""
    name, preferences = given.get("dataset_name"), x.has_section("dpo") or x.has_section("rm")
    prompt, answer = given.get("input_key", "input"), given.get("output_key", "output")
    if path := given.get("data_path"):
        if gym.is_used(x):
            return gym.rows(str(path))
        keys = {
            "prompt_key": given.get("prompt_key", "prompt"),
            "chosen_key": given.get("chosen_key", "chosen"),
        }
        keys |= {"rejected_key": given.get("rejected_key", "rejected")}
        section = {"name": "preference", **keys} if preferences else {"name": "tasks", "prompt_key": prompt}
        return section | {"path": str(path)} | ({} if preferences else {"answer_key": answer})
    if name == _TEXTS:
        return _texts(x, given, key)
    public = PUBLIC.get(str(name))
    if public is None or preferences:
        x.changed(key, _PREPARED)
        file = f"data/{name}-{given.get('split', 'train')}.jsonl"
        x.note(file, f"write the rows of {name} here, as NeMo-RL formats them in its code")
        if preferences:
            return {"name": "preference", "path": file}
        return {"name": "tasks", "path": file}
    split = given.get("split", public.split)
    shown = PublicData(public.path, split, public.rows, public.prompt_key, public.answer_key)
    section = shown.section()
    if "output_key" in given and name == "OpenMathInstruct-2":
        section["answer_key"] = given["output_key"]
    return section


def _texts(x: Origin, given: dict[str, Any], key: str) -> dict[str, Any]:
    """The dataset `arrow_text`: distillation cuts its texts, to which tokenizers add a start token only."""
    below = key.removesuffix(".dataset_name")
    section = {"name": "texts", **_place_of_texts(given, f"{below}.data_files")}
    section["text_key"] = given.get("text_key", "text")
    size = given.get("characters_per_sample") or 0
    if not isinstance(size, int):
        problem = f"{below}.characters_per_sample = {size}"
        raise CannotImport(f"{problem}: expected a number of characters; correct the value")
    if size > 0:
        section["min_characters"] = size
    if aligns(x):
        return section | {"truncate": True, "end_token": False}
    x.changed(key, "texts are trained as they are; there the chat template writes them as an answer")
    return section


def _place_of_texts(given: dict[str, Any], key: str) -> dict[str, Any]:
    """What is read: files are, without their package, unless it has to hold out rows of them."""
    files, split = given.get("data_files"), given.get("split") or "train"
    if not isinstance(files, str):
        raise CannotImport(f"{key} = {files}: expected a file, a pattern or a dataset; name one")
    if files.startswith(_HUB):
        parts = files.removeprefix(_HUB).split("/")
        name, _, revision = "/".join(parts[:2]).partition("@")
        section = {"path": name, "split": split} | ({"revision": revision} if revision else {})
        return section | ({"files": "/".join(parts[2:])} if parts[2:] else {})
    if "://" in files:
        raise CannotImport(
            f"{key} = {files}: only files and datasets are read; download it, and name the file"
        )
    path = Path(files)
    if path.suffix not in (*_OWN_FORMATS, ".csv", ".json"):
        return {"path": files, "split": split} | ({"subset": given["subset"]} if given.get("subset") else {})
    wild = next((number for number, part in enumerate(path.parts) if set(part) & set("*?[")), None)
    is_own = path.suffix in _OWN_FORMATS and not given.get("split_validation_size")
    if is_own and wild is None:
        return {"path": files}
    border = len(path.parts) - 1 if wild is None else wild
    section = {"path": str(Path(*path.parts[:border])), "files": str(Path(*path.parts[border:]))}
    return section if is_own else section | {"split": split}


def _prompts(x: Origin) -> Fields:
    """Templates in files, whose `{}` is the task, as Python's format reads them."""
    fields: dict[str, Any] = {}
    if aligns(x):
        for name in ("prompt_file", "system_prompt_file"):
            x.lost(f"data.default.{name}", "texts have no prompts", changes_result=False)
        return fields
    for name, path in (("prompt_file", "data.prompt_template"), ("system_prompt_file", "data.system_prompt")):
        file = _defaults(x).get(name) or x.get(f"data.{name}")
        key = f"data.default.{name}" if f"data.default.{name}" in x.values else f"data.{name}"
        if not file:
            continue
        text = _read(x, str(file))
        if text is None:
            x.lost(key, f"the file is not here; set {path} to its text")
        elif name == "prompt_file":
            template = text.replace("{{", "\0").replace("}}", "\1").replace("{}", "{prompt}")
            fields[path] = template.replace("\0", "{").replace("\1", "}")
        else:
            fields[path] = text
    return fields


def _read(x: Origin, name: str) -> str | None:
    folder = Path(x.options.folder).resolve()
    for base in (Path(), folder, *folder.parents):
        if (file := base / name).is_file():
            return read_text(file)
    return None


def _environment(x: Origin) -> Fields:
    if not is_online(x):
        return {}
    name = _env_name(x)
    if gym.is_used(x):
        return gym.environment(x)
    if name in _MATH:
        by_text = x.get(f"env.{name}.math_verify_impl") == "dapo_math_verify"
        return {"env.name": "math"} | ({"env.comparison": "text"} if by_text else {})
    if name == "math_multi_reward":
        return {"env.name": "single_turn", "rewards": _several_rewards(x)}
    if name == "sliding_puzzle_game":
        game, template = f"env.{name}.cfg", "policy.tokenizer.template_arguments"
        shown = x.get("data.add_system_prompt")
        moves = [x.get(f"{game}.max_moves", 20), get(x, "max_rollout_turns")]
        return ({} if shown is None else {f"{template}.add_system_prompt": shown}) | {
            "env.name": "sliding_puzzle",
            "env.size": x.get(f"{game}.game_config.size", 3),
            "env.num_shuffles": x.get(f"{game}.game_config.shuffle_moves", 4),
            "env.max_moves": min(number for number in moves if number is not None),
        }
    if name == "reward_model":
        model = {"kind": "local_model", "model_path": x.get("env.reward_model.model_name")}
        return {"env.name": "single_turn", "rewards": [model | {"devices": "policy"}]}
    raise not_imported("data.default.env_name", name, "environment", _ENVIRONMENTS)


def _several_rewards(x: Origin) -> list[dict[str, Any]]:
    weights = reward_weights(x, [one["name"] for one in _SEVERAL])
    if x.get("grpo.adv_estimator.name") != "gdpo" and x.get(WEIGHTS):
        x.changed(WEIGHTS, "they weigh the sum of the rewards, too; there only GDPO's advantages")
    how = "an answer without its tags is wrong; there all of its text counts"
    x.changed("data.default.env_name", how)
    return [one | {"weight": weights[one["name"]]} for one in _SEVERAL]


def _longest_prompt(x: Origin) -> Fields:
    """Longer prompts stay in the step there, and train nothing; of examples the limit is of all tokens."""
    key = "data.max_input_seq_length"
    longest, length = x.get(key), x.get("policy.max_total_sequence_length", 0)
    if longest is None or longest >= length:
        return {}
    if aligns(x):
        x.lost(key, "the policy's length is that of texts there, too", changes_result=False)
        return {}
    if not is_online(x):
        x.lost(key, "examples that are longer are an error; there they are left out")
        return {}
    return {"data.max_prompt_tokens": longest - 1}


def _shuffle(x: Origin) -> Fields:
    return {"data.shuffle": x.get("data.shuffle", True)}


_GAME = "env.sliding_puzzle_game.cfg"
DATA_RULES: tuple[Rule, ...] = (
    Part(
        (
            *("data.train", "data.dataset_name"),
            *(f"data.train.{name}" for name in ("dataset_name", "data_path", "split", "output_key")),
            *("data.train.split_validation_size", "data.validation"),
            *(f"data.validation.{name}" for name in ("dataset_name", "data_path", "split")),
            *(f"data.{part}.{name}" for part in ("train", "validation") for name in _OF_TEXTS),
            *(_LOADERS, _DRAWN, _PER_LOADER),
        ),
        ("data.train", "data.validation", "data.validation_sets"),
        _data,
    ),
    Part(
        (
            *("data.default.prompt_file", "data.default.system_prompt_file", "data.prompt_file"),
            "data.system_prompt_file",
        ),
        ("data.prompt_template", "data.system_prompt"),
        _prompts,
    ),
    Part(("data.shuffle",), ("data.shuffle",), _shuffle),
    Part(("data.max_input_seq_length",), ("data.max_prompt_tokens",), _longest_prompt),
    Part(
        (
            *("data.default.env_name", "env.should_use_nemo_gym", "env.reward_model.model_name"),
            "env.should_mask_flagged_samples",
            *(f"env.{name}.math_verify_impl" for name in _MATH),
            WEIGHTS,
            *(*of_online("max_rollout_turns"), "data.add_system_prompt"),
            *(f"{_GAME}.game_config.size", f"{_GAME}.game_config.shuffle_moves", f"{_GAME}.max_moves"),
        ),
        ("env", "rewards", "policy.tokenizer.template_arguments"),
        _environment,
    ),
    Ignored(("data.train.seed",), "of the rows that are held out, which are the last ones"),
    Lost(("data.add_bos", "data.add_eos"), "as the chat template does", (None, True)),
    Ignored(("data.add_generation_prompt",), "as the chat template requires"),
    Ignored(
        (
            *("data.num_workers", "data.default.processor", "data.default.*"),
            *("data.train.*", "data.validation.*", "env.math.*", "env.dapo.*", "env.reward_model.*"),
            *(
                "env.vlm.*",
                "env.clevr-cogent.*",
                "env.geometry3k.*",
                "env.refcoco.*",
                "env.math_multi_reward.*",
            ),
            "env.should_log_nemo_gym_responses",
        ),
        "how its workers read data and score answers",
    ),
)
