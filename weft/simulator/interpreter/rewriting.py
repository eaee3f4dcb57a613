"""Rewriting of a kernel's source into Python with the meaning that Triton's compiler gives it.

Python and Triton disagree on calls (a builtin gets the compiler as an argument), assignments (a number becomes a tensor),
``and``/``or``/``not`` and chained comparisons (elementwise, not short-circuit) and conditions. These become calls of helpers,
which reach the code as closure cells: no global of the user's module changes. Lines, columns and file name stay the user's,
so tracebacks and debuggers show the kernel as written.
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Callable, Mapping
from functools import cache

# name -> effect on its arguments; `bind` needs one function for each.
HELPERS = {
    "__weft_call__": "callee -> function to call instead",
    "__weft_assign__": "value -> value that the variable holds",
    "__weft_truth__": "condition -> bool",
    "__weft_enter__": "condition of an `if` -> whether some thread takes it",
    "__weft_leave__": "what `enter` gave -> None, at the end of the branch",
    "__weft_all__": "asserted value -> bool",
    "__weft_not__": "x -> not x",
    "__weft_and_more__": "first operand -> whether the second of `and` is evaluated",
    "__weft_and__": "two operands -> first and second",
    "__weft_or_more__": "first operand -> whether the second of `or` is evaluated",
    "__weft_or__": "two operands -> first or second",
}
_INNER = "__weft_kernel__"


class _Rewriter(ast.NodeTransformer):
    def __init__(self) -> None:
        self.temporaries = 0
        self.constants: set[str] = set()  # names declared by a bare `x: tl.constexpr`

    def _helper(self, name: str, at: ast.AST, *args: ast.expr) -> ast.expr:
        call = ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=list(args), keywords=[])
        return ast.fix_missing_locations(ast.copy_location(call, at))

    def _temporary(self, value: ast.expr) -> tuple[ast.expr, Callable[[], ast.expr]]:
        """(expression that binds ``value`` to a fresh name, function that makes expressions reading it)."""
        self.temporaries += 1
        name = f"__weft_{self.temporaries}__"
        kept = ast.NamedExpr(target=ast.Name(id=name, ctx=ast.Store()), value=value)

        def read() -> ast.expr:
            return ast.fix_missing_locations(ast.copy_location(ast.Name(id=name, ctx=ast.Load()), value))

        return ast.fix_missing_locations(ast.copy_location(kept, value)), read

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        node.func = self._helper("__weft_call__", node.func, node.func)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        self.generic_visit(node)
        if not (isinstance(node.targets[0], ast.Name) and node.targets[0].id in self.constants):
            node.value = self._helper("__weft_assign__", node.value, node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        is_constant = ast.unparse(node.annotation).split(".")[-1].strip("'\"") == "constexpr"
        node.annotation = ast.copy_location(ast.Constant(value=None), node.annotation)
        self.generic_visit(node)
        if node.value is None:
            if is_constant and isinstance(node.target, ast.Name):
                self.constants.add(node.target.id)
        elif not is_constant:
            node.value = self._helper("__weft_assign__", node.value, node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        if not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        read = ast.copy_location(ast.Name(id=node.target.id, ctx=ast.Load()), node.target)
        result = ast.copy_location(ast.BinOp(left=read, op=node.op, right=node.value), node)
        return self.visit_Assign(ast.copy_location(ast.Assign(targets=[node.target], value=result), node))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        self.generic_visit(node)
        node.value = self._helper("__weft_assign__", node.value, node.value)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.generic_visit(node)
        return self._fold(node.values, "and" if isinstance(node.op, ast.And) else "or", node)

    def _fold(self, values: list[ast.expr], word: str, at: ast.AST) -> ast.expr:
        """Evaluate left to right. Only a compile-time value can short-circuit the next operand."""
        result = values[0]
        for value in values[1:]:
            kept, read = self._temporary(result)
            test = self._helper(f"__weft_{word}_more__", at, kept)
            both = self._helper(f"__weft_{word}__", at, read(), value)
            result = ast.copy_location(ast.IfExp(test=test, body=both, orelse=read()), at)
        return result

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if len(node.ops) == 1:
            return node
        parts, left = [], node.left
        for index, (op, right) in enumerate(zip(node.ops, node.comparators, strict=True)):
            following = right
            if index + 1 < len(node.ops):
                right, read = self._temporary(right)
                following = read()
            parts.append(ast.copy_location(ast.Compare(left=left, ops=[op], comparators=[right]), node))
            left = following
        return self._fold(parts, "and", node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return self._helper("__weft_not__", node, node.operand) if isinstance(node.op, ast.Not) else node

    def _condition(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        node.test = self._helper("__weft_truth__", node.test, node.test)
        return node

    visit_While = visit_IfExp = _condition

    def visit_If(self, node: ast.If) -> ast.stmt:
        if node.orelse or any(isinstance(inner, ast.Return) for inner in ast.walk(node)):
            return self._condition(node)  # of all threads
        self.generic_visit(node)
        entered, read = self._temporary(self._helper("__weft_enter__", node.test, node.test))
        left = ast.Expr(value=self._helper("__weft_leave__", node.body[-1], read()))
        node.test = entered
        node.body.append(ast.copy_location(left, node.body[-1]))
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        self.generic_visit(node)
        node.test = self._helper("__weft_all__", node.test, node.test)
        return node


@cache
def compile_kernel(
    source: str, filename: str, first_line: int, indent: int, name: str, free: tuple[str, ...]
) -> types.CodeType:
    """Code of the function whose dedented ``source`` begins at ``first_line`` of ``filename``."""
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    rewriter = _Rewriter()
    function.body = [rewriter.visit(statement) for statement in function.body]
    # Decorators, annotations and defaults were evaluated once already; `bind` carries the defaults over.
    function.name, function.decorator_list, function.returns = _INNER, [], None
    arguments = function.args
    arguments.defaults, arguments.kw_defaults = [], [None] * len(arguments.kwonlyargs)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    for node in ast.walk(function):
        if hasattr(node, "col_offset"):
            node.col_offset += indent
            node.end_col_offset = (node.end_col_offset or 0) + indent
    ast.increment_lineno(function, first_line - 1)
    outer = ast.parse(f"def __weft_factory__({', '.join([*HELPERS, *free])}): pass").body[0]
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [function]
    module = ast.fix_missing_locations(ast.Module(body=[outer], type_ignores=[]))
    code: types.CodeType = compile(module, filename, "exec", dont_inherit=True)
    for wanted in ("__weft_factory__", _INNER):
        code = next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == wanted)
    return code.replace(co_name=name)


def compile_expression(node: ast.expr, filename: str) -> types.CodeType:
    """Code of an expression of a kernel, which is left unchanged. It needs the helpers as variables."""
    expression = ast.Expression(_Rewriter().visit(copy.deepcopy(node)))
    return compile(ast.fix_missing_locations(expression), filename, "eval", dont_inherit=True)


def bind(code: types.CodeType, original: types.FunctionType, helpers: Mapping[str, Callable]) -> types.FunctionType:
    """Function of ``code`` with the globals, closure and defaults of ``original``."""
    cells = dict(zip(original.__code__.co_freevars, original.__closure__ or (), strict=True))
    closure = tuple(cells[n] if n in cells else types.CellType(helpers[n]) for n in code.co_freevars)
    function = types.FunctionType(code, original.__globals__, original.__name__, original.__defaults__, closure)
    function.__kwdefaults__ = original.__kwdefaults__
    function.__qualname__, function.__doc__ = original.__qualname__, original.__doc__
    return function


def codes_of(code: types.CodeType) -> list[types.CodeType]:
    """``code`` and all code nested in it (comprehensions, lambdas)."""
    nested = [
        inner for constant in code.co_consts if isinstance(constant, types.CodeType) for inner in codes_of(constant)
    ]
    return [code, *nested]
