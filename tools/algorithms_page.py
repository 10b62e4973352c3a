"""Generate the parts of docs/algorithms.md about presets and sections from the presets and the schema.

The description of a preset, between its title and its settings, is written in the page by hand.

.venv/bin/python tools/algorithms_page.py
"""

import inspect
from collections.abc import Iterator
from pathlib import Path

import yaml

from nemorl.config.algorithm import OnlineConfig
from nemorl.config.algorithm.base import Preset
from nemorl.config.algorithm.online import PRESETS
from nemorl.config.base import Config
from nemorl.config.schema import help_text, names, type_text, variants

PAGE = Path(__file__).parents[1] / "docs" / "algorithms.md"
_SETTINGS = "The preset:"
PARTS = ("advantage", "filters", "loss", "kl", "correction", "entropy", "likelihood", "critic")


def written(page: str) -> str:
    """The page with its generated parts as the code has them now."""
    for name, lines in (("presets", _presets(page)), ("parts", _parts())):
        before, begin, rest = page.partition(f"<!-- {name}: written by tools/algorithms_page.py -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->\n")
        if not begin or not end:
            raise SystemExit(f"{PAGE} has no part for {name}")
        page = before + begin + "\n".join(lines) + "\n" + end + after
    return page


def _presets(page: str) -> Iterator[str]:
    yield "| `name` | | advantage | loss | aggregation | also sets | paper |"
    yield "|---|---|---|---|---|---|---|"
    for name, preset in PRESETS.items():
        yield _row(name, preset)
    for name, preset in PRESETS.items():
        title = f"{preset.title}: [paper]({preset.paper})."
        yield from ("", f"### {name}", title, "", _description(page, name), "", *_settings(name, preset))


def _description(page: str, name: str) -> str:
    """The text of the page between the title of a preset and its settings."""
    section = page.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
    before, settings, _ = section.partition(_SETTINGS)
    if not settings:
        return "TODO: describe its formulas, and what differs from the paper or from other algorithms."
    return before.partition("\n")[2].strip("\n")


def _row(name: str, preset: Preset) -> str:
    config = OnlineConfig(name=name, num_steps=1, num_prompts_per_step=1, num_generations_per_prompt=16)
    others = [part for part in preset.settings if part not in ("advantage", "loss")]
    cells = (
        f"[`{name}`](#{name})",
        preset.title,
        f"`{config.advantage.name}`",
        f"`{config.loss.name}`",
        config.loss.aggregation,
        ", ".join(f"`{part}`" for part in others),
        f"[{preset.paper.rpartition('/')[2]}]({preset.paper})",
    )
    return f"| {' | '.join(cells)} |"


def _settings(name: str, preset: Preset) -> Iterator[str]:
    tree = {"algorithm": {"name": name, **preset.settings}}
    yield _SETTINGS
    yield "```yaml"
    yield yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=108).rstrip()
    yield "```"


def _parts() -> Iterator[str]:
    for part in PARTS:
        field = OnlineConfig.model_fields[part]
        yield f"### algorithm.{part}"
        yield help_text(OnlineConfig, part)
        for variant in variants(field.annotation):
            yield from _variant(variant)
        yield ""


def _variant(variant: type[Config]) -> Iterator[str]:
    title = ", ".join(f"**`{name}`** " for name in names(variant))
    summary = " ".join(inspect.cleandoc(variant.__doc__ or "").split("\n\n")[0].split())
    fields = {key: f for key, f in variant.model_fields.items() if key != "name" or not names(variant)}
    if title or summary:
        yield from ("", f"{title}{summary}")
    if fields:
        yield ""
    for name, field in fields.items():
        default = (
            "required" if field.is_required() else _default(field.get_default(call_default_factory=True))
        )
        kind = "" if variants(field.annotation) else f"{type_text(field)}, "
        yield f"- `{name}` ({kind}{default}): {help_text(variant, name)}"
        for inner in variants(field.annotation):
            yield from (f"    {line}" for line in _variant(inner) if line)


def _default(value: object) -> str:
    if isinstance(value, Config):
        return "a section"
    return f"default {yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
