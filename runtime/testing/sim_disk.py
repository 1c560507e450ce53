"""``SimDisk``: one process's view of a ``SimDevice``; implements ``runtime.kv.disk.Disk``.

Faults are planned: each names an operation, which call of it, and what happens.  A crash is
``SimCrash`` at the operation with a given number; after it every operation of this process raises
``SimCrash`` and does nothing, so that no cleanup runs which a dead process could not run.

An operation never waits.  It says how long it took by ``delay_s``; the worker that ran it takes
that (``take_delay``) and waits in virtual time.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from millpond.runtime.kv.disk import WRITERS, DiskEntry
from millpond.runtime.testing.sim_device import SimDevice
from millpond.runtime.testing.sim_faults import (
    ERRNOS,
    STUCK_S,
    CrashPoint,
    DiskFault,
    PlannedFaults,
    SimCrash,
)

Watch = Callable[[str, str, str], None]


class SimDisk:
    """The disk of one simulated process.

    watch  called after every operation that changed names or bytes, and before every read, with
           operation, path and target; what it raises leaves the operation
    """

    def __init__(
        self,
        device: SimDevice,
        faults: Sequence[DiskFault] = (),
        crash: CrashPoint | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.device, self._crash, self._watch = device, crash, watch
        # mutable state, changed only by the operations, by plan and by kill
        self._planned = PlannedFaults()
        self.operations = 0
        self._powered = device.power_losses
        self._killed = False
        self.delay_s = 0.0
        self.injected: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._writers: set[str] = set()
        self._locked = False
        self.plan(*faults)

    def __repr__(self) -> str:
        state = "crashed" if self.crashed else f"{self.operations} operations"
        return f"<SimDisk {state}, {self.device!r}>"

    @property
    def crashed(self) -> bool:
        """True once the process is dead, by its own crash or by any loss of power."""
        return self._killed or self.lost_power

    @property
    def lost_power(self) -> bool:
        """True once the machine lost power while this process ran."""
        return self._powered != self.device.power_losses

    def take_delay(self) -> float:
        """Return how long the operations since the last call took, in virtual seconds."""
        delay, self.delay_s = self.delay_s, 0.0
        return delay

    def plan(self, *faults: DiskFault) -> None:
        """Plan more faults; calls and time count from now on."""
        for fault in faults:
            self._planned.add(fault, self._calls[fault.operation])

    def plan_crash(self, crash: CrashPoint) -> None:
        """Plan where the process dies; operations count from now on."""
        self._crash = msgspec.structs.replace(crash, operation=self.operations + crash.operation)

    # -- the operations of Disk

    def scan(self, folder: str) -> list[DiskEntry]:
        """See ``Disk.scan``."""
        self._begin("scan", folder)
        return self.device.listing(folder)

    def read_into(self, path: str, offset: int, *buffers: memoryview) -> int:
        """See ``Disk.read_into``."""
        self._see("read", path)
        kind = self._begin("read", path)
        if path not in self.device.files and sum(map(len, buffers)) > 1:
            self._see("missing", path)  # one byte only asks whether a file is there
        content = memoryview(self.device.file(path).content)[offset:].toreadonly()
        if kind == "short" and path.startswith("v1/") and len(content):
            content = content[: self.device.random.randrange(len(content))]
        done = 0
        for buffer in buffers:
            piece = content[done : done + len(buffer)]
            buffer[: len(piece)] = piece
            done += len(piece)
        return done

    def write(self, path: str, parts: Sequence[memoryview | bytes], sync: bool) -> None:
        """See ``Disk.write``."""
        content = b"".join(parts)
        kind = self._begin("write", path)
        room = self.device.free_bytes()
        is_half = kind in ("half", *ERRNOS) or len(content) > room
        if is_half:
            content = content[: self.device.random.randrange(min(len(content), room) + 1)]
        file = self.device.create(path, content)
        self._see("write", path)
        self._end(kind if not is_half or kind else "ENOSPC")
        if sync:
            file.sync()

    def append(self, path: str, offset: int, data: bytes, sync: bool) -> None:
        """See ``Disk.append``."""
        kind = self._begin("append", path)
        if path not in self.device.files:
            self.device.create(path, b"")
        file = self.device.file(path)
        room = self.device.free_bytes()
        is_half = kind in ("half", *ERRNOS) or len(data) > room
        if is_half:
            data = data[: self.device.random.randrange(min(len(data), room) + 1)]
        self.device.overwrite(file, offset, data)
        self._see("append", path)
        self._end(kind if not is_half or kind else "ENOSPC")
        if sync:
            file.sync()
            self.device.sync_folder(path)

    def rename(self, source: str, target: str, sync: bool) -> None:
        """See ``Disk.rename``."""
        kind = self._begin("rename", source)
        if kind not in ("half", *ERRNOS):
            self.device.rename(source, target)
            self._see("rename", source, target)
        self._end(kind)
        if sync:
            self.device.sync_folder(target)
        self._see("published", source, target)

    def remove(self, path: str) -> None:
        """See ``Disk.remove``."""
        kind = self._begin("remove", path)
        if kind not in ("half", *ERRNOS):
            self.device.remove(path)
            self._see("remove", path)
        self._end(kind)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        self._begin("remove_folder", path)
        self.device.remove_folder(path)

    def free_bytes(self) -> int:
        """See ``Disk.free_bytes``."""
        self._check_alive()
        return self.device.free_bytes()

    def total_bytes(self) -> int:
        """Size of the file system."""
        return self.device.capacity_bytes or 2**50

    def is_attached(self) -> bool:
        """The root is always what was opened."""
        return True

    def reattach(self) -> None:
        """See ``Disk.reattach``; never needed."""

    @contextmanager
    def lock(self) -> Iterator[None]:
        """See ``Disk.lock``; calls are whole, so nobody ever waits."""
        self._check_alive()
        assert not self._locked, "the root's lock is not taken twice by one call"
        self._locked = True
        try:
            yield
        finally:
            self._locked = False

    def claim_writer(self, token: str) -> None:
        """See ``Disk.claim_writer``."""
        path = f"{WRITERS}/{token}"
        kind = self._begin("claim", path)
        if kind in ERRNOS:
            raise _os_error(kind, path)
        if path not in self.device.files:
            self.device.create(path, b"")
        self._writers.add(token)
        self.device.writers[token] = self

    def writer_lives(self, token: str) -> bool:
        """See ``Disk.writer_lives``; the file of a writer that is gone is removed."""
        self._begin("lives", token)
        if token in self.device.writers:
            return True
        if f"{WRITERS}/{token}" in self.device.files:
            self.device.remove(f"{WRITERS}/{token}")
        return False

    def close(self) -> None:
        """Let go of every claimed writer; closing again does nothing."""
        for token in sorted(self._writers):
            self.device.writers.pop(token, None)
            path = f"{WRITERS}/{token}"
            if not self.crashed and path in self.device.files:
                self.device.remove(path)
        self._writers.clear()

    # -- faults

    def kill(self, power: bool) -> None:
        """The process dies here, between two operations."""
        self._killed = True
        self.injected["power loss" if power else "process crash"] += 1
        self.close()
        if power:
            self.device.lose_power()

    def _check_alive(self) -> None:
        if self.crashed:
            raise SimCrash

    def _see(self, operation: str, path: str, target: str = "") -> None:
        if self._watch is not None and not self.crashed:
            self._watch(operation, path, target)

    def _begin(self, operation: str, path: str) -> str:
        """Count the operation and return the fault that it meets; ``half`` before a crash."""
        self._check_alive()
        number, nth = self.operations, self._calls[operation]
        self.operations += 1
        self._calls[operation] += 1
        crash = self._crash
        if crash is not None and number == crash.operation:
            if crash.effect == "none" or operation in ("scan", "read", "lives", "claim"):
                self._die(crash)
            return "half" if crash.effect == "half" else "all"
        fault = self._planned.find(operation, nth)
        if fault is None:
            return ""
        self._inject(fault, path)
        return fault.kind

    def _inject(self, fault: DiskFault, path: str) -> None:
        operation, kind = fault.operation, fault.kind
        if kind in ("rot", "vanish"):
            blocks = sorted(name for name in self.device.files if name.endswith(".safetensors"))
            blocks = [name for name in blocks if name.startswith("v1/")]
            if not blocks:
                return
            victim = self.device.random.choice(blocks)
            (self.device.flip if kind == "rot" else self.device.vanish)(victim)
            self._see(kind, victim)
        elif kind in ("slow", "stuck"):
            self.delay_s += fault.slow_s if kind == "slow" else STUCK_S
        if operation == "read" and kind in ("short", *ERRNOS):
            self._see("hurt", path)
        self.injected[f"{kind} {operation}"] += 1
        if kind in ERRNOS and operation in ("scan", "read"):
            raise _os_error(kind, path)

    def _end(self, kind: str) -> None:
        """After the effect of an operation: fail or die if that was planned."""
        if kind in ("half", "all"):
            assert self._crash is not None, "only a crash cuts an operation"
            self._die(self._crash)
        if kind == "late":
            raise _os_error("EIO", "after the operation")
        if kind in ERRNOS:
            raise _os_error(kind, "during the operation")

    def _die(self, crash: CrashPoint) -> None:
        self.kill(crash.power)
        raise SimCrash


def _os_error(name: str, path: str) -> OSError:
    number = getattr(errno, name)
    return OSError(number, os.strerror(number), path)
