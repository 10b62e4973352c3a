"""Find words that have a better one in the field's vocabulary: `python tools/words.py [PATH ...]`.

Searches identifiers (cut at underscores and capitals), comments, docstrings, messages and Markdown; in tests/
only names of tests, comments and docstrings, since other strings are data or expected text. A line that has
to use a word, for example one of another library's interface, ends with the comment `words: allow`.

Exits with status 1 if a word is found.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Each word or phrase (a regular expression, matched as whole words) and what to write instead.
DENIED = {
    r"mends?|mended|mending": "fix",
    r"told": "reported, configured, requested",
    r"tells?|telling": "reports, shows, sends",
    r"learnt|unlearnt": "learned, trained",
    r"anew": "again, from the start",
    r"whoever|whomever": "the caller, any process that",
    r"wherever": "where",
    r"whereabouts": "activity, location",
    r"beside": "next to, besides, auxiliary",
    r"wants?|wanted|wanting": "requires, expects, requested",
    r"stands?|standing|stood": "is, stays; paused",
    r"speaks?|speaking|spoken|spoke": "uses, supports",
    r"hears?|heard|hearing": "receives",
    r"alike|likewise": "the same, also",
    r"so many": "the number of",
    r"by itself": "automatically, alone",
    r"of itself": "on its own",
    r"goes on|go on|went on|going on": "continues",
    r"comes whole|come whole": "is complete",
    r"lent|lends?|lender": "shared, borrowed",
    r"paid|pays?|paying": "rewarded, scored, costs",
    r"torn|tears?": "corrupt, partial",
    r"damaged": "corrupt",
    r"barren": "without progress",
    r"figures?": "metric, value, result",
    r"somebody|someone|nobody": "the user, another process, no one",
    r"bookkeepers?|books": "recorder",
    r"takers?": "consumers",
    r"kin": "variants",
    r"thereof|therein|thereby|whence|thence|hither|thither": "(plain English)",
    r"as it stands|as they stand": "unchanged",
    r"at last": "finally, at the end",
    r"one after another|one after the other": "in sequence",
    r"as long as asked": "(say how long)",
    r"in order that": "so that",
    r"nothing but": "only",
    r"a whole number": "an integer",
    r"in a circle|go in circles": "circular",
    r"came to nothing|comes to nothing": "failed",
    r"behaviours?|colours?|coloured|centres?|licences?|labell(?:ed|ing)|modell(?:ed|ing)": "US spelling",
    r"(?:optim|initial|normal|quant|serial|token|synchron|recogn|general|organ|minim|maxim|regular)is"
    r"(?:e|es|ed|er|ers|ing|ation|ations)": "US spelling",
    r"honours?|honoured|neighbours?|neighbouring|favours?|favoured|analyse[ds]?|analysing": "US spelling",
}
PATTERN = re.compile(rf"\b(?:{'|'.join(f'(?:{word})' for word in DENIED)})\b", re.IGNORECASE)
RULES = [(re.compile(rf"(?:{word})$", re.IGNORECASE), better) for word, better in DENIED.items()]
ALLOWED = re.compile(r"words: allow")
# Terms of the field that contain a denied word.
TERMS = re.compile(r"stand[- ]ins?|standalone|standin|asyncio\.CancelledError|go\.Figure", re.IGNORECASE)
FOLDERS = (
    "nemorl",
    "algorithms",
    "environments",
    "slurm",
    "tools",
    "benchmarks",
    "tests",
    "configs",
    "containers",
    "docs",
    "README.md",
    "CONTRIBUTING.md",
    "Makefile",
)
SUFFIXES = (".py", ".md", ".yaml", ".sh", ".j2", ".sbatch", "")


@dataclass(frozen=True)
class Found:
    path: Path
    line: int
    word: str

    @property
    def better(self) -> str:
        return next(better for rule, better in RULES if rule.match(self.word))


def denied(text: str) -> list[str]:
    """Return the denied words of a text, in order."""
    return PATTERN.findall(TERMS.sub(" ", text))


def parts(identifier: str) -> str:
    """Return the words of an identifier: `numTornFiles` and `num_torn_files` are `num Torn Files`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", identifier).replace("_", " ")


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield each identifier, comment and string of a Python file with its line."""
    dotted: list[str] = []  # the names of an attribute so far: a term such as `go.Figure` has several
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            if dotted[-1:] != ["."]:
                dotted.clear()
            dotted.append(token.string)
            if not TERMS.fullmatch("".join(dotted)):
                yield token.start[0], parts(token.string)
        elif token.string == ".":
            dotted.append(".")
        elif token.type in (tokenize.COMMENT, tokenize.STRING):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line.replace("_", " ")


def test_file_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield each test's name, docstring line and comment of a file of tests with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.lineno, parts(node.name)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            for offset, line in enumerate(str(node.value.value).splitlines()):
                yield node.lineno + offset, line.replace("_", " ")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.replace("_", " ")


def search(path: Path) -> Iterator[Found]:
    """Yield the denied words of a file."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    if path.suffix != ".py":
        texts: Iterable[tuple[int, str]] = enumerate(lines, 1)
    else:
        texts = test_file_texts(source) if path.parts[0] == "tests" else python_texts(source)
    for number, text in texts:
        for word in denied(text):
            if not ALLOWED.search(lines[number - 1]):
                yield Found(path, number, word)


def files_of(paths: Sequence[str]) -> list[Path]:
    """Return the tracked text files under `paths`, without the changelog and this list."""
    listed = subprocess.run(["git", "ls-files", *paths], check=True, capture_output=True, text=True).stdout
    files = [Path(name) for name in listed.splitlines()]
    return [
        file for file in files if file.suffix in SUFFIXES and file.exists() and file != Path("tools/words.py")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", default=FOLDERS)
    parser.add_argument(
        "--count", action="store_true", help="print the number of each word instead of every line"
    )
    arguments = parser.parse_args()
    found = [one for file in files_of(arguments.paths) for one in search(file)]
    if arguments.count:
        for word, count in Counter(one.word.lower() for one in found).most_common():
            sys.stdout.write(f"{count:6} {word}\n")
    else:
        for one in found:
            sys.stdout.write(f"{one.path}:{one.line}: {one.word} -> {one.better}\n")
    sys.stderr.write(f"{len(found)} denied words\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
