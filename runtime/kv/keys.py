"""The key of encrypted block files, and where it is read from."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.runtime.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
KEY_VARIABLE = "MILLPOND_SPILL_KEY"


@dataclass(frozen=True, slots=True)
class Seal:
    """The key of a root's files; not shown.  See ``sealing``."""

    key: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """16 hex digits that tell files of one key from those of others, and nothing of it."""
        return hmac.digest(self.key, b"millpond name", "sha256").hex()[:16]

    def guard(self, guard: bytes) -> bytes:
        """Return the guard of blocks that this key seals (I3)."""
        return hmac.digest(self.key, b"millpond guard" + guard, "sha256")

    def cipher(self, nonce: bytes) -> AESGCM:
        """Return the cipher of one file (I1)."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(hmac.digest(self.key, b"millpond block" + nonce, "sha256"))


def read_key(path: str | None, environment: Mapping[str, str]) -> Seal | None:
    """Return the key of a file, else of ``MILLPOND_SPILL_KEY``, else None; blocks.

    A key is 32 bytes in a file, or 64 hex digits in either.  Raises ConfigError.
    """
    if path is None and KEY_VARIABLE not in environment:
        return None
    if path is None:
        found = environment[KEY_VARIABLE].encode()
    else:
        try:
            with Path(path).expanduser().open("rb") as file:
                found = file.read(4 * KEY_BYTES)
        except OSError as error:
            raise ConfigError(f"spill_key_file: {path}: {error.strerror}") from error
    where = "spill_key_file" if path is not None else KEY_VARIABLE
    if len(found) != KEY_BYTES:
        digits = found.strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{64}", digits):
            raise ConfigError(f"{where}: expected {KEY_BYTES} bytes or {2 * KEY_BYTES} hex digits")
        found = bytes.fromhex(digits.decode())
    if find_spec("cryptography") is None:
        raise ConfigError(f"{where}: encryption needs the extra millpond[crypto]")
    return Seal(found)
