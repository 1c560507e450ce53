"""Jinja for templates of unknown origin: sandboxed, and bounded in time, work and memory.

Jinja's sandbox keeps a template from reaching Python; it does not keep it from running for ever or
from filling the memory.  Here everything that repeats, grows or reads values through is charged to
a ``Meter`` before it happens: turns of loops, calls, filters, arithmetic, comparisons, text put
out.  One operation is thereby short, and the meter looks at the clock between operations.

Invariants
(B1) What an operation will make, or read through, is charged before it runs.
(B2) Only plain data becomes text.
(B3) Filters, and methods of plain types, are listed.  What could grow its operand without a charge
     (``center``, ``batch``, ``str.format``) or compare uncharged (``list.index``) is not there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from types import CodeType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from millpond.runtime.chat_filters import metered_filters, metered_tests
from millpond.runtime.chat_meter import Meter
from millpond.runtime.errors import ChatTemplateError

SOURCE_CHARS_MAX = 2**16
"""Characters of a template; the longest in use have some 30,000."""

# What a broken or hostile template makes Python raise; anything else is our own fault.
_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
_STRING_METHODS = frozenset(
    (
        *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha"),
        *("isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle"),
        *("isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix"),
        *("replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
        *("startswith", "strip", "swapcase", "title", "upper"),
    )
)
_METHODS: dict[type, frozenset[str]] = {
    str: _STRING_METHODS,
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy",)),
    tuple: frozenset(),
    int: frozenset(),
    float: frozenset(("is_integer",)),
}
_INTEGER_BITS_MAX = 4096
# names of filters that only the compiled template uses
_TURNS, _SHALLOW, _DEEP, _JOINED = "~turns", "~shallow", "~deep", "~joined"


def compile_template(source: str) -> CodeType:
    """Return the template's code, to be run by ``render``.

    Raises ChatTemplateError for a source that is too long, no Jinja, or uses what is not there.
    """
    if len(source) > SOURCE_CHARS_MAX:
        raise ChatTemplateError(
            f"chat template: found {len(source)} characters, expected at most {SOURCE_CHARS_MAX}"
        )
    environment = BoundedEnvironment(Meter(0))
    try:
        tree = _Metering().visit(environment.parse(source))
        code = environment.compile(tree, "chat template", "<chat template>")
    except _FAULTS as error:
        raise _translated(error) from error
    assert isinstance(code, CodeType)
    return code


def render(code: CodeType, variables: Mapping[str, object], meter: Meter) -> str:
    """Return the text; run it on a worker thread: it may take as long as the meter allows.

    Raises ChatTemplateError for whatever goes wrong in the template.
    """
    environment = BoundedEnvironment(meter)
    try:
        template = jinja2.Template.from_code(environment, code, environment.globals)
        return "".join(template.generate(**variables))
    except _FAULTS as error:
        raise _translated(error) from error


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face sets it up for chat templates, metered; one for each rendering."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self, meter: Meter) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # else constant expressions would run, unmetered, while compiling
            finalize=_finalize,
            extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do", _GenerationBlock],
            cache_size=0,
        )
        self.meter = meter
        self.globals = {
            "range": self.globals["range"],  # the sandbox's, at most 100,000
            "dict": dict,
            "namespace": jinja2.utils.Namespace,
            "cycler": jinja2.utils.Cycler,
            "joiner": jinja2.utils.Joiner,
            "raise_exception": self._raise_exception,
            "strftime_now": _strftime_now,
        }
        tests: dict[str, Any] = metered_tests(meter)
        self.tests = tests
        filters: dict[str, Any] = metered_filters(self, meter) | {
            _TURNS: meter.turns,
            _SHALLOW: meter.shallow,
            _DEEP: meter.deep,
            _JOINED: lambda parts: meter.joined("", parts),
        }
        self.filters = filters

    def wrap_str_format(self, value: Any) -> None:
        """Return nothing: ``str.format`` is not on offer (B3), a field may be of any width."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Tell whether a template may reach this attribute; plain types have lists (B3)."""
        for kind, methods in _METHODS.items():
            if isinstance(obj, kind):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    def call(
        __self,
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a macro, a global or a method, and charge for it (B1)."""
        meter = __self.meter
        meter.charge(1)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            if name == "join":
                return meter.joined(owner, *args, **kwargs)
            if name == "replace":
                meter.replacement(owner, *args[:2])
            meter.search(owner, args)
        return meter.shallow(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do arithmetic and concatenation with operands of bounded size (B1)."""
        meter = self.meter
        meter.charge(1)
        if isinstance(left, int) and isinstance(right, int):
            bits = max(left.bit_length(), right.bit_length())
            if operator == "**":
                bits = max(bits, left.bit_length() * max(right, 0))
            if bits > _INTEGER_BITS_MAX:
                raise ChatTemplateError("chat template: an integer grew too large")
        elif operator == "*":
            meter.repetition(left, right)
        elif operator == "%" and isinstance(left, str):
            meter.printf(left, right)
        else:
            for operand in (left, right):
                # tuples are hashed, which reads them through: they pay for that when they are made
                meter.deep(operand) if isinstance(operand, tuple) else meter.shallow(operand)
        return super().call_binop(context, operator, left, right)

    def _raise_exception(self, message: object) -> None:
        raise jinja2.TemplateError(self.meter.text(message))


class _Metering(NodeTransformer):
    """Puts a filter of ours wherever the compiled template would grow or repeat on its own."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._filtered(_TURNS, node.iter)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # unlike literal text, it is finalised

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filtered(_JOINED, nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._filtered(_SHALLOW, node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._filtered(_SHALLOW, node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx == "store" else self._filtered(_DEEP, node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._filtered(_DEEP, node.expr)
        for operand in node.ops:
            operand.expr = self._filtered(_DEEP, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = self._filtered(_SHALLOW, node.node)
        return node

    def _filtered(self, name: str, node: nodes.Node) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the model's own words for training; here it is a plain block."""

    tags = {"generation"}  # noqa: RUF012 - the base class wants a set here

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> str:
    """Turn what ``{{ }}`` puts out into text, and charge it."""
    environment = context.environment
    assert isinstance(environment, BoundedEnvironment)
    return environment.meter.text(value)


def _strftime_now(form: str) -> str:
    if len(form) > 256:
        raise ValueError("strftime_now: the format is too long")
    return datetime.now().strftime(form)


def _translated(error: BaseException) -> ChatTemplateError:
    """Return one line: what went wrong, and where if the template's line is known."""
    if isinstance(error, ChatTemplateError):
        return error
    line = getattr(error, "lineno", None) or _template_line(error)
    place = f", line {line}" if line else ""
    what = re.sub(r"\s+", " ", str(error)).strip()[:500] or type(error).__name__
    if isinstance(error, RecursionError):
        what = "it nests or calls itself too deeply"
    return ChatTemplateError(f"chat template{place}: {what}")


def _template_line(error: BaseException) -> int | None:
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<chat template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
