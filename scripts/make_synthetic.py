#!/usr/bin/env python3
"""Write a GGUF of a known shape with random weights, for measurements where no weights are at hand.

    scripts/make_synthetic.py --preset gemma3-4b --out 4b.gguf                 7.8 GB of bfloat16
    scripts/make_synthetic.py --preset gemma3-4b --type Q4_0 --out 4b-q4.gguf
    scripts/make_synthetic.py --preset gemma4-31b --type Q4_0 --layers 12 --out 31b.gguf

The same arguments give the same bytes.  Weights are cut out of one pool of random values at random
places, so that writing is as fast as the disk; memory stays at a few hundred megabytes.  A model of
random weights says nothing worth reading: every text ends by ``--max-tokens``.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from millpond.codecs.ggml_types import BY_NAME
from millpond.runtime.families.config_gguf import model_config
from millpond.runtime.families.tensors import Shape, expected_tensors
from millpond.runtime.testing.gguf_writer import RawTensor, string_bytes, tensor_bytes, value_bytes

POOL_VALUES = 2**25
ALIGNMENT = 32
CONTROL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")


@dataclass(frozen=True, slots=True)
class Preset:
    """Vocabulary, layers per full one, and metadata without the tokenizer's."""

    vocab: int
    period: int
    metadata: Callable[[int], dict[str, object]]
    layers: int


def _gemma3(
    width: int, inner: int, heads: tuple[int, int], window: int
) -> Callable[[int], dict[str, object]]:
    def metadata(layers: int) -> dict[str, object]:
        return {
            "general.architecture": "gemma3",
            "gemma3.context_length": 131072,
            "gemma3.embedding_length": width,
            "gemma3.block_count": layers,
            "gemma3.feed_forward_length": inner,
            "gemma3.attention.head_count": heads[0],
            "gemma3.attention.head_count_kv": heads[1],
            "gemma3.attention.key_length": 256,
            "gemma3.attention.value_length": 256,
            "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
            "gemma3.attention.sliding_window": window,
            "gemma3.rope.freq_base": 1e6,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
        }

    return metadata


def _gemma4_31b(layers: int) -> dict[str, object]:
    slides = np.array([(index + 1) % 6 != 0 for index in range(layers)])
    return {
        "general.architecture": "gemma4",
        "gemma4.context_length": 262144,
        "gemma4.embedding_length": 5376,
        "gemma4.block_count": layers,
        "gemma4.feed_forward_length": 21504,
        "gemma4.attention.head_count": 32,
        "gemma4.attention.head_count_kv": np.where(slides, 16, 4).astype(np.int32),
        "gemma4.attention.key_length": 512,
        "gemma4.attention.value_length": 512,
        "gemma4.attention.key_length_swa": 256,
        "gemma4.attention.value_length_swa": 256,
        "gemma4.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma4.attention.sliding_window": 1024,
        "gemma4.attention.sliding_window_pattern": slides,
        "gemma4.rope.freq_base": 1e6,
        "gemma4.rope.freq_base_swa": 1e4,
        "gemma4.rope.dimension_count": 512,
        "gemma4.rope.dimension_count_swa": 256,
        "gemma4.final_logit_softcapping": 30.0,
    }


PRESETS: Mapping[str, Preset] = {
    "gemma3-4b": Preset(262208, 6, _gemma3(2560, 10240, (8, 4), 1024), 34),
    "gemma3-270m": Preset(262144, 6, _gemma3(640, 2048, (4, 1), 512), 18),
    "gemma3-mini": Preset(4096, 6, _gemma3(256, 512, (2, 1), 512), 6),
    "gemma4-31b": Preset(262144, 6, _gemma4_31b, 60),
}


def main() -> int:
    """Write the file and print what it is."""
    options = _options()
    preset = PRESETS[options.preset]
    layers = options.layers or preset.layers
    pairs = preset.metadata(layers) | {
        "general.name": f"synthetic {options.preset}",
        "general.file_type": {"BF16": 32, "F16": 1, "F32": 0, "Q4_0": 2, "Q8_0": 7}[options.type],
    }
    shapes = _shapes(pairs, preset, layers)
    started = time.perf_counter()
    with Path(options.out).open("wb") as file:
        _write(file, pairs | _tokenizer(preset.vocab), shapes, options)
    size = Path(options.out).stat().st_size
    seconds = time.perf_counter() - started
    found = {"preset": options.preset, "layers": layers, "type": options.type, "bytes": size}
    print(json.dumps(found | {"seconds": round(seconds, 1)}))
    return 0


def _shapes(pairs: Mapping[str, object], preset: Preset, layers: int) -> dict[str, Shape]:
    width = int(str(pairs[f"{pairs['general.architecture']}.embedding_length"]))
    config = model_config(pairs, {"token_embd.weight": (preset.vocab, width)})
    sliding = {
        f"blk.{index}.attn_v.weight" for index in range(layers) if (index + 1) % preset.period
    }
    return dict(sorted(expected_tensors(config, sliding).items()))


def _write(
    file: BinaryIO,
    pairs: Mapping[str, object],
    shapes: Mapping[str, Shape],
    options: argparse.Namespace,
) -> None:
    source = np.random.default_rng(options.seed)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(pairs))
    file.write(head + b"".join(string_bytes(k) + value_bytes(v) for k, v in pairs.items()))
    offset = 0
    for name, shape in shapes.items():
        kind = options.type if len(shape) > 1 else "F32"
        file.write(tensor_bytes(name, RawTensor(shape, kind, b""), offset))
        offset += _padding(_stored(shape, kind)) + _stored(shape, kind)
    file.write(bytes(_padding(file.tell())))
    pools = {kind: _pool(kind, source) for kind in {options.type, "F32"}}
    for name, shape in shapes.items():
        kind = options.type if len(shape) > 1 else "F32"
        size = _stored(shape, kind)
        if len(shape) > 1:
            _write_matrix(file, pools[kind], (size, BY_NAME[kind].block_bytes), source)
        else:
            file.write(_vector(name, shape, source).astype("<f4").tobytes())
        file.write(bytes(_padding(size)))


def _write_matrix(
    file: BinaryIO, pool: memoryview, size_and_block: tuple[int, int], source: np.random.Generator
) -> None:
    left, block = size_and_block
    while left:
        first = int(source.integers(0, len(pool) // block // 2)) * block
        part = pool[first : first + min(left, len(pool) // 2 // block * block)]
        file.write(part)
        left -= len(part)


def _vector(name: str, shape: Shape, source: np.random.Generator) -> np.ndarray:
    """Norm weights around 1; frequency factors of 1 (rotated) and 1e30 (not)."""
    if name == "rope_freqs.weight":
        return np.where(np.arange(shape[0]) < shape[0] // 4, 1.0, 1e30)
    return 1 + 0.1 * source.standard_normal(shape)


def _pool(kind: str, source: np.random.Generator) -> memoryview:
    """Random weights of about 0.02, as the type stores them."""
    values = (0.02 * source.standard_normal(POOL_VALUES)).astype(np.float32)
    if kind == "F32":
        return _bytes_of(values)
    if kind == "F16":
        return _bytes_of(values.astype(np.float16))
    if kind == "BF16":
        return _bytes_of((values.view(np.uint32) >> 16).astype(np.uint16))
    blocks = np.frombuffer(source.bytes(POOL_VALUES // 32 * BY_NAME[kind].block_bytes), np.uint8)
    blocks = blocks.reshape(-1, BY_NAME[kind].block_bytes).copy()
    steps = {"Q4_0": 4.6, "Q8_0": 74.0}[kind]  # root mean square of its codes
    blocks[:, :2] = np.frombuffer(np.float16(0.02 / steps).tobytes(), np.uint8)
    return _bytes_of(blocks)


def _bytes_of(values: np.ndarray[Any, Any]) -> memoryview:
    return values.reshape(-1).view(np.uint8).data


def _stored(shape: Shape, kind: str) -> int:
    found = BY_NAME[kind]
    return math.prod(shape) // found.block_values * found.block_bytes


def _padding(size: int) -> int:
    return -size % ALIGNMENT


def _tokenizer(vocab: int) -> dict[str, object]:
    """Control tokens, every byte, then made-up words."""
    head = [*CONTROL, *(f"<0x{value:02X}>" for value in range(256))]
    kinds = np.ones(vocab, np.int32)
    kinds[: len(CONTROL)], kinds[len(CONTROL) : len(head)] = 3, 6
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*head, *(f"w{index}" for index in range(vocab - len(head)))],
        "tokenizer.ggml.scores": -np.arange(vocab, dtype=np.float32),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), required=True)
    parser.add_argument("--out", required=True)
    kinds = ("BF16", "F16", "F32", "Q4_0", "Q8_0")
    parser.add_argument("--type", choices=kinds, default="BF16", help="of the matrices")
    parser.add_argument("--layers", type=int, help="fewer than the preset has")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
