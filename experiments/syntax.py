"""Source files as syntax trees: what a module binds at its top level, and a normal form of each tree.

The normal form is text. It says nothing of comments, docstrings and formatting, and is the same in every Python: fields
that are empty, or that only newer ones know, are left out.
"""

import ast
import hashlib
import json

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
IMPORTS = (ast.Import, ast.ImportFrom)
MATCHED = {ast.ExceptHandler: "name", ast.MatchAs: "name", ast.MatchStar: "name", ast.MatchMapping: "rest"}
LEFT_OUT = ("ctx", "kind", "type_comment")  # said by the place; u"" for ""; a comment


class Module:
    """The top level of a source file.

    bindings   {name: the trees that decide what it is}; several where it is set again
    imports    {name: the full name of what it is}
    effects    statements that may change what is bound, such as `table[key] = value`
    """

    def __init__(self, name, path):
        self.name, self.path, self.bindings, self.imports, self.effects = name, path, {}, {}, []
        for node in ast.parse(path.read_text(encoding="utf-8"), path).body:
            if isinstance(node, IMPORTS):
                self.imports.update(imported(node))
            elif not (is_text(node) or is_main(node)):
                for name, tree in definitions(node):
                    self.bindings.setdefault(name, []).append(tree)
                self.effects += [] if is_plain(node) else [node]


def is_text(node):
    """A docstring, or another constant that stands alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_main(node):
    """if __name__ == "__main__": it doesn't run when the module is imported."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def is_plain(node):
    """Whether a statement does nothing but give values to names."""
    if isinstance(node, ast.Tuple):
        return all(map(is_plain, node.elts))
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return all(map(is_plain, node.targets if isinstance(node, ast.Assign) else [node.target]))
    return isinstance(node, (ast.Name, *DEFINITIONS))


def definitions(node):
    """(name, tree that decides what it is) for each name that a statement binds; of `A, B = 1, 2` each has its own."""
    pairs = [(target, node.value) for target in node.targets] if isinstance(node, ast.Assign) else []
    if not pairs:
        yield from ((name, node) for name, _ in bound(node))
    for target, value in pairs:
        if isinstance(target, ast.Name):
            yield target.id, value
        elif is_plain(target) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            yield from ((name, part) for each, part in zip(target.elts, value.elts) for name, _ in bound(each))
        else:
            yield from ((name, node) for name, _ in bound(target))


def imported(node):
    """{name: the full name of what it is} of an import statement."""
    if isinstance(node, ast.ImportFrom):
        if node.level or any(alias.name == "*" for alias in node.names):
            raise ValueError(f"{ast.unparse(node)}: write the module's full name, and what is imported from it")
        return {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    tops = {alias.name.partition(".")[0] for alias in node.names if not alias.asname}
    return {top: top for top in tops} | {alias.asname: alias.name for alias in node.names if alias.asname}


def bound(node):
    """(name, full name of what was imported, or None) of all that a tree binds in the scope in which it stands."""
    if isinstance(node, DEFINITIONS):
        yield node.name, None
    elif isinstance(node, IMPORTS):
        yield from imported(node).items()
    elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id, None
    elif isinstance(node, ast.comprehension):  # its targets are its own; what := binds is not
        yield from (pair for part in (node.iter, *node.ifs) for pair in bound(part))
    elif not isinstance(node, ast.Lambda):
        if name := getattr(node, MATCHED.get(type(node), ""), None):
            yield name, None
        yield from (pair for child in ast.iter_child_nodes(node) for pair in bound(child))


def local(node, scope):
    """The names that are local in a function: {name: the full name of what was imported, or None}."""
    body, arguments = node.body if isinstance(node.body, list) else [node.body], node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    found = {**(scope or {}), **{argument.arg: None for argument in every if argument}}
    for statement in body:
        found.update(bound(statement))
    walked = (inner for statement in body for inner in ast.walk(statement))
    declared = {name for inner in walked if isinstance(inner, ast.Global) for name in inner.names}
    return {name: what for name, what in found.items() if name not in declared}


class Form:
    """Makes the normal forms of the trees of one module.

    `meaning(names, module)` is text for what `names`, joined by dots, mean in a module; "" is outside of all modules.
    In the methods `scope` has the names that are local where a tree stands, see `local`; None: not in a function.
    """

    def __init__(self, module, meaning):
        self.module, self.meaning = module, meaning

    def definition(self, node):
        """The form of a tree from `Module.bindings`. The name that it defines doesn't count."""
        return self.of(node, None, ("name",) if isinstance(node, DEFINITIONS) else ())

    def of(self, node, scope=None, leave_out=()):
        if isinstance(node, (ast.Name, ast.Attribute)) and (found := self.reference(node, scope)):
            return found
        if isinstance(node, ast.Constant):
            return self.constant(node.value)
        if isinstance(node, IMPORTS):  # in a function every use of the name says what it is
            names = imported(node).values() if scope is None else ()
            return " ".join(self.meaning(name.split("."), "") for name in names)
        if isinstance(node, COMPREHENSIONS):  # the first iterable is looked up in the scope around it
            own = dict(pair for generator in node.generators for pair in bound(generator.target))
            return self.fields(node, {**(scope or {}), **own}) + self.of(node.generators[0].iter, scope)
        if isinstance(node, FUNCTIONS):  # and so are defaults, decorators and annotations
            return self.fields(node, scope, (*leave_out, "body")) + self.value(node.body, local(node, scope))
        return self.fields(node, scope, leave_out)

    def fields(self, node, scope, leave_out=()):
        values = {name: getattr(node, name, None) for name in node._fields if name not in (*LEFT_OUT, *leave_out)}
        if isinstance(node, ast.JoinedStr):
            values["values"] = joined(node.values)
        there = (f"{name}={self.value(value, scope)}" for name, value in values.items() if value not in (None, []))
        return f"{type(node).__name__}({', '.join(there)})"

    def value(self, value, scope):
        if isinstance(value, list):
            return f"[{', '.join(self.value(each, scope) for each in value if not is_text(each))}]"
        return self.of(value, scope) if isinstance(value, ast.AST) else ascii(value)

    def constant(self, value):
        """The name of a JSON file beside the source stands for what the file holds."""
        if isinstance(value, str) and value.endswith(".json") and (path := self.module.path.parent / value).is_file():
            held = json.loads(path.read_text(encoding="utf-8"))
            held.pop("provenance", None)  # decides nothing
            return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()
        return ascii(value)

    def reference(self, node, scope):
        """What a name, or names joined by dots, mean; None for what is local or built in."""
        names = []
        while isinstance(node, ast.Attribute):
            names, node = [node.attr, *names], node.value
        if not isinstance(node, ast.Name):
            return None
        local_names, is_read = scope or {}, isinstance(node.ctx, ast.Load)
        if node.id in local_names:
            found = local_names[node.id]
            return found and is_read and self.meaning([*found.split("."), *names], "")
        if (node.id in self.module.bindings or node.id in self.module.imports) and (is_read or scope is not None):
            return self.meaning([node.id, *names], self.module.name)  # written to: it was declared global
        return None


def joined(values):
    """The parts of an f-string, with texts that follow each other as one: Pythons differ in where they cut."""
    found = []
    for value in values:
        if isinstance(value, ast.Constant) and found and isinstance(found[-1], ast.Constant):
            value = ast.Constant(found.pop().value + value.value)
        found.append(value)
    return [value for value in found if not (isinstance(value, ast.Constant) and value.value == "")]
