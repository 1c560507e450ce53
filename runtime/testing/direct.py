"""From a GGUF file to a loaded ``Model`` without any actor: for scripts and tests.

MLX is imported inside, after the BLAS that it shall use.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from millpond.codecs.messages import Tensor
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.errors import ContextExceeded, EmptyPrompt, InvalidParameter
from millpond.runtime.families.tensors import expected_tensors
from millpond.runtime.gguf_file import GgufFile
from millpond.runtime.identify import identify
from millpond.runtime.identity import ModelIdentity
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.numerics import numerics_identity
from millpond.runtime.tensor_types import encoding_of
from millpond.runtime.weight_rows import RowRange, stage_rows, staged_row_bytes

if TYPE_CHECKING:
    from millpond.runtime.model import Model
    from millpond.runtime.testing.reading import DirectModel


def load_direct(
    path: str | os.PathLike[str], config: RuntimeConfig | None = None
) -> tuple[ModelIdentity, KvLayout, DirectModel]:
    """Return identity, layout and the loaded model of a file; it must not change meanwhile.

    config  its ``model`` is ``path`` from here on; None: defaults, no environment is looked at

    The calling thread becomes the model's.  Raises ModelError, ConfigError or DescriptorError.
    """
    whole = msgspec.structs.replace(config or RuntimeConfig(model=""), model=os.fspath(path))
    settings = whole.checked()
    numerics = numerics_identity(settings)  # before MLX is imported below
    from millpond.runtime.testing.reading import DirectModel

    with GgufFile.open(path) as file:
        identity = identify(file, settings, numerics, {})
        layout = KvLayout.from_descriptor(
            identity.descriptor,
            settings.block_tokens,
            settings.chunk_tokens_on(numerics.device_kind),
            settings.sliding_boundary_on(numerics.device_kind),
        )
        model = DirectModel(identity, layout)
        load_weights(file, identity, model, settings.limits.weight_slot_bytes)
    return identity, layout, model


def load_weights(file: GgufFile, identity: ModelIdentity, model: Model, slot_bytes: int) -> None:
    """Stage every tensor that the model needs, in ranges of about ``slot_bytes``, and build it."""
    needed = expected_tensors(identity.config, file.tensors.keys())
    for stored in file.tensors.values():
        if stored.name not in needed:
            continue
        encoding = encoding_of(stored, identity.numerics.weight_form)
        step = max(1, slot_bytes // staged_row_bytes(stored, encoding))
        for first in range(0, stored.rows, step):
            rows = RowRange(stored, encoding, first, min(step, stored.rows - first))
            payload = memoryview(bytearray(rows.payload_bytes))
            stage_rows(file, rows, payload, hashlib.sha256())
            model.load_rows(_message(rows), payload)
    model.finish_load()


def check_ids(ids: Sequence[int], identity: ModelIdentity) -> None:
    """Raise EmptyPrompt, InvalidParameter or ContextExceeded for ids that the model cannot run."""
    if not ids:
        raise EmptyPrompt("token ids: found none, expected at least one")
    vocab, context = identity.config.vocab, identity.config.context_tokens
    for place, token_id in enumerate(ids):
        if not 0 <= token_id < vocab:
            raise InvalidParameter(f"token id {place}: found {token_id}, expected 0 to {vocab - 1}")
    if len(ids) > context:
        raise ContextExceeded(f"token ids: found {len(ids)}, the context has {context}")


def chunks(tokens: int, chunk_tokens: int) -> Iterator[range]:
    """Cut positions ``[0, tokens)`` on the grid: whole chunks, the last one at its true length."""
    for first in range(0, tokens, chunk_tokens):
        yield range(first, min(first + chunk_tokens, tokens))


def _message(rows: RowRange) -> Tensor:
    return Tensor(
        name=rows.tensor.name,
        shape=rows.tensor.shape,
        encoding=rows.encoding,
        first_row=rows.first_row,
        rows=rows.rows,
        slot=0,
        lease=0,
        payload_bytes=rows.payload_bytes,
        scale_dtype="" if rows.encoding == "f32" else "f32",
    )
