"""``ModelIdentity``: everything about a model file that is known before its house starts."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.codecs.descriptors import KvSpillDescriptor
from millpond.codecs.fingerprint import Namespace, NumericsIdentity
from millpond.runtime.families.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokenizer arrays of a GGUF, as found; ``runtime.tokenizer`` makes a tokenizer of them.

    model          ``tokenizer.ggml.model``: ``llama`` (SentencePiece), ``gpt2`` or ``gemma4`` (BPE)
    pre            ``tokenizer.ggml.pre``, ``""`` if absent
    tokens         raw UTF-8 bytes of each token, in id order
    scores         one per token, or empty
    types          one per token: 1 normal, 2 unknown, 3 control, 4 user, 5 unused, 6 byte; or empty
    merges         raw UTF-8 bytes of each merge, or empty
    bos, eos, unk, eot  ids, or None
    add_bos, add_eos, add_space_prefix  as in the file, defaults of the family applied
    chat_template  Jinja source, ``""`` for none
    """

    model: str
    pre: str
    tokens: tuple[bytes, ...]
    scores: tuple[float, ...]
    types: tuple[int, ...]
    merges: tuple[bytes, ...]
    bos: int | None
    eos: int | None
    unk: int | None
    eot: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_template: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """One loaded model's name, shape and namespace; immutable.

    name, repo, quant  for people; ``repo`` and ``quant`` enter the fingerprint
    config             shape and constants of the forward pass
    descriptor         KV shape and provenance
    fingerprint        32 bytes, the cache namespace; ``namespace`` tells by which rule
    guard              32 bytes over everything that changes K and V
    tensors_sha256     hex digest of all tensor bytes
    numerics           device, dtypes and libraries
    vocabulary         what the tokenizer is built from
    """

    name: str
    repo: str
    quant: str
    config: ModelConfig
    descriptor: KvSpillDescriptor
    fingerprint: bytes
    namespace: Namespace
    guard: bytes
    tensors_sha256: str
    numerics: NumericsIdentity
    vocabulary: Vocabulary
