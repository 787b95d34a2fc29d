"""Which form of `content` a chat template reads: vLLM's server finds it out from the template's syntax tree.

A template that loops over a message's content gets a list of parts (`openai`), any other the text itself (`string`).
What is sent is the same for a message of one text; texts of several parts are joined by the template or by the server.
The rules are those of vLLM 0.32's `renderers/hf.py`, which a parity test compares with.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import TemplateError, nodes

ContentFormat = Literal["string", "openai"]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` of transformers' templates: its body is all that matters here."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@lru_cache(maxsize=32)
def content_format(template: str) -> ContentFormat:
    """Form of `content` that a template's text asks for; `string` where it cannot be parsed."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    try:
        return "openai" if _loops_over_content(environment.parse(template)) else "string"
    except TemplateError:
        return "string"


def _loops_over_content(tree: nodes.Template) -> bool:
    message_names = _message_names(tree)
    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        given = _content_parameters(tree, macro, message_names)
        in_macros.update({id(loop): given for loop in macro.find_all(nodes.For)})
    for loop in tree.find_all(nodes.For):
        # Outside macros the name alone tells; inside, only a parameter that is given a message's content counts.
        names = in_macros.get(id(loop), {"content"})
        by_name = isinstance(loop.iter, nodes.Name) and loop.iter.name in names
        if by_name or any(_is(loop.iter, name, "content") for name in message_names):
            return bool(_variable(loop.target))
    return False


def _message_names(tree: nodes.Template) -> list[str]:
    """Variables that loop over the messages, or over what was assigned from them."""
    lists = ["messages"]
    for name in lists:  # grows while it is walked
        assigned = (_variable(a.target) for a in tree.find_all(nodes.Assign) if _is(a.node, name))
        lists += [other for other in assigned if other not in lists]
    loops = (loop for loop in tree.find_all(nodes.For) if any(_is(loop.iter, name) for name in lists))
    return [_variable(loop.target) for loop in loops]


def _variable(target: nodes.Node) -> str:
    """Name that is assigned; at anything else the server gives up reading, and so does this."""
    if not isinstance(target, nodes.Name):
        raise TemplateError("messages or their content are assigned to something that is no plain variable")
    return target.name


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, message_names: list[str]) -> set[str]:
    """Parameters of a macro that some call gives a message's content."""
    names = [parameter.name for parameter in macro.args]

    def arguments() -> Iterator[tuple[str, nodes.Node]]:
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                yield from zip(names, call.args, strict=False)
                yield from ((k.key, k.value) for k in call.kwargs if k.key in names)

    return {name for name, value in arguments() if any(_is(value, message, "content") for message in message_names)}


def _is(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is the variable (or its `key`), filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _is(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is(node.node, name, key)
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return _is(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and _is(node.node, name) and node.attr == key
