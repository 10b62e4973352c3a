"""`${a.b}`: a value taken from another place of the experiment."""

import re

from nemorl.errors import Violation

from .yaml import Document, FieldPath, Tree, dotted, field_path, look_up

# `$${` writes a literal `${`.
_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}")


class _Unresolvable(Exception):
    """The reference names nothing, or leads back to itself."""


def interpolate(document: Document) -> tuple[Document, list[Violation]]:
    """Replace every `${a.b}` by the value at that path; `${rewards.0.weight}` reaches into lists.

    A text that is nothing but one reference becomes the value with its type, a section included; inside a
    longer text the value is written as text. Only what files and overrides say can be referred to, not the
    defaults of fields. A reference that fails stays as it is, and a violation names it.
    """
    resolver = _Resolver(document)
    tree = resolver.everything()
    return Document(tree, document.origins), resolver.violations


class _Resolver:
    def __init__(self, document: Document) -> None:
        self._tree = document.tree
        self._origins = document.origins
        self.violations: list[Violation] = []

    def everything(self) -> Tree:
        tree = self._resolved(self._tree, (), ())
        assert isinstance(tree, dict)
        return tree

    def _resolved(self, value: object, path: FieldPath, chain: tuple[str, ...]) -> object:
        """`chain` are the references that led here."""
        if isinstance(value, dict):
            return {key: self._resolved(item, (*path, key), chain) for key, item in value.items()}
        if isinstance(value, list):
            return [self._resolved(item, (*path, index), chain) for index, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            return self._text(value, chain)
        except _Unresolvable as error:
            if chain:  # told once, where the first reference of the chain stands
                raise
            self.violations.append(Violation(dotted(path), value, str(error), self._origins.get(path, "")))
            return value

    def _text(self, text: str, chain: tuple[str, ...]) -> object:
        whole = _REFERENCE.fullmatch(text)
        if whole and whole[1] is not None:
            return self._referred(whole[1].strip(), chain)
        return _REFERENCE.sub(lambda match: self._inserted(match, chain), text)

    def _inserted(self, match: re.Match[str], chain: tuple[str, ...]) -> str:
        if match[1] is None:
            return "${"
        value = self._referred(match[1].strip(), chain)
        if isinstance(value, dict | list) or value is None:
            raise _Unresolvable(f"`{match[0]}` is no single value, so it cannot stand inside a text")
        return str(value).lower() if isinstance(value, bool) else str(value)

    def _referred(self, name: str, chain: tuple[str, ...]) -> object:
        if name in chain:
            circle = " -> ".join(f"${{{link}}}" for link in (*chain, name))
            raise _Unresolvable(f"the references go in a circle: {circle}; write one of the values out")
        path = field_path(name)
        try:
            value = look_up(self._tree, path)
        except LookupError as error:
            raise _Unresolvable(
                f"`${{{name}}}` names nothing that the file, what it inherits or the command line sets: "
                "set it, or write the value out"
            ) from error
        return self._resolved(value, path, (*chain, name))
