"""A turn that is one call of a tool: the grammar that holds a model to it.  Pure.

The form is that in which ``turns`` reads a call back: between the marks that the model's template
knows, or bare JSON.  The grammar is llguidance's, in its Lark form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from anyio import CapacityLimiter, to_thread
from millpond.actors.http.forced_gemma import GemmaRules
from millpond.actors.http.forced_text import Mark, bare_schema, literal, mark_rule
from millpond.actors.http.problems import invalid, unsupported
from millpond.actors.http.tool_calls import CALL_NAME
from millpond.actors.http.turns import GEMMA_CALL, LLAMA_CALL, MISTRAL_CALLS, Region, regions_of
from millpond.runtime.served import ServedModel

# Between tokens of JSON: as much white space as pretty printing needs, never endless.
_SPACE = r"[\x20\x0A\x0D\x09]{0,20}"
_GUIDANCE = {"whitespace_pattern": _SPACE, "lenient": True}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What ``tool_choice`` says.

    tools   the model may call at all
    forced  it must
    name    the one that it must call, "" for any
    """

    tools: bool = True
    forced: bool = False
    name: str = ""


def tool_choice_of(found: str | dict[str, Any] | None) -> ToolChoice:
    """Return what OpenAI's ``tool_choice`` says; raises ApiError 400."""
    match found:
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice(tools=False)
        case "required":
            return ToolChoice(forced=True)
        case {"type": "function", "function": {"name": str(name)}} if name:
            return ToolChoice(forced=True, name=name)
        case {"type": str(kind)} if kind != "function":
            raise unsupported("tool_choice", "expected auto, none, required or a function")
    raise invalid("tool_choice", "tool_choice: expected auto, none, required or a function")


def anthropic_tool_choice_of(found: dict[str, Any] | None) -> ToolChoice:
    """Return what Anthropic's ``tool_choice`` says; raises ApiError 400."""
    match found:
        case None | {"type": "auto"}:
            return ToolChoice()
        case {"type": "none"}:
            return ToolChoice(tools=False)
        case {"type": "any"}:
            return ToolChoice(forced=True)
        case {"type": "tool", "name": str(name)} if name:
            return ToolChoice(forced=True, name=name)
    raise invalid("tool_choice", "tool_choice.type: expected auto, any, none or tool with a name")


def chosen_tools(tools: list[dict[str, Any]], choice: ToolChoice) -> list[dict[str, Any]]:
    """Return the checked tools that the model is shown; raises ApiError 400 if one is missing."""
    if not choice.tools:
        return []
    if choice.forced and not tools:
        raise invalid("tool_choice", "tool_choice: it asks for a call, and there are no tools")
    if choice.name and choice.name not in [one["function"]["name"] for one in tools]:
        raise invalid("tool_choice", f"tool_choice: {choice.name:.80} is none of the tools")
    return tools


async def call_grammar(
    model: ServedModel,
    tools: Sequence[dict[str, Any]],
    choice: ToolChoice,
    readers: CapacityLimiter,
) -> str:
    """Return the grammar of a turn that is one call, "" where none is forced.

    readers  bounds the threads that write it; schemas may be long

    Raises ApiError 400 where the model cannot be held to one.
    """
    if not choice.forced:
        return ""
    if not model.can_guide:
        raise unsupported("tool_choice", "a forced call needs the schema extra, not installed here")
    return await to_thread.run_sync(
        partial(grammar_of, model, tools, choice.name), abandon_on_cancel=True, limiter=readers
    )


def grammar_of(model: ServedModel, tools: Sequence[dict[str, Any]], name: str) -> str:
    """Return the grammar of a call of one tool, or of any where the name is ""; any thread."""
    functions = [
        (place, tool["function"])
        for place, tool in enumerate(tools)
        if name in ("", tool["function"]["name"])
    ]
    for place, function in functions:
        if not CALL_NAME.fullmatch(function["name"]):
            where = f"tools[{place}].function.name"
            raise invalid(where, f"{where}: expected letters, digits and ._:- in a forced call")
    regions = regions_of(model.template, True)
    region = next((one for one in regions if one.kind == "call"), None)
    if region is GEMMA_CALL:
        lines = _gemma_rules(model, functions)
    else:
        lines = _json_rules(functions, _arguments_key(model.template, region))
    calls = " | ".join(f"c{place}" for place, _ in functions)
    return "\n".join([_start(model, region), f"call: {calls}", *lines])


def _start(model: ServedModel, region: Region | None) -> str:
    """The turn: what stands around a call in this form."""
    if region is None:
        return "start: call"
    start, end = (mark_rule(Mark(one, model.special_id(one))) for one in (region.start, region.end))
    if region is GEMMA_CALL:
        return f"start: {start} call {end}"
    if region is MISTRAL_CALLS:
        return f'start: {start} SPACE "[" SPACE call SPACE "]"'
    if region is LLAMA_CALL:
        return f"start: {start} call"
    return f"start: {start} SPACE call SPACE {end}"


def _arguments_key(template: str, region: Region | None) -> str:
    """How JSON calls of this model name their arguments; both are read."""
    is_llamas = region is LLAMA_CALL or ("parameters" in template and "arguments" not in template)
    return "parameters" if is_llamas else "arguments"


def _json_rules(functions: Sequence[tuple[int, dict[str, Any]]], key: str) -> list[str]:
    lines = [f"SPACE: /{_SPACE}/"]
    for place, function in functions:
        schema = bare_schema(function.get("parameters"), f"tools[{place}].function.parameters")
        parts = ['"{"', literal('"name"'), '":"', literal(f'"{function["name"]}"'), '","']
        parts += [literal(f'"{key}"'), '":"', f"a{place}", '"}"']
        lines.append(f"c{place}: {' SPACE '.join(parts)}")
        guided = msgspec.json.encode(schema | {"x-guidance": _GUIDANCE}).decode()
        lines.append(f"a{place}: %json {guided}")
    return lines


def _gemma_rules(model: ServedModel, functions: Sequence[tuple[int, dict[str, Any]]]) -> list[str]:
    lines: list[str] = []
    for place, function in functions:
        where = f"tools[{place}].function.parameters"
        schema = bare_schema(function.get("parameters"), where)
        rules = GemmaRules(f"g{place}_", Mark('<|"|>', model.special_id('<|"|>')), schema)
        lines.append(f"c{place}: {literal('call:' + function['name'])} {rules.arguments()}")
        lines += rules.lines
    return [*lines, *GemmaRules.shared]
