"""Rewrites the code of a method so that its attention is done by a layer.

    scores = torch.matmul(q, k)            product = attend.matmul(q, k)
    scores = scores / 8 + mask             def bias():
    weights = F.softmax(scores, -1)   →        scores = attend.start(product)
    out = torch.matmul(weights, v)             scores = scores / 8 + mask
                                               return scores
                                           out = attend(product, bias, v)

What lies between product and softmax becomes a function that gives the bias, run on scores of
zero; in the engine it is never run. Whether the layer computes the same is for a proof to tell.
"""

from __future__ import annotations

import ast
import copy
import functools
import linecache
import types
from typing import TYPE_CHECKING

from polysilicon.adapt.probe import Unverified

if TYPE_CHECKING:
    from polysilicon.adapt.attention_sites import Position, Site

#: Global name of the layer in the rewritten code, and the names of our own that it uses.
ATTEND = "polysilicon_attend"
_PRODUCT, _BIAS = "polysilicon_product", "polysilicon_bias"

#: A list of statements, and the place of one of them.
_Step = tuple[list[ast.stmt], int]


def outlined(function: types.FunctionType, site: Site) -> types.CodeType:
    """The function's code with `ATTEND` in the place of its attention.

    Raises:
        Unverified: its source is not at hand, or is not written as straight steps.
    """
    if function.__closure__:
        raise Unverified("its code uses names of an enclosing function")
    tree = copy.deepcopy(_definition(function))
    product = _expression(tree, site.product)
    if site.softmax is None or site.values is None:
        assert isinstance(product, ast.Call)
        product.func = _method(_last_name(product.func))
    else:
        softmax, values = _expression(tree, site.softmax), _expression(tree, site.values)
        _Chain(tree, function, product, softmax, values).rewrite()
    return _compiled(tree, function.__code__.co_filename)


def _definition(function: types.FunctionType) -> ast.FunctionDef:
    code = function.__code__
    for node in ast.walk(_file(code.co_filename)):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    raise Unverified("its source is not at hand")


@functools.lru_cache(maxsize=4)
def _file(name: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(name)))


def _compiled(tree: ast.FunctionDef, filename: str) -> types.CodeType:
    tree.decorator_list, tree.returns = [], None
    arguments = tree.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    for rest in (arguments.vararg, arguments.kwarg):
        if rest is not None:
            rest.annotation = None
    whole = ast.fix_missing_locations(ast.Module([tree], []))
    constants = compile(whole, filename, "exec").co_consts
    return next(value for value in constants if isinstance(value, types.CodeType))


def _expression(tree: ast.FunctionDef, position: Position) -> ast.expr:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Call, ast.BinOp)):
            own = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
            if own == position:
                return node
    raise Unverified("a call of its attention is not to be found in its source")


class _Chain:
    """A product, a softmax and a product, as steps of one block."""

    def __init__(
        self,
        tree: ast.FunctionDef,
        function: types.FunctionType,
        product: ast.expr,
        softmax: ast.expr,
        values: ast.expr,
    ) -> None:
        self.tree, self.known = tree, function.__globals__
        self.product, self.softmax, self.values = product, softmax, values
        steps = [_innermost_step(tree.body, node) for node in (product, softmax, values)]
        (self.block, self.first), (_, self.middle), (_, self.last) = steps
        if any(block is not self.block for block, _ in steps) or not (
            self.first <= self.middle <= self.last
        ):
            raise Unverified("its scores, weights and values stand in different branches")

    def rewrite(self) -> None:
        """Changes the tree."""
        after = self._loads_after()
        name, operands, keywords = _call(self.product, self.known)
        scores = _load(_PRODUCT)
        begin = _assign(_PRODUCT, ast.Call(_method(name), operands, keywords))
        v = self._operands(self.values, 2)[1]
        made = self._made()
        if made & _loads(v):
            raise Unverified("its values depend on its scores")
        argument = self._operands(self.softmax, 1)[0]
        attended = ast.Call(_load(ATTEND), [scores, _load(_BIAS), v], [])
        end = _replaced(self.block[self.last], self.values, attended)
        later = _loads(end) | after
        kept = self._kept(made, later)
        steps = [step for step in self.block[self.first : self.middle] if step not in kept]
        steps.append(ast.Return(argument))
        start = ast.Call(_method("start"), [scores], [])
        steps = [_replaced(step, self.product, start) for step in steps]
        gone = sorted(made & later - _stores(end))
        # The weights are never held; the model is refused them by name.
        none = [_assign(gone_name, ast.Constant(None)) for gone_name in gone]
        new = [begin, *kept, _function(steps), *none, end]
        self.block[self.first : self.last + 1] = new

    def _operands(self, node: ast.expr, count: int) -> list[ast.expr]:
        operands = _call(node, self.known)[1]
        if len(operands) < count:
            raise Unverified("a call of its attention names its operands")
        return operands

    def _made(self) -> set[str]:
        """Names that hold scores or weights, or what was made of them."""
        made: set[str] = set()
        for step in self.block[self.first : self.last]:
            if step is self.block[self.first] or _loads(step) & made:
                made |= _stores(step)
        return made

    def _kept(self, made: set[str], needed: set[str]) -> list[ast.stmt]:
        """Steps between that have nothing to do with scores and that something later reads."""
        kept: list[ast.stmt] = []
        needed = set(needed)
        for step in reversed(self.block[self.first + 1 : self.last]):
            if not _loads(step) & made and _stores(step) & needed:
                kept.insert(0, step)
                needed |= _loads(step)
        return kept

    def _loads_after(self) -> set[str]:
        end = self.block[self.last].end_lineno or 0
        return {
            node.id
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.lineno > end
        }


def _innermost_step(block: list[ast.stmt], target: ast.expr) -> _Step:
    """The innermost block whose statement holds `target`."""
    for index, step in enumerate(block):
        if not any(node is target for node in ast.walk(step)):
            continue
        if isinstance(step, (ast.For, ast.While)):
            raise Unverified("it attends in a loop")
        blocks = [
            inner
            for _, inner in ast.iter_fields(step)
            if isinstance(inner, list) and inner and isinstance(inner[0], ast.stmt)
        ]
        for inner in blocks:
            if any(node is target for one in inner for node in ast.walk(one)):
                return _innermost_step(inner, target)
        return block, index
    raise Unverified("a call of its attention is not to be found in its source")


def _call(
    node: ast.expr, known: dict[str, object]
) -> tuple[str, list[ast.expr], list[ast.keyword]]:
    """Name, operands and keywords of a product or a softmax, however it is spelled."""
    if isinstance(node, ast.BinOp):
        return "matmul", [node.left, node.right], []
    assert isinstance(node, ast.Call)
    if _last_name(node.func) == "einsum":
        raise Unverified("its products are written as einsum")
    operands = list(node.args)
    # A softmax may be a child of the module: only of products does the receiver matter.
    if isinstance(node.func, ast.Attribute) and not _is_namespace(node.func.value, known):
        operands.insert(0, node.func.value)
    return _last_name(node.func), operands, list(node.keywords)


def _is_namespace(node: ast.expr, known: dict[str, object]) -> bool:
    """Whether what a method is called on is a module of Python, or the module itself."""
    while isinstance(node, ast.Attribute):
        node = node.value
    if not isinstance(node, ast.Name):
        return False
    return node.id == "self" or isinstance(known.get(node.id), types.ModuleType)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _replaced(step: ast.stmt, old: ast.expr, new: ast.expr) -> ast.stmt:
    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            if node is old:
                return ast.copy_location(new, old)
            return self.generic_visit(node)

    Replace().visit(step)
    return step


def _function(steps: list[ast.stmt]) -> ast.FunctionDef:
    """`def bias(name=name): steps`, with a parameter for each name that it reads and sets."""
    read: set[str] = set()
    _reads(steps, set(), read)
    both = sorted(read & {name for step in steps for name in _stores(step)})
    arguments = ast.arguments(
        posonlyargs=[],
        args=[ast.arg(name) for name in both],
        kwonlyargs=[],
        kw_defaults=[],
        defaults=[_load(name) for name in both],
    )
    return ast.FunctionDef(name=_BIAS, args=arguments, body=steps, decorator_list=[])


def _reads(steps: list[ast.stmt], certain: set[str], read: set[str]) -> None:
    """Adds to `read` the names that may be read before they are set; `certain` are set."""
    for step in steps:
        if isinstance(step, ast.If):
            read |= _loads(step.test) - certain
            for branch in (step.body, step.orelse):
                _reads(branch, set(certain), read)
            continue
        read |= _loads(step) - certain
        if isinstance(step, ast.AugAssign):
            read |= _stores(step) - certain
        certain |= _stores(step)


def _loads(node: ast.AST) -> set[str]:
    """Names that are read anywhere in a node; a name that is added to is read too."""
    found = {
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    }
    added = (part.target for part in ast.walk(node) if isinstance(part, ast.AugAssign))
    return found | {target.id for target in added if isinstance(target, ast.Name)}


def _stores(node: ast.AST) -> set[str]:
    return {
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _method(name: str) -> ast.Attribute:
    return ast.Attribute(_load(ATTEND), name, ast.Load())


def _assign(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value)
