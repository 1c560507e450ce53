"""The digest of a model file's tensors: what makes two files the same model for the KV cache.

A digest per tensor (SHA-256 of its bytes as stored), and one over all of them: SHA-256 of the
lines ``name·type·shape·digest``, sorted by name.  Order, offsets and splitting do not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
from millpond.runtime.gguf_file import GgufFile, StoredTensor

READ_BYTES = 2**20  # per thread: fits the cache, so hashing finds what reading left there
HASH_THREADS = 2  # reading is memory-bound beyond that


@contextmanager
def digesting(file: GgufFile) -> Iterator[Callable[[], dict[str, bytes]]]:
    """Read every tensor beside the block; the call that it gets waits for name → 32 bytes.

    That call blocks and raises ModelUnreadable.  After an error in the block the rest is not read.
    """
    largest_first = sorted(file.tensors.values(), key=lambda one: -one.payload_bytes)
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="digest") as threads:
        running = {one.name: threads.submit(tensor_digest, file, one) for one in largest_first}
        try:
            yield lambda: {name: future.result() for name, future in running.items()}
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def tensor_digests(file: GgufFile) -> dict[str, bytes]:
    """Read every tensor and return name → 32 bytes.  Blocks; raises ModelUnreadable."""
    with digesting(file) as found:
        return found()


def tensor_digest(file: GgufFile, tensor: StoredTensor) -> bytes:
    """Read one tensor and return the SHA-256 of its bytes.  Blocks; raises ModelUnreadable."""
    digest = hashlib.sha256()
    add_to_digest(file, tensor, range(tensor.payload_bytes), digest)
    return digest.digest()


def add_to_digest(file: GgufFile, tensor: StoredTensor, part: range, digest: hashlib._Hash) -> None:
    """Read some bytes of a tensor into its digest.  Blocks; raises ModelUnreadable."""
    buffer = memoryview(bytearray(min(READ_BYTES, len(part))))
    for start in range(part.start, part.stop, READ_BYTES):
        piece = buffer[: part.stop - start]
        file.read(tensor, start, piece)
        digest.update(piece)


def combined_digest(tensors: Mapping[str, StoredTensor], digests: Mapping[str, bytes]) -> str:
    """Return the hex digest over all tensors; ``digests`` has one entry for each."""
    combined = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        line = (name, tensor.type.name, tensor.shape, digests[name].hex())
        combined.update(msgspec.json.encode(line) + b"\n")
    return combined.hexdigest()
