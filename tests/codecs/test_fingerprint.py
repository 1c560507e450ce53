"""Fingerprint, guard and chain: the same inputs give the same bytes, any change gives others."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from millpond.codecs.descriptors import KvSpillProvenance
from millpond.codecs.fingerprint import (
    GuardInputs,
    NumericsIdentity,
    chain_hash,
    chain_root,
    kv_guard,
    model_fingerprint,
    namespace_fingerprint,
    namespace_of,
)
from millpond.runtime.kv.blocks import block_chain, pack_tokens, unpack_tokens

NUMERICS = NumericsIdentity(
    device_kind="cpu",
    device_model="x",
    compute_dtype="float32",
    weight_form="dense",
    mlx_version="0.32.4",
    blas_name="openblas",
    blas_version="0.3.30",
    blas_threads=1,
    kernel_revision=1,
)
GUARD = GuardInputs(
    tensors_sha256="ab" * 32,
    family="gemma3",
    family_revision=1,
    rope=("full.base=1e6",),
    kv_dtype="f32",
    groups=("g0-full-h1-d256-f32",),
    block_tokens=256,
    chunk_tokens=256,
    numerics=NUMERICS,
)


def test_nul_joining_keeps_neighbours_apart() -> None:
    assert model_fingerprint("ab", "c", "", "", "") != model_fingerprint("a", "bc", "", "", "")
    assert model_fingerprint("a", "b", "c", "d", "e") == hashlib.sha256(b"a\0b\0c\0d\0e").digest()


def test_a_changed_template_changes_the_strict_fingerprint_and_not_the_legacy_one() -> None:
    for provenance, differs in (
        (KvSpillProvenance("1", "ab", "t1"), True),
        (KvSpillProvenance("", "", "t1"), False),
    ):
        other = msgspec.structs.replace(provenance, tokenizer_chat_template_hash="t2")
        one = namespace_fingerprint("repo", "Q4_K_M", provenance)
        assert (one != namespace_fingerprint("repo", "Q4_K_M", other)) is differs


def test_the_namespace_follows_the_provenance() -> None:
    assert namespace_of(KvSpillProvenance("1", "ab")) == "strict"
    assert namespace_of(KvSpillProvenance()) == "legacy"
    legacy = namespace_fingerprint("r", "q", KvSpillProvenance(tokenizer_chat_template_hash="t"))
    assert legacy == model_fingerprint("r", "q", "", "", "")


def _changed(field: str) -> GuardInputs:
    value = getattr(GUARD, field)
    if field == "numerics":
        raise AssertionError("its own fields are changed one by one")
    if isinstance(value, int):
        return msgspec.structs.replace(GUARD, **{field: value + 1})
    new = (*value, "x") if isinstance(value, tuple) else value + "x"
    return msgspec.structs.replace(GUARD, **{field: new})


@pytest.mark.parametrize("field", [name for name in GUARD.__struct_fields__ if name != "numerics"])
def test_every_input_of_the_guard_counts(field: str) -> None:
    assert kv_guard(_changed(field)) != kv_guard(GUARD)


@pytest.mark.parametrize("field", NUMERICS.__struct_fields__)
def test_every_part_of_the_numerics_identity_counts(field: str) -> None:
    value = getattr(NUMERICS, field)
    new = value + 1 if isinstance(value, int) else value + "x"
    numerics = msgspec.structs.replace(NUMERICS, **{field: new})
    assert kv_guard(msgspec.structs.replace(GUARD, numerics=numerics)) != kv_guard(GUARD)


def test_the_guard_is_the_hash_of_its_canonical_json() -> None:
    text = msgspec.json.encode(GUARD, order="deterministic")
    assert b" " not in text.replace(b"g0-full", b"")
    assert kv_guard(GUARD) == hashlib.sha256(text).digest()


def test_known_bytes_never_change() -> None:
    """File names hang on these: a change would orphan every cache in the field."""
    fingerprint = model_fingerprint("repo", "Q4_K_M", "", "", "")
    root = chain_root(fingerprint, kv_guard(GUARD), "exact", "")
    block = chain_hash(fingerprint, root, pack_tokens([1, 2, 3]))
    assert fingerprint.hex() == hashlib.sha256(b"repo\0Q4_K_M\0\0\0").hexdigest()
    assert root == hashlib.sha256(fingerprint + kv_guard(GUARD) + b"exact").digest()
    packed = b"\x01\0\0\0\x02\0\0\0\x03\0\0\0"
    assert block == hashlib.sha256(fingerprint + root + packed).digest()


def test_salt_and_reuse_tag_give_other_roots() -> None:
    roots = {
        chain_root(b"f" * 32, b"g" * 32, tag, salt)
        for tag in ("exact", "fast")
        for salt in ("", "a", "b")
    }
    assert len(roots) == 6


def test_a_chain_names_whole_blocks_only_and_depends_on_all_before() -> None:
    ids = list(range(10))
    chain = block_chain(b"f" * 32, b"r" * 32, pack_tokens(ids), 4)
    assert len(chain) == 2
    changed = block_chain(b"f" * 32, b"r" * 32, pack_tokens([9, *ids[1:]]), 4)
    assert chain[0] != changed[0] and chain[1] != changed[1]
    assert block_chain(b"f" * 32, b"r" * 32, pack_tokens(ids[:8]), 4) == chain
    assert block_chain(b"f" * 32, b"r" * 32, pack_tokens(ids[:3]), 4) == ()


def test_packed_tokens_come_back_and_what_does_not_fit_is_refused() -> None:
    ids = [0, 1, 2**32 - 1]
    assert unpack_tokens(pack_tokens(ids)) == ids
    with pytest.raises(OverflowError):
        pack_tokens([2**32])
    with pytest.raises(OverflowError):
        pack_tokens([-1])
