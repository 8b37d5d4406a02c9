"""Whether a model's forward only hands the residual stream from layer to layer: read from its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import NamedTuple

from torch import nn


class Loop(NamedTuple):
    """The attributes that a model's forward loops over and ends with."""

    layers: str
    norm: str


def find_loop(cls: type[nn.Module]) -> Loop | None:
    """The names in ``for layer in self.<layers>: h = layer(h, ..., **kwargs)`` and ``h = self.<norm>(h)``.

    None where the loop, or what stands between it and the norm, does anything else with `h`. A pending sum
    would be done there at its first use, but a loop that keeps `h` for someone must keep a tensor.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(cls.forward))))
    except (OSError, TypeError, SyntaxError):
        return None
    body = tree.body[0].body  # type: ignore[attr-defined]
    for position, statement in enumerate(body):
        if isinstance(statement, ast.For) and (layers := _layers_of(statement.iter)):
            stream = _handed_on(statement)
            for after in body[position + 1 :] if stream else []:
                norm = _normed(after, stream)
                if norm:
                    return Loop(layers, norm)
                if _mentions(after, stream):
                    break
            return None
    return None


def _layers_of(iterated: ast.expr) -> str | None:
    """``layers`` in ``[enumerate(] self.layers [[...]] [)]``."""
    if (
        isinstance(iterated, ast.Call)
        and isinstance(iterated.func, ast.Name)
        and iterated.func.id == "enumerate"
    ):
        iterated = iterated.args[0]
    if isinstance(iterated, ast.Subscript):
        iterated = iterated.value
    return _attribute_of_self(iterated)


def _handed_on(loop: ast.For) -> str | None:
    """``h`` where the loop's only statement about it is ``h = layer(h, ..., **kwargs)``."""
    layer = loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else loop.target
    stream = None
    for statement in loop.body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=target)],
                value=ast.Call(
                    func=ast.Name(id=called), args=[ast.Name(id=first), *others], keywords=keywords
                ),
            ) if isinstance(layer, ast.Name) and called == layer.id and target == first and stream is None:
                passes_on = any(keyword.arg is None for keyword in keywords)
                if not passes_on or any(_mentions(part, target) for part in (*others, *keywords)):
                    return None
                stream = target
    rest = [statement for statement in loop.body if stream and _mentions(statement, stream)]
    return stream if len(rest) == 1 else None


def _normed(statement: ast.stmt, stream: str | None) -> str | None:
    """``norm`` in ``h = self.norm(h)``."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=target)],
            value=ast.Call(func=function, args=[ast.Name(id=argument)], keywords=[]),
        ) if target == argument == stream:
            return _attribute_of_self(function)
    return None


def _attribute_of_self(expression: ast.expr) -> str | None:
    match expression:
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return None


def _mentions(node: ast.AST, name: str | None) -> bool:
    return any(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node))
