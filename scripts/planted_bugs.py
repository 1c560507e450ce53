"""The bugs that ``scripts/mutants.py`` plants: a few lines of source each, and what replaces them.

A bug is wrong in a way that a tired programmer's change could be.  ``old`` stands exactly once in
its file; one that does not apply any more is an error of this list, not a caught bug.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace ``old`` by ``new`` in a file of the package."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """One bug: its name as a sentence would put it, and the edits that make it."""

    name: str
    edits: tuple[Edit, ...]


def one(name: str, file: str, old: str, new: str) -> PlantedBug:
    """Return a bug of one edit."""
    return PlantedBug(name, (Edit(file, old, new),))


BUGS = (
    # -- rows
    one(
        "wrong ring slot",
        "runtime/testing/fake_caches.py",
        "return np.arange(first, end) % self._ring",
        "return np.arange(first + 1, end + 1) % self._ring",
    ),
    one(
        "sliding window one row short",
        "runtime/kv/layout.py",
        "return range(max(0, boundary - self.sliding_window) // self.block_tokens, end)",
        "return range(max(0, boundary - self.sliding_window + 1) // self.block_tokens, end)",
    ),
    one(
        "a block is copied out one token late",
        "actors/engine_offers.py",
        "first_token=part.block * tokens,",
        "first_token=part.block * tokens + 1,",
    ),
    one(
        "rows of a partial chunk are kept",
        "runtime/sequence.py",
        "if tokens != layout.chunk_tokens or chunk.first_token % layout.chunk_tokens:",
        "if tokens < layout.block_tokens or chunk.first_token % layout.chunk_tokens:",
    ),
    one(
        "decode writes its row one position late",
        "runtime/sequence.py",
        "position=self.prompt_tokens + step - 1,",
        "position=self.prompt_tokens + step,",
    ),
    one(
        "a hit may cover the whole prompt",
        "runtime/kv/layout.py",
        "return max(0, prompt_tokens - 1) // self.chunk_tokens * self.chunk_tokens",
        "return max(0, prompt_tokens) // self.chunk_tokens * self.chunk_tokens",
    ),
    one(
        "off by one at a block border: the last block before a boundary is not restored",
        "runtime/kv/layout.py",
        "            return range(end)\n",
        "            return range(end - 1)\n",
    ),
    # -- names
    one(
        "hash without parent",
        "codecs/fingerprint.py",
        "return hashlib.sha256(fingerprint + parent + token_ids).digest()",
        "return hashlib.sha256(fingerprint + token_ids).digest()",
    ),
    one(
        "wrong salt: the chain's root has none",
        "codecs/fingerprint.py",
        "return hashlib.sha256(fingerprint + guard + reuse.encode() + salt.encode()).digest()",
        "return hashlib.sha256(fingerprint + guard + reuse.encode()).digest()",
    ),
    one(
        "weights do not name their blocks: the chain's root has no guard",
        "codecs/fingerprint.py",
        "return hashlib.sha256(fingerprint + guard + reuse.encode() + salt.encode()).digest()",
        "return hashlib.sha256(fingerprint + reuse.encode() + salt.encode()).digest()",
    ),
    one(
        "a restore expects the root as every block's parent",
        "actors/store_restore.py",
        "parent=submit.chain[index - 1] if index else submit.root,",
        "parent=submit.root,",
    ),
    # -- files
    one(
        "missing verify: the payload's checksum is not compared",
        "runtime/kv/files.py",
        "    _check_digest(block.check_header(bytes(header)), digest.digest())\n",
        "    block.check_header(bytes(header))\n",
    ),
    one(
        "rename before the write is complete: blocks are written under their name",
        "runtime/kv/files.py",
        "        disk.write(draft.temporary, parts, draft.sync)\n",
        "        disk.write(draft.temporary, (), draft.sync)\n"
        "        disk.rename(draft.temporary, draft.block.path, draft.sync)\n"
        "        disk.remove(draft.block.path)\n"
        "        disk.write(draft.block.path, parts, draft.sync)\n"
        "        disk.rename(draft.block.path, draft.temporary, draft.sync)\n",
    ),
    one(
        "durability power does not sync",
        "actors/store_spill.py",
        "root.options.sync)",
        "False)",
    ),
    # -- slots and leases
    one(
        "lease freed twice",
        "actors/engine_batch.py",
        "        self.restores.give(plan.restores)\n",
        "        self.restores.give(plan.restores)\n"
        "        self.restores.give(plan.restores[:1])\n",
    ),
    one(
        "a slot is lent twice",
        "runtime/staging.py",
        "        slot = self._free.pop()\n",
        "        slot = self._free[-1]\n",
    ),
    one(
        "slots of a failed sequence never come home",
        "actors/engine_offers.py",
        "            for part in parts:\n"
        "                self._pool.give(part.lease.slot, part.lease.lease)\n"
        "            return\n",
        "            return\n",
    ),
    one(
        "slots of a block that is there already never come home",
        "actors/store_spill.py",
        "            self.figures.duplicates += 1\n",
        "            self.figures.duplicates += 1\n            staged.clear()\n",
    ),
    one(
        "a restored block is not unpinned",
        "actors/store_restore.py",
        "                self._root.index.unpin(plan.tips)\n",
        "                self._root.index.unpin(plan.tips[1:])\n",
    ),
    one(
        "live caches of finished sequences are not freed",
        "actors/engine_batch.py",
        "        if not held.boundaries:\n            self.frees.append(sequence.id)\n",
        "",
    ),
    one(
        "one sequence too many is admitted",
        "runtime/scheduler.py",
        "return max(0, min(waiting, sequences_max - running))",
        "return max(0, min(waiting, sequences_max + 3 - running))",
    ),
    # -- eviction
    one(
        "evict while reading: pins are not looked at",
        "runtime/kv/index.py",
        "if block.children is None and not block.pins:",
        "if block.children is None:",
    ),
    one(
        "the budget is checked without the new block",
        "runtime/kv/books.py",
        "            return self.ledger.used_bytes + size - self.bytes_max\n",
        "            return self.ledger.used_bytes - self.bytes_max\n",
    ),
    one(
        "a block is evicted from the index, its file stays",
        "runtime/kv/index.py",
        "            found.append(block)\n",
        "            found.append(block) if freed % 3 else None\n",
    ),
    # -- messages and waiting
    one(
        "lost wake-up: taking a message does not wake the sender",
        "runtime/channels.py",
        "        data = arrow.queue.popleft()\n        arrow.notify()\n",
        "        data = arrow.queue.popleft()\n",
    ),
    one(
        "lost wake-up: the engine does not hear of new requests",
        "actors/engine.py",
        "                    assert_never(message)\n            self._wake()\n",
        "                    assert_never(message)\n",
    ),
    one(
        "lost wake-up: a slot that comes home wakes nobody",
        "runtime/staging.py",
        "        self._free.append(slot)\n        self._notify()\n",
        "        self._free.append(slot)\n",
    ),
    one(
        "cancel dropped in restore",
        "actors/store.py",
        "        request.cancelled = True\n        request.scope.cancel()\n",
        "        if request.turn.is_set():\n            return\n"
        "        request.cancelled = True\n        request.scope.cancel()\n",
    ),
    one(
        "a Cancel before Admit says that the request was admitted",
        "actors/store.py",
        "before_admit=not request.admitted)",
        "before_admit=False)",
    ),
    one(
        "the engine ignores the Cancel of a running request",
        "actors/engine.py",
        "            running.cancelled = True\n",
        "",
    ),
    one(
        "a cancelled request that waits finishes twice",
        "actors/engine_batch.py",
        "        sequence = self.waiting.pop(request_id, None)\n",
        "        sequence = self.waiting.get(request_id)\n",
    ),
    one(
        "a follower does not wait for its leader's rows",
        "actors/engine_sharing.py",
        "                if leader.prefilled >= sequence.follows_tokens:\n",
        "                if leader.prefilled:\n",
    ),
    one(
        "what a dropped cache was forked for is freed with it",
        "actors/engine_batch.py",
        "            frees=tuple(one for one in dict.fromkeys(self.frees) if one not in forked),\n",
        "            frees=tuple(dict.fromkeys([*self.frees, *forked])),\n",
    ),
    one(
        "a request that ends before it runs keeps its memory",
        "actors/engine.py",
        "        self._notes.append(Held(request_id=sequence.id))\n",
        "",
    ),
    one(
        "held caches are kept beyond their number",
        "runtime/kv/memory.py",
        "        while len(self._held) > self._held_max or self._is_over():\n",
        "        while False:\n",
    ),
    one(
        "a second attempt does not start over",
        "actors/store_restore.py",
        "_Attempt(submit, admissions, attempt > 0)",
        "_Attempt(submit, admissions, False)",
    ),
    one(
        "every message of a second attempt starts over",
        "actors/store_restore.py",
        "        read.sent, attempt.starts_over = True, False\n",
        "        read.sent = True\n",
    ),
    one(
        "what is restored is copied over a fork of the same step",
        "actors/engine_batch.py",
        "                if message.request_id not in forked\n",
        "                if message.request_id >= 0\n",
    ),
    one(
        "a live cache is forked where its window has moved on",
        "runtime/sharing.py",
        "    if not layout.sliding_groups:\n",
        "    if layout.groups:\n",
    ),
    one(
        "a closed arrow loses what was sent before",
        "runtime/channels.py",
        "        if not arrow.queue:\n            if arrow.sender_closed:\n",
        "        if not arrow.queue or arrow.sender_closed:\n            if arrow.sender_closed:\n",
    ),
    # -- memory of live caches
    one(
        "a request that is cancelled before its Admit keeps its claim",
        "actors/store_admission.py",
        "            self.memory.release(request.id)\n",
        "            pass\n",
    ),
    one(
        "a held cache is dropped although a request was told of it",
        "runtime/kv/memory.py",
        "drops = [one for one in self._outlived(names) if not self._held[one].pins]",
        "drops = list(self._outlived(names))",
    ),
    # -- the root's books
    one(
        "what a writer that is gone had reserved stays reserved",
        "runtime/kv/recovery.py",
        "if not disk.writer_lives(token)]",
        "if not token]",
    ),
    one(
        "temporaries of a writer that is gone are not swept",
        "runtime/kv/scan.py",
        "        if lives[token]:\n",
        "        if token:\n",
    ),
    one(
        "blocks behind a lost one are not removed at open",
        "runtime/kv/recovery.py",
        "                    orphans.append(block_path(folder, gone.chain_hash))\n",
        "                    continue\n",
    ),
    one(
        "the quarantine does not count",
        "runtime/kv/books.py",
        "        self.apply(Record(Kind.ASIDE, bytes=held), records)\n",
        "",
    ),
    one(
        "a block does not know what follows it",
        "runtime/kv/index.py",
        "            adopt(above, block)\n",
        "            pass\n",
    ),
    one(
        "another process never hears that a block went",
        "runtime/kv/books.py",
        "                self.ledger.doomed.pop(path_of(block), None)\n"
        "            records.append(gone_record(block))\n",
        "                self.ledger.doomed.pop(path_of(block), None)\n",
    ),
    one(
        "a temporary that failed is left behind",
        "runtime/kv/writing.py",
        "        self._books.discard(draft.temporary, file_bytes(draft.block))\n",
        "",
    ),
)
