"""``BlockWriter``: reserves room for a block, writes it, gives it its name.  Blocks."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from millpond.runtime.errors import SpillFailed, SpillFull
from millpond.runtime.kv.books import Books
from millpond.runtime.kv.disk import Disk
from millpond.runtime.kv.files import Draft, file_bytes, prepare, publish
from millpond.runtime.kv.index import Shelf
from millpond.runtime.kv.journal import Kind, Record
from millpond.runtime.kv.root_options import RootOptions

Refusal = Literal["off", "parent", "full"]
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # what a full file system says


class BlockWriter:
    """Writes the blocks of one root, at most one at a time."""

    def __init__(self, disk: Disk, options: RootOptions, books: Books) -> None:
        self._disk, self._options, self._books = disk, options, books

    def store(self, shelf: Shelf, draft: Draft) -> Refusal | None:
        """Publish a block; return None, or why it was not kept; a block that is there is kept.

        Raises SpillFailed or OSError if the disk fails.
        """
        with self._prefix_pinned(shelf, draft):
            try:
                return self._reserve_and_write(shelf, draft)
            except SpillFailed as error:
                if error.errno not in FULL:
                    raise
            with self._books.transaction() as records:
                self._books.evict(file_bytes(draft.block), records)
            return self._reserve_and_write(shelf, draft)

    def _reserve_and_write(self, shelf: Shelf, draft: Draft) -> Refusal | None:
        books = self._books
        try:
            with books.transaction() as records:
                standing = self._standing(shelf, draft)
                if standing is None:
                    books.make_room(file_bytes(draft.block), records)
                    books.apply(self._record(Kind.INTENT, shelf, draft), records)
        except SpillFull:
            return "full"
        if standing is None:
            standing = self._write(shelf, draft)
        return "parent" if standing == "parent" else None

    @contextmanager
    def _prefix_pinned(self, shelf: Shelf, draft: Draft) -> Iterator[None]:
        """Room for a block is not made by evicting what it is of no use without."""
        model, names = shelf.folder.rpartition("/")[0], (draft.block.chain_hash, draft.block.parent)
        with self._books.guard:
            pinned = [
                other.blocks[name]
                for folder, other in self._books.ledger.index.shelves.items()
                if folder.rpartition("/")[0] == model and (other.is_full or other is not shelf)
                for name in names
                if name in other.blocks
            ]
            self._books.ledger.index.pin(pinned)
        try:
            yield
        finally:
            with self._books.guard:
                self._books.ledger.index.unpin(pinned)

    def _write(self, shelf: Shelf, draft: Draft) -> Literal["there", "parent"] | None:
        """Write what was reserved; the intent ends here, on every path."""
        books, is_kept = self._books, False
        try:
            prepare(self._disk, draft)
            with books.transaction() as records:
                standing = self._standing(shelf, draft)
                if standing is None:
                    self._publish(draft)
                    is_kept = True
                    books.apply(self._record(Kind.BLOCK, shelf, draft), records)
                    with self._books.guard:
                        books.ledger.doomed.pop(draft.block.path, None)
        finally:
            if not is_kept:
                self._release(draft)
        return standing

    def _publish(self, draft: Draft) -> None:
        try:
            publish(self._disk, draft)
        except SpillFailed:  # the rename may have taken effect nevertheless
            self._books.discard(draft.block.path, file_bytes(draft.block))
            raise

    def _release(self, draft: Draft) -> None:
        self._books.discard(draft.temporary, file_bytes(draft.block))
        release = Record(Kind.RELEASE, token=self._options.token)
        with contextlib.suppress(OSError, SpillFailed), self._books.transaction() as records:
            self._books.apply(release, records)

    def _standing(self, shelf: Shelf, draft: Draft) -> Literal["there", "parent"] | None:
        """Tell what keeps a block from being written now."""
        block = draft.block
        with self._books.guard:
            if block.chain_hash in shelf.blocks:
                return "there"
            if shelf.is_full and block.first_token and block.parent not in shelf.blocks:
                return "parent"
        return None

    def _record(self, kind: Kind, shelf: Shelf, draft: Draft) -> Record:
        block = draft.block
        return Record(
            kind,
            shelf.folder,
            block.chain_hash,
            block.parent,
            block.first_token,
            file_bytes(block),
            self._options.token,
        )
