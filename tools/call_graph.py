"""A static call graph over annotated code, precise enough to follow one path through a program.

The type of an expression is the set of the program's classes that its annotation names: `dict[str, list[T]]`
has the type {T}, and so has what comes out of it. A method of a class is also looked for in its subclasses,
and one of a Protocol in the classes that have all its methods with the same parameters.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Key: TypeAlias = tuple[str, str]  # module, and a class, a function or `Class.method` in it
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Types: TypeAlias = frozenset[Key]
_NONE: Types = frozenset()
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_CONSTRUCTORS = ("__init__", "__post_init__", "__new__")
_CALLED = ("__call__", "forward")
_ENTERED = ("__enter__", "__exit__", "__aenter__", "__aexit__")


@dataclass(frozen=True)
class Step:
    """A function on a path and the one that leads to it."""

    function: Key
    caller: Key | None

    @property
    def module(self) -> str:
        """The file it is in."""
        return self.function[0]


def matches(pattern: str, key: Key) -> bool:
    """True if `[module:]name` is the key or the class around it; `module` may be the end of a dotted name."""
    module, _, name = pattern.rpartition(":")
    is_name = key[1] == name or key[1].startswith(f"{name}.")
    return is_name and (not module or f".{key[0]}".endswith(f".{module}"))


def find(pattern: str, keys: Iterable[Key]) -> Key:
    """Return the one key that is exactly `[module:]name`. Raises LookupError."""
    name = pattern.rpartition(":")[2]
    found = [key for key in keys if key[1] == name and matches(pattern, key)]
    if len(found) != 1:
        where = ", ".join(f"{module}:{name}" for module, name in found) or "nowhere"
        raise LookupError(
            f"{pattern}: expected one definition, found {where}; edit the tables of tools/house.py"
        )
    return found[0]


class CallGraph:
    """The functions of a program and what each may call."""

    def __init__(
        self,
        trees: Mapping[str, ast.Module],
        imports: Mapping[str, Sequence[tuple[str, str, str]]],
        chosen: Mapping[str, str],
        hosted: Sequence[str],
        stops: Sequence[str],
    ) -> None:
        """Read the program.

        `imports`: (local name, module, name in it) of each module. `chosen`: the class behind an interface,
        "" for none. `hosted`: classes whose methods are called by their names as strings. `stops`: patterns
        of what is not entered. A name of the last three that does not exist has no effect.
        """
        self._modules = set(trees)
        self._names = {
            module: {local: (base, name) for local, base, name in imports[module]} for module in trees
        }
        self._definitions: dict[Key, ast.AST] = {}
        self._methods: dict[Key, dict[str, Function]] = {}
        for module, tree in trees.items():
            self._define(module, tree)
        self._bases = {key: self._bases_of(key) for key in self._methods}
        self._subclasses: dict[Key, set[Key]] = defaultdict(set)
        for key, bases in self._bases.items():
            for base in bases:
                self._subclasses[base].add(key)
        self._fields: dict[Key, dict[str, list[tuple[ast.expr, str]]]] = {
            key: _fields(self._definitions[key]) for key in self._methods
        }
        self._chosen = {key: name for name in chosen for key in self._classes(name)}
        self._chosen_classes = {key: self._classes(chosen[name]) for key, name in self._chosen.items()}
        self._hosted = [key for name in hosted for key in self._classes(name)]
        self._stops = stops
        self._implementations: dict[Key, list[Key]] = {}
        self._members: dict[tuple[Key, str], list[tuple[Key, Function | None]]] = {}
        self._field_types: dict[tuple[Key, str], Types] = {}
        self._environments: dict[Key, dict[str, Types]] = {}
        self._complete: set[Key] = set()
        self._types: dict[tuple[int, Key], Types] = {}

    def walk(self, roots: Iterable[str]) -> Iterator[Step]:
        """Yield every function that the roots may reach, once. Raises LookupError for a missing root."""
        functions = self.definitions()
        left = [Step(find(root, functions), None) for root in roots]
        seen: set[Key] = set()
        while left:
            step = left.pop(0)
            if step.function in seen:
                continue
            seen.add(step.function)
            yield step
            left += [
                Step(called, step.function)
                for called in self._calls(step.function)
                if not any(matches(stop, called) for stop in self._stops)
            ]

    def definitions(self) -> list[Key]:
        """Return all classes, functions and methods."""
        methods = [(module, f"{cls}.{name}") for (module, cls), of in self._methods.items() for name in of]
        functions = [key for key, node in self._definitions.items() if isinstance(node, _FUNCTION)]
        return [*self._methods, *functions, *methods]

    # Definitions.

    def _define(self, module: str, tree: ast.Module) -> None:
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self._methods[module, node.name] = {n.name: n for n in node.body if isinstance(n, _FUNCTION)}
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self._definitions[module, node.name] = node
            for target in _targets(node):
                if isinstance(target, ast.Name):
                    self._definitions[module, target.id] = node

    def _classes(self, pattern: str) -> list[Key]:
        return [key for key in self._methods if pattern and matches(pattern, key)]

    def _bases_of(self, key: Key) -> list[Key]:
        node = self._definitions[key]
        assert isinstance(node, ast.ClassDef)
        return [base for expression in node.bases for base in self._named(expression, key[0])]

    def _resolve(self, module: str, name: str) -> Key | None:
        """The definition behind a name of a module, through re-exports."""
        for _ in range(6):
            if (module, name) in self._definitions:
                return module, name
            if name not in self._names.get(module, {}):
                return None
            module, name = self._names[module][name]
        return None

    def _resolve_dotted(self, module: str, name: str) -> Key | None:
        """The same of a name, or of `imported_module.name`."""
        of, _, last = name.rpartition(".")
        whole = self._module(module, of) if of else module
        return None if whole is None else self._resolve(whole, last)

    def _module(self, module: str, name: str) -> str | None:
        """Return the module that a name refers to."""
        whole = ".".join(filter(None, self._names[module].get(name, ())))
        return whole if whole in self._modules else None

    def _named(self, annotation: ast.expr | None, module: str, depth: int = 0) -> Types:
        """The classes that an annotation names, through aliases."""
        found: set[Key] = set()
        for node in ast.walk(annotation) if annotation is not None and depth < 5 else ():
            is_name = isinstance(node, ast.Name | ast.Attribute)
            name = ast.unparse(node) if is_name else getattr(node, "value", None)
            key = self._resolve_dotted(module, name) if isinstance(name, str) else None
            if key in self._methods:
                found.add(key)
            elif key is not None:
                found |= self._named(getattr(self._definitions[key], "value", None), key[0], depth + 1)
        return frozenset(found)

    def _ancestors(self, key: Key) -> list[Key]:
        found = [key]
        for base in self._bases[key]:
            found += [ancestor for ancestor in self._ancestors(base) if ancestor not in found]
        return found

    def _behind(self, key: Key) -> list[Key]:
        """The classes of the objects behind a type."""
        if key not in self._implementations:
            self._implementations[key] = self._find_behind(key)
        return self._implementations[key]

    def _find_behind(self, key: Key) -> list[Key]:
        if key in self._chosen_classes:
            return self._chosen_classes[key]
        found = [key]
        for cls in found:
            found += [subclass for subclass in sorted(self._subclasses[cls]) if subclass not in found]
        if self._is_protocol(key) and self._methods[key]:
            found += [cls for cls in self._methods if cls not in found and self._fits(key, cls)]
        return found

    def _is_protocol(self, key: Key) -> bool:
        return any("Protocol" in ast.unparse(base) for base in getattr(self._definitions[key], "bases", ()))

    def _fits(self, protocol: Key, cls: Key) -> bool:
        if self._is_protocol(cls):
            return False
        methods = {
            n: m for ancestor in reversed(self._ancestors(cls)) for n, m in self._methods[ancestor].items()
        }
        fields = {name for ancestor in self._ancestors(cls) for name in self._fields[ancestor]}
        return all(
            _same_parameters(declared, methods[name]) if name in methods else name in fields
            for name, declared in self._methods[protocol].items()
        )

    def _find(self, key: Key, name: str) -> list[tuple[Key, Function | None]]:
        """Who defines an attribute of a type, with the method; None for a field."""
        if (key, name) not in self._members:
            found: list[tuple[Key, Function | None]] = []
            for cls in self._behind(key):
                for ancestor in self._ancestors(cls):
                    if name in self._methods[ancestor] or name in self._fields[ancestor]:
                        found.append((ancestor, self._methods[ancestor].get(name)))
                        break
            self._members[key, name] = found
        return self._members[key, name]

    # Types.

    def _node(self, function: Key) -> Function:
        cls, _, name = function[1].rpartition(".")
        node = self._methods[function[0], cls][name] if cls else self._definitions[function]
        assert isinstance(node, _FUNCTION)
        return node

    def _environment(self, function: Key) -> dict[str, Types]:
        """The types of a function's parameters and local names."""
        if function in self._environments:
            return self._environments[function]
        types: dict[str, Types] = defaultdict(frozenset)
        self._environments[function] = types
        module, name = function
        if "." in name:
            types["self"] = types["cls"] = frozenset({(module, name.partition(".")[0])})
        node = self._node(function)
        for inner in ast.walk(node):
            if isinstance(inner, (*_FUNCTION, ast.Lambda)):
                arguments = inner.args
                for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                    types[argument.arg] |= self._named(argument.annotation, module)
        bindings = list(_bindings(node))
        for _ in range(2):  # a loop may use a name before the line that binds it
            for target, value, is_annotation in bindings:
                found = self._named(value, module) if is_annotation else self._type(value, function)
                for bound in ast.walk(target):
                    if isinstance(bound, ast.Name):
                        types[bound.id] |= found
        self._complete.add(function)
        return types

    def _type(self, node: ast.expr, function: Key) -> Types:
        """The classes of an expression of a function; a class and its objects are the same."""
        key = (id(node), function)
        if key not in self._types:
            self._types[key] = _NONE  # for a circle
            found = self._find_type(node, function)
            if function not in self._complete:
                del self._types[key]
                return found
            self._types[key] = found
        return self._types[key]

    def _find_type(self, node: ast.expr, function: Key) -> Types:
        local = self._environment(function)
        if isinstance(node, ast.Name):
            return local[node.id] if node.id in local else self._global_type(function[0], node.id)
        if isinstance(node, ast.Attribute):
            of = node.value.id if isinstance(node.value, ast.Name) and node.value.id not in local else ""
            if whole := self._module(function[0], of):
                return self._global_type(whole, node.attr)
            return _union(
                self._named(method.returns, owner[0]) if method else self._field_type(owner, node.attr)
                for cls in self._type(node.value, function)
                for owner, method in self._find(cls, node.attr)
            )
        if isinstance(node, ast.Call):
            return self._call_type(node, function)
        if isinstance(node, ast.Compare | ast.JoinedStr):
            return _NONE
        return _union(
            self._type(child, function) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)
        )

    def _global_type(self, module: str, name: str) -> Types:
        key = self._resolve(module, name)
        if key is None:
            return _NONE
        if key in self._methods:
            return frozenset({key})
        node = self._definitions[key]
        return self._named(
            node.returns if isinstance(node, _FUNCTION) else getattr(node, "value", None), key[0]
        )

    def _call_type(self, node: ast.Call, function: Key) -> Types:
        called = node.func
        if isinstance(called, ast.Name) and called.id == "super" and "." in function[1]:
            return frozenset(self._bases[function[0], function[1].partition(".")[0]])
        is_ours = isinstance(called, ast.Name) and self._resolve(function[0], called.id) is not None
        found = self._type(called, function)
        if found or is_ours or (isinstance(called, ast.Attribute) and self._type(called.value, function)):
            return found
        # Another library's, such as asyncio.gather: what it returns is made of what it is given.
        given = (*node.args, *(keyword.value for keyword in node.keywords))
        return _union(self._type(argument, function) for argument in given)

    def _field_type(self, owner: Key, name: str) -> Types:
        if (owner, name) not in self._field_types:
            self._field_types[owner, name] = _NONE
            self._field_types[owner, name] = _union(
                self._type(value, (owner[0], f"{owner[1]}.{method}"))
                if method
                else self._named(value, owner[0])
                for value, method in self._fields[owner][name]
            )
        return self._field_types[owner, name]

    # Calls. A function that is named counts as called, since it is mostly handed to what calls it.

    def _calls(self, function: Key) -> Iterator[Key]:
        for node in _executed(self._node(function)):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                yield from self._named_functions(node, function)
            elif isinstance(node, ast.Call):
                yield from self._called_objects(node, function)
            elif isinstance(node, ast.With | ast.AsyncWith):
                for item in node.items:
                    yield from self._special(_ENTERED, self._type(item.context_expr, function))

    def _named_functions(self, node: ast.Name | ast.Attribute, function: Key) -> Iterator[Key]:
        module, local = function[0], self._environment(function)
        key: Key | None = None
        if isinstance(node, ast.Name):
            key = None if node.id in local else self._resolve(module, node.id)
        else:
            of = node.value.id if isinstance(node.value, ast.Name) and node.value.id not in local else ""
            if whole := self._module(module, of):
                key = self._resolve(whole, node.attr)
            else:
                yield from self._special((node.attr,), self._type(node.value, function))
        if key is not None and isinstance(self._definitions[key], _FUNCTION):
            yield key

    def _called_objects(self, node: ast.Call, function: Key) -> Iterator[Key]:
        """Methods that run where an object is called, or a method by its name as a string."""
        called = node.func
        is_class = isinstance(called, ast.Name) and called.id not in self._environment(function)
        is_method = isinstance(called, ast.Attribute) and any(
            method is not None
            for cls in self._type(called.value, function)
            for _, method in self._find(cls, called.attr)
        )
        if not is_class and not is_method:
            yield from self._special(_CALLED, self._type(called, function))
        for argument in node.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                method = argument.value.rpartition(".")[2]  # `attribute.method` of a hosted object
                yield from self._special((method,), frozenset(self._hosted))

    def _special(self, names: Sequence[str], types: Types) -> Iterator[Key]:
        for cls in sorted(types):
            for name in names:
                for owner, method in self._find(cls, name):
                    if method is not None and name not in _CONSTRUCTORS:
                        yield owner[0], f"{owner[1]}.{name}"


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    return node.targets if isinstance(node, ast.Assign) else []


def _fields(cls: ast.AST) -> dict[str, list[tuple[ast.expr, str]]]:
    """Of each field, its annotations with "" and its values with the method that assigns them."""
    assert isinstance(cls, ast.ClassDef)
    fields: dict[str, list[tuple[ast.expr, str]]] = defaultdict(list)
    for node in cls.body:
        value = getattr(node, "annotation", None) or getattr(node, "value", None)
        for target in _targets(node):
            if isinstance(target, ast.Name) and value is not None:
                fields[target.id].append((value, ""))
    for method in (node for node in cls.body if isinstance(node, _FUNCTION)):
        for inner in ast.walk(method):
            for target in _targets(inner):
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self":
                        if isinstance(inner, ast.AnnAssign):
                            fields[part.attr].append((inner.annotation, ""))
                        elif isinstance(inner, ast.Assign):
                            fields[part.attr].append((inner.value, method.name))
    return fields


def _bindings(function: Function) -> Iterator[tuple[ast.expr, ast.expr, bool]]:
    """Each target with its value, or its annotation and True."""
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target, node.annotation, True
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if not isinstance(target, ast.Attribute | ast.Subscript):
                    yield target, node.value, False
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            yield node.target, node.iter, False
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield node.optional_vars, node.context_expr, False
        elif isinstance(node, ast.NamedExpr):
            yield node.target, node.value, False


def _executed(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function without annotations, `raise` statements and exception handlers."""
    left: list[ast.AST] = [*function.decorator_list, *function.body]
    while left:
        node = left.pop(0)
        if isinstance(node, ast.Raise | ast.ExceptHandler):
            continue
        yield node
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns"):
                left += [
                    child
                    for child in (value if isinstance(value, list) else [value])
                    if isinstance(child, ast.AST)
                ]


def _same_parameters(declared: Function, given: Function) -> bool:
    names = [[a.arg for a in (*f.args.posonlyargs, *f.args.args)] for f in (declared, given)]
    return len(names[0]) == len(names[1]) and bool(declared.args.posonlyargs or names[0] == names[1])


def _union(types: Iterable[Types]) -> Types:
    return _NONE.union(*types)
