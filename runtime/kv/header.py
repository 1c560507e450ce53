"""The header of a block file: its one canonical form, written and compared byte for byte.  Pure.

A block file is a safetensors file:

    u64 little-endian   n, the length of the JSON text
    n bytes             JSON, padded with spaces
    payload             k, then v: (layers, kv_heads, tokens, head_dim) each

Invariants

(I1) Everything in a header is known before the file is read, except the 32 checksum digits; so a
     header is valid only if it equals its canonical form in every other byte.
(I2) Every header of one group has the same length, a multiple of 64: the payload is aligned and
     the files of a group have one size.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field
from functools import lru_cache

from millpond.codecs.descriptors import KvDType, LayerType
from millpond.codecs.fingerprint import chain_hash
from millpond.runtime.errors import BlockError
from millpond.runtime.kv.keys import Seal
from millpond.runtime.kv.layout import LayerGroup

FORMAT = "millpond-kv-1"
SEALED_FORMAT = "millpond-kv-sealed-1"  # see ``sealing``
VERSION_FOLDER = "v1"
SUFFIX = ".safetensors"
ALIGNMENT = 64
PEEK_BYTES = 768  # what is needed to tell whose block a file is
_POSITION_DIGITS = 20
_CHECKSUM_DIGITS = 32
_CHECKSUM_NAME = b'"payload_xxh3_128":"'
_DIGITS = re.compile(rb"[0-9a-f]{32}")
LAYERS_MAX = 4096
HEADER_BYTES_MAX = 2**22
GROUP_NAME = re.compile(
    r"g(?P<index>[0-9]{1,4})-(?P<kind>full|sliding)-h(?P<heads>[0-9]{1,9})-d(?P<dim>[0-9]{1,9})"
    r"-(?P<dtype>f32|f16|bf16)"
)
_DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
_PEEK = re.compile(
    rb'\{"__metadata__":\{"format":"(?P<format>[^"\\]{1,64})",'
    rb'"chain_hash":"(?P<hash>[0-9a-f]{64})",'
    rb'"parent":"(?P<parent>[0-9a-f]{64})","first_token":"(?P<first>[0-9]{1,20})",'
    rb'"group":"(?P<group>[0-9a-z-]{1,64})","fingerprint":"(?P<fingerprint>[0-9a-f]{64})",'
    rb'"guard":"(?P<guard>[0-9a-f]{64})",'
)


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """Everything that a block file must say of itself.

    fingerprint, guard  32 bytes each, of the model
    group, block_tokens the shape
    first_token         position of the block's first token
    chain_hash, parent  32 bytes each
    token_ids           the block's ids, little-endian u32
    seal                the key of its file; None: the file is plain
    """

    fingerprint: bytes
    guard: bytes
    group: LayerGroup
    block_tokens: int
    first_token: int
    chain_hash: bytes
    parent: bytes
    token_ids: bytes
    seal: Seal | None = field(default=None, compare=False, repr=False)

    @property
    def path(self) -> str:
        """Path of the file under the root."""
        folder = group_folder(self.fingerprint, self.group.name)
        return block_path(folder, self.chain_hash)

    @property
    def payload_bytes(self) -> int:
        """Length of the payload."""
        return self.group.block_bytes(self.block_tokens)

    def header(self, payload_xxh3: bytes) -> bytes:
        """Return the canonical header, its length field included, for a payload's xxh3-128."""
        length = self.header_bytes() - 8
        text = self._json(payload_xxh3.hex()).encode()
        assert len(text) <= length, "the widest header of the group sets the size"
        return length.to_bytes(8, "little") + text.ljust(length)

    def header_bytes(self) -> int:
        """Length of the header, its length field included; one for the whole group (I2)."""
        return _header_bytes(self.group, self.block_tokens)

    def check_header(self, found: bytes) -> bytes:
        """Return the payload checksum that a header names.

        Raises BlockError: ``mismatch`` if it is the whole header of another block, ``corrupt``
        if it is none at all.
        """
        expected = self.header(bytes(16))
        place = expected.index(_CHECKSUM_NAME) + len(_CHECKSUM_NAME)
        end = place + _CHECKSUM_DIGITS
        digits = found[place:end]
        if found[:place] == expected[:place] and found[end:] == expected[end:]:
            if _DIGITS.fullmatch(digits):
                return bytes.fromhex(digits.decode())
            raise BlockError("header: found other characters than a checksum's digits")
        raise _other_block(found, expected)

    def _json(self, checksum: str) -> str:
        """Return the text; every value is hex, base64, a number or a name of ours."""
        group, half = self.group, self.payload_bytes // 2
        shape = f"[{len(group.layers)},{group.kv_heads},{self.block_tokens},{group.head_dim}]"
        rows = f'"dtype":"{_DTYPES[group.dtype.value]}","shape":{shape}'
        token_ids = base64.b64encode(self.token_ids).decode()
        return (
            f'{{"__metadata__":{{"format":"{FORMAT}","chain_hash":"{self.chain_hash.hex()}",'
            f'"parent":"{self.parent.hex()}","first_token":"{self.first_token}",'
            f'"group":"{group.name}","fingerprint":"{self.fingerprint.hex()}",'
            f'"guard":"{self.guard.hex()}","payload_xxh3_128":"{checksum}",'
            f'"token_ids":"{token_ids}"}},'
            f'"k":{{{rows},"data_offsets":[0,{half}]}},'
            f'"v":{{{rows},"data_offsets":[{half},{2 * half}]}}}}'
        )


@lru_cache(maxsize=64)
def _header_bytes(group: LayerGroup, block_tokens: int) -> int:
    ids = bytes(4 * block_tokens)
    widest = BlockIdentity(
        bytes(32),
        bytes(32),
        group,
        block_tokens,
        10**_POSITION_DIGITS - 1,
        bytes(32),
        bytes(32),
        ids,
    )
    text = widest._json("0" * _CHECKSUM_DIGITS)
    return -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Peek:
    """What the start of a block file says; nothing of it is verified."""

    chain_hash: bytes
    parent: bytes
    first_token: int
    group: str
    fingerprint: bytes
    guard: bytes
    is_sealed: bool = False


def group_folder(fingerprint: bytes, group_name: str) -> str:
    """Return the folder of one model's group under the root."""
    return f"{VERSION_FOLDER}/{fingerprint.hex()[:16]}/{group_name}"


def block_path(folder: str, chain_hash: bytes) -> str:
    """Return the path of a block in its group's folder."""
    name = chain_hash.hex()
    return f"{folder}/{name[:2]}/{name}{SUFFIX}"


def peek(start: bytes) -> Peek:
    """Read whose block a file is from its first ``PEEK_BYTES``.

    Raises BlockError (``corrupt``) if it does not start as a header of this format does.
    """
    match = _PEEK.match(start, 8)
    if match is None or match["format"].decode() not in (FORMAT, SEALED_FORMAT):
        raise BlockError("header: found other bytes than the start of a block file")
    return Peek(
        chain_hash=bytes.fromhex(match["hash"].decode()),
        parent=bytes.fromhex(match["parent"].decode()),
        first_token=int(match["first"]),
        group=match["group"].decode(),
        fingerprint=bytes.fromhex(match["fingerprint"].decode()),
        guard=bytes.fromhex(match["guard"].decode()),
        is_sealed=match["format"] == SEALED_FORMAT.encode(),
    )


def read_identity(header: bytes) -> tuple[BlockIdentity, bytes]:
    """Return the identity and the payload checksum that a whole header gives, from its bytes alone.

    Raises BlockError unless the header is canonical, and its name follows from parent and ids.
    """
    try:
        metadata = json.loads(header[8:])["__metadata__"]
        shape = json.loads(header[8:])["k"]["shape"]
        block = BlockIdentity(
            fingerprint=bytes.fromhex(metadata["fingerprint"]),
            guard=bytes.fromhex(metadata["guard"]),
            group=_group_of(metadata["group"], shape[0]),
            block_tokens=shape[2],
            first_token=int(metadata["first_token"]),
            chain_hash=bytes.fromhex(metadata["chain_hash"]),
            parent=bytes.fromhex(metadata["parent"]),
            token_ids=base64.b64decode(metadata["token_ids"], validate=True),
        )
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise BlockError("header: found other bytes than a block's") from error
    if not _is_sound(block) or len(header) != block.header_bytes():
        raise BlockError("header: found another length than its block's")
    checksum = block.check_header(header)
    if chain_hash(block.fingerprint, block.parent, block.token_ids) != block.chain_hash:
        raise BlockError("header: found a chain hash that does not follow from parent and ids")
    return block, checksum


def _is_sound(block: BlockIdentity) -> bool:
    """True iff every field has a length that a header of ours can have."""
    digests = (block.fingerprint, block.guard, block.chain_hash, block.parent)
    return (
        type(block.block_tokens) is int
        and block.block_tokens > 0
        and len(block.token_ids) == 4 * block.block_tokens
        and 0 <= block.first_token < 10**_POSITION_DIGITS
        and all(len(one) == 32 for one in digests)
    )


def _group_of(name: str, layers: int) -> LayerGroup:
    """Return a group of so many layers from its folder's name; which layers is not known."""
    match = GROUP_NAME.fullmatch(name)
    if match is None or not isinstance(layers, int) or not 0 < layers <= LAYERS_MAX:
        raise ValueError(name)
    return LayerGroup(
        index=int(match["index"]),
        layer_type=LayerType(match["kind"]),
        kv_heads=int(match["heads"]),
        head_dim=int(match["dim"]),
        dtype=KvDType(match["dtype"]),
        layers=tuple(range(layers)),
    )


def _other_block(found: bytes, expected: bytes) -> BlockError:
    """Tell a whole header of another block from bytes that are no header."""
    if len(found) < len(expected):
        return BlockError(f"header: found {len(found)} bytes, expected {len(expected)}")
    try:
        metadata = json.loads(found[8:])["__metadata__"]
        wanted = json.loads(expected[8:])["__metadata__"]
        names = [name for name in wanted if metadata[name] != wanted[name]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return BlockError("header: found other bytes than the canonical ones")
    names = [name for name in names if name != "payload_xxh3_128"]
    if not names or _padded_again(found) != found:
        return BlockError("header: found other bytes than the canonical ones")
    return BlockError(f"header: found another {names[0]} than expected", reason="mismatch")


def _padded_again(found: bytes) -> bytes:
    """Write a header's JSON again in our own form."""
    text = json.dumps(json.loads(found[8:]), separators=(",", ":")).encode()
    return (len(found) - 8).to_bytes(8, "little") + text.ljust(len(found) - 8)
