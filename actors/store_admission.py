"""The store's admission: memory for each request's live cache, then a restore's turn, in order.

Invariants

(I1) A request that was admitted keeps its claim until the engine's Held; one that was not gives it
     back when it leaves.
(I2) At most ``sequences_max + restores_max`` requests have a claim: as many as can run, and those
     that are read meanwhile.  The others wait here, where their order can still change.
(I3) The held cache that a request was given is pinned until its Admit was sent, so a Drop follows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from anyio import CancelScope, Event
from millpond.actors.store_parts import StoreParts
from millpond.codecs.messages import Admit, Held, RestoreReport, Submit
from millpond.runtime.admission import WaitingRequests
from millpond.runtime.kv.memory import KvMemory


@dataclass(frozen=True, slots=True)
class Found:
    """A held live cache, and how many tokens of it a request takes."""

    held_id: int
    tokens: int


@dataclass(slots=True, eq=False)
class Request:
    """A request from Submit to Admit or Cancel.

    may_restore   its prefix may be read from the disk
    turn          set once it has its memory
    restore_turn  set once it may read
    over          set once its Admit was sent, or never will be
    held          the live cache that it begins with
    """

    submit: Submit
    scope: CancelScope
    may_restore: bool
    turn: Event = field(default_factory=Event)
    restore_turn: Event = field(default_factory=Event)
    over: Event = field(default_factory=Event)
    held: Found | None = None
    cancelled: bool = False
    admitted: bool = False

    @property
    def id(self) -> int:
        """The request id."""
        return self.submit.request_id

    @property
    def choice_of(self) -> int:
        """Id of the request that this one is another choice of; its own if of none."""
        return self.id if self.submit.twin_of is None else self.submit.twin_of


class Admission:
    """Used by the store only, on the event loop.

    drops  held caches that the engine is to be told to free, in order
    """

    def __init__(self, parts: StoreParts) -> None:
        limits = parts.limits
        self._layout, self._context_tokens = parts.layout, parts.context_tokens
        self._restores_max = max(1, limits.restores_max)
        self._claims_max = max(1, limits.sequences_max) + self._restores_max
        # mutable state, changed only in the methods
        self.memory = KvMemory(parts.kv_bytes_max, limits.held_max)
        self.restoring = 0
        self.drops: deque[int] = deque()
        self._dropping = Event()
        self._waiting = WaitingRequests(limits.bypass_max)
        self._requests: dict[int, Request] = {}
        self._claimed: dict[int, Submit] = {}
        self._readers: deque[Request] = deque()  # those that may read, the running ones first

    def enter(self, request: Request) -> None:
        """A request came; its ``turn`` is set once it has its memory."""
        self._requests[request.id] = request
        self._waiting.add(request.id, request.submit.priority)
        self._advance()

    def leave(self, request: Request) -> None:
        """Its Admit was sent, or it was cancelled before."""
        request.over.set()
        del self._requests[request.id]
        self._waiting.remove(request.id)
        self.end_restore(request)
        self.let_go(request)
        if not request.admitted and self._claimed.pop(request.id, None) is not None:
            self.memory.release(request.id)
        self._advance()

    def let_go(self, request: Request) -> None:
        """It needs no held cache any more."""
        if request.held is not None:
            self.memory.unpin(request.held.held_id)
            request.held = None

    def begin_restore(self, request: Request) -> None:
        """It may read once it is its turn."""
        if request not in self._readers:
            self._readers.append(request)
            self._let_read()

    def end_restore(self, request: Request) -> None:
        """It reads no more; the next one may."""
        if request in self._readers:
            self._readers.remove(request)
            self._let_read()

    def end(self, message: Held) -> None:
        """The engine is done with a request."""
        submit = self._claimed.pop(message.request_id)
        if not message.boundaries:
            self.memory.release(message.request_id)
        else:
            block = self._layout.block_tokens
            names = {submit.chain[tokens // block - 1]: tokens for tokens in message.boundaries}
            size = self._layout.held_bytes(message.boundaries[-1])
            self._drop(self.memory.hold(message.request_id, size, names))
        self._advance()

    def has_leader(self, request: Request) -> bool:
        """True iff another choice of the same prompt is at the engine."""
        return request.choice_of != request.id and self.memory.has_claim(request.choice_of)

    async def wait_drops(self) -> None:
        """Wait until there is something to drop."""
        while not self.drops:
            await self._dropping.wait()

    def _advance(self) -> None:
        """Give memory to those who wait, as far as it goes."""
        while len(self._claimed) < self._claims_max:
            first = self._waiting.first()
            if first is None:
                return
            request = self._requests[first]
            request.held = self._find(request)
            drops = self._claim(request)
            if drops is None:
                return
            self._drop(drops)
            self._waiting.take(first)
            self._claimed[first] = request.submit
            request.turn.set()
            if request.may_restore and request.held is None and request.choice_of == first:
                self.begin_restore(request)

    def _claim(self, request: Request) -> tuple[int, ...] | None:
        """Claim memory beside the held cache, or else instead of it."""
        size = self._size(request.submit)
        drops = self.memory.claim(request.id, size)
        if drops is None and request.held is not None:
            self.let_go(request)
            drops = self.memory.claim(request.id, size)
        return drops

    def _find(self, request: Request) -> Found | None:
        """Look for a held cache with a prefix of this prompt, and pin it."""
        submit, layout = request.submit, self._layout
        if submit.no_store or self.has_leader(request):
            return None
        limit = layout.reuse_limit(len(submit.token_ids) // 4)
        block = layout.block_tokens
        ends = range(limit, 0, -layout.chunk_tokens)
        found = self.memory.find([submit.chain[tokens // block - 1] for tokens in ends])
        if found is None:
            return None
        self.memory.pin(found[0])
        return Found(*found)

    def _size(self, submit: Submit) -> int:
        wanted = len(submit.token_ids) // 4 + submit.sampling.max_tokens
        return self._layout.live_bytes(min(wanted, self._context_tokens))

    def _let_read(self) -> None:
        for request in list(self._readers)[: self._restores_max]:
            request.restore_turn.set()
        self.restoring = min(len(self._readers), self._restores_max)

    def _drop(self, drops: tuple[int, ...]) -> None:
        self.drops.extend(drops)
        if drops:
            self._dropping.set()
            self._dropping = Event()


def admission(
    request: Request, prefix: int, report: RestoreReport, offers: tuple[int, tuple[int, ...], bool]
) -> Admit:
    """Return what the engine is sent.

    offers  first block of full groups to offer, blocks of sliding ones, and whether any at all
    """
    submit = request.submit
    return Admit(
        request_id=submit.request_id,
        token_ids=submit.token_ids,
        root=submit.root,
        chain=submit.chain,
        sampling=submit.sampling,
        prefix_tokens=prefix,
        restored=report,
        full_from_block=offers[0],
        sliding_blocks=offers[1],
        offers=offers[2],
        held_id=request.held.held_id if request.held is not None else None,
        shares=not submit.no_store,
        priority=submit.priority,
        twin_of=submit.twin_of,
    )
