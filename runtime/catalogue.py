"""``Catalogue``: the model files that a server may load, by name."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from millpond.runtime.errors import ConfigError, UnknownModel

ENTRIES_MAX = 10_000
"""Entries of a folder that are looked at; a folder of models has some hundreds."""
NAMES_SHOWN_MAX = 20
"""Names that an error lists."""
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model file: its name, where it lies, bytes, and seconds since the epoch of its change."""

    name: str
    path: str
    file_bytes: int
    modified_at: int


class Catalogue:
    """Named files, and every ``*.gguf`` of a folder under its stem; any thread.

    files   (name, path), given one by one
    folder  looked through again whenever a name is asked for that is not known; None for none

    Raises ConfigError if two files have one name, or the folder is none.
    """

    def __init__(self, files: Sequence[tuple[str, str]], folder: str | None = None) -> None:
        self._files = dict(files)
        if len(self._files) != len(files):
            names = ", ".join(sorted({name for name, _ in files}))
            raise ConfigError(f"models: found two files of one name among {names}")
        self._folder = None if folder is None else Path(folder).expanduser().absolute()
        if self._folder is not None and not self._folder.is_dir():
            raise ConfigError(f"models: {self._folder} is no folder")
        # mutable state, replaced as a whole in scan
        self._paths: dict[str, str] = dict(self._files)
        self.scan()

    def known(self, name: str) -> str | None:
        """Return the path of a model as the last scan found it, None if it did not."""
        return self._paths.get(name)

    def resolve(self, name: str | None) -> str:
        """Return the name of a model there is; None is the only one.  Raises UnknownModel."""
        if name is not None and name in self._paths:
            return name
        if name is not None:
            self.scan()
        names = sorted(self._paths)
        if name is None and len(names) == 1:
            return names[0]
        if name is not None and name in self._paths:
            return name
        shown = ", ".join(names[:NAMES_SHOWN_MAX]) or "none"
        raise UnknownModel(
            f"model: found {f'{name!r:.200}' if name is not None else 'no name'}, "
            f"expected one of: {shown}"
        )

    def scan(self) -> tuple[ModelFile, ...]:
        """Look at the files again; return those that are there, by name."""
        paths = dict(self._files)
        for path in _gguf_files(self._folder) if self._folder is not None else ():
            paths.setdefault(path.stem, str(path))
        found = []
        for name in sorted(paths):
            try:
                state = os.stat(paths[name])
            except OSError:
                if name not in self._files:
                    del paths[name]
                continue
            if stat.S_ISREG(state.st_mode):
                found.append(ModelFile(name, paths[name], state.st_size, int(state.st_mtime)))
        self._paths = paths
        return tuple(found)


def _gguf_files(folder: Path) -> list[Path]:
    """Return the model files of a folder; of a split set the first part."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for count, entry in enumerate(entries):
                if count >= ENTRIES_MAX:
                    break
                path = Path(entry.path)
                if path.suffix.lower() == ".gguf" and not _LATER_PART.search(path.stem):
                    found.append(path)
    except OSError:
        return []
    return sorted(found)
