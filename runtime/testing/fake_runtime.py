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
from typing import NoReturn

from millpond.runtime.api import Runtime
from millpond.runtime.config import Limits, RuntimeConfig
from millpond.runtime.errors import EngineError
from millpond.runtime.shared import Shared
from millpond.runtime.testing.fake_process import FakeProcess
from millpond.runtime.testing.fake_talker import Answers, Tempo
from millpond.runtime.testing.faults import Fault, trouble_of
from millpond.runtime.testing.leaks import Leaked
from millpond.runtime.testing.sim_device import SimDevice
from millpond.runtime.testing.sim_faults import SimCrash

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
        self._process: FakeProcess | None = None

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
        process = self._process = FakeProcess(self, config, trouble_of(planned))
        self.starts, self.crashed = self.starts + 1, False
        is_open = False
        try:
            async with process.run() as runtime:
                is_open = True
                yield runtime
        except (SimCrash, EngineError, BaseExceptionGroup) as error:
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

    async def wait_idle(self) -> None:
        """Wait until no request is left in the running process."""
        await self._running().wait_idle()

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

    def _running(self) -> FakeProcess:
        assert self._process is not None, "no runtime is open"
        return self._process


def _no_answer(prompt: str) -> None:
    return None
