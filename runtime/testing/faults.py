"""Fault scripts: one function for each kind of planned trouble, in the words of a test.

    faults.disk_fails("write", "ENOSPC", nth=3)      # the third write
    faults.disk_slow("read", 0.2, from_s=1.0)        # every read, from one second on
    faults.process_dies(operation=57)                # at the 57th operation of its disk
    faults.thread_dies("engine", call=4)

Numbers begin at 1, and count from the start of the process, or from ``FakeRuntime.inject``.  What
comes back is plain data: it can be compared, printed, and given to marks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
from millpond.runtime.testing.fake_model import ModelFault
from millpond.runtime.testing.sim_faults import SLOW_S, CrashPoint, DiskFault
from millpond.runtime.testing.workers import WorkerFault
from millpond.runtime.testing.world_plan import ProcessPlan

Operation = Literal["scan", "read", "write", "append", "rename", "remove", "claim"]
ErrorName = Literal["ENOSPC", "EIO", "EROFS", "EACCES", "EMFILE"]
ThreadName = Literal["engine", "reader", "writer"]
Effect = Literal["none", "half", "all"]


class ThreadFault(msgspec.Struct, frozen=True, kw_only=True):
    """Planned trouble of one thread.

    thread  engine, reader (the first one) or writer
    fault   which call, and what happens
    """

    thread: ThreadName
    fault: WorkerFault


Fault = DiskFault | CrashPoint | ThreadFault | ModelFault


# -- the disk


def disk_fails(
    operation: Operation,
    error: ErrorName = "EIO",
    *,
    nth: int = 1,
    times: int = 1,
    from_s: float | None = None,
) -> Fault:
    """Return: calls of an operation fail with an ``OSError``, perhaps half done.

    nth, times  which call, and how many in a row
    from_s      every call from that time on instead
    """
    _check(error, ErrorName)
    return _disk(operation, error, (nth, times, from_s))


def disk_slow(
    operation: Operation,
    seconds: float = SLOW_S,
    *,
    nth: int | None = None,
    times: int = 1,
    from_s: float = 0.0,
) -> Fault:
    """Return: calls of an operation take ``seconds``, every one unless ``nth`` says which."""
    found = _disk(operation, "slow", (nth or 1, times, None if nth is not None else from_s))
    return msgspec.structs.replace(found, slow_s=seconds)


def disk_stuck(operation: Operation, *, nth: int = 1) -> Fault:
    """Return: a call of an operation does not come back; ``disk_stall_s`` says who notices when."""
    return _disk(operation, "stuck", (nth, 1, None))


def disk_fails_late(operation: Operation, *, nth: int = 1) -> Fault:
    """Return: a call does all its work, and then fails with EIO."""
    return _disk(operation, "late", (nth, 1, None))


def read_short(*, nth: int = 1) -> Fault:
    """Return: a read of a block gives less than was asked for."""
    return _disk("read", "short", (nth, 1, None))


def block_rots(*, before: Operation = "read", nth: int = 1) -> Fault:
    """Return: before a call of an operation, one bit of some block flips."""
    return _disk(before, "rot", (nth, 1, None))


def block_vanishes(*, before: Operation = "read", nth: int = 1) -> Fault:
    """Return: before a call of an operation, somebody else removes some block."""
    return _disk(before, "vanish", (nth, 1, None))


def process_dies(*, operation: int, effect: Effect = "half", power: bool = False) -> Fault:
    """Return: the process dies at an operation of its disk, whichever it is.

    effect  how much of that operation is done
    power   the machine loses power: what was not synced is kept, lost or garbage
    """
    _check(effect, Effect)
    return CrashPoint(operation=_from_zero(operation), effect=effect, power=power)


# -- threads and model


def thread_slow(thread: ThreadName, *, call: int = 1) -> Fault:
    """Return: a call on a thread takes a second."""
    return _thread(thread, call, "slow")


def thread_stalls(thread: ThreadName, *, call: int = 1) -> Fault:
    """Return: a call on a thread does not come back.

    The engine's ends its requests with EngineStalled after ``engine_stall_s``.
    """
    return _thread(thread, call, "stall")


def thread_dies(thread: ThreadName, *, call: int = 1) -> Fault:
    """Return: a thread ends without an answer; the engine's requests get EngineDied."""
    return _thread(thread, call, "die")


def request_fails(*, step: int = 1) -> Fault:
    """Return: one request of a step of the model gets RequestFailed, the others go on."""
    return ModelFault(step=_from_zero(step), kind="sequence")


def model_breaks(*, step: int = 1) -> Fault:
    """Return: a step raises what no step may raise; a bug, which ends the house."""
    return ModelFault(step=_from_zero(step), kind="bug")


# -- for whoever carries them out


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Faults by what they hit.

    disk, crash, model  of those
    threads             by the thread's name
    """

    disk: tuple[DiskFault, ...]
    crash: CrashPoint | None
    threads: dict[str, tuple[WorkerFault, ...]]
    model: tuple[ModelFault, ...]


def trouble_of(faults: Iterable[Fault]) -> Trouble:
    """Return faults by what they hit; raises ValueError for two crashes, TypeError for no fault."""
    found = list(faults)
    for fault in found:
        if not isinstance(fault, DiskFault | CrashPoint | ThreadFault | ModelFault):
            raise TypeError(f"found {fault!r}, expected a fault: faults.disk_fails(...) and others")
    crashes = [fault for fault in found if isinstance(fault, CrashPoint)]
    if len(crashes) > 1:
        raise ValueError(f"found {len(crashes)} crashes, expected one: a process dies once")
    threads: dict[str, tuple[WorkerFault, ...]] = dict.fromkeys(get_args(ThreadName), ())
    for fault in found:
        if isinstance(fault, ThreadFault):
            threads[fault.thread] += (fault.fault,)
    return Trouble(
        disk=tuple(fault for fault in found if isinstance(fault, DiskFault)),
        crash=crashes[0] if crashes else None,
        threads=threads,
        model=tuple(fault for fault in found if isinstance(fault, ModelFault)),
    )


def added_to(process: ProcessPlan, faults: Iterable[Fault]) -> ProcessPlan:
    """Return the plan of a world's process with more faults; a crash takes the place of its own."""
    trouble = trouble_of(faults)
    return msgspec.structs.replace(
        process,
        crash=trouble.crash or process.crash,
        disk_faults=process.disk_faults + trouble.disk,
        model_faults=process.model_faults + trouble.model,
        reader_faults=process.reader_faults + trouble.threads["reader"],
        writer_faults=process.writer_faults + trouble.threads["writer"],
        engine_faults=process.engine_faults + trouble.threads["engine"],
    )


def _disk(operation: Operation, kind: str, when: tuple[int, int, float | None]) -> DiskFault:
    _check(operation, Operation)
    nth, times, from_s = when
    if times < 1:
        raise ValueError(f"times: found {times}, expected at least 1")
    if from_s is not None:
        return DiskFault(operation=operation, nth=0, kind=kind, from_s=from_s)
    return DiskFault(operation=operation, nth=_from_zero(nth), kind=kind, times=times)


def _thread(thread: ThreadName, call: int, kind: str) -> ThreadFault:
    _check(thread, ThreadName)
    return ThreadFault(thread=thread, fault=WorkerFault(call=_from_zero(call), kind=kind))


def _from_zero(number: int) -> int:
    if number < 1:
        raise ValueError(f"found number {number}, expected at least 1: the first one")
    return number - 1


def _check(name: str, known: object) -> None:
    if name not in get_args(known):
        raise ValueError(f"found {name!r}, expected one of {', '.join(get_args(known))}")
