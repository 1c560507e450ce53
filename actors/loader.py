"""The loader: owns the model file; reads every tensor once and sends the rows that are needed.

Invariants

(I1) A slot that was lent is sent in a Tensor or given back, on every path but one: what a stuck
     read may still write to is lost.
(I2) The bytes sent are those that the identity was made of: the digest is computed again on the
     way, and a file that changed ends in Loaded with an error.
(I3) The file is closed when ``run`` ends, however it ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from millpond.codecs.messages import Loaded, Tensor, Weights
from millpond.runtime.channels import Outbox
from millpond.runtime.errors import EngineStalled, ModelError, UnsupportedModel
from millpond.runtime.families.tensors import expected_tensors
from millpond.runtime.gguf_file import GgufFile, StoredTensor
from millpond.runtime.identity import ModelIdentity
from millpond.runtime.staging import StagingPool
from millpond.runtime.tensor_digest import add_to_digest, combined_digest
from millpond.runtime.tensor_types import encoding_of
from millpond.runtime.threads import Worker
from millpond.runtime.weight_rows import RowRange, stage_rows, staged_row_bytes


@dataclass(frozen=True, slots=True)
class LoaderStatistics:
    """Tensors sent and to be sent, bytes of the file read and to be read, bytes staged."""

    tensors: int
    tensors_total: int
    read_bytes: int
    total_bytes: int
    staged_bytes: int


class Loader:
    """Reads on ``worker``, stages in ``pool``; a slot is prepared while the engine copies another.

    file      open; the loader owns it from here on
    identity  of that very file; its ``numerics.weight_form`` decides between f32 and repacked rows
    stall_s   reading and staging one slot longer than this ends the load; None: never
    """

    def __init__(
        self,
        file: GgufFile,
        identity: ModelIdentity,
        pool: StagingPool,
        worker: Worker,
        stall_s: float | None = None,
    ) -> None:
        self._file, self._identity = file, identity
        self._pool, self._worker, self._stall_s = pool, worker, stall_s
        self._needed = expected_tensors(identity.config, file.tensors.keys())
        # mutable state, changed only in run
        self._digests: dict[str, bytes] = {}
        self._sent = self._read_bytes = self._staged_bytes = 0

    def __repr__(self) -> str:
        figures = self.statistics()
        return (
            f"<Loader {figures.tensors} of {figures.tensors_total} tensors, "
            f"{figures.read_bytes} of {figures.total_bytes} bytes>"
        )

    async def run(self, weights: Outbox[Weights]) -> None:
        """Send the rows of every needed tensor, then Loaded, and close the arrow."""
        with self._file:
            async with weights:
                try:
                    for tensor in self._file.tensors.values():
                        await self._send(tensor, weights)
                    error = self._difference()
                except ModelError as failure:
                    error = str(failure)
                except EngineStalled as failure:
                    error = f"{self._file.path}: it cannot be read: {failure}"
                await weights.send(Loaded(tensors=self._sent, error=error))

    def statistics(self) -> LoaderStatistics:
        """Return how far the loader is."""
        total = sum(tensor.payload_bytes for tensor in self._file.tensors.values())
        return LoaderStatistics(
            self._sent, len(self._needed), self._read_bytes, total, self._staged_bytes
        )

    async def _send(self, tensor: StoredTensor, weights: Outbox[Weights]) -> None:
        """Send one tensor in ranges that fit a slot; one that nobody reads is only hashed."""
        if tensor.name in self._needed:
            digest = hashlib.sha256()
            for rows in self._ranges(tensor):
                await self._send_rows(rows, digest, weights)
            self._digests[tensor.name] = digest.digest()
            self._sent += 1
        else:
            self._digests[tensor.name] = await self._hash(tensor)
        self._read_bytes += tensor.payload_bytes

    async def _hash(self, tensor: StoredTensor) -> bytes:
        """Return the digest of a tensor that is not needed, read in slots' worths."""
        digest = hashlib.sha256()
        for start in range(0, tensor.payload_bytes, self._pool.slot_bytes):
            end = min(start + self._pool.slot_bytes, tensor.payload_bytes)
            add = partial(add_to_digest, self._file, tensor, range(start, end), digest)
            await self._worker.call(add, self._stall_s)
        return digest.digest()

    async def _send_rows(
        self, rows: RowRange, digest: hashlib._Hash, weights: Outbox[Weights]
    ) -> None:
        lease = await self._pool.lend(rows.payload_bytes)
        try:
            stage = partial(stage_rows, self._file, rows, lease.buffer, digest)
            await self._worker.call(stage, self._stall_s)
            await weights.send(_message(rows, lease.slot, lease.lease))
        except EngineStalled:
            raise  # the stuck thread may still write to the slot
        except BaseException:
            self._pool.give(lease.slot, lease.lease)  # (I1): neither raises once it was sent
            raise
        self._staged_bytes += rows.payload_bytes

    def _ranges(self, tensor: StoredTensor) -> Iterator[RowRange]:
        encoding = encoding_of(tensor, self._identity.numerics.weight_form)
        row_bytes = staged_row_bytes(tensor, encoding)
        step = self._pool.slot_bytes // row_bytes
        if not step:
            raise UnsupportedModel(
                f"tensor {tensor.name!r}: found rows of {row_bytes} bytes, "
                f"expected at most {self._pool.slot_bytes}, a weight slot"
            )
        for first in range(0, tensor.rows, step):
            yield RowRange(tensor, encoding, first, min(step, tensor.rows - first))

    def _difference(self) -> str:
        found = combined_digest(self._file.tensors, self._digests)
        if found == self._identity.tensors_sha256:
            return ""
        return (
            f"{self._file.path}: found tensors with digest {found}, "
            f"expected {self._identity.tensors_sha256}: the file changed while it was loaded"
        )


def _message(rows: RowRange, slot: int, lease: int) -> Tensor:
    return Tensor(
        name=rows.tensor.name,
        shape=rows.tensor.shape,
        encoding=rows.encoding,
        first_row=rows.first_row,
        rows=rows.rows,
        slot=slot,
        lease=lease,
        payload_bytes=rows.payload_bytes,
        scale_dtype="" if rows.encoding == "f32" else "f32",
    )
