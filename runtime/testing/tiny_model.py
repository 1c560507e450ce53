"""A whole Gemma 3 of random weights, small enough to run a real house in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from millpond.runtime.families.config_gguf import model_config
from millpond.runtime.families.tensors import expected_tensors
from millpond.runtime.testing.gguf_writer import RawTensor, gguf_bytes

CONTEXT_TOKENS = 2048
_CONTROL = (b"<unk>", b"<bos>", b"<eos>", b"<start_of_turn>", b"<end_of_turn>")
_BYTES = tuple(b"<0x%02X>" % value for value in range(256))
_SPACE = "▁".encode()  # as the file format writes it
_LETTERS = (*(bytes([value]) for value in range(ord("a"), ord("z") + 1)), _SPACE)
TOKENS = (*_CONTROL, *_BYTES, *_LETTERS)
BOS, EOS = 1, 2


def tiny_gemma3(
    seed: int = 0,
    metadata: Mapping[str, object] | None = None,
    tensors: Mapping[str, np.ndarray | RawTensor] | None = None,
) -> bytes:
    """Return a GGUF file: 4 layers (three sliding, window 300 tokens), a vocabulary of bytes.

    seed      of the weights
    metadata  pairs that replace ours; None drops one
    tensors   tensors that replace ours

    The vocabulary has every byte, the lower-case letters and the space, so any text has ids.
    """
    pairs = {k: v for k, v in (_metadata() | dict(metadata or {})).items() if v is not None}
    config = model_config(_metadata(), {"token_embd.weight": (len(TOKENS), _WIDTH)})
    source = np.random.default_rng(seed)
    made: dict[str, np.ndarray | RawTensor] = {
        name: (source.standard_normal(shape) * (0.3 if len(shape) > 1 else 0.1)).astype(np.float32)
        for name, shape in sorted(expected_tensors(config, ()).items())
    }
    return gguf_bytes(pairs, made | dict(tensors or {}))


_WIDTH = 32


def _metadata() -> dict[str, object]:
    return {
        "general.architecture": "gemma3",
        "general.name": "tiny",
        "general.file_type": 0,
        "gemma3.context_length": CONTEXT_TOKENS,
        "gemma3.embedding_length": _WIDTH,
        "gemma3.block_count": 4,
        "gemma3.feed_forward_length": 64,
        "gemma3.attention.head_count": 2,
        "gemma3.attention.head_count_kv": 1,
        "gemma3.attention.key_length": 16,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.attention.sliding_window": 300,
        "gemma3.attention.sliding_window_pattern": 4,
        "gemma3.rope.freq_base": 1e6,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.scores": -np.arange(len(TOKENS), dtype=np.float32),
        "tokenizer.ggml.token_type": _types(),
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _types() -> np.ndarray:
    """2 unknown, 3 control, 6 byte, 1 normal."""
    kinds = [2] + [3] * (len(_CONTROL) - 1) + [6] * len(_BYTES) + [1] * len(_LETTERS)
    return np.array(kinds, np.int32)
