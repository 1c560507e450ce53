"""What must always hold in a world; the first breach raises ``Violation``.

(V1) Every answer equals the one of a run without faults; what a reader sees of a stream is the
     beginning of it.
(V2) Every request ends exactly once, with the answer, or with the error of a fault that happened.
(V3) On the arrows: one Admit at most and nothing of a request after its early Cancel; one Finished.
(V4) All slots, leases, pins, reservations and live caches come home.
(V5) The budget holds after every operation; a root that was opened over it only shrinks.
(V6) What was quarantined is never read.
(V7) No block of a full group is written without its parent, or outlives it.
(V8) A file that appears under a block's name is that block, whole, with the rows it should have.
(V9) What the durability promises is there after a crash.
(V10) A hit is never longer than what lies whole on the disk, or than what another request with that
     prefix and salt has in a live cache; in quiet times it is never shorter.
(V11) A Cancel that was sent reaches the engine, and its request stops within a step.
(V12) No more live caches exist, and no more sequences run, than the limits allow.
(V13) A block that is being read is not evicted: it is there unless somebody else took it.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec
from millpond.codecs.messages import (
    Admit,
    Cancel,
    Finished,
    Restore,
    Submit,
    ToEngine,
    ToGateway,
    Tokens,
    ToStore,
)
from millpond.runtime.testing.oracle import Oracle
from millpond.runtime.testing.sim_device import SimDevice

BLOCK_FOLDER, BLOCK_SUFFIX, QUARANTINE_FOLDER = "v1/", ".safetensors", "quarantine/"
LATE_TOKENS_MAX = 4  # sent while a Cancel was on its way: one step, and what the arrows held up


class Violation(BaseException):
    """Something that must always hold did not; nothing in the house can catch it."""


class Judge:
    """Remembers the first breach: what comes after it are its consequences."""

    def __init__(self) -> None:
        # mutable state, changed only in the methods below
        self.first = ""

    def breach(self, text: str) -> Violation:
        """Return the error to raise."""
        self.first = self.first or text
        return Violation(text)

    def explain(self, others: Iterable[str]) -> None:
        """Add what else ended the process of the first breach; it may be the cause."""
        found = "; ".join(dict.fromkeys(others))
        if self.first and found:
            self.first = f"{self.first} (with it: {found})"


class DiskWatch:
    """Looks at every operation of every process: (V5) to (V9)."""

    def __init__(self, judge: Judge, device: SimDevice, oracle: Oracle, bytes_max: int) -> None:
        self._breach, self._device, self._oracle = judge.breach, device, oracle
        self._bytes_max = bytes_max
        # mutable state, changed only in the methods below
        self.written: dict[str, bytes] = {}  # what each block file must hold, once published
        self._promised: dict[str, bytes] = {}
        self._stray: set[str] = set()  # blocks whose parents somebody else took or damaged
        self._most = bytes_max
        self.alone = True  # no other process uses the root

    def process_starts(self) -> None:
        """A process finds the root as it is: from here on it only shrinks to the budget (V5)."""
        self._most = max(self._bytes_max, self._device.used_bytes)

    def see(self, operation: str, path: str, target: str) -> None:
        """Look at one operation; ``SimDisk`` calls it."""
        match operation:
            case "read":
                if path.startswith(QUARANTINE_FOLDER):
                    raise self._breach(f"V6: {path} is read")
                return
            case "missing":
                if self.alone and path in self.written and path not in self._stray:
                    raise self._breach(f"V13: {path} is gone while it is read")
                return
            case "hurt":
                self._lead_astray(path)
                return
            case "write" if path.startswith(BLOCK_FOLDER) and path.endswith(BLOCK_SUFFIX):
                self._see_published(path)
            case "rename":
                self._see_rename(path, target)
            case "published":
                if target.startswith(BLOCK_FOLDER):
                    self._promised[target] = self.written[target]
                return
            case "remove":
                self._promised.pop(path, None)
                self._see_gone(path)
            case "rot" | "vanish":
                self._promised.pop(path, None)
                self._lead_astray(path)
        self._check_budget(operation, path)

    def after_crash(self, power: bool, durability: str) -> None:
        """Compare the device with what was promised (V9)."""
        if not power or durability == "power":
            for path, content in self._promised.items():
                file = self._device.files.get(path)
                if file is None or file.content != content:
                    raise self._breach(f"V9: {path} was published and did not survive the crash")
        elif power:
            self._promised.clear()
        for path in self.written:
            if not self.is_whole(path):
                self._lead_astray(path)

    def is_whole(self, path: str) -> bool:
        """True iff the file is there and as it was published."""
        file = self._device.files.get(path)
        return file is not None and bytes(file.content) == self.written.get(path)

    def _see_rename(self, path: str, target: str) -> None:
        if target.startswith(BLOCK_FOLDER):
            self._see_published(target)
        elif target.startswith(QUARANTINE_FOLDER):
            self._promised.pop(path, None)
            self._see_gone(path)

    def _see_published(self, path: str) -> None:
        block = self._oracle.blocks.get(path)
        if block is None:
            raise self._breach(f"V8: {path} is no block of any request")
        content = bytes(self._device.files[path].content)
        known = self.written.setdefault(path, content)
        if not content.endswith(block.payload) or content != known:
            raise self._breach(f"V8: {path} holds other rows than its tokens have")
        parent = block.parent if block.is_full else ""
        if parent and parent not in self._device.files and parent not in self._stray:
            raise self._breach(f"V7: {path} is written without its parent")
        if parent not in self._stray:
            self._stray.discard(path)

    def _see_gone(self, path: str) -> None:
        if path in self._stray:
            return
        for child in self._oracle.children.get(path, ()):
            if child in self._device.files and child not in self._stray:
                raise self._breach(f"V7: {path} goes before {child}, which follows it")

    def _lead_astray(self, path: str) -> None:
        """Whatever follows a block that somebody else took is on its own."""
        self._stray.add(path)
        for child in self._oracle.children.get(path, ()):
            if child not in self._stray:
                self._lead_astray(child)

    def _check_budget(self, operation: str, path: str) -> None:
        used = self._device.used_bytes
        if used > self._most:
            raise self._breach(
                f"V5: {operation} {path}: found {used} bytes under the root, "
                f"expected at most {self._most}"
            )
        self._most = max(self._bytes_max, used)


class ArrowWatch:
    """Looks at every message of one house: (V2) and (V3).  Its ``see`` is the house's tap."""

    def __init__(self, judge: Judge, forward: Callable[[str, bytes], None]) -> None:
        self._breach, self._forward = judge.breach, forward
        self._decoders = {
            "submissions": msgspec.msgpack.Decoder(ToStore).decode,
            "admissions": msgspec.msgpack.Decoder(ToEngine).decode,
            "tokens": msgspec.msgpack.Decoder(ToGateway).decode,
        }
        # mutable state, changed only in see
        self.submitted: dict[int, Submit] = {}
        self.admitted: set[int] = set()
        self.withdrawn: set[int] = set()
        self.finished: Counter[int] = Counter()
        self.cancelled: set[int] = set()
        self.passed_on: set[int] = set()
        self.late_tokens: Counter[int] = Counter()

    def see(self, arrow: str, data: bytes) -> None:
        """Look at one message, then pass it on."""
        self._forward(arrow, data)
        decode = self._decoders.get(arrow)
        if decode is None:
            return
        message = decode(data)
        match message:
            case Submit():
                self.submitted[message.request_id] = message
            case Restore() | Admit():
                self._see_admission(message)
            case Cancel() if arrow == "submissions":
                self.cancelled.add(message.request_id)
            case Cancel():
                self._see_cancel(message)
            case Tokens() if message.request_id in self.passed_on:
                self.late_tokens[message.request_id] += 1
                if self.late_tokens[message.request_id] > LATE_TOKENS_MAX:
                    raise self._breach(
                        f"V11: request {message.request_id} goes on after its Cancel"
                    )
            case Finished():
                self.finished[message.request_id] += 1
                if self.finished[message.request_id] > 1:
                    raise self._breach(f"V2: request {message.request_id} finished twice")
            case _:
                return

    def check_end(self) -> None:
        """After a house that closed in order: every request finished (V2)."""
        open_ids = sorted(set(self.submitted) - set(self.finished))
        if open_ids:
            raise self._breach(f"V2: requests {open_ids} never finished")
        lost = sorted(self.cancelled - self.passed_on)
        if lost:
            raise self._breach(f"V11: the Cancel of requests {lost} never reached the engine")

    def _see_late(self, request_id: int) -> None:
        self.late_tokens[request_id] += 1
        if self.late_tokens[request_id] > LATE_TOKENS_MAX:
            raise self._breach(f"V11: request {request_id} goes on after its Cancel")

    def _see_cancel(self, message: Cancel) -> None:
        self.passed_on.add(message.request_id)
        if message.before_admit:
            if message.request_id in self.admitted:
                raise self._breach(f"V3: request {message.request_id} is withdrawn after Admit")
            self.withdrawn.add(message.request_id)

    def _see_admission(self, message: Restore | Admit) -> None:
        request_id = message.request_id
        if request_id in self.admitted or request_id in self.withdrawn:
            kind = type(message).__name__
            raise self._breach(f"V3: request {request_id}: {kind} after its Admit or early Cancel")
        if isinstance(message, Admit):
            self.admitted.add(request_id)


def leaves_of(error: BaseException) -> Iterator[BaseException]:
    """Iterate over an error's own errors, or give it itself."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from leaves_of(one)
    else:
        yield error


def story_of(error: BaseException) -> str:
    """Return an error's message and where it was raised; a violation speaks for itself."""
    found = next(leaves_of(error))
    if isinstance(found, Violation):
        return str(found)
    frames = traceback.extract_tb(found.__traceback__)
    ours = [
        frame for frame in frames if "millpond" in frame.filename or "/actors/" in frame.filename
    ]
    place = f" at {ours[-1].filename.rsplit('/', 1)[-1]}:{ours[-1].lineno}" if ours else ""
    return f"{type(found).__name__}: {found}{place}"
