"""Hook of MkDocs: the pages that are generated, and links of docs/ to files outside of it.

reference/index.md   every field of an experiment, by section, from the schema
defaults.md          the defaults that matter most, with the reasons that the schema gives
contributing.md, changelog.md   CONTRIBUTING.md and CHANGELOG.md
source/              copies of other files that pages link to, for use without a network
"""

import json
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from nemorl.config.schema import FieldHelp, describe, section_help
from nemorl.errors import ABSENT

ROOT = Path(__file__).parents[1]
COPIED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")

# Shown in defaults.md; each field's help in the schema gives the reason.
DEFAULTS = (
    *("policy.optimizer.lr", "policy.max_grad_norm", "policy.precision", "policy.micro_batch_tokens"),
    *("policy.recompute.name", "algorithm.max_staleness", "algorithm.num_minibatches"),
    *("algorithm.kl.coefficient", "algorithm.max_logprob_gap", "generation.backend", "generation.colocated"),
    *(
        "generation.sampling.temperature",
        "generation.transport",
        "checkpointing.period",
        "checkpointing.keep",
    ),
    *("cluster.max_model_restarts", "cluster.deadlines.stall", "cluster.on_lost_node", "seed"),
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    generated = {"reference/index.md": reference_page(), "defaults.md": defaults_page()}
    for name, page in COPIED.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        generated[page] = text.replace("](docs/", "](").replace("`docs/design.md`", "[design](design.md)")
    for uri, text in generated.items():
        files.append(File.generated(config, uri, content=text))
    for file in sorted(files.documentation_pages(), key=lambda file: file.src_uri):
        for target in _outside(file.content_string, file.src_uri):
            uri = f"source/{target}"
            if (ROOT / target).is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def moved(found: "re.Match[str]") -> str:
        text, link = found.groups()
        target = _target(link, page.file.src_uri)
        if target is None:
            return found[0]
        path, _, anchor = target.partition("#")
        if path in COPIED:
            uri = COPIED[path] + (f"#{anchor}" if anchor else "")
        elif (ROOT / path).is_file():
            uri = f"source/{path}"
        else:  # a folder
            return f"{text} (`{path}`)" if text.strip("`") != path else text
        start = posixpath.dirname(page.file.src_uri)
        return f"[{text}]({posixpath.relpath(uri, start or '.')})"

    return _LINK.sub(moved, markdown)


def _outside(text: str, uri: str) -> Iterator[str]:
    for found in _LINK.finditer(text):
        if (target := _target(found[2], uri)) and target.partition("#")[0] not in COPIED:
            yield target.partition("#")[0]


def _target(link: str, uri: str) -> str | None:
    """The path from the root of a link that leaves docs/; None for others, and for one to nothing."""
    if re.match(r"[a-z]+:|#", link):
        return None
    path, _, anchor = link.partition("#")
    if uri in COPIED.values():  # whose links start at the root
        target = posixpath.normpath(path)
        if (ROOT / "docs" / target).exists():
            return None
    else:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(uri), path))
    if target == "docs" or target.startswith("docs/") or not os.path.exists(ROOT / target):
        return None
    return target + (f"#{anchor}" if anchor else "")


def reference_page() -> str:
    """All fields by section, each with type, default and meaning."""
    lines = [
        "# Every field",
        "",
        f"The {len(describe())} fields of an experiment file, as `nemorl config` lists",
    ]
    lines += [
        "them. Fields of some variants only name these in parentheses. [Defaults](../defaults.md) gives"
    ]
    lines += ["reasons.", ""]
    sections: dict[str, list[FieldHelp]] = {}
    for field in describe():
        sections.setdefault(field.path.rpartition(".")[0], []).append(field)
    top = ""
    for section, fields in sorted(sections.items(), key=lambda item: _order(item[0])):
        if section and section.partition(".")[0] != top:
            top = section.partition(".")[0]
            lines += [f"## {top}", ""]
            if section != top:
                lines += [_escaped(section_help(top)), ""]
        if not section:
            lines += ["## Top level", ""]
        elif section != top:
            lines += [f"### {section}", ""]
        lines += [_escaped(section_help(section)), ""] if section else []
        lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
        for field in fields:
            name = field.path.rpartition(".")[2]
            variant = f" ({_escaped(field.variant)})" if field.variant else ""
            row = (f"`{name}`{variant}", _escaped(field.type), _default(field), _linked(field.help, "../"))
            lines.append(f"| {' | '.join(row)} |")
        lines.append("")
    return "\n".join(lines)


def _order(section: str) -> tuple[int, int]:
    """Sections in the order of the schema; the fields outside of sections first."""
    paths = [field.path for field in describe()]
    tops = list(dict.fromkeys(path.partition(".")[0] for path in paths))
    if not section:
        return -1, 0
    first = next(index for index, path in enumerate(paths) if path.rpartition(".")[0] == section)
    return tops.index(section.partition(".")[0]), first


def defaults_page() -> str:
    """The table of `DEFAULTS`. Raises `LookupError` for a field that no longer exists."""
    lines = ["# What each default is, and why", ""]
    lines += ["A field without a default is required. These are the defaults that decide most about a run;"]
    lines += [
        "[every field](reference/index.md) has the others, and `nemorl train CONFIG --dry-run` prints the"
    ]
    lines += [
        "complete experiment with the defaults that follow from other fields and the reason of each.",
        "",
    ]
    lines += ["| field | default | meaning and reason |", "|---|---|---|"]
    for path in DEFAULTS:
        fields = [field for field in describe() if field.path == path and field.default is not ABSENT]
        if not fields:
            raise LookupError(f"{path}: no such field with a default; correct DEFAULTS in {__file__}")
        lines.append(f"| `{path}` | {_default(fields[0])} | {_linked(fields[0].help, '')} |")
    return "\n".join(lines) + "\n"


def _default(field: FieldHelp) -> str:
    if field.default is ABSENT:
        return "required"
    text = field.default if isinstance(field.default, str) else json.dumps(field.default, default=str)
    return f"`{text}`" if text else '`""`'


def _linked(text: str, up: str) -> str:
    """Help with the pages that it names as links."""
    return re.sub(r"\bdocs/(\w+)\.md\b", rf"[\1]({up}\1.md)", _escaped(text))


def _escaped(text: str) -> str:
    """Text in a cell of a table: bars, and angle brackets and underscores outside of code."""
    parts = re.split(r"(`[^`]*`)", text.replace("|", "\\|"))
    return "".join(p if p.startswith("`") else p.replace("<", "&lt;").replace("*", "\\*") for p in parts)
