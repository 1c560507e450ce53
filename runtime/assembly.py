"""How a house is put together: threads, spill root, pools and actors of one model.

With ``runtime.api`` the only place in ``runtime`` that knows actors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from millpond.actors.engine import Engine, EngineParts
from millpond.actors.gateway import Gateway, GatewayParts
from millpond.actors.loader import Loader
from millpond.actors.store import Store, StoreParts
from millpond.actors.supervisor import HouseParts, LoaderActor
from millpond.codecs.choices import AnswerForm
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
from millpond.runtime.threads import Thread
from millpond.runtime.tokenizer import Tokenizer, make_tokenizer
from millpond.runtime.vocabulary import read_vocabulary

READ_BYTES_PER_S_MIN = 10e6  # a file that is read slower counts as stuck


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads of one house: MLX on one, files, tokens and hashes on the other."""

    engine: Thread
    host: Thread

    def all(self) -> tuple[Thread, ...]:
        """Return both."""
        return (self.engine, self.host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fittings:
    """What a house is made of, beside its configuration and its threads.

    identity, layout, tokenizer, chats  of the model
    context_tokens  tokens of one request that the memory for live caches holds
    kv_bytes_max    budget of the live caches
    runner          runs on the engine's thread and nowhere else
    loader          makes the loader, given the pool of weights
    check_form      raises InvalidParameter for a form that answers cannot be held to
    clock           monotonic seconds
    """

    identity: ModelIdentity
    layout: KvLayout
    tokenizer: Tokenizer
    chats: ChatEncoder
    context_tokens: int
    kv_bytes_max: int
    runner: Runner
    loader: Callable[[StagingPool], LoaderActor]
    check_form: Callable[[AnswerForm], None]
    clock: Callable[[], float] = time.monotonic


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
    loader: LoaderActor

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
    fittings = Fittings(
        identity=identity,
        layout=layout,
        tokenizer=tokenizer,
        chats=chats,
        context_tokens=context_tokens,
        kv_bytes_max=kv_bytes_max,
        runner=runner,
        loader=lambda pool: Loader(file, identity, pool, threads.host, config.limits.read_stall_s),
        check_form=guides.check,
    )
    return put_together(config, fittings, shared, threads)


def put_together(
    config: RuntimeConfig, fittings: Fittings, shared: Shared, threads: Threads
) -> Built:
    """Make the pools and the actors of a house; nothing runs yet."""
    layout = fittings.layout
    config = msgspec.structs.replace(config, limits=_fitted(layout, config.limits))
    pools = _pools(layout, config.limits)
    engine = Engine(
        EngineParts(
            runner=fittings.runner,
            thread=threads.engine,
            layout=layout,
            context_tokens=fittings.context_tokens,
            end_ids=fittings.tokenizer.end_ids,
            weight_pool=pools[0],
            restore_pool=pools[1],
            spill_pool=pools[2],
            limits=config.limits,
            clock=fittings.clock,
        )
    )
    return Built(
        config=config,
        identity=fittings.identity,
        tokenizer=fittings.tokenizer,
        chats=fittings.chats,
        threads=threads,
        shared=shared,
        pools=pools,
        gateway=_gateway(config, fittings, shared, threads),
        store=_store(config, fittings, shared, pools),
        engine=engine,
        loader=fittings.loader(pools[0]),
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
        config.sliding_boundary_on(numerics.device_kind),
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
    config: RuntimeConfig, fittings: Fittings, shared: Shared, threads: Threads
) -> Gateway:
    identity = fittings.identity
    return Gateway(
        GatewayParts(
            tokenizer=fittings.tokenizer,
            check_form=fittings.check_form,
            thread=threads.host,
            fingerprint=identity.fingerprint,
            guard=shared.guard(identity),
            reuse=config.reuse,
            block_tokens=config.block_tokens,
            context_tokens=identity.config.context_tokens,
            limits=config.limits,
            clock=fittings.clock,
            memory_tokens=fittings.context_tokens,
        )
    )


def _store(
    config: RuntimeConfig, fittings: Fittings, shared: Shared, pools: tuple[StagingPool, ...]
) -> Store:
    return Store(
        StoreParts(
            layout=fittings.layout,
            fingerprint=fittings.identity.fingerprint,
            guard=shared.guard(fittings.identity),
            root=shared.root,
            readers=shared.readers,
            writer=shared.writer,
            restore_pool=pools[1],
            spill_pool=pools[2],
            limits=config.limits,
            clock=fittings.clock,
            context_tokens=fittings.context_tokens,
            kv_bytes_max=fittings.kv_bytes_max,
        )
    )
