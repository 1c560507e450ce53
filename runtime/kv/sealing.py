"""Block files that are encrypted: AES-256-GCM, one message for the header and one for each plane.

    u64 little-endian   n, the length of the JSON text
    n bytes             JSON, padded with spaces: whose block it is, and the file's own nonce
    message 0           the header that the block would have in plain, token ids and checksum too
    messages 1 …        its planes; each message is followed by its tag of 16 bytes

Any safetensors reader sees one tensor of type ``U8``.

Invariants

(I1) Each file has a key of its own, HMAC-SHA256 of the root's key over 32 random bytes, and its
     messages are numbered: no nonce is used twice under one key.
(I2) The outer header is authenticated with every message, so nothing of it can be exchanged.
(I3) The root's key goes into the guard, and so into every block's name: to another key, or to none,
     a sealed block is absent.  Names tell nothing of the tokens to who has no key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace

from millpond.runtime.errors import BlockError
from millpond.runtime.kv.disk import Disk
from millpond.runtime.kv.header import ALIGNMENT, SEALED_FORMAT, BlockIdentity, peek, read_identity
from millpond.runtime.kv.keys import Seal

TAG_BYTES = 16
NONCE_DIGITS = 64
OUTER_BYTES_MAX = 2**12
_NUMBERS = re.compile(rb'"sealed_header":"(?P<length>[0-9]{1,8})"')
_KEY = re.compile(rb'"key":"(?P<name>[0-9a-f]{16})"')
_NONCE = re.compile(rb'"nonce":"(?P<nonce>[0-9a-f]{64})"')


def sealed_bytes(block: BlockIdentity) -> int:
    """Return the whole size of a block's file when it is sealed."""
    return len(outer_header(block, bytes(NONCE_DIGITS // 2))) + _tensor_bytes(block)


def outer_header(block: BlockIdentity, nonce: bytes) -> bytes:
    """Return the canonical outer header for a file's nonce."""
    assert block.seal is not None, "only what has a key is sealed"
    size = _tensor_bytes(block)
    text = (
        f'{{"__metadata__":{{"format":"{SEALED_FORMAT}","chain_hash":"{block.chain_hash.hex()}",'
        f'"parent":"{block.parent.hex()}","first_token":"{block.first_token}",'
        f'"group":"{block.group.name}","fingerprint":"{block.fingerprint.hex()}",'
        f'"guard":"{block.guard.hex()}","sealed_header":"{block.header_bytes()}",'
        f'"key":"{block.seal.name}","nonce":"{nonce.hex()}"}},'
        f'"sealed":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}}}'
    ).encode()
    # as wide as with the longest position: one size for all files of a group
    widest = 8 + len(text) + 20 - len(str(block.first_token))
    length = -(-widest // ALIGNMENT) * ALIGNMENT - 8
    return length.to_bytes(8, "little") + text.ljust(length)


def seal(block: BlockIdentity, header: bytes, planes: Iterable[memoryview]) -> list[bytes]:
    """Return the parts of the file of a block that has a key.

    header  of the block in plain
    planes  of the payload, in order
    """
    assert block.seal is not None, "only what has a key is sealed"
    nonce = os.urandom(NONCE_DIGITS // 2)
    outer, cipher = outer_header(block, nonce), block.seal.cipher(nonce)
    messages = [cipher.encrypt(_number(0), header, outer)]
    for number, plane in enumerate(planes, 1):
        messages.append(cipher.encrypt(_number(number), plane, outer))
    return [outer, *messages]


class SealedFile:
    """A sealed file that is read: its outer header was compared, its plain one opened."""

    def __init__(self, disk: Disk, block: BlockIdentity) -> None:
        """Read and compare both headers.

        Raises BlockError, FileNotFoundError or OSError.
        """
        assert block.seal is not None, "only what has a key can be opened"
        self._disk, self._block = disk, block
        self._outer = bytearray(len(outer_header(block, bytes(NONCE_DIGITS // 2))))
        self._message = memoryview(
            bytearray(max(block.header_bytes(), block.group.plane_bytes(block.block_tokens)) + 16)
        )
        found = disk.read_into(block.path, 0, memoryview(self._outer))
        outer = bytes(self._outer[:found])
        digits = _NONCE.search(outer)
        nonce = bytes.fromhex(digits["nonce"].decode()) if digits is not None else b""
        if digits is None or outer != outer_header(block, nonce):
            raise BlockError("header: found other bytes than the canonical ones of a sealed block")
        self._cipher = block.seal.cipher(nonce)
        header = bytearray(block.header_bytes())
        self._open(0, len(self._outer), memoryview(header))
        self.checksum = block.check_header(bytes(header))

    def read_plane(self, plane: int, target: memoryview) -> None:
        """Open one plane of the payload into a buffer of its size; raises as the constructor."""
        first = len(self._outer) + self._block.header_bytes() + TAG_BYTES
        self._open(1 + plane, first + plane * (len(target) + TAG_BYTES), target)

    def check_end(self) -> None:
        """Raise BlockError if there are bytes behind the last plane."""
        behind = memoryview(bytearray(1))
        if self._disk.read_into(self._block.path, sealed_bytes(self._block), behind):
            raise BlockError(f"{self._block.group.name}: found bytes behind the payload")

    def _open(self, number: int, offset: int, target: memoryview) -> None:
        from cryptography.exceptions import InvalidTag

        message = self._message[: len(target) + TAG_BYTES]
        if self._disk.read_into(self._block.path, offset, message) < len(message):
            raise BlockError(f"{self._block.group.name}: the file ends early")
        try:
            self._cipher.decrypt_into(_number(number), message, bytes(self._outer), target)
        except InvalidTag:
            raise BlockError(f"message {number}: found bytes that the key does not open") from None


def is_sealed(disk: Disk, path: str) -> bool:
    """True iff a block's file is encrypted; raises as ``read_sealed_identity``."""
    return peek(_start(disk, path)).is_sealed


def is_closed(disk: Disk, path: str, key: Seal | None) -> bool:
    """True iff a file is encrypted, and not with this key; raises as ``read_sealed_identity``."""
    start = _start(disk, path)
    found = _KEY.search(start)
    is_of_key = key is not None and found is not None and found["name"].decode() == key.name
    return peek(start).is_sealed and not is_of_key


def read_sealed_identity(disk: Disk, path: str, key: Seal) -> BlockIdentity:
    """Return what a sealed file says of itself, with its seal.

    Raises BlockError, FileNotFoundError or OSError.
    """
    from cryptography.exceptions import InvalidTag

    start = memoryview(bytearray(OUTER_BYTES_MAX))
    start = start[: disk.read_into(path, 0, start)]
    size = 8 + int.from_bytes(start[:8], "little")
    outer = bytes(start[:size])
    length, nonce = _NUMBERS.search(outer), _NONCE.search(outer)
    if len(outer) < size or length is None or nonce is None:
        raise BlockError("header: found other bytes than the start of a sealed block")
    message = memoryview(bytearray(int(length["length"]) + TAG_BYTES))
    if disk.read_into(path, size, message) < len(message):
        raise BlockError("header: the file ends within it")
    cipher = key.cipher(bytes.fromhex(nonce["nonce"].decode()))
    try:
        header = cipher.decrypt(_number(0), message, outer)
    except InvalidTag:
        raise BlockError("message 0: found bytes that the key does not open") from None
    return replace(read_identity(header)[0], seal=key)


def _tensor_bytes(block: BlockIdentity) -> int:
    planes = block.group.planes
    return block.header_bytes() + block.payload_bytes + TAG_BYTES * (1 + planes)


def _start(disk: Disk, path: str) -> bytes:
    start = memoryview(bytearray(OUTER_BYTES_MAX))
    return bytes(start[: disk.read_into(path, 0, start)])


def _number(message: int) -> bytes:
    return message.to_bytes(12, "big")
