"""SentencePiece BPE from a GGUF's scores (``tokenizer.ggml.model`` = ``llama``).

The arrays are written as a serialised ``sentencepiece_model.proto`` and loaded into the library.
Only ordinary text reaches it: special tokens were cut out before, so they get names that no text
can hold, which also makes room for duplicate, empty and broken vocabulary strings.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import sentencepiece
from millpond.runtime.detokenizer import SPACE_MARK
from millpond.runtime.errors import TokenizerError
from millpond.runtime.identity import Vocabulary
from millpond.runtime.tokenizer_special import TokenKind

_TAIL_BYTES = struct.calcsize("<cfcB")
_TAIL = struct.Struct("<cfcB").pack
_FLOAT32_MAX = 3.4028234663852886e38
_MODEL_BPE = 2
_PIECE_NORMAL, _PIECE_UNKNOWN, _PIECE_CONTROL, _PIECE_UNUSED, _PIECE_BYTE = 1, 2, 3, 5, 6


class SpmEngine:
    """Encodes fragments of ordinary text; any thread, several at once.

    The library releases the interpreter lock while it works.
    """

    def __init__(self, vocabulary: Vocabulary, kinds: Sequence[TokenKind]) -> None:
        """Build the model.  Raises TokenizerError for broken arrays."""
        if len(vocabulary.scores) != len(vocabulary.tokens):
            raise TokenizerError(
                f"tokenizer.ggml.scores: found {len(vocabulary.scores)}, "
                f"expected one for each of {len(vocabulary.tokens)} tokens"
            )
        if not all(-_FLOAT32_MAX <= score <= _FLOAT32_MAX for score in vocabulary.scores):
            raise TokenizerError("tokenizer.ggml.scores: found a score that is no finite float32")
        # a space before every fragment, as llama.cpp puts it: at the start and after special tokens
        self._prefix = SPACE_MARK if vocabulary.add_space_prefix else ""
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(_serialised(vocabulary, kinds))
        except (RuntimeError, OSError, ValueError) as error:
            raise TokenizerError(f"tokenizer: the vocabulary cannot be loaded: {error}") from error
        # a piece of ours may follow the file's, see _pieces
        self._unknown = len(vocabulary.tokens)

    def encode_all(self, fragments: Sequence[str]) -> list[list[int]]:
        """Return the ids of each fragment; none of them is empty."""
        return [self._encode(self._prefix + text.replace(" ", SPACE_MARK)) for text in fragments]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.EncodeAsIds(text)
        if self._unknown in ids:
            return [token_id for token_id in ids if token_id != self._unknown]
        return ids


def _serialised(vocabulary: Vocabulary, kinds: Sequence[TokenKind]) -> bytes:
    """Return a ModelProto; field numbers as in ``sentencepiece_model.proto``.

    ModelProto      pieces = 1, trainer_spec = 2, normalizer_spec = 3
    SentencePiece   piece = 1 (string), score = 2 (float), type = 3 (enum)
    TrainerSpec     model_type = 3, byte_fallback = 35
    NormalizerSpec  name = 1, add_dummy_prefix = 3, remove_extra_whitespaces = 4,
                    escape_whitespaces = 5: all off, the text arrives as the vocabulary spells it
    """
    parts: list[bytes] = []
    byte_pieces = 0
    heads: dict[int, bytes] = {}  # by length of the piece
    for piece, score, kind in _pieces(vocabulary, kinds):
        size = len(piece)
        head = heads.get(size)
        if head is None:
            named = b"\x0a" + _varint(size)
            head = heads[size] = b"\x0a" + _varint(len(named) + size + _TAIL_BYTES) + named
        parts += (head, piece, _TAIL(b"\x15", score, b"\x18", kind))
        byte_pieces += kind == _PIECE_BYTE
    trainer = b"\x18" + _varint(_MODEL_BPE)
    if byte_pieces == 256:  # the library refuses byte fallback with fewer
        trainer += _varint(35 << 3) + b"\x01"
    normaliser = b"\x0a\x08identity" + b"\x18\x00\x20\x00\x28\x00"
    for field, body in ((b"\x12", trainer), (b"\x1a", normaliser)):
        parts += (field, _varint(len(body)), body)
    return b"".join(parts)


def _pieces(
    vocabulary: Vocabulary, kinds: Sequence[TokenKind]
) -> Iterator[tuple[bytes, float, int]]:
    """Iterate over (text, score, type) of each piece; every text is unique and not empty.

    Of duplicate strings the last counts.  The library wants exactly one unknown piece: a vocabulary
    without one gets it after its last token, and that id is dropped again.
    """
    last = {token: index for index, token in enumerate(vocabulary.tokens)}
    is_text = _is_plain if _are_clean(vocabulary.tokens) else _is_text
    unknown = _unknown_id(vocabulary, kinds)
    normal, byte, unused = TokenKind.NORMAL, TokenKind.BYTE, TokenKind.UNUSED
    for index, (token, score, kind) in enumerate(
        zip(vocabulary.tokens, vocabulary.scores, kinds, strict=True)
    ):
        if index == unknown:
            yield _name(index), score, _PIECE_UNKNOWN
        elif kind is byte and last[token] == index and token in _BYTE_NAMES:
            yield token, score, _PIECE_BYTE
        elif kind is normal and last[token] == index and is_text(token):
            yield token, score, _PIECE_NORMAL
        elif kind is unused and last[token] == index and is_text(token):
            yield token, score, _PIECE_UNUSED
        else:
            yield _name(index), score, _PIECE_CONTROL
    if unknown is None:
        yield _name(len(vocabulary.tokens)), 0.0, _PIECE_UNKNOWN


def _unknown_id(vocabulary: Vocabulary, kinds: Sequence[TokenKind]) -> int | None:
    if vocabulary.unk is not None:
        return vocabulary.unk
    return kinds.index(TokenKind.UNKNOWN) if TokenKind.UNKNOWN in kinds else None


_BYTE_NAMES = frozenset(b"<0x%02X>" % byte for byte in range(256))


def _are_clean(tokens: Sequence[bytes]) -> bool:
    """Tell whether none of them is broken or holds a name of ours; one pass for most vocabularies.

    A line feed between them keeps two broken ones from making a whole one.
    """
    joined = b"\n".join(tokens)
    if b"\0" in joined or _NAME in joined:
        return False
    try:
        joined.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_plain(token: bytes) -> bool:
    return bool(token) and token not in _BYTE_NAMES


def _is_text(token: bytes) -> bool:
    """Tell whether the library may hold this token as a piece that text can match."""
    if not token or b"\0" in token or token in _BYTE_NAMES:
        return False
    if token.isascii():
        return True
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return not token.startswith(_NAME)


# U+FDD0 is a noncharacter: no vocabulary has a reason to hold it.
_NAME = "\ufdd0".encode()


def _name(index: int) -> bytes:
    return b"%b%d" % (_NAME, index)


def _varint(number: int) -> bytes:
    """Return a protobuf varint: seven bits a byte, low first, the top bit set but in the last."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
