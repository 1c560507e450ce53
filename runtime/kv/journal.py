"""The journal of a spill root: what every process did to it, in one order.

    head     32 bytes: magic, then the generation's name, padded with zeros
    record   u32 crc32 of all that follows · u8 kind · u8 flags · u16 length of the body · body

    kind      body
    FOLDER    u16 number · name          names a group's folder from here on
    BLOCK     block · token              a file got its name; that writer's intent is fulfilled
    INTENT    block · token              that writer reserved the block's bytes and will write it
    RELEASE   token                      that writer's intent is over, without a block
    GONE      u16 folder · 32 hash       a file was removed
    USED      u16 folder · 32 hash       a request used this block and all above it
    ASIDE     u64 bytes                  what the quarantine holds now
    HOLD      u16 folder · 32 hash · u64 seconds   this block and all above it are held until then,
                                         since 1970; 0: no longer

    block     u16 folder · 32 hash · 32 parent · u64 first token · u64 bytes

Invariants

(I1) Records are appended under the root's lock, and whoever appends has applied everything before.
     So every process sees one order, and decides on the newest state.
(I2) Bytes that do not decode, left by a writer that was killed or by a bad disk, are never appended
     to: whoever finds them begins a new generation from what it knows.
(I3) The journal is an index, no truth: an open checks it against the directory; a missing, torn,
     stale or damaged one costs time only.
(I4) A new generation is a new file; others notice its name and read it whole.
"""

from __future__ import annotations

import errno
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from millpond.runtime.kv.disk import JOURNAL, NO_FILE, Disk
from millpond.runtime.kv.files import TEMP_SUFFIX

MAGIC = b"millpond"
HEAD_BYTES = 32
READ_BYTES = 2**20
TAIL_BYTES = 4096  # of the first read: most calls find little or nothing
RECORD_BYTES_MAX = 1024
KEPT = 1  # flag of BLOCK: the block was used since it was written
OLDER = 2  # flag of BLOCK: used before every block that came so far; in new generations
_FRAME = struct.Struct("<IBBH")
_BLOCK = struct.Struct("<H32s32sQQ")
_NAME = struct.Struct("<H32s")
_COUNT = struct.Struct("<Q")
_HOLD = struct.Struct("<H32sQ")
_FOLDER = struct.Struct("<H")
FOLDERS_MAX = 2**16 - 1


class Kind(IntEnum):
    """Kinds of records."""

    FOLDER = 1
    BLOCK = 2
    INTENT = 3
    RELEASE = 4
    GONE = 5
    USED = 6
    ASIDE = 7
    HOLD = 8


class Record(NamedTuple):
    """One record; the fields that its kind has no use for are empty."""

    kind: Kind
    folder: str = ""
    chain_hash: bytes = b""
    parent: bytes = b""
    first_token: int = 0
    bytes: int = 0
    token: str = ""
    flags: int = 0
    until: int = 0


class JournalCodec:
    """Encodes and decodes one generation; knows the folders that it named.  Pure."""

    def __init__(self) -> None:
        # mutable state, changed only in encode and decode
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def encode(self, records: Iterable[Record]) -> bytes:
        """Return records as bytes, with FOLDER records where a folder has no number yet."""
        out: list[bytes] = []
        for record in records:
            if record.folder and record.folder not in self._numbers:
                number = len(self._numbers)
                self._name(number, record.folder)
                body = _FOLDER.pack(number) + record.folder.encode()
                out.append(_framed(Kind.FOLDER, 0, body))
            out.append(_framed(record.kind, record.flags, self._body(record)))
        return b"".join(out)

    def decode(self, data: bytes | memoryview) -> tuple[list[Record], int]:
        """Return the leading whole records and the count of bytes that they take."""
        found: list[Record] = []
        position, size = 0, len(data)
        while position + _FRAME.size <= size:
            checksum, kind, flags, length = _FRAME.unpack_from(data, position)
            end = position + _FRAME.size + length
            if end > size or zlib.crc32(data[position + 4 : end]) != checksum:
                break
            try:
                record = self._record(kind, flags, bytes(data[position + _FRAME.size : end]))
            except (ValueError, KeyError, struct.error):
                break
            if record is not None:
                found.append(record)
            position = end
        return found, position

    def _body(self, record: Record) -> bytes:
        match record.kind:
            case Kind.BLOCK | Kind.INTENT:
                return self._block(record) + record.token.encode()
            case Kind.RELEASE:
                return record.token.encode()
            case Kind.ASIDE:
                return _COUNT.pack(record.bytes)
            case Kind.HOLD:
                number = self._numbers[record.folder]
                return _HOLD.pack(number, record.chain_hash, record.until)
            case _:
                return _NAME.pack(self._numbers[record.folder], record.chain_hash)

    def _block(self, record: Record) -> bytes:
        return _BLOCK.pack(
            self._numbers[record.folder],
            record.chain_hash,
            record.parent,
            record.first_token,
            record.bytes,
        )

    def _record(self, kind: int, flags: int, body: bytes) -> Record | None:
        if kind == Kind.BLOCK:  # nearly all of them
            folder, chain_hash, parent, first_token, size = _BLOCK.unpack_from(body)
            token = body[_BLOCK.size :].decode()
            name = self._names[folder]
            return Record(Kind.BLOCK, name, chain_hash, parent, first_token, size, token, flags)
        match Kind(kind):
            case Kind.FOLDER:
                self._name(_FOLDER.unpack_from(body)[0], body[_FOLDER.size :].decode())
                return None
            case Kind.INTENT:
                folder, chain_hash, parent, first_token, size = _BLOCK.unpack_from(body)
                token = body[_BLOCK.size :].decode()
                name = self._names[folder]
                return Record(
                    Kind.INTENT, name, chain_hash, parent, first_token, size, token, flags
                )
            case Kind.RELEASE:
                return Record(Kind.RELEASE, token=body.decode())
            case Kind.ASIDE:
                return Record(Kind.ASIDE, bytes=_COUNT.unpack(body)[0])
            case Kind.HOLD:
                folder, chain_hash, until = _HOLD.unpack(body)
                return Record(Kind.HOLD, self._names[folder], chain_hash, until=until)
            case known:
                folder, chain_hash = _NAME.unpack(body)
                return Record(known, self._names[folder], chain_hash)

    def _name(self, number: int, folder: str) -> None:
        self._numbers[folder] = number
        self._names[number] = folder


@dataclass(frozen=True, slots=True)
class Tail:
    """What a process had not seen yet.

    records   in order
    is_whole  they are all records of a generation that is new to us
    is_broken behind them lies something that does not decode, or the file is missing
    """

    records: list[Record]
    is_whole: bool
    is_broken: bool


class Journal:
    """The journal file of one root; every method under the root's lock, on a disk thread."""

    def __init__(self, disk: Disk, token: str) -> None:
        self._disk, self._token = disk, token
        # mutable state, changed only in the methods below
        self._codec = JournalCodec()
        self._head = b""
        self._generations = 0
        self._failed = False
        self.bytes = 0  # length of the leading whole records, all of them applied by us
        self.file_bytes = 0  # length of the file, or more where it is broken
        self.temporary, self.temporary_bytes = "", 0

    def read(self) -> Tail:
        """Return what was appended since the last call; raises OSError as the system does."""
        head = self._read_head()
        if not head:
            self.file_bytes = self._listed_bytes()
            return Tail([], False, True)
        is_whole = head != self._head
        if is_whole:
            self._head, self._codec, self._failed = head, JournalCodec(), False
            self.bytes = HEAD_BYTES
        data = self._read_from(self.bytes)
        is_short = not data and self._is_short()
        records, size = self._codec.decode(data)
        self.file_bytes = self.bytes + len(data)
        self.bytes += size
        return Tail(records, is_whole, bool(size < len(data) or is_short or self._failed))

    def append(self, records: Iterable[Record]) -> None:
        """Add records behind all that was read; a failure breaks the journal until ``replace``."""
        failed, self._failed = self._failed, True
        data = self._codec.encode(records)
        if data:
            self.file_bytes = max(self.file_bytes, self.bytes + len(data))
            self._disk.append(JOURNAL, self.bytes, data, False)
            self.bytes += len(data)
            self.file_bytes = self.bytes
        self._failed = failed

    def replace(self, records: Iterable[Record]) -> None:
        """Begin a new generation with these records (I4).

        Raises OSError; the caller removes ``temporary`` then.
        """
        self._generations += 1
        codec = JournalCodec()
        name = f"{self._token[:16]}.{self._generations}".encode()
        head = (MAGIC + name).ljust(HEAD_BYTES, b"\0")
        data = head + codec.encode(records)
        self.temporary = f"{JOURNAL}.{self._token}.{self._generations}{TEMP_SUFFIX}"
        self.temporary_bytes = len(data)
        self._disk.write(self.temporary, (data,), False)
        self._disk.rename(self.temporary, JOURNAL, False)
        self._head, self._codec, self._failed = head, codec, False
        self.bytes = self.file_bytes = len(data)

    def _listed_bytes(self) -> int:
        """Length of a file that is no journal of ours."""
        return sum(entry.bytes for entry in self._disk.scan("") if entry.name == JOURNAL)

    def _is_short(self) -> bool:
        """True iff the file ends before what we have applied."""
        last = memoryview(bytearray(1))
        return self._disk.read_into(JOURNAL, self.bytes - 1, last) == 0

    def _read_head(self) -> bytes:
        head = memoryview(bytearray(HEAD_BYTES))
        try:
            count = self._disk.read_into(JOURNAL, 0, head)
        except OSError as error:
            if error.errno not in (errno.ENOENT, *NO_FILE):
                raise
            return b""
        found = bytes(head)
        return found if count == HEAD_BYTES and found.startswith(MAGIC) else b""

    def _read_from(self, offset: int) -> bytes:
        return b"".join(self._pieces(offset))

    def _pieces(self, offset: int) -> Iterator[bytes]:
        size = TAIL_BYTES
        while True:
            piece = memoryview(bytearray(size))
            count = self._disk.read_into(JOURNAL, offset, piece)
            yield bytes(piece[:count])
            if count < size:
                return
            offset, size = offset + count, READ_BYTES


def _framed(kind: Kind, flags: int, body: bytes) -> bytes:
    rest = struct.pack("<BBH", kind, flags, len(body)) + body
    return struct.pack("<I", zlib.crc32(rest)) + rest
