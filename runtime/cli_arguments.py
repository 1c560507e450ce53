"""The flags of the command line, and the structs that they fill."""

from __future__ import annotations

import argparse
import logging
import math
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

import msgspec
from millpond.codecs.choices import SamplingParams
from millpond.codecs.descriptors import KvDType
from millpond.runtime.config import RuntimeConfig

# Flags that fill a field of the same name; a flag not given leaves the field's own default.
_CONFIG_FIELDS = (
    "model",
    "repo",
    "spill",
    "spill_root",
    "spill_bytes_max",
    "spill_key_file",
    "kv_dtype",
    "reuse",
    "block_tokens",
    "context_tokens",
    "durability",
    "blas_threads",
    "chat_template",
    "deterministic",
)
_SAMPLING_FIELDS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")
_DESCRIPTION = "Run local language models whose KV cache survives restarts."


class UsageError(Exception):
    """A command line that asks for nothing we know; the message says what was expected."""


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """Return the options of one command: its flags, and ``command``, its name.

    Raises UsageError; SystemExit after ``--help`` and ``--version``.
    """
    parser = _Parser(prog="millpond", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"millpond {version('millpond')}")
    parser.set_defaults(log_level=logging.WARNING)
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_Parser
    )
    from millpond.runtime.cli_serve_flags import add_serve

    for add in (_add_generate, _add_chat, add_serve, _add_inspect, _add_tokenize, _add_cache):
        add(commands)
    return parser.parse_args(arguments)


def runtime_config(options: Namespace) -> RuntimeConfig:
    """Return the configuration that the flags ask for; raises ConfigError."""
    found = _given(options, _CONFIG_FIELDS)
    if "block_tokens" in found:
        # the grid follows the block, as its default does
        found["prefill_chunk_tokens"] = found["block_tokens"]
    return RuntimeConfig(**found).checked()


def sampling_params(options: Namespace) -> SamplingParams:
    """Return how the flags choose tokens; raises UsageError naming the flag."""
    found = _given(options, _SAMPLING_FIELDS)
    try:
        return msgspec.convert(found, SamplingParams)
    except msgspec.ValidationError as error:
        raise UsageError(_flagged(str(error))) from error


def _given(options: Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def _flagged(message: str) -> str:
    """Name the flag instead of the field: ``... - at `$.top_p``` → ``argument --top-p: ...``."""
    match = re.fullmatch(r"(?P<fault>.*) - at `\$\.(?P<field>\w+).*`", message)
    if match is None:
        return message
    return f"argument --{match['field'].replace('_', '-')}: {match['fault']}"


class _Parser(ArgumentParser):
    """One line for a usage error, and no flag by half its name."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def _real(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


_real.__name__ = "number"  # argparse says "invalid number value"

Commands = argparse._SubParsersAction  # the only name that argparse has for it


def add_command(commands: Commands[_Parser], name: str, text: str) -> _Parser:
    """Add a command; the default of its flags is to be absent, so that structs keep theirs."""
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.set_defaults(command=name, json=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "-v",
        "--verbose",
        dest="log_level",
        action="store_const",
        const=logging.INFO,
        help="log to stderr what happens",
    )
    return parser


def _add_generate(commands: Commands[_Parser]) -> None:
    parser = add_command(commands, "generate", "complete one prompt")
    parser.set_defaults(backend="asyncio")
    parser.add_argument("--model", required=True, metavar="GGUF", help="model file")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="BOS is added as the model wants it")
    prompt.add_argument("--prompt-file", metavar="FILE", help="the same from a file; - is stdin")
    prompt.add_argument(
        "--token-ids-file", metavar="FILE", help="a JSON list of token ids, taken verbatim"
    )
    add_sampling(parser)
    add_spilling(parser)
    add_numerics(parser)
    parser.set_defaults(pin=None)
    parser.add_argument(
        "--pin",
        type=_real,
        metavar="SECONDS",
        help="evict no block of this prompt for so long; 0 ends that",
    )
    parser.add_argument("--backend", choices=("asyncio", "trio"), help="default asyncio")


def _add_chat(commands: Commands[_Parser]) -> None:
    parser = add_command(commands, "chat", "talk with a model, a line a message")
    parser.set_defaults(backend="asyncio", system="")
    parser.add_argument("--model", required=True, metavar="GGUF", help="model file")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file instead of the model's own template"
    )
    add_sampling(parser)
    add_spilling(parser)
    add_numerics(parser)
    parser.add_argument("--backend", choices=("asyncio", "trio"), help="default asyncio")


def add_sampling(parser: _Parser) -> None:
    """Add the flags that fill SamplingParams."""
    group = parser.add_argument_group("choosing tokens")
    group.add_argument("--max-tokens", type=int, metavar="N", help="completion tokens at most, 256")
    group.add_argument("--temperature", type=_real, metavar="T", help="0, the default, is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K best; 0 keeps all")
    group.add_argument("--top-p", type=_real, metavar="P", help="keep this probability mass")
    group.add_argument("--min-p", type=_real, metavar="P", help="drop below P times the best")
    group.add_argument("--seed", type=int, metavar="N", help="random key; drawn if not given")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="ends the completion; may be repeated"
    )


def add_spilling(parser: _Parser) -> None:
    """Add the flags of the spill root."""
    group = parser.add_argument_group("spilling")
    group.add_argument(
        "--spill-root", metavar="DIR", help="KV blocks; default $XDG_CACHE_HOME/millpond/spill"
    )
    group.add_argument(
        "--spill-bytes-max", metavar="SIZE", help='budget of the root: "10GiB", "25%%"'
    )
    group.add_argument(
        "--spill-key-file", metavar="FILE", help="encrypt blocks: 32 bytes, or 64 hex digits"
    )
    group.add_argument(
        "--no-spill", dest="spill", action="store_false", help="neither read nor write a root"
    )
    group.add_argument(
        "--durability",
        choices=("process", "power"),
        help="what blocks survive: a crash of the process (default), or of the machine",
    )
    group.add_argument("--reuse", choices=("exact",), help="exact: a hit changes no bit")


def add_numerics(parser: _Parser) -> None:
    """Add the flags of model and cache."""
    group = parser.add_argument_group("model and cache")
    _add_repo_and_kv(group)
    group.add_argument("--block-tokens", type=int, metavar="N", help="tokens of a KV block, 256")
    group.add_argument(
        "--context-tokens", type=int, metavar="N", help="prompt and completion at most"
    )
    group.add_argument("--blas-threads", type=int, metavar="N", help="threads of the CPU BLAS, 1")


def _add_repo_and_kv(group: argparse._ArgumentGroup | _Parser) -> None:
    group.add_argument("--repo", metavar="NAME", help="name for the cache namespace")
    group.add_argument(
        "--kv-dtype", choices=[kind.value for kind in KvDType], help="element type of K and V"
    )


def _add_model(parser: _Parser) -> None:
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--model", metavar="GGUF", help="model file")
    chosen.add_argument("file", nargs="?", metavar="GGUF", help="the same without the flag")


def model_of(options: Namespace) -> str:
    """Return the model file, given by flag or as the argument."""
    return str(options.model if hasattr(options, "model") else options.file)


def _add_inspect(commands: Commands[_Parser]) -> None:
    parser = add_command(commands, "inspect", "show what a model file holds")
    _add_model(parser)
    _add_repo_and_kv(parser)


def _add_tokenize(commands: Commands[_Parser]) -> None:
    parser = add_command(commands, "tokenize", "turn text on stdin into ids")
    parser.set_defaults(special=False, bos=False)
    _add_model(parser)
    parser.add_argument("--special", action="store_true", help="control tokens in the text count")
    parser.add_argument("--bos", action="store_true", help="begin with BOS as the model wants it")


_CACHE_COMMANDS = {
    "ls": "list what a spill root holds",
    "verify": "read every block and set aside what is not whole",
    "unpin": "let prompts be evicted again that were pinned for a time",
    "gc": "evict down to a budget and sweep what dead writers left",
    "clear": "remove every byte of a spill root",
    "export": "write a prefix to one file",
    "import": "take the blocks of an exported prefix",
}


def _add_cache(commands: Commands[_Parser]) -> None:
    from millpond.runtime.cli_cache_care import add_arguments as add_care_arguments

    cache = commands.add_parser(
        "cache",
        help="look at a spill root and care for it",
        description="Look at a spill root and care for it.",
        allow_abbrev=False,
    )
    parsers = cache.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_Parser
    )
    for name, text in _CACHE_COMMANDS.items():
        parser = add_command(parsers, name, text)
        parser.add_argument(
            "--spill-root", metavar="DIR", help="default $XDG_CACHE_HOME/millpond/spill"
        )
        add_care_arguments(name, parser)
