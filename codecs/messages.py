"""The messages of a house, one union per arrow.  Frozen, tagged; decoding is the check.

gateway → store: Submit, Cancel           store → engine: Restore, Admit, Cancel, Drop
engine → store: Snapshot, Held            engine → gateway: Ready, Tokens, Finished, Stopped
loader → engine: Tensor, Loaded

Token ids travel as bytes, little-endian u32.  New fields come last and have defaults.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from millpond.codecs.choices import Count, Positive, SamplingParams, TokenId, TokenLogprob

Priority = Annotated[int, msgspec.Meta(ge=-100, le=100)]
Hash32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Hash16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
MissReason = Literal["absent", "incomplete_group", "corrupt", "io_error", "mismatch"]
FinishReason = Literal["stop", "length", "cancelled", "error"]


class Descriptor(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"
):
    """Base of every message: immutable, keyword-only, unknown fields forbidden."""


class Submit(Descriptor, frozen=True, tag="submit"):
    """Gateway → store: one request.

    request_id  unique within the house, growing
    token_ids   the whole prompt, at least one token
    root        chain root: fingerprint, guard, reuse tag and salt
    chain       chain hash of each whole block of the prompt, first block first
    sampling    how to choose tokens
    no_store    neither read from nor written to the spill root, nor shared with other requests
    priority    the higher ones go first; who was passed over often enough goes before them
    twin_of     another choice of the request of that number, submitted before: the same prompt
    pin_s       seconds for which its blocks stay on the disk, from its end on; 0: no longer
    """

    request_id: Count
    token_ids: bytes
    root: Hash32
    chain: tuple[Hash32, ...]
    sampling: SamplingParams
    no_store: bool = False
    priority: Priority = 0
    twin_of: Count | None = None
    pin_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


class Cancel(Descriptor, frozen=True, tag="cancel"):
    """Gateway → store → engine: end a request early; on the same arrow, so it cannot overtake.

    request_id    the request
    before_admit  set by the store: the engine has not been sent this request's Admit and never
                  will be.  The engine answers such a Cancel with Finished; any other one only if
                  the request still runs
    """

    request_id: Count
    before_admit: bool = False


class Restore(Descriptor, frozen=True, tag="restore"):
    """Store → engine: verified planes of one KV block, staged in host memory.

    request_id, group  the request whose live cache they go to; index of the layer group
    first_token   position of the block's first token, a multiple of block_tokens
    first_plane   first plane; planes 0..L-1 are K of the group's layers, L..2L-1 are V
    planes        count of planes; each is (kv_heads, block_tokens, head_dim), logical order
    slot, lease, payload_bytes  where it lies in the restore pool; the receiver gives it back
    starts_over   drop whatever this request restored before: a new attempt begins here
    context_tokens  tokens that prompt and completion may reach; 0: as many as the model takes
    boundary      tokens that this attempt restores in all
    """

    request_id: Count
    group: Count
    first_token: Count
    first_plane: Count
    planes: Positive
    slot: Count
    lease: Count
    payload_bytes: Positive
    starts_over: bool = False
    context_tokens: Count = 0
    boundary: Count = 0


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a restore did.

    blocks, bytes  files read and verified, and their whole sizes
    restore_ms  time from the request's arrival at the store to its Admit
    misses      count of misses by reason
    """

    blocks: Count = 0
    bytes: Count = 0
    restore_ms: float = 0.0
    misses: dict[MissReason, int] = {}


class Admit(Descriptor, frozen=True, tag="admit"):
    """Store → engine: run this request; its restored rows were all sent before.

    request_id       the request
    token_ids        the whole prompt
    root, chain      as in Submit
    sampling         as in Submit
    prefix_tokens    leading tokens whose K and V are in place, or in ``held_id``'s live cache;
                     0 drops any restored row
    restored         report for the caller
    full_from_block  offer full-attention blocks from this block index on
    sliding_blocks   offer sliding blocks with these indexes
    offers           False: offer nothing at all
    held_id          the held request whose live cache has the prefix; None: it was restored
    shares           False: this request's rows are for nobody else, nor others' for it
    priority, twin_of  as in Submit
    """

    request_id: Count
    token_ids: bytes
    root: Hash32
    chain: tuple[Hash32, ...]
    sampling: SamplingParams
    prefix_tokens: Count
    restored: RestoreReport
    full_from_block: Count = 0
    sliding_blocks: tuple[Count, ...] = ()
    offers: bool = True
    held_id: Count | None = None
    shares: bool = True
    priority: Priority = 0
    twin_of: Count | None = None


class Drop(Descriptor, frozen=True, tag="drop"):
    """Store → engine: free a held live cache.

    request_id  of its Held; one that is gone already is no news
    """

    request_id: Count


class Snapshot(Descriptor, frozen=True, tag="snapshot"):
    """Engine → store, an offer: planes of one full KV block, staged in host memory.

    request_id    whose prompt it is; for logs and statistics
    group         index of the layer group
    first_token   position of the block's first token, a multiple of block_tokens
    chain_hash    32 bytes; names the model and every token up to the block's end
    parent        chain hash of the block before, or the chain root
    token_ids     the block's token ids
    first_plane, planes  which planes of the block, as in Restore; the parts of one block are
                  offered one after another, first plane first, with no other offer between
    last          no part of this block follows
    slot, lease   where the payload lies in the spill pool; the receiver gives the slot back
    payload_bytes, payload_xxh3  length and xxh3-128 of the payload as staged
    """

    request_id: Count
    group: Count
    first_token: Count
    chain_hash: Hash32
    parent: Hash32
    token_ids: bytes
    first_plane: Count
    planes: Positive
    last: bool
    slot: Count
    lease: Count
    payload_bytes: Positive
    payload_xxh3: Hash16


class Held(Descriptor, frozen=True, tag="held"):
    """Engine → store, exactly once after each Admit: the request ended, its memory is free.

    request_id  the request
    boundaries  prefixes of its prompt, in tokens, ascending, that its live cache still serves; the
                engine keeps the cache until Drop.  Empty: nothing is kept
    """

    request_id: Count
    boundaries: tuple[Positive, ...] = ()


class Ready(Descriptor, frozen=True, tag="ready"):
    """Engine → gateway, once and first: the model is loaded.

    load_ms  from the engine's start to the model's
    """

    load_ms: float


class Tokens(Descriptor, frozen=True, tag="tokens"):
    """Engine → gateway: tokens that a request gained in one step.

    request_id     the request
    first_index    index of the first of them within the completion
    token_ids      the ids
    logits_xxh3    xxh3-128 of each step's float32 logits, where digest_logits asked for it
    logprobs       of each token, where they were asked for
    """

    request_id: Count
    first_index: Count
    token_ids: tuple[TokenId, ...]
    logits_xxh3: tuple[Hash16, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class Finished(Descriptor, frozen=True, tag="finished"):
    """Engine → gateway: the end of a request; exactly one for each.

    request_id      the request
    reason          stop, length, cancelled or error
    error           what went wrong; empty unless reason is ``error``
    error_type      class of ``runtime.errors`` that tells it to the caller
    cached_tokens   prompt tokens whose K and V this request did not compute
    prefilled_tokens  prompt tokens that went through the forward pass
    shared_tokens   of cached_tokens, those whose K and V came from another live cache
    restored        the store's report
    prefill_ms, decode_ms  time on the pinned thread
    offered, refused  blocks offered to the store, and not offered because pool or arrow was full
    """

    request_id: Count
    reason: FinishReason
    error: str = ""
    cached_tokens: Count = 0
    prefilled_tokens: Count = 0
    restored: RestoreReport = RestoreReport()
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    offered: Count = 0
    refused: Count = 0
    error_type: str = ""
    shared_tokens: Count = 0


class Stopped(Descriptor, frozen=True, tag="stopped"):
    """Engine → gateway, at most once: the pinned thread is gone, no request can go on.

    error, error_type  as in Finished
    """

    error: str
    error_type: str


class Tensor(Descriptor, frozen=True, tag="tensor"):
    """Loader → engine: whole rows of one weight tensor, staged in host memory.

    name          GGUF name
    shape         shape of the whole tensor, row-major (out, in)
    encoding      ``f32``, ``f16``, ``bf16``, or ``q<bits>g<group>``: the parts of MLX affine
                  quantisation one after another (packed u32, then scales, then biases)
    first_row, rows  which rows of the matrix (prod(shape[:-1]), shape[-1]) that the tensor is once
                  its leading axes are flattened; a vector is one row.  The ranges of a tensor come
                  in order, without gaps, with no other tensor between
    slot, lease   where the bytes lie in the weight pool; the receiver gives the slot back
    payload_bytes length of the payload
    scale_dtype   dtype of scales and biases of a quantised encoding, else empty
    """

    name: str
    shape: tuple[Positive, ...]
    encoding: str
    first_row: Count
    rows: Positive
    slot: Count
    lease: Count
    payload_bytes: Positive
    scale_dtype: str = ""


class Loaded(Descriptor, frozen=True, tag="loaded"):
    """Loader → engine: the end of the weights.

    tensors  count of tensors sent
    error    why the file could not be read to its end; empty if it could
    """

    tensors: Count
    error: str = ""


ToStore = Submit | Cancel
ToEngine = Restore | Admit | Cancel | Drop
Offer = Snapshot | Held
ToGateway = Ready | Tokens | Finished | Stopped
Weights = Tensor | Loaded
