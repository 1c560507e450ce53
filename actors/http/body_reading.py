"""Bodies of requests: JSON bytes → checked structs, with OpenAI's kind of error for what is wrong.

A field that is null counts as absent.  A field that OpenAI knows and that changes the answer is
refused unless it can be honoured; one that changes nothing here is ignored; any other is unknown.

Decoding holds the interpreter's lock wherever it runs.  So a long body is read on a thread, in
pieces that hold it for a few milliseconds each.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
from anyio import CapacityLimiter, to_thread
from millpond.actors.http.bodies import IGNORED, NEUTRAL
from millpond.actors.http.body_ids import take_lists
from millpond.actors.http.body_values import check_objects, check_values
from millpond.actors.http.exchange import Exchange
from millpond.actors.http.problems import ApiError, unsupported

BodyKind = TypeVar("BodyKind", bound=msgspec.Struct)
SMALL_BYTES = 2**16
"""A body up to this is decoded at once, within a millisecond."""
NEUTRAL_BYTES_MAX = 64
_ID_FIELDS = ("prompt", "tokens")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


async def read_as(exchange: Exchange, kind: type[BodyKind], readers: CapacityLimiter) -> BodyKind:
    """Return the body of a request; raises ApiError and ClientGone.

    readers  bounds the threads that read long ones
    """
    data = await exchange.read_body()
    if len(data) <= SMALL_BYTES:
        return parse(data, kind)
    return await to_thread.run_sync(partial(parse_long, data, kind), limiter=readers)


def parse(data: bytes, kind: type[BodyKind]) -> BodyKind:
    """Return the body; raises ApiError 400 that names the field."""
    with _told():
        return _decoded(_fields(data, kind), kind)


def parse_long(data: bytes, kind: type[BodyKind]) -> BodyKind:
    """Return the body as ``parse`` does, long lists of ids as arrays; ApiError 413 too.

    On a thread: most of the time others can have the interpreter's lock.
    """
    check_values(data)
    taken = take_lists(data)
    check_objects(taken.short)
    body = parse(taken.short, kind)
    filled = {name: taken.filled(getattr(body, name)) for name in _ID_FIELDS if hasattr(body, name)}
    if sum(map(_count_arrays, filled.values())) == len(taken.lists):
        return msgspec.structs.replace(body, **filled)
    check_objects(data)  # a list of numbers is somewhere else
    return parse(data, kind)


def _count_arrays(found: Any) -> int:
    if isinstance(found, array):
        return 1
    return sum(isinstance(one, array) for one in found) if isinstance(found, list) else 0


def _fields(data: bytes, kind: type[msgspec.Struct]) -> dict[str, msgspec.Raw]:
    """Return the fields that are given and known; raises ApiError."""
    found = _FIELDS.decode(data)
    given = {name: raw for name, raw in found.items() if bytes(raw) != b"null"}
    for name in given.keys() - frozenset(kind.__struct_encode_fields__):
        _check_unknown(name, given.pop(name))
    return given


def _decoded(given: dict[str, msgspec.Raw], kind: type[BodyKind]) -> BodyKind:
    parts = (b"%s:%s" % (msgspec.json.encode(name), raw) for name, raw in given.items())
    return msgspec.json.decode(b"{%s}" % b",".join(parts), type=kind)


@contextmanager
def _told() -> Iterator[None]:
    """Raise what a decoder says as ApiError 400."""
    try:
        yield
    except msgspec.ValidationError as error:
        if str(error).startswith("Expected `object`, got") and "$" not in str(error):
            raise ApiError(400, "invalid_json", "the body is no JSON object") from None
        raise _invalid(str(error)) from None
    except RecursionError:
        raise ApiError(400, "invalid_json", "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, "invalid_json", f"the body is no JSON: {error}") from None


def _check_unknown(name: str, raw: msgspec.Raw) -> None:
    if name in IGNORED:
        return
    if name not in NEUTRAL:
        raise ApiError(400, "unknown_parameter", f"{name:.80}: no such parameter", f"{name:.80}")
    if len(bytes(raw)) > NEUTRAL_BYTES_MAX or msgspec.json.decode(raw) not in NEUTRAL[name]:
        raise unsupported(name)


def _invalid(message: str) -> ApiError:
    """Name the field: ``Expected … - at `$.stop[0]``` → ``stop[0]: expected …``."""
    match = re.fullmatch(r"(?P<fault>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?", message, re.S)
    assert match is not None, "the path is optional"
    fault, path = match["fault"], match["path"]
    missing = re.fullmatch(r"Object missing required field `(\w+)`", fault)
    if missing is not None:
        path = f"{path}.{missing[1]}" if path else missing[1]
        return ApiError(400, "missing_parameter", f"{path}: it is required", path)
    code = "invalid_type" if re.search(r", got `\w+`$", fault) else "invalid_value"
    text = fault[:1].lower() + fault[1:]
    return ApiError(400, code, f"{path}: {text}" if path else text, path or None)
