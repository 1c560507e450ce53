"""``millpond cache ls``: what lies under a spill root.  Reads only, and only the heads of files."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from millpond.runtime.cli_terminal import Terminal, bytes_text, visible
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.errors import SpillFailed

if TYPE_CHECKING:
    from millpond.runtime.kv.disk import Disk, DiskEntry
    from millpond.runtime.kv.index import FoundBlock


def run(options: Namespace, terminal: Terminal) -> int:
    """Run the command; return its exit code.  Raises SpillFailed and OutputClosed."""
    config = RuntimeConfig(model="", spill_root=getattr(options, "spill_root", None))
    root = config.checked().resolved_spill_root()
    with terminal.waiting(f"reading {root}"):
        report = cache_report(root)
    if options.json:
        terminal.write_json(report)
    else:
        terminal.write_text("\n".join(cache_lines(report)) + "\n")
    return 0


def cache_report(root: Path) -> dict[str, Any]:
    """Return what a root holds: namespaces, their groups, quarantine; bytes are whole files.

    A root that does not exist, or is empty, holds nothing.  Raises SpillFailed if one cannot be
    read.
    """
    from millpond.runtime.kv.disk import PosixDisk
    from millpond.runtime.kv.pinned import pinned_tips
    from millpond.runtime.kv.scan import RootScan, scan_root

    found, set_aside, pinned = RootScan(), [], []
    try:
        if root.exists() and os.listdir(root):
            disk = PosixDisk(root)
            try:
                found, set_aside = scan_root(disk), _set_aside(disk)
                pinned = pinned_tips(disk)
            finally:
                disk.close()
    except OSError as error:
        raise SpillFailed("read", str(root), error) from error
    return {
        "root": str(root),
        "blocks": len(found.blocks),
        "bytes": sum(block.bytes for block in found.blocks),
        "namespaces": _namespaces(found.blocks),
        "pinned": [
            {"folder": tip.folder, "tip": tip.chain_hash, "until": _utc(tip.until)}
            for tip in pinned
            if tip.until > time.time()
        ],
        "quarantine": set_aside,
        "unreadable": [{"path": path, "problem": str(error)} for path, error in found.bad],
        "temporary_bytes": sum(size for _, _, size in found.temporaries),
        "other_bytes": found.other_bytes,
    }


def _namespaces(blocks: Iterable[FoundBlock]) -> list[dict[str, Any]]:
    """One entry per model namespace; ``used`` is when one of its blocks was last used, UTC."""
    folders: dict[str, list[FoundBlock]] = {}
    for block in blocks:
        folders.setdefault(block.folder, []).append(block)
    spaces: dict[str, dict[str, Any]] = {}
    for folder, held in sorted(folders.items()):
        _, namespace, group = folder.split("/")
        space = spaces.setdefault(
            namespace, {"namespace": namespace, "blocks": 0, "bytes": 0, "used": "", "groups": []}
        )
        size, last = sum(block.bytes for block in held), max(block.mtime_ns for block in held)
        space["blocks"] += len(held)
        space["bytes"] += size
        used = _utc(last // 10**9)
        space["used"] = max(space["used"], used)
        space["groups"].append({"group": group, "blocks": len(held), "bytes": size})
    return list(spaces.values())


def _utc(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _set_aside(disk: Disk) -> list[dict[str, Any]]:
    """One entry per file in quarantine: its name, its bytes and why, as far as that was noted."""
    from millpond.runtime.kv.files import NOTE_SUFFIX, QUARANTINE

    try:
        entries = sorted(disk.scan(QUARANTINE), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    notes = {entry.name: entry for entry in entries if entry.name.endswith(NOTE_SUFFIX)}
    found = []
    for entry in entries:
        if entry.name not in notes:
            note = notes.get(entry.name.rpartition(".")[0] + NOTE_SUFFIX)
            why = _note(disk, note) if note is not None else {"reason": "", "detail": ""}
            found.append({"file": entry.name, "bytes": entry.bytes} | why)
    return found


def _note(disk: Disk, entry: DiskEntry) -> dict[str, str]:
    from millpond.runtime.kv.files import QUARANTINE, QuarantineNote

    data = memoryview(bytearray(min(entry.bytes, NOTE_BYTES_MAX)))
    try:
        count = disk.read_into(f"{QUARANTINE}/{entry.name}", 0, data)
        note = msgspec.json.decode(data[:count], type=QuarantineNote)
    except (OSError, msgspec.DecodeError):
        return {"reason": "", "detail": ""}
    return {"reason": note.reason, "detail": note.detail}


NOTE_BYTES_MAX = 2**16
"""Bytes of a note that are read; ours have a few hundred."""


def cache_lines(report: dict[str, Any]) -> list[str]:
    """Return a report as lines for people."""
    lines = [f"{report['root']}: {report['blocks']:,} blocks, {bytes_text(report['bytes'])}"]
    for space in report["namespaces"]:
        lines.append(f"{space['namespace']}  last used {space['used']}")
        for group in space["groups"]:
            size = bytes_text(group["bytes"])
            lines.append(f"  {group['group']:<32}{group['blocks']:>9,} blocks{size:>12}")
    for tip in report["pinned"]:
        lines.append(f"pinned until {tip['until']}  {tip['tip']}  {tip['folder']}")
    for entry in report["quarantine"]:
        why = f"{entry['reason']}: {entry['detail']}" if entry["reason"] else "no reason noted"
        lines.append(f"quarantine  {entry['file']}  {why}")
    lines += [f"unreadable  {entry['path']}  {entry['problem']}" for entry in report["unreadable"]]
    if report["temporary_bytes"]:
        lines.append(f"being written, or left behind: {bytes_text(report['temporary_bytes'])}")
    return [visible(line) for line in lines]
