"""JavaScript of a Python file of formulas, so that a page computes with them and they are written once.

A file may hold constants, functions, and named tuples whose properties compute. A function may hold assignments, `if`,
`return` and functions of its own, and of expressions those that `expression` lists. A class becomes a function that
takes its fields as one object; a call with keywords passes one. SyntaxError, with the line, for anything else.
"""

import ast
import json

SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Mod: "%", ast.And: "&&", ast.Or: "||"}
SIGNS |= {ast.Eq: "===", ast.NotEq: "!==", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
CALLS = {"int": "Math.trunc", "min": "Math.min", "max": "Math.max", "sum": "sum", "range": "range", "zip": "zip"}
NEEDED = """const range = (n) => Array.from({ length: n }, (_, i) => i);
const zip = (some, others) => some.map((value, i) => [value, others[i]]);
"""


def javascript(source):
    """The JavaScript of Python `source`: all functions and constants are exported, and it needs `sum` of figure.js."""
    lines = [line for node in ast.parse(source).body for line in at_the_top(node)]
    return 'import { sum } from "./figure.js";\n' + NEEDED + "\n".join(lines) + "\n"


def at_the_top(node):
    match node:
        case ast.ImportFrom(module="typing") | ast.Expr(ast.Constant()):
            return []
        case ast.Assign([ast.Name(name)], value):
            return [f"export const {name} = {expression(value)};"]
        case ast.FunctionDef():
            return ["export " + function(node)]
        case ast.ClassDef(name):
            getters = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name != "__repr__"]
            bodies = [f"get {part.name}() {{ const self = this; {statements(part.body)} }}" for part in getters]
            return [f"export const {name} = (fields) => ({{ {', '.join(['...fields', *bodies])} }});"]
    raise SyntaxError(f"line {node.lineno}: {ast.unparse(node)}")


def function(node):
    names, defaults = [arg.arg for arg in node.args.args], [expression(value) for value in node.args.defaults]
    first = len(names) - len(defaults)
    names[first:] = [f"{name} = {value}" for name, value in zip(names[first:], defaults, strict=True)]
    return f"function {node.name}({', '.join(names)}) {{ {statements(node.body)} }}"


def statements(body):
    """A function's; all names that it assigns are declared first."""
    found = [statement(node) for node in body]
    stores = {name.id for node in body if not isinstance(node, ast.FunctionDef) for name in assigned(node)}
    return (f"let {', '.join(sorted(stores))}; " if stores else "") + " ".join(found)


def assigned(node):
    """The names that a statement gives a value; those of a comprehension are its own."""
    targets = [target for part in ast.walk(node) for target in getattr(part, "targets", [])]
    return [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def statement(node):
    match node:
        case ast.Expr(ast.Constant(str())):
            return ""  # a docstring
        case ast.Assign([target], value):
            return f"{expression(target)} = {expression(value)};"
        case ast.AugAssign(target, ast.Add() | ast.Sub() as op, value):
            return f"{expression(target)} {SIGNS[type(op)]}= {expression(value)};"
        case ast.If(test, body, []):
            return f"if ({expression(test)}) {{ {' '.join(map(statement, body))} }}"
        case ast.If(test, body, orelse):
            return statement(ast.If(test, body, [])) + f" else {{ {' '.join(map(statement, orelse))} }}"
        case ast.Return(value):
            return f"return {expression(value)};"
        case ast.FunctionDef():
            return function(node)
    raise SyntaxError(f"line {node.lineno}: {ast.unparse(node)}")


def expression(node):
    match node:
        case ast.Constant(value):
            return json.dumps(value)
        case ast.Name(name):
            return name
        case ast.Attribute(value, name):
            return f"{expression(value)}.{name}"
        case ast.Subscript(value, index):
            return f"{expression(value)}[{expression(index)}]"
        case ast.BinOp(left, ast.FloorDiv(), right):
            return f"Math.floor({expression(left)} / {expression(right)})"
        case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]) | ast.BoolOp(op, [left, right]) if (
            type(op) in SIGNS
        ):
            return f"({expression(left)} {SIGNS[type(op)]} {expression(right)})"
        case ast.UnaryOp(ast.USub() | ast.Not() as op, value):
            return f"{'-' if isinstance(op, ast.USub) else '!'}({expression(value)})"
        case ast.IfExp(test, body, orelse):
            return f"({expression(test)} ? {expression(body)} : {expression(orelse)})"
        case ast.Tuple(values) | ast.List(values):
            return f"[{', '.join(map(expression, values))}]"
        case ast.Starred(value):
            return f"...{expression(value)}"
        case ast.Dict(keys, values):
            words = [f"{expression(key)}: " if key else "..." for key in keys]
            parts = [word + expression(value) for word, value in zip(words, values, strict=True)]
            return f"{{ {', '.join(parts)} }}"
    return words_and_calls(node)


def words_and_calls(node):
    match node:
        case ast.JoinedStr(values):
            return f"`{''.join(part.value if isinstance(part, ast.Constant) else inserted(part) for part in values)}`"
        case ast.ListComp(value, [each]) | ast.GeneratorExp(value, [each]) if not each.ifs:
            return f"{expression(each.iter)}.map(({expression(each.target)}) => {expression(value)})"
        case ast.DictComp(key, value, [each]):
            pairs = expression(ast.ListComp(ast.Tuple([key, value]), [each]))
            return f"Object.fromEntries({pairs})"
        case ast.Call(ast.Attribute(value, "values"), [], []):
            return f"Object.values({expression(value)})"
        case ast.Call(ast.Name("max"), [values], []):
            return f"Math.max(...{expression(values)})"
        case ast.Call(ast.Name(name), [], keywords):
            return f"{name}({{ {', '.join(f'{word.arg}: {expression(word.value)}' for word in keywords)} }})"
        case ast.Call(ast.Name(name), args, []):
            return f"{CALLS.get(name, name)}({', '.join(map(expression, args))})"
    raise SyntaxError(f"line {node.lineno}: {ast.unparse(node)}")


def inserted(node):
    match node:
        case ast.FormattedValue(value, -1, None):
            return f"${{{expression(value)}}}"
    raise SyntaxError(f"line {node.lineno}: {ast.unparse(node)}")
