"""``FakeRuntime``: the whole runtime without a model file, a GPU or a disk, for tests of services.

    async with fake.open() as runtime:                    # in the place of open_runtime
        done = await runtime.generate("Once upon a time")

Gateway, store, engine and supervisor are the real ones, as is the ``Runtime`` that a test gets.
Simulated are the model (``Talker``), the disk (``SimDevice``, in memory, kept from one ``open`` to
the next) and the threads (``SimWorker``, on the event loop).  Time is the event loop's: real, or
virtual where the test's loop has a virtual clock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
from anyio import current_time
from millpond.actors.supervisor import House, open_house
from millpond.runtime.api import Runtime
from millpond.runtime.assembly import Built, Fittings, Threads, put_together
from millpond.runtime.chat_encoder import ChatEncoder, read_template
from millpond.runtime.config import Limits, RuntimeConfig, parse_bytes
from millpond.runtime.errors import EngineError, InvalidParameter, SpillError
from millpond.runtime.kv.root import RootOptions, SpillRoot
from millpond.runtime.shared import Shared
from millpond.runtime.testing.fake_talker import Answers, Talker, TalkerThread, Tempo
from millpond.runtime.testing.fake_text import fake_identity, fake_weights
from millpond.runtime.testing.faults import Fault, Trouble, trouble_of
from millpond.runtime.testing.invariants import leaves_of
from millpond.runtime.testing.leaks import Leaked, left_behind, unread_requests
from millpond.runtime.testing.sim_device import SimDevice
from millpond.runtime.testing.sim_disk import SimDisk
from millpond.runtime.testing.sim_faults import SimCrash
from millpond.runtime.testing.sim_house import SimLoader
from millpond.runtime.testing.workers import InlineWorker, Pace, SimWorker
from millpond.runtime.testing.world_plan import ProcessPlan
from millpond.runtime.tokenizer import make_tokenizer

FAKE_MEMORY_BYTES = 2**30
SETTLE_S = 1.0
FAKE_CONFIG = RuntimeConfig(
    model="fake.gguf",
    block_tokens=16,
    prefill_chunk_tokens=16,
    sliding_boundary_tokens=0,
    limits=Limits(engine_stall_s=1.0, engine_warm_s=1.0, disk_stall_s=1.0, drain_s=5.0),
)
"""What ``FakeRuntime.open`` uses without a configuration: short blocks, so that short prompts are
cached, and short waits for what is stuck."""


class FakeRuntime:
    """One simulated machine: its disk, and the process that runs on it now.

    device    files and folders that outlive the processes; ``capacity_bytes`` may be set
    answers   prompt → the whole answer; None, the default for every prompt, is letters without end
    settle_s  how long requests may still run after a test's body before they count as leaks
    leaks     what was left behind so far, a line each
    crashed   whether the last process died
    starts    processes so far
    tempo     when the model may take a step; see ``hold``, ``release`` and ``step_s``
    """

    def __init__(self, seed: int = 0, faults: Sequence[Fault] = ()) -> None:
        """Get ready; ``faults`` wait for the first process."""
        self.seed, self.device, self.settle_s = seed, SimDevice(seed), SETTLE_S
        self.answers: Answers = _no_answer
        # mutable state, changed only in the methods below
        self.leaks: list[str] = []
        self.crashed = False
        self.starts = 0
        self.tempo = Tempo()
        self._faults = list(faults)
        self._process: _Process | None = None

    def __repr__(self) -> str:
        state = "open" if self._process is not None else "crashed" if self.crashed else "closed"
        return f"<FakeRuntime seed {self.seed}, {self.starts} starts, {state}, {self.device!r}>"

    # -- one process after another

    @asynccontextmanager
    async def open(
        self,
        config: RuntimeConfig | None = None,
        shared: Shared | None = None,
        *,
        faults: Sequence[Fault] = (),
    ) -> AsyncIterator[Runtime]:
        """Open a runtime on this machine; takes the place of ``open_runtime``.

        config  ``model`` names the weights, no file; its spill root is the simulated disk.  None is
                FAKE_CONFIG
        shared  must be None: one runtime at a time
        faults  of this process

        A process that dies, by ``process_dies`` or ``kill``, leaves the block without an error;
        ``crashed`` tells.  One that dies while it opens raises SimCrash.  Raises ConfigError.
        """
        assert shared is None and self._process is None, "one runtime at a time"
        planned, self._faults = [*self._faults, *faults], []
        config = (config or FAKE_CONFIG).checked()
        process = self._process = _Process(self, config, trouble_of(planned))
        self.starts, self.crashed = self.starts + 1, False
        is_open = False
        try:
            async with process.run() as runtime:
                is_open = True
                yield runtime
        except BaseException as error:
            if not is_open or not process.is_the_end(error):
                raise
        finally:
            self.crashed = process.disk.crashed
            self._process = None

    def kill(self, *, power: bool = False) -> NoReturn:
        """Kill the process now: raises SimCrash, which the block of ``open`` takes.

        power  the machine loses power: what was not synced is kept, lost or garbage
        """
        self._running().disk.kill(power)
        raise SimCrash

    def inject(self, *faults: Fault) -> None:
        """Plan faults of the running process, counted from now, or of the next one."""
        if self._process is None:
            self._faults += faults
        else:
            self._process.plan(trouble_of(faults))

    # -- the model

    @property
    def step_s(self) -> float:
        """Time that every step of the model takes, 0 by default; may be set at any time."""
        return self.tempo.step_s

    @step_s.setter
    def step_s(self, seconds: float) -> None:
        self.tempo.step_s = seconds

    def hold(self, after_tokens: int = 0) -> None:
        """Let the model give so many more tokens, over all requests, and then wait.

        It goes on with ``release``, or once nobody waits for an answer any more.
        """
        self.tempo.hold(after_tokens)

    def release(self) -> None:
        """Let the model go on."""
        self.tempo.release()

    async def wait_held(self) -> None:
        """Wait until the model waits."""
        await self.tempo.wait_held()

    @property
    def tokens_given(self) -> int:
        """Tokens that the model gave so far, over all processes."""
        return self.tempo.given

    # -- what is there

    def blocks(self) -> list[str]:
        """Return the paths of the block files on the disk."""
        return sorted(path for path in self.device.files if path.endswith(".safetensors"))

    def injected(self) -> Mapping[str, int]:
        """Return how often each kind of fault happened in the running process."""
        return self._running().injected()

    def check(self) -> None:
        """Raise Leaked if anything was left behind, or a runtime is still open."""
        found = list(self.leaks)
        if self._process is not None:
            found.append("a runtime is still open: its block of `open` was never left")
        if found:
            raise Leaked("\n".join(found))

    def _running(self) -> _Process:
        assert self._process is not None, "no runtime is open"
        return self._process


@dataclass(frozen=True, slots=True)
class _Workers:
    """The threads of a process."""

    engine: TalkerThread
    readers: tuple[SimWorker, ...]
    writer: SimWorker

    def by_name(self) -> dict[str, SimWorker]:
        return {"engine": self.engine, "reader": self.readers[0], "writer": self.writer}

    def all(self) -> tuple[SimWorker, ...]:
        return (self.engine, *self.readers, self.writer)


class _Process:
    """One process: disk, threads, spill root and house."""

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
        self.workers = _Workers(TalkerThread(seed, machine.tempo), readers, writer)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[Runtime]:
        """Open everything; look for what was left behind once the body ended by itself."""
        started = current_time()
        try:
            built = self._put_together(await self._open_shared())
            async with open_house(replace(built.house_parts(), tap=self.model.see)) as house:
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
            check_schema=_check_schema,
            clock=current_time,
        )
        threads = Threads(engine=self.workers.engine, host=InlineWorker("host"))
        return put_together(config, fittings, shared, threads)


def _check_schema(schema: str) -> None:
    """Any JSON will do: answers are not held to it, ``answers`` chooses them."""
    try:
        msgspec.json.decode(schema)
    except msgspec.DecodeError as error:
        raise InvalidParameter(f"json_schema: {error}") from None


def _no_answer(prompt: str) -> None:
    return None
