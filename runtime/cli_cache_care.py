"""``millpond cache`` ``verify``, ``unpin``, ``gc``, ``clear``, ``export`` and ``import``."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from millpond.runtime.cli_terminal import Terminal, bytes_text, visible
from millpond.runtime.config import RuntimeConfig, parse_bytes
from millpond.runtime.errors import SpillFailed

_FAILED = 1


def add_arguments(name: str, parser: Any) -> None:
    """Add the arguments of one of these commands to its parser."""
    from millpond.runtime.cli_arguments import add_numerics

    if name == "gc":
        parser.add_argument(
            "--spill-bytes-max", default="10GiB", metavar="BYTES", help='as "10GiB" or "25%%"'
        )
    if name == "clear":
        parser.add_argument(
            "--namespace", metavar="HEX", default=None, help="only these blocks, as ls shows them"
        )
    if name == "verify":
        parser.set_defaults(spill_key_file=None)
        parser.add_argument("--spill-key-file", metavar="FILE", help="key of encrypted blocks")
    if name == "unpin":
        parser.add_argument(
            "tip", nargs="?", metavar="HASH", help="last block of one, as ls shows it; else all"
        )
        parser.set_defaults(tip="")
    if name == "export":
        parser.add_argument("tip", metavar="HASH", help="last block of the prefix, as ls shows it")
    if name in ("export", "import"):
        parser.add_argument("file", metavar="FILE", help="the exported prefix")
        parser.add_argument("--model", required=True, metavar="GGUF", help="model file")
        add_numerics(parser)


def run(options: Namespace, terminal: Terminal) -> int:
    """Run the command; return its exit code.

    Raises SpillFailed, BlockError, ModelError, ConfigError and OutputClosed.
    """
    config = RuntimeConfig(model="", spill_root=getattr(options, "spill_root", None))
    root = config.checked().resolved_spill_root()
    commands: dict[str, Callable[[Namespace, Path, Terminal], dict[str, Any]]] = {
        "verify": _verify,
        "unpin": _unpin,
        "gc": _gc,
        "clear": _clear,
        "export": _export,
        "import": _import,
    }
    report = commands[options.command](options, root, terminal)
    if options.json:
        terminal.write_json(report)
    else:
        terminal.write_text("\n".join(_lines(report)) + "\n")
    return _FAILED if report.get("bad") or report.get("refused") else 0


def _verify(options: Namespace, path: Path, terminal: Terminal) -> dict[str, Any]:
    from millpond.runtime.kv.catalog import VerifyReport, open_for_care, verify
    from millpond.runtime.kv.keys import read_key

    key = read_key(options.spill_key_file, os.environ)
    report = VerifyReport()
    if path.exists() and not (path.is_dir() and not os.listdir(path)):
        root = open_for_care(path)
        try:
            with _bar(terminal, "checking blocks") as step:
                report = verify(root, step, key)
        finally:
            root.close()
    bad = [{"path": name, "reason": why, "detail": detail} for name, why, detail in report.bad]
    return {
        "root": str(path),
        "blocks": report.blocks,
        "bytes": report.bytes,
        "unopened": report.unopened,
        "bad": bad,
    }


def _unpin(options: Namespace, path: Path, terminal: Terminal) -> dict[str, Any]:
    from millpond.runtime.kv.catalog import open_for_care
    from millpond.runtime.kv.pinned import unpin

    root = open_for_care(path)
    try:
        with terminal.waiting(f"unpinning in {path}"):
            return {"root": str(path), "unpinned": unpin(root, options.tip)}
    finally:
        root.close()


def _gc(options: Namespace, path: Path, terminal: Terminal) -> dict[str, Any]:
    from millpond.runtime.kv.catalog import collect

    if not path.is_dir():
        raise SpillFailed("open", str(path), FileNotFoundError(2, "No such folder"))
    found = os.statvfs(path)
    budget = parse_bytes(options.spill_bytes_max, found.f_blocks * found.f_frsize)
    with terminal.waiting(f"collecting {path}"):
        done = collect(path, budget)
    return {
        "root": str(path),
        "blocks": done.blocks,
        "bytes": done.bytes,
        "removed_blocks": done.removed_blocks,
        "removed_bytes": done.removed_bytes,
    }


def _clear(options: Namespace, path: Path, terminal: Terminal) -> dict[str, Any]:
    from millpond.runtime.kv.catalog import clear

    with terminal.waiting(f"clearing {path}"):
        done = clear(path, options.namespace)
    return {
        "root": str(path),
        "removed_files": done.files,
        "removed_bytes": done.bytes,
        "left": done.left,
    }


def _export(options: Namespace, path: Path, terminal: Terminal) -> dict[str, Any]:
    from millpond.runtime.kv.catalog import open_for_care
    from millpond.runtime.kv.exchange import export_prefix

    _, _, numerics = _identity(options)
    root = open_for_care(path)
    try:
        with terminal.waiting(f"exporting to {options.file}"):
            done = export_prefix(root, options.tip, Path(options.file), numerics)
    finally:
        root.close()
    return {"file": options.file, "blocks": done.blocks, "bytes": done.bytes}


def _import(options: Namespace, path: Path, terminal: Terminal) -> dict[str, Any]:
    from millpond.runtime.kv.catalog import open_for_care
    from millpond.runtime.kv.exchange import import_prefix

    fingerprint, guard, _ = _identity(options)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    root = open_for_care(path)
    try:
        with terminal.waiting(f"importing {options.file}"):
            done = import_prefix(root, Path(options.file), fingerprint, guard)
    finally:
        root.close()
    return {
        "file": options.file,
        "blocks": done.blocks,
        "bytes": done.bytes,
        "refused": done.refused,
    }


def _identity(options: Namespace) -> tuple[bytes, bytes, str]:
    """Return fingerprint and guard of a model on this machine, and what the machine says."""
    import msgspec
    from millpond.runtime.cli_arguments import runtime_config
    from millpond.runtime.gguf_file import GgufFile
    from millpond.runtime.identify import identify
    from millpond.runtime.numerics import numerics_identity

    config = runtime_config(options).checked()
    numerics = numerics_identity(config)
    file = GgufFile.open(config.model)
    try:
        identity = identify(file, config, numerics, os.environ)
    finally:
        file.close()
    return identity.fingerprint, identity.guard, msgspec.json.encode(numerics).decode()


def _lines(report: dict[str, Any]) -> Iterator[str]:
    for name, value in report.items():
        if name == "bad":
            for one in value:
                yield f"bad: {one['path']}: {one['reason']}: {visible(one['detail'])}"
        elif isinstance(value, list):
            yield from (f"{name}: {visible(one)}" for one in value)
        elif name.endswith("bytes"):
            yield f"{name.replace('_', ' ')}: {bytes_text(value)}"
        else:
            text = f"{value:,}" if isinstance(value, int) else visible(str(value))
            yield f"{name.replace('_', ' ')}: {text}"


@contextmanager
def _bar(terminal: Terminal, what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar where a person watches."""
    if not terminal.is_interactive:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=sys.stderr)) as bars:
        task = bars.add_task(what)
        yield lambda done, total: bars.update(task, completed=done, total=total)
