"""The memory of the device, and whether a model's weights fit into their share of it."""

from __future__ import annotations

from millpond.runtime.errors import ModelTooLarge
from millpond.runtime.families.tensors import expected_tensors
from millpond.runtime.gguf_file import GgufFile
from millpond.runtime.identity import ModelIdentity
from millpond.runtime.weight_rows import held_weight_bytes


def device_memory() -> int:
    """Return its bytes; on the pinned thread, once MLX may be imported."""
    from millpond.runtime.device_memory import memory_bytes

    return memory_bytes()


def check_weights(file: GgufFile, identity: ModelIdentity, bytes_max: int) -> None:
    """Raise ModelTooLarge if the tensors that the model needs would take more, as held."""
    needed = expected_tensors(identity.config, file.tensors.keys())
    found = held_weight_bytes(file.tensors, needed, identity.numerics)
    if found > bytes_max:
        raise ModelTooLarge(
            f"{file.path}: found {found} bytes of weights, expected at most {bytes_max}"
        )
