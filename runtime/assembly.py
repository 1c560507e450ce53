"""How a house is put together: threads, spill root, pools and actors of one model.

With ``runtime.api`` the only place in ``runtime`` that knows actors.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial

import msgspec
from millpond.actors.engine import Engine, EngineParts
from millpond.actors.gateway import Gateway, GatewayParts
from millpond.actors.loader import Loader
from millpond.actors.store import Store, StoreParts
from millpond.actors.supervisor import HouseParts
from millpond.codecs.fingerprint import NumericsIdentity
from millpond.runtime.chat_encoder import ChatEncoder, read_template
from millpond.runtime.config import Limits, RuntimeConfig, parse_bytes
from millpond.runtime.errors import ModelError
from millpond.runtime.gguf_file import GgufFile
from millpond.runtime.guidance import Guides
from millpond.runtime.identify import identify, read_config
from millpond.runtime.identity import ModelIdentity
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.memory_budget import check_weights, device_memory
from millpond.runtime.numerics import numerics_identity
from millpond.runtime.shared import Shared
from millpond.runtime.staging import StagingPool
from millpond.runtime.steps import Runner
from millpond.runtime.tensor_digest import digesting
from millpond.runtime.threads import PinnedThread
from millpond.runtime.tokenizer import Tokenizer, make_tokenizer
from millpond.runtime.vocabulary import read_vocabulary

READ_BYTES_PER_S_MIN = 10e6  # a file that is read slower counts as stuck


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads of one house: MLX on one, files, tokens and hashes on the other."""

    engine: PinnedThread
    host: PinnedThread

    def all(self) -> tuple[PinnedThread, ...]:
        """Return both."""
        return (self.engine, self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A house before it runs."""

    config: RuntimeConfig
    identity: ModelIdentity
    tokenizer: Tokenizer
    chats: ChatEncoder
    threads: Threads
    shared: Shared
    pools: tuple[StagingPool, ...]
    gateway: Gateway
    store: Store
    engine: Engine
    loader: Loader

    def house_parts(self) -> HouseParts:
        """Return what the supervisor starts."""
        return HouseParts(
            gateway=self.gateway,
            store=self.store,
            engine=self.engine,
            loader=self.loader,
            limits=self.config.limits,
            threads=(*self.threads.all(), *self.shared.readers, self.shared.writer),
            pools=self.pools,
        )


async def build(config: RuntimeConfig, shared: Shared, threads: Threads) -> Built:
    """Read the model's header, name it, and make its actors; nothing runs yet.

    Raises ModelError (ChatTemplateError too), ConfigError, DescriptorError, or EngineStalled.
    """
    warm_s = config.limits.engine_warm_s
    file = await threads.host.call(partial(GgufFile.open, config.model), config.limits.read_stall_s)
    try:
        numerics = await threads.engine.call(partial(numerics_identity, config), warm_s)
        stall_s = warm_s + file.file_bytes / READ_BYTES_PER_S_MIN
        named = partial(_identify, file, config, numerics)
        identity, layout, tokenizer, chats = await threads.host.call(named, stall_s)
        memory = await threads.engine.call(device_memory, warm_s)
        check_weights(file, identity, parse_bytes(config.weight_bytes_max, memory))
        kv_bytes_max = parse_bytes(config.kv_bytes_max, memory)
        context_tokens = layout.tokens_within(kv_bytes_max, identity.config.context_tokens)
        guides = Guides(tokenizer)
        make = partial(_make_runner, identity, layout, config, guides)
        runner = await threads.engine.call(make, warm_s)
    except BaseException:
        file.close()
        raise
    config = msgspec.structs.replace(config, limits=_fitted(layout, config.limits))
    pools, guard = _pools(layout, config.limits), shared.guard(identity)
    engine = Engine(
        EngineParts(
            runner=runner,
            thread=threads.engine,
            layout=layout,
            context_tokens=context_tokens,
            end_ids=tokenizer.end_ids,
            weight_pool=pools[0],
            restore_pool=pools[1],
            spill_pool=pools[2],
            limits=config.limits,
            clock=time.monotonic,
        )
    )
    return Built(
        config=config,
        identity=identity,
        tokenizer=tokenizer,
        chats=chats,
        threads=threads,
        shared=shared,
        pools=pools,
        gateway=_gateway(config, (identity, context_tokens, guard), (tokenizer, guides), threads),
        store=_store(config, (identity, layout, kv_bytes_max, context_tokens), shared, pools),
        engine=engine,
        loader=Loader(file, identity, pools[0], threads.host, config.limits.read_stall_s),
    )


def _identify(
    file: GgufFile, config: RuntimeConfig, numerics: NumericsIdentity
) -> tuple[ModelIdentity, KvLayout, Tokenizer, ChatEncoder]:
    chosen = "" if config.chat_template is None else read_template(config.chat_template)
    vocabulary = read_vocabulary(file.metadata, read_config(file, config).vocab)
    with digesting(file) as digests:
        tokenizer = make_tokenizer(vocabulary)
        identity = identify(file, config, numerics, os.environ, digests)
    if not identity.descriptor.num_layers:
        raise ModelError(f"{file.path}: found no layers, expected at least one")
    layout = KvLayout.from_descriptor(
        identity.descriptor,
        config.block_tokens,
        config.chunk_tokens_on(numerics.device_kind),
        config.sliding_boundary_tokens,
    )
    chats = ChatEncoder(tokenizer, chosen or identity.vocabulary.chat_template)
    if chosen:
        chats.compile()  # who chose it learns now if it is none
    return identity, layout, tokenizer, chats


def _make_runner(
    identity: ModelIdentity, layout: KvLayout, config: RuntimeConfig, guides: Guides
) -> Runner:
    """On the pinned thread: MLX is imported there first, with its BLAS in place."""
    from millpond.runtime.model import Model

    decode_batch = 1 if config.deterministic else max(1, config.limits.sequences_max)
    return Model(identity, layout, decode_batch, guides)


def _slot_bytes(layout: KvLayout, limits: Limits) -> int:
    """A slot holds the largest block, or as much of it as is allowed, one plane at least."""
    tokens = layout.block_tokens
    plane = max(group.plane_bytes(tokens) for group in layout.groups)
    largest = max(group.block_bytes(tokens) for group in layout.groups)
    return max(plane, min(largest, limits.slot_bytes_max))


def _fitted(layout: KvLayout, limits: Limits) -> Limits:
    """Make room in pool and arrow for the offers of two chunks, whatever the grid.

    With less, a chunk's last blocks would be refused each time, however idle the disk is.
    """
    tokens, slot_bytes = layout.block_tokens, _slot_bytes(layout, limits)
    parts = sum(len(group.parts(tokens, slot_bytes)) for group in layout.groups)
    needed = 2 * parts * (layout.chunk_tokens // tokens)
    return msgspec.structs.replace(
        limits,
        spill_slots=max(limits.spill_slots, needed),
        channel_messages=max(limits.channel_messages, needed),
    )


def _pools(layout: KvLayout, limits: Limits) -> tuple[StagingPool, StagingPool, StagingPool]:
    """Weights, restore, spill."""
    slot_bytes = _slot_bytes(layout, limits)
    return (
        StagingPool("weights", limits.weight_slots, limits.weight_slot_bytes),
        StagingPool("restore", limits.restore_slots, slot_bytes),
        StagingPool("spill", limits.spill_slots, slot_bytes),
    )


def _gateway(
    config: RuntimeConfig,
    model: tuple[ModelIdentity, int, bytes],
    texts: tuple[Tokenizer, Guides],
    threads: Threads,
) -> Gateway:
    identity, memory_tokens, guard = model
    return Gateway(
        GatewayParts(
            tokenizer=texts[0],
            check_schema=texts[1].check,
            thread=threads.host,
            fingerprint=identity.fingerprint,
            guard=guard,
            reuse=config.reuse,
            block_tokens=config.block_tokens,
            context_tokens=identity.config.context_tokens,
            limits=config.limits,
            clock=time.monotonic,
            memory_tokens=memory_tokens,
        )
    )


def _store(
    config: RuntimeConfig,
    model: tuple[ModelIdentity, KvLayout, int, int],
    shared: Shared,
    pools: tuple[StagingPool, ...],
) -> Store:
    identity, layout, kv_bytes_max, context_tokens = model
    return Store(
        StoreParts(
            layout=layout,
            fingerprint=identity.fingerprint,
            guard=shared.guard(identity),
            root=shared.root,
            readers=shared.readers,
            writer=shared.writer,
            restore_pool=pools[1],
            spill_pool=pools[2],
            limits=config.limits,
            clock=time.monotonic,
            context_tokens=context_tokens,
            kv_bytes_max=kv_bytes_max,
        )
    )
