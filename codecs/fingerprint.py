"""The root of every chain: fingerprint, guard and chain hashes.  Pure; the same on every host.

Source: architecture of millpond, section "The seed's vocabulary"; SHA-256 throughout (FIPS 180-4).
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec
from millpond.codecs.descriptors import KvSpillProvenance

ReuseTag = Literal["exact", "fast"]
Namespace = Literal["strict", "legacy"]


def model_fingerprint(
    repo: str, quant: str, producer_version: str, source_sha256: str, chat_template_hash: str
) -> bytes:
    """Return 32 bytes: SHA-256 of the five strings in UTF-8 joined by single NUL bytes."""
    parts = (repo, quant, producer_version, source_sha256, chat_template_hash)
    return hashlib.sha256(b"\0".join(part.encode() for part in parts)).digest()


def namespace_of(provenance: KvSpillProvenance) -> Namespace:
    """Return ``strict`` for a file that hf2q made, ``legacy`` for an External one."""
    return "strict" if provenance.is_hf2q else "legacy"


def namespace_fingerprint(repo: str, quant: str, provenance: KvSpillProvenance) -> bytes:
    """Return the fingerprint of a file's namespace: all five strings, or the first two (legacy).

    Legacy is a permanent rule: for an External file a changed chat template keeps the namespace.
    """
    if namespace_of(provenance) == "legacy":
        return model_fingerprint(repo, quant, "", "", "")
    return model_fingerprint(
        repo,
        quant,
        provenance.producer_version,
        provenance.source_sha256,
        provenance.tokenizer_chat_template_hash,
    )


class NumericsIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about the machine and the build that may change a bit of K or V.

    device_kind, device_model   ``cpu``/``gpu`` and the name that the device gives itself
    compute_dtype               ``float32`` or ``bfloat16``
    weight_form                 ``dense`` or ``repacked``
    mlx_version                 as ``mlx.core.__version__``
    blas_name, blas_version, blas_threads  the BLAS that float32 products use on a CPU
    kernel_revision             counts changes of our own forward pass that change bits
    host_kernels                library and version of what is computed beside MLX, or empty
    """

    device_kind: str
    device_model: str
    compute_dtype: str
    weight_form: str
    mlx_version: str
    blas_name: str
    blas_version: str
    blas_threads: int
    kernel_revision: int
    host_kernels: str = ""


class GuardInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that changes K and V values, and nothing that does not.

    tensors_sha256     hex digest of all tensor bytes of the file
    family             architecture name
    family_revision    numerics version of the family's forward pass
    rope               RoPE parameters, as ``name=value`` strings
    kv_dtype           ``f32``, ``f16`` or ``bf16``
    groups             names of the layer groups, in order
    block_tokens       tokens of one KV block
    chunk_tokens       ``C``, tokens of one prefill chunk
    numerics           the machine and the build
    constants          other constants of the forward pass, as ``name=value`` strings
    """

    tensors_sha256: str
    family: str
    family_revision: int
    rope: tuple[str, ...]
    kv_dtype: str
    groups: tuple[str, ...]
    block_tokens: int
    chunk_tokens: int
    numerics: NumericsIdentity
    constants: tuple[str, ...] = ()


def kv_guard(inputs: GuardInputs) -> bytes:
    """Return 32 bytes: SHA-256 of the canonical (sorted, compact) msgspec JSON of the inputs."""
    return hashlib.sha256(msgspec.json.encode(inputs, order="deterministic")).digest()


def chain_root(fingerprint: bytes, guard: bytes, reuse: ReuseTag, salt: str = "") -> bytes:
    """Return the 32 bytes that stand before the first block: SHA-256(fp ‖ guard ‖ tag ‖ salt)."""
    return hashlib.sha256(fingerprint + guard + reuse.encode() + salt.encode()).digest()


def chain_hash(fingerprint: bytes, parent: bytes, token_ids: bytes) -> bytes:
    """Return the 32 bytes that name a block.

    parent     chain hash of the block before, or the chain root, 32 bytes
    token_ids  the block's token ids as little-endian u32
    """
    return hashlib.sha256(fingerprint + parent + token_ids).digest()
