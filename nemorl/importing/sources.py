"""Configs as their projects read them: inherited files, interpolations, Hydra's overrides."""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .rules import CannotImport

if TYPE_CHECKING:
    from omegaconf import DictConfig

RESOLVERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),  # OmegaConf warns of functions without a signature
}
_OVERRIDE = re.compile(r"^(\+\+|\+|~)?([A-Za-z_][\w./@-]*)=(.*)$", re.DOTALL)
_REFERENCE = re.compile(r"\$\{(\w+)(?::?-((?:[^{}]|\{[^{}]*\})*))?\}|\$(\w+)")
_HERE = re.compile(r"^read -r -d '' (\w+) <<(\w+)\n(.*?)\n\2$", re.DOTALL | re.MULTILINE)
_CHOICE = re.compile(r"\$\(([^()]+?)&&\s*echo\s+(\S+)\s*\|\|\s*echo\s+([^\s()]+)\s*\)")
_ASSIGNMENT = re.compile(r"^(?:export\s+|local\s+)?(\w+)(\+?)=(.*)$", re.DOTALL)
_MAX_BYTES = 8 * 2**20  # of a config; the longest public one has 60 kB


def read_text(file: Path) -> str:
    """The text of a config or script. Raises CannotImport if it is none."""
    try:
        if (size := file.stat().st_size) > _MAX_BYTES:
            raise CannotImport(f"{file}: {size / 2**20:.0f} MiB are no config; name the config, not its data")
        data = file.read_bytes()
    except OSError as error:
        raise CannotImport(
            f"{file}: cannot be read: {error.strerror}; correct the path or its rights"
        ) from error
    if 0 in data:
        raise CannotImport(f"{file}: there are null bytes in it, so it is no text; name a text file")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = f"the byte {data[error.start]:#04x} is no UTF-8"
        fix = "name a text file, or convert it, such as with `iconv -f latin1 -t utf-8`"
        raise CannotImport(f"{file}:{line}: {problem}; {fix}") from error


def omegaconf() -> Any:
    """The module, with the resolvers of the projects."""
    try:
        from omegaconf import OmegaConf
    except ImportError as error:
        raise CannotImport('this requires omegaconf; run `pip install "nemorl[import]"`') from error
    register = getattr(OmegaConf, "register_resolver", OmegaConf.register_new_resolver)
    for name, function in RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            register(name, function)
    return OmegaConf


def read_inherited(file: Path, heirs: tuple[Path, ...] = ()) -> "DictConfig":
    """A file over those that its `defaults` names, by paths relative to it; the last one has precedence.

    `_override_: true` in a section drops the section of the files below. `heirs` are the files that inherit
    from it. Raises CannotImport.
    """
    conf = omegaconf()
    own = conf.to_container(read_yaml(file), resolve=False)
    names = own.pop("defaults", None) or []
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CannotImport(f"{file}: defaults = {names}: expected a path or a list of paths; correct it")
    base = conf.create({})
    chain = (*heirs, file)
    for name in names:
        parent = file.parent / name
        if any(parent.resolve() == one.resolve() for one in chain):
            raise CannotImport(f"{file}: defaults = {name}: the file inherits from itself; remove the entry")
        if not parent.is_file():
            problem = f"there is no file {parent}"
            raise CannotImport(f"{file}: defaults = {name}: {problem}; correct the path, or add the file")
        base = _merged(base, read_inherited(parent, chain), file)
    return _merged(base, conf.create(own), file)


def _merged(base: "DictConfig", over: "DictConfig", file: Path) -> "DictConfig":
    """`over` laid over `base`. Raises CannotImport where one has a list and the other a section."""
    conf = omegaconf()
    for key in list(over.keys()):
        section: Any = None if conf.is_missing(over, key) else over._get_node(key)
        if conf.is_dict(section) and not section._is_none() and section.pop("_override_", False):
            base.pop(key, None)
    kinds = (conf.to_container(config, resolve=False) for config in (base, over))
    if problems := [f"{file}: {problem}" for problem in _clashes(*kinds)]:
        raise CannotImport(*problems)
    merged: DictConfig = conf.merge(base, over)
    return merged


def _clashes(base: dict[Any, Any], over: dict[Any, Any], section: str = "") -> Iterator[str]:
    """The keys that are a list in one config and a section in the other, which OmegaConf does not merge."""
    for key, above in over.items():
        below = base.get(key)
        if isinstance(below, dict) and isinstance(above, dict):
            yield from _clashes(below, above, f"{section}{key}.")
        elif {type(below), type(above)} == {dict, list}:
            inherited = "section" if isinstance(below, dict) else "list"
            yield f"{section}{key} = {above}: the inherited file has a {inherited} there; give a {inherited}"


def read_yaml(file: Path) -> "DictConfig":
    import yaml

    conf = omegaconf()
    from omegaconf.errors import GrammarParseError

    text = read_text(file)
    try:
        config = conf.load(file)
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, error.problem or error.context
        line = f":{mark.line + 1}" if mark is not None else ""
        raise CannotImport(f"{file}{line}: invalid YAML: {problem}; correct the line") from error
    except GrammarParseError as error:
        lines = enumerate(text.splitlines(), start=1)
        line = next((f":{number}" for number, one in lines if one.count("${") > one.count("}")), "")
        raise CannotImport(f"{file}{line}: {_why(error)}") from error
    except OSError as error:  # the file has been read, so it is a number, a date or the like
        problem = "there is a single value at the top level"
        raise CannotImport(f"{file}: {problem}; name a config, which has sections there") from error
    except Exception as error:
        raise CannotImport(f"{file}: cannot be read: {str(error).partition(chr(10))[0]}") from error
    if not conf.is_dict(config):
        raise CannotImport(
            f"{file}: there is a list at the top level; name a config, which has sections there"
        )
    tree: DictConfig = config
    return tree


def resolved(config: "DictConfig", source: str) -> dict[str, Any]:
    """The config with all references resolved. Raises CannotImport with each that is not."""
    conf = omegaconf()
    try:
        return conf.to_container(config, resolve=True)  # type: ignore[no-any-return]
    except Exception as error:
        raise CannotImport(*(f"{source}: {problem}" for problem in _unresolved(config, error))) from error


def _unresolved(config: "DictConfig", error: Exception) -> list[str]:
    """Why each value with a reference has none; `error` is that of the first one."""
    from nemorl.config.yaml import leaves

    conf, problems = omegaconf(), []
    for key, text in leaves(conf.to_container(config, resolve=False)):
        if "${" not in str(text):
            continue
        try:
            conf.to_container(conf.create({"value": conf.select(config, key)}), resolve=True)
        except Exception as failure:  # noqa: BLE001  of resolvers, any
            problems.append(f"{key} = {text}: {_why(failure)}")
    return problems or [f"{getattr(error, 'full_key', None) or 'a reference'}: {_why(error)}"]


def _why(error: Exception) -> str:
    from omegaconf.errors import (
        GrammarParseError,
        InterpolationKeyError,
        InterpolationToMissingValueError,
        UnsupportedInterpolationType,
    )

    text = str(error).partition("\n")[0]
    if "Recursive" in text:
        return "circular reference; write the value"
    named = re.search(r"'([^']*)'|type (\S+)", text)
    name = (named[1] or named[2]) if named else "it"
    match error:
        case InterpolationToMissingValueError():
            return "the value that it refers to is missing (`???`); give it"
        case InterpolationKeyError():
            return f"there is no key `{name}`; correct the reference, or give the key"
        case UnsupportedInterpolationType():
            return f"`{name}` is no resolver that is read; write the value instead"
        case GrammarParseError():
            return "invalid reference; close its braces, or write the value"
    return f"the reference has no value ({text.rpartition(': ')[2]}); write the value instead"


def overridden(config: "DictConfig", words: Iterable[str]) -> "DictConfig":
    """The config with Hydra's overrides: `a.b=1`, `+a.b=1`, `++a.b=1` and `~a.b`."""
    conf = omegaconf()
    for word in words:
        if word.startswith("~"):
            conf.update(config, word[1:].partition("=")[0], None, force_add=True)
            continue
        if (match := _OVERRIDE.match(word)) is None:
            raise CannotImport(f"{word}: expected an override such as a.b=1")
        conf.update(config, match[2], _value(match[3]), force_add=True, merge=False)
    return config


def _value(text: str) -> Any:
    """A value in Hydra's grammar, whose strings need no quotes: `['a','b']`, `{a:1}`, `1e-6`, `null`."""
    import yaml

    from nemorl.config.yaml import _Loader

    spaced = re.sub(r"(?<=[\w'\"]):(?=[^\s/])", ": ", text) if text.startswith("{") else text
    if not text or text == "''":
        return "" if text else None
    try:
        value = yaml.load(spaced, _Loader)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and value in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[value]
    return value


Find = Callable[[list[str]], list[str]]


def module_command(words: list[str]) -> list[str]:
    """The words behind `-m` or `--module`; none if there is neither."""
    for flag in ("-m", "--module"):
        if flag in words:
            return words[words.index(flag) + 1 :]
    return []


def read_command(
    text: str, environment: Mapping[str, str] | None = None, find: Find = module_command
) -> list[str]:
    """The words of the last command of a shell script that `find` accepts, as far as they can be known.

    Assignments, arrays and defaults such as `${N:-8}` are followed; a branch is taken if its test compares
    two texts that are equal, and of `case` the first whose pattern matches. The same decides
    `$(TEST && echo A || echo B)`. Nothing is executed. Variables that are not assigned are looked up in
    `environment`, and otherwise stay as `$NAME`.
    """
    shell = _Shell(dict(environment or {}), find)
    for line in _lines(_HERE.sub(lambda match: f"{match[1]}='{match[3]}'", text)):
        shell.run(line)
    if not shell.command:
        raise CannotImport("the script has no command that starts training; give the config as YAML instead")
    return shell.command


def _lines(text: str) -> Iterable[str]:
    """Statements: lines joined at a backslash, inside parentheses and inside quotes."""
    pending = ""
    for raw in text.splitlines():
        line = raw.rstrip()
        if not pending and line.lstrip().startswith("#"):
            continue
        inside = pending.lstrip()
        if inside and line.lstrip().startswith("#"):
            continue
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        pending += line
        if re.match(r"^\s*(?:export\s+|local\s+)?\w+\+?=\(", pending) and not _closed(pending):
            pending += "\n"
            continue
        if pending.count('"') % 2 and "'" not in pending:
            pending += "\n"
            continue
        yield pending.strip()
        pending = ""
    if pending.strip():
        yield pending.strip()


def _closed(text: str) -> bool:
    plain = re.sub(r"\"(?:\\.|[^\"\\])*\"|'[^']*'|#[^\n]*", "", text)
    return plain.count("(") <= plain.count(")")


class _Shell:
    def __init__(self, environment: dict[str, str], find: Find) -> None:
        self._values, self._find = environment, find
        self._arrays: dict[str, list[str]] = {}
        self._taken: list[bool] = []  # of the branches around the statement
        self._cases: dict[int, tuple[str, bool]] = {}  # by depth: the word, and if a pattern has matched it
        self.command: list[str] = []

    def run(self, line: str) -> None:
        line = re.sub(r"\$\(\((.*?)\)\)", lambda match: self._number(match[1]), line)
        line = _CHOICE.sub(lambda match: match[2 if self._holds(match[1]) else 3], line)
        line = re.sub(r"\s#\s[^\n]*$", "", line)
        if match := re.match(r"^(if|elif)\s+(.*?);?\s*(then)?$", line):
            if match[1] == "elif":
                self._taken[-1] = not self._taken[-1] and self._holds(match[2])
            else:
                self._taken.append(self._holds(match[2]))
        elif match := re.match(r"^case\s+(.*?)\s+in$", line):
            self._taken.append(False)
            self._cases[len(self._taken)] = self._expanded(match[1].strip("\"'")), False
        elif line == "esac" and self._taken:
            self._cases.pop(len(self._taken), None)
            self._taken.pop()
        elif len(self._taken) in self._cases:
            self._run_in_case(line)
        elif line == "else" and self._taken:
            self._taken[-1] = not self._taken[-1]
        elif line == "fi" and self._taken:
            self._taken.pop()
        elif all(self._taken):
            self._statement(line)

    def _run_in_case(self, line: str) -> None:
        """A line of `case`: a pattern, a statement or `;;`, or several of them."""
        depth = len(self._taken)
        word, has_matched = self._cases[depth]
        if match := re.match(r"^\(?([^()\s]+(?:\s*\|\s*[^()\s]+)*)\)\s*(.*)$", line):
            patterns = [self._expanded(one.strip(" \"'")) for one in match[1].split("|")]
            matches = any(fnmatch(word, pattern) for pattern in patterns)
            self._taken[-1] = matches and not has_matched
            self._cases[depth] = word, has_matched or matches
            line = match[2]
        statement = line.removesuffix(";;").strip()
        if statement and all(self._taken):
            self._statement(statement)
        if line.endswith(";;"):
            self._taken[-1] = False

    def _holds(self, test: str) -> bool:
        """True if all comparisons of a test hold; what is not a comparison of texts does not."""
        if "||" in test:
            return any(self._holds(part) for part in test.split("||"))
        if "&&" in test:
            return all(self._holds(part) for part in test.split("&&"))
        words = [self._expanded(word) for word in _words(test.strip(" ;{}"))]
        words = [word for word in words if word not in ("[", "[[", "]", "]]")]
        match words:
            case [left, "=" | "==" | "-eq", right]:
                return left == right
            case [left, "!=" | "-ne", right]:
                return left != right
            case ["-z", text]:
                return text in ("", "$")
            case ["-n", text]:
                return text != ""
        return False

    def _statement(self, line: str) -> None:
        match = _ASSIGNMENT.match(line)
        if match and match[3].startswith("("):
            inner = re.sub(r"(^|\s)#[^\n]*", "", match[3].strip()[1:].rpartition(")")[0])
            items = self._items(inner)
            self._arrays[match[1]] = (self._arrays.get(match[1], []) if match[2] else []) + items
        elif match and len(words := _words(line)) == 1 + line.startswith(("export ", "local ")):
            name, value = match[1], words[-1].partition("=")[2]
            self._values[name] = self._values.get(name, "") * bool(match[2]) + self._expanded(value)
        else:
            words = self._items(line)
            quoted = [self._items(word) for word in words if " -m " in word]  # of `bash -c "…"`
            commands = [command for one in (words, *quoted) if (command := self._find(one))]
            self.command = commands[-1] if commands else self.command

    def _items(self, text: str) -> list[str]:
        items = []
        for word in _words(text):
            if array := re.fullmatch(r"\$\{(\w+)\[@\](?::?[-+].*)?\}", word):
                items += self._arrays.get(array[1], [])
            elif word in ("$@", "${@}", "$*", "\n"):
                continue
            elif word in ("|", "2>&1", ";", "&", ">", ">>"):
                break
            elif bare := re.fullmatch(r"\$\{?(\w+)\}?", word):
                items += shlex.split(self._expanded(word)) if bare[1] in self._values else []
            else:
                items.append(self._expanded(word))
        return items

    def _expanded(self, text: str) -> str:
        def replaced(match: re.Match[str]) -> str:
            name, default = match[1] or match[3], match[2]
            if self._values.get(name):
                return self._values[name]
            if default is not None:
                return self._expanded(default.strip("\"'"))
            return self._values.get(name, f"${name}")

        for _ in range(4):  # defaults may have references
            if (new := _REFERENCE.sub(replaced, text)) == text:
                break
            text = new
        return text

    def _number(self, expression: str) -> str:
        """The integer that an expression is, whose names may be without `$`; itself if one is not known."""
        names = re.sub(r"(?<![\w$])\$?\{?([A-Za-z_]\w*)(?::?-[^}]*)?\}?", r"${\1}", expression)
        text = self._expanded(self._expanded(expression) if "$" in expression else names)
        text = re.sub(r"[A-Za-z_]\w*", lambda match: self._values.get(match[0], match[0]), text)
        return _arithmetic(text)


def _words(text: str) -> list[str]:
    """Words of a statement without their quotes; `$` stays."""
    try:
        return shlex.split(text, comments=False)
    except ValueError:
        return text.split()


def _arithmetic(text: str) -> str:
    """The integer that an expression of numbers is; the expression itself if it has names."""
    if not re.fullmatch(r"[\d\s+*/()%-]+", text) or "**" in text:  # powers of any size
        return f"$(({text}))"
    try:
        return str(int(eval(text.replace("/", "//"), {"__builtins__": {}})))
    except (SyntaxError, ArithmeticError):
        return f"$(({text}))"


def home(path: str) -> str:
    """A path of a script without the home folder that it names."""
    return re.sub(r"^(\$HOME|\$\{HOME\}|~)/", "", os.fspath(path))


def words_with_values(words: Sequence[str]) -> list[str]:
    """The overrides among the words of a command."""
    return [word for word in words if _OVERRIDE.match(word) or word.startswith("~")]


def options_of(words: Iterable[str]) -> dict[str, Any]:
    """The options of a command: `--a 1`, `--a=1`, `--a 1 2` (a list) and `--a` (true)."""
    tree: dict[str, Any] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, _, value = word[2:].replace("-", "_").partition("=")
            tree[key] = _plain(value) if value else True
        elif key:
            given = _plain(word)
            tree[key] = given if tree[key] is True else [*_listed(tree[key]), given]
    return tree


def _plain(word: str) -> Any:
    """The number, truth or list that a word is; YAML 1.1 reads 1e-6 as text."""
    import yaml

    try:
        value = yaml.safe_load(word)
    except yaml.YAMLError:
        return word
    if not isinstance(value, str):
        return word if isinstance(value, dict) else value
    try:
        return float(value)
    except ValueError:
        return value


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]
