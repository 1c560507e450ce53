"""The flags of ``millpond serve``."""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from millpond.runtime.cli_arguments import (
    Commands,
    UsageError,
    add_command,
    add_numerics,
    add_spilling,
)

_NAMED = re.compile(r"(?P<name>[\w.:-]+)=(?P<path>.+)", re.S)
PORT = 8080


def add_serve(commands: Commands[Any]) -> None:
    """Add the command to the parser."""
    parser = add_command(commands, "serve", "serve models over HTTP, in OpenAI's form")
    parser.set_defaults(backend="asyncio", files=[], preload=[])
    models = parser.add_argument_group("models")
    models.add_argument(
        "--model",
        dest="files",
        action="append",
        metavar="[NAME=]GGUF",
        help="a model file, loaded at the start; its name is the file's stem; may be repeated",
    )
    models.add_argument("--models", metavar="DIR", help="every *.gguf of a folder, on demand")
    models.add_argument("--preload", action="append", metavar="NAME", help="load at the start")
    models.add_argument("--models-max", type=_count, metavar="N", help="loaded at once, 4")
    models.add_argument(
        "--memory-max", metavar="SIZE", help='bytes of loaded weights: "20GiB", "60%%" of memory'
    )
    models.add_argument(
        "--kv-max", metavar="SIZE", help='bytes of live KV caches over all models: "8GiB", "30%%"'
    )
    models.add_argument(
        "--keep-alive", type=float, metavar="S", help="close models idle so long; default: never"
    )
    _add_listening(parser.add_argument_group("listening"))
    models.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file instead of the models' own templates"
    )
    _add_bounds(parser.add_argument_group("bounds"))
    add_spilling(parser)
    add_numerics(parser)
    parser.add_argument("--backend", choices=("asyncio", "trio"), help="default asyncio")


def model_files(options: Namespace) -> list[tuple[str, str]]:
    """Return name and path of each ``--model``; raises UsageError for one that is not there."""
    found = []
    for text in options.files:
        match = None if Path(text).exists() else _NAMED.fullmatch(text)
        name, path = (match["name"], match["path"]) if match else (Path(text).stem, text)
        if not Path(path).is_file():
            raise UsageError(f"argument --model: {path} is no file")
        found.append((name, path))
    return found


def _add_listening(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", metavar="NAME", help="default 127.0.0.1: this machine only")
    group.add_argument("--port", type=_port, metavar="N", help=f"default {PORT}; 0 chooses one")
    group.add_argument("--unix", metavar="PATH", help="a Unix socket instead of TCP")
    group.add_argument(
        "--api-key", metavar="KEY", help="what clients must show; better: $MILLPOND_API_KEY"
    )
    group.add_argument(
        "--allow-origin", action="append", metavar="URL", help="web pages that may call"
    )
    group.add_argument(
        "--allow-host", action="append", metavar="NAME", help="further names of this server"
    )


def _add_bounds(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--queue-max", type=_count, metavar="N", help="requests per model, 256")
    group.add_argument("--batch-max", type=_count, metavar="N", help="sequences at once, 8")
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="decode sequences one by one: an answer does not depend on what runs beside it",
    )
    group.add_argument("--request-max", type=float, metavar="S", help="time of a request, 3600")
    group.add_argument("--drain", type=float, metavar="S", help="time to end after SIGTERM, 30")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**16:
        raise ValueError(text)
    return number


_count.__name__, _port.__name__ = "count", "port"  # argparse says "invalid count value"
