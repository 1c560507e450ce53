"""``FakeProcess``: one process of a ``FakeRuntime``, with its threads, spill root and house."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from anyio import current_time, sleep
from millpond.actors.supervisor import House, open_house
from millpond.codecs.choices import AnswerForm
from millpond.runtime.api import Runtime
from millpond.runtime.assembly import Built, Fittings, Threads, put_together
from millpond.runtime.chat_encoder import ChatEncoder, read_template
from millpond.runtime.config import RuntimeConfig, parse_bytes
from millpond.runtime.errors import EngineError, InvalidParameter, SpillError
from millpond.runtime.kv.root import RootOptions, SpillRoot
from millpond.runtime.shared import Shared
from millpond.runtime.testing.fake_talker import Talker, TalkerThread
from millpond.runtime.testing.fake_text import fake_identity, fake_weights
from millpond.runtime.testing.faults import Trouble
from millpond.runtime.testing.invariants import leaves_of
from millpond.runtime.testing.leaks import LOOK_S, left_behind, unread_requests
from millpond.runtime.testing.sim_disk import SimDisk
from millpond.runtime.testing.sim_faults import SimCrash
from millpond.runtime.testing.sim_house import SimLoader
from millpond.runtime.testing.workers import InlineWorker, Pace, SimWorker
from millpond.runtime.testing.world_plan import ProcessPlan
from millpond.runtime.tokenizer import make_tokenizer

if TYPE_CHECKING:
    from millpond.runtime.testing.fake_runtime import FakeRuntime

FAKE_MEMORY_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Workers:
    """The threads of a process."""

    engine: TalkerThread
    readers: tuple[SimWorker, ...]
    writer: SimWorker

    def by_name(self) -> dict[str, SimWorker]:
        return {"engine": self.engine, "reader": self.readers[0], "writer": self.writer}

    def all(self) -> tuple[SimWorker, ...]:
        return (self.engine, *self.readers, self.writer)


class FakeProcess:
    """Made by ``FakeRuntime.open``, for one ``run``."""

    def __init__(self, machine: FakeRuntime, config: RuntimeConfig, trouble: Trouble) -> None:
        self._machine, self._config, self._trouble = machine, config, trouble
        name = Path(config.model).stem
        self._weights = fake_weights(name)
        self.identity, self.layout = fake_identity(name, config)
        self.disk = SimDisk(machine.device, trouble.disk, trouble.crash)
        self.model = Talker(self.layout, self._answer, machine.tempo)
        for fault in trouble.model:
            self.model.plan(fault)
        pace, seed, delay = Pace(share=0.0), machine.seed, self.disk.take_delay
        readers = tuple(
            SimWorker(
                f"reader{one}", seed + one, pace, trouble.threads["reader"] * (not one), delay
            )
            for one in range(max(1, config.limits.disk_readers))
        )
        writer = SimWorker("writer", seed, pace, trouble.threads["writer"], delay)
        self.workers = Workers(TalkerThread(seed, machine.tempo), readers, writer)
        # mutable state, changed only in run
        self._house: House | None = None

    @asynccontextmanager
    async def run(self) -> AsyncIterator[Runtime]:
        """Open everything; look for what was left behind once the body ended by itself."""
        started = current_time()
        try:
            built = self._put_together(await self._open_shared())
            async with open_house(replace(built.house_parts(), tap=self.model.see)) as house:
                self._house = house
                runtime = Runtime(built, house, 1e3 * (current_time() - started))
                async with self._judged(house):
                    yield runtime
                closing_s = current_time()
            was_cut = current_time() - closing_s >= self._config.limits.drain_s
            if not self.disk.crashed and not was_cut:
                is_hurt = any(worker.statistics().broken for worker in self.workers.all())
                self._machine.leaks += left_behind(built, self.model, is_hurt)
        finally:
            self.disk.close()

    @asynccontextmanager
    async def _judged(self, house: House) -> AsyncIterator[None]:
        """Faults of the engine count from here; at the end the model is held, then free."""
        tempo, machine, gateway = self._machine.tempo, self._machine, house.gateway
        for fault in self._trouble.threads["engine"]:
            self.workers.engine.plan(fault)
        tempo.start(lambda: bool(gateway.unread()))
        try:
            yield
            if not self.disk.crashed:
                tempo.hold(0)
                machine.leaks += await unread_requests(
                    gateway, self.model.prompts, machine.settle_s
                )
        finally:
            tempo.free()

    async def wait_idle(self) -> None:
        """Wait until no request is left."""
        assert self._house is not None, "the runtime is not open yet"
        while self._house.gateway.statistics().live:  # noqa: ASYNC110, nobody tells
            await sleep(LOOK_S)

    def is_the_end(self, error: BaseException) -> bool:
        """True if the process died and an error says only that."""
        leaves = list(leaves_of(error))
        return self.disk.crashed and all(isinstance(one, SimCrash | EngineError) for one in leaves)

    def plan(self, trouble: Trouble) -> None:
        """Plan more trouble, counted from now."""
        self.disk.plan(*trouble.disk)
        if trouble.crash is not None:
            self.disk.plan_crash(trouble.crash)
        for name, faults in trouble.threads.items():
            for fault in faults:
                self.workers.by_name()[name].plan(fault)
        for step in trouble.model:
            self.model.plan(step)

    def injected(self) -> Mapping[str, int]:
        found = self.disk.injected + self.model.injected
        for worker in self.workers.all():
            found += worker.injected
        return found

    def _answer(self, prompt: str) -> str | None:
        return self._machine.answers(prompt)

    async def _open_shared(self) -> Shared:
        config, problem, root = self._config, "", None
        options = RootOptions(
            token=f"fake{self._machine.starts}",
            bytes_max=parse_bytes(config.spill_bytes_max, self.disk.total_bytes()),
            quarantine_bytes_max=config.limits.quarantine_bytes_max,
            stall_s=config.limits.disk_stall_s,
            sync=config.durability == "power",
        )
        workers = self.workers
        if config.spill:
            opened = partial(SpillRoot.open, self.disk, options)
            try:
                root = await workers.writer.call(opened, 10 * config.limits.disk_stall_s)
            except (SpillError, EngineError) as error:
                problem = str(error)
        return Shared(workers.readers, workers.writer, root, problem)

    def _put_together(self, shared: Shared) -> Built:
        config, identity, layout = self._config, self.identity, self.layout
        tokenizer = make_tokenizer(identity.vocabulary)
        chosen = config.chat_template and read_template(config.chat_template)
        kv_bytes_max = parse_bytes(config.kv_bytes_max, FAKE_MEMORY_BYTES)
        fittings = Fittings(
            identity=identity,
            layout=layout,
            tokenizer=tokenizer,
            chats=ChatEncoder(tokenizer, chosen or identity.vocabulary.chat_template),
            context_tokens=layout.tokens_within(kv_bytes_max, identity.config.context_tokens),
            kv_bytes_max=kv_bytes_max,
            runner=self.model,
            loader=lambda pool: SimLoader(self._weights, pool, ProcessPlan()),
            check_form=_check_form,
            clock=current_time,
        )
        threads = Threads(engine=self.workers.engine, host=InlineWorker("host"))
        return put_together(config, fittings, shared, threads)


def _check_form(form: AnswerForm) -> None:
    """Any JSON or grammar will do: answers are not held to it, ``answers`` chooses them."""
    try:
        if form.kind == "json_schema":
            msgspec.json.decode(form.text)
    except msgspec.DecodeError as error:
        raise InvalidParameter(f"json_schema: {error}") from None
