"""Generate the tables of docs/moving_in_recipes.md from the recipes in tests/importing/tables.

.venv/bin/python tools/moving_in_page.py
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from nemorl.importing.document import PROJECTS, import_values  # noqa: E402
from nemorl.importing.rules import CannotImport, Imported, Options  # noqa: E402
from tests.importing.recipes import FILES, FOLDER, ROWS, recipes, table  # noqa: E402

PAGE = ROOT / "docs" / "moving_in_recipes.md"
_LONGEST = 90  # characters of a cell
_NAMED = 3  # keys in one


def outcome(project: str, name: str) -> tuple[Imported | None, str, bool]:
    """What a recipe becomes, why it does not, and whether its length needs `--rows`."""
    for rows in (None, ROWS):
        try:
            options = Options(rows, str(FOLDER), "experiment.jinja")
            return import_values(PROJECTS[project], recipes(project)[name], options), "", rows is not None
        except CannotImport as error:
            why = error.problems[0]
            if "--rows" not in why:
                break
    return None, why, False


def written(page: str) -> str:
    """The page with its generated parts as the rules and the recipes have them now."""
    for project in FILES:
        before, begin, rest = page.partition(f"<!-- {project}: written by tools/moving_in_page.py -->\n")
        _, end, after = rest.partition(f"<!-- end of {project} -->\n")
        if not begin or not end:
            raise SystemExit(f"{PAGE} has no part for {project}")
        page = before + begin + "\n".join(_lines(project)) + "\n" + end + after
    return page


def _lines(project: str) -> Iterator[str]:
    found = {name: outcome(project, name) for name in recipes(project)}
    done = [imported for imported, _, _ in found.values() if imported is not None]
    shares = [_share(imported) for imported in done]
    complete = sum(not imported.count("none", changes_result=True) for imported in done)
    origin = table(project)
    recipes_done = f"{len(done)} of {len(found)} recipes are imported, with"
    yield f"{origin['origin']} at {origin['commit'][:8]}: {recipes_done}"
    share = " to ".join(dict.fromkeys(f"{one:.0%}" for one in (min(shares), max(shares))))
    yield f"{share} of the keys that matter mapped; {complete} lose no key"
    yield "that changes the result."
    yield ""
    yield "| recipe | keys | mapped | changed | no effect on the result | changes the result | which |"
    yield "|---|---|---|---|---|---|---|"
    for name, (imported, why, needs_rows) in found.items():
        shown = name.removeprefix("recipes/llm/")
        if imported is None:
            yield f"| {shown} | {len(recipes(project)[name])} | - | - | - | - | not imported: {_cell(why)} |"
            continue
        lost = [row.key for row in imported.rows if row.outcome == "none" and row.changes_result]
        more = f" + {len(lost) - _NAMED}" if lost[_NAMED:] else ""
        named = ", ".join(f"`{key}`" for key in lost[:_NAMED]) + more
        named += " (with `--rows`)" if needs_rows else ""
        counts = (len(imported.rows), imported.count("mapped"), imported.count("changed"))
        harmless = imported.count("none", changes_result=False)
        yield f"| {shown} | {' | '.join(map(str, counts))} | {harmless} | {len(lost)} | {named.strip()} |"
    yield from _lost(done)


def _lost(done: list[Imported]) -> Iterator[str]:
    """The keys that change the result and have no counterpart, the most frequent first."""
    counts: Counter[str] = Counter()
    reasons = {}
    for imported in done:
        lost = [row for row in imported.rows if row.outcome == "none" and row.changes_result]
        counts.update(row.key for row in lost)
        reasons |= {row.key: row.note for row in lost}
    if not counts:
        return
    yield ""
    yield "| key that changes the result | recipes | reason |"
    yield "|---|---|---|"
    for key, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])):
        yield f"| `{key}` | {count} | {reasons[key].replace('|', chr(92) + '|')} |"


def _share(imported: Imported) -> float:
    """Of the keys with an effect on the result, those that are mapped, also with a changed meaning."""
    mapped = imported.count("mapped") + imported.count("changed")
    return mapped / (mapped + imported.count("none", changes_result=True))


def _cell(text: str) -> str:
    short = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return short.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
