"""Planned trouble of a simulated disk, as plain data."""

from __future__ import annotations

import msgspec

ERRNOS = ("ENOSPC", "EIO", "EROFS", "EACCES", "EMFILE")


class SimCrash(BaseException):
    """The simulated process is dead: killed, or without power."""


class DiskFault(msgspec.Struct, frozen=True, kw_only=True):
    """One planned fault.

    operation  scan, read, write, append, rename, remove or claim
    nth        which call of that operation, from 0
    times      how many calls in a row, from that one on
    kind       ENOSPC, EIO, EROFS, EACCES, EMFILE: the call fails, perhaps half done;
               late: the call does its work and fails with EIO; slow, stuck: it takes long;
               short: a read returns too little; rot: a bit of some block flips before the call;
               vanish: somebody else removes some block before the call
    """

    operation: str
    nth: int
    kind: str
    times: int = 1


class CrashPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where the process dies.

    operation  number of the operation within the process, from 0
    effect     how much of it is done: none, half or all
    power      the machine loses power, too
    """

    operation: int
    effect: str = "half"
    power: bool = False
