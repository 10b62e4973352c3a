"""What becomes of a section whose variant changes: `generation.backend=vllm` over a file that says `torch`.

The fields that both variants have in common, those of the class that both come from, stay: replicas,
sampling, lengths. The old variant's own fields go, and so do the parts that a preset sets: what was said of
GRPO's loss would turn DAPO's into another. Others stay, to be taken by the new variant or refused.
"""

from .algorithm.preference import PREFERENCE_PRESETS
from .algorithm.presets import presets
from .base import Config
from .schema import declaration, names, sections_at, tag
from .yaml import FieldPath, Tree

_ALGORITHM = ("algorithm",)


def common_fields(path: FieldPath, base: Tree, over: Tree) -> Tree:
    """For one file over another: a section that names no variant is of the default one, if it has any."""
    return _staying(path, base, over, unnamed=_default(sections_at(path)))


def common_fields_of_named(path: FieldPath, base: Tree, over: Tree) -> Tree:
    """For overrides among themselves, in any order: one that names no variant is of whichever is named."""
    return _staying(path, base, over, unnamed=None)


def _staying(path: FieldPath, base: Tree, over: Tree, unnamed: type[Config] | None) -> Tree:
    sections = sections_at(path)
    key = tag(sections[0]) if sections else ""
    if len(sections) < 2 or key not in over or base.get(key) == over[key]:
        return base
    old = _named(sections, base[key]) if key in base else unnamed
    new = _named(sections, over[key])
    if old is None or new is None:  # a name that nobody knows is refused, whatever else is there
        return base
    named = (base.get(key), over[key]) if path == _ALGORITHM else ()
    parts = frozenset[str]().union(*map(_preset_parts, named))
    return {
        name: value
        for name, value in base.items()
        if name not in old.model_fields
        or (name not in parts and name in new.model_fields and _is_common(name, old, new))
    }


def _preset_parts(name: object) -> frozenset[str]:
    preset = presets().get(str(name)) or PREFERENCE_PRESETS.get(str(name))
    return frozenset(preset.settings) if preset else frozenset()


def _is_common(field: str, old: type[Config], new: type[Config]) -> bool:
    return declaration(old, field) is declaration(new, field)


def _named(sections: tuple[type[Config], ...], name: object) -> type[Config] | None:
    return next((section for section in sections if name in names(section)), None)


def _default(sections: tuple[type[Config], ...]) -> type[Config] | None:
    defaults = (s for s in sections if tag(s) in s.model_fields and not s.model_fields[tag(s)].is_required())
    return next(defaults, None)
