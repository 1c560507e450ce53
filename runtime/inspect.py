"""What ``millpond inspect`` shows of a GGUF: all that its header tells, no tensor byte is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from millpond.codecs.descriptors import KvSpillDescriptor, KvSpillProvenance
from millpond.codecs.errors import MillpondError
from millpond.codecs.fingerprint import NumericsIdentity, namespace_fingerprint, namespace_of
from millpond.codecs.quants import DEQUANTISED
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.errors import ConfigError
from millpond.runtime.families.config import ModelConfig
from millpond.runtime.families.tensors import expected_tensors
from millpond.runtime.gguf_file import GgufFile, StoredTensor
from millpond.runtime.identify import describe, name_of, quant_of, read_config, repo_of
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.numerics import compute_problem
from millpond.runtime.tensor_types import encoding_of
from millpond.runtime.tokenizer import make_tokenizer
from millpond.runtime.vocabulary import read_vocabulary
from millpond.runtime.weight_rows import staged_row_bytes

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def inspect_report(
    path: str | Path,
    config: RuntimeConfig,
    numerics: NumericsIdentity,
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Return a report of plain data, ready for JSON.

    ``problem`` says why the file cannot be served, ``""`` if it can; ``descriptor``, ``kv``,
    ``memory`` and ``vocabulary`` are None where the file does not get that far.

    Raises ModelNotFound, ModelUnreadable (not a GGUF at all) and ConfigError.
    """
    with GgufFile.open(path) as file:
        report = _head(file, config)
        shape, problem = _attempt(lambda: read_config(file, config))
        needed = set(file.tensors)
        if shape is not None:
            needed = set(expected_tensors(shape, file.tensors.keys()))
            descriptor = describe(file, shape, config, numerics, environment)
            report |= {
                "descriptor": msgspec.json.decode(msgspec.json.encode(descriptor)),
                "layers": _layers(shape),
                "context_tokens": shape.context_tokens,
                "memory": _memory(file, needed, numerics),
            }
            report["kv"], kv_problem = _attempt(lambda: _kv(descriptor, config))
            report["vocabulary"], vocabulary_problem = _attempt(lambda: _vocabulary(file, shape))
            problem = problem or kv_problem or vocabulary_problem
        report["numerics"] = msgspec.to_builtins(numerics)
        report["compute_problem"] = compute_problem(numerics, config)
        report["tensor_types"] = _tensor_types(file, needed)
        report["problem"] = problem
        return report


def _attempt(read: Any) -> tuple[Any, str]:
    """Return what ``read`` gives and no problem, or None and the problem."""
    try:
        return read(), ""
    except ConfigError:
        raise
    except MillpondError as error:
        return None, str(error)


def _head(file: GgufFile, config: RuntimeConfig) -> dict[str, Any]:
    provenance = KvSpillProvenance.from_metadata(file.metadata)
    repo, quant = repo_of(file, config), quant_of(file)
    architecture = file.metadata.get("general.architecture")
    return {
        "path": str(file.path),
        "file_bytes": file.file_bytes,
        "gguf_version": file.version,
        "architecture": architecture if isinstance(architecture, str) else "",
        "name": name_of(file),
        "repo": repo,
        "quant": quant,
        "weights": sum(tensor.elements for tensor in file.tensors.values()),
        "namespace": namespace_of(provenance),
        "fingerprint": namespace_fingerprint(repo, quant, provenance).hex(),
        "provenance": msgspec.to_builtins(provenance),
        "descriptor": None,
        "layers": None,
        "context_tokens": None,
        "memory": None,
        "kv": None,
        "vocabulary": None,
    }


def _layers(shape: ModelConfig) -> list[dict[str, Any]]:
    return [
        {
            "layer": index,
            "kind": layer.kind.value,
            "kv_heads": layer.kv_heads,
            "head_dim": layer.head_dim,
            "feed_forward": layer.feed_forward,
            "kv_source": layer.kv_source,
        }
        for index, layer in enumerate(shape.layers)
    ]


def _tensor_types(file: GgufFile, needed: set[str]) -> list[dict[str, Any]]:
    """One entry per type: counts, bytes as stored, and what becomes of it in either weight form."""
    found: dict[str, dict[str, Any]] = {}
    for tensor in file.tensors.values():
        entry = found.setdefault(
            tensor.type.name,
            {"type": tensor.type.name, "tensors": 0, "unused": 0, "bytes": 0, "weights": 0},
        )
        entry["tensors"] += 1
        entry["unused"] += tensor.name not in needed
        entry["bytes"] += tensor.payload_bytes
        entry["weights"] += tensor.elements
        entry["dense"] = _fate(tensor.type.name)
        is_packed = encoding_of(tensor, "repacked") != "f32"
        entry["repacked"] = "repacked losslessly" if is_packed else entry["dense"]
    return sorted(found.values(), key=lambda entry: -int(entry["bytes"]))


def _fate(kind: str) -> str:
    """What becomes of a type in the dense weight form."""
    if kind not in DEQUANTISED:
        return "unsupported"
    return {"F32": "kept", "F16": "widened", "BF16": "widened"}.get(kind, "dequantised")


def _memory(file: GgufFile, needed: set[str], numerics: NumericsIdentity) -> dict[str, int]:
    """Bytes of the weights as held, for both weight forms; vectors count as the compute dtype."""
    tensors = [file.tensors[name] for name in needed]
    width = _DTYPE_BYTES[numerics.compute_dtype]
    return {
        "dense_bytes": sum(tensor.elements * width for tensor in tensors),
        "repacked_bytes": sum(_repacked_bytes(tensor, width) for tensor in tensors),
    }


def _repacked_bytes(tensor: StoredTensor, width: int) -> int:
    encoding = encoding_of(tensor, "repacked")
    if encoding == "f32":
        return tensor.elements * width
    return tensor.rows * staged_row_bytes(tensor, encoding)


def _kv(descriptor: KvSpillDescriptor, config: RuntimeConfig) -> dict[str, Any]:
    layout = KvLayout.from_descriptor(
        descriptor,
        config.block_tokens,
        config.chunk_tokens_on("cpu"),
        config.sliding_boundary_on("cpu"),
    )
    full = sum(group.block_bytes(1) for group in layout.full_groups)
    sliding = sum(group.block_bytes(1) for group in layout.sliding_groups)
    return {
        "dtype": descriptor.kv_dtype.value,
        "full_bytes_per_token": full,
        "sliding_bytes_per_token": sliding,
        "sliding_bytes_max": sliding * descriptor.sliding_window,
        "block_tokens": layout.block_tokens,
        "groups": [
            {
                "name": group.name,
                "layers": list(group.layers),
                "bytes_per_token": group.block_bytes(1),
                "block_bytes": group.block_bytes(layout.block_tokens),
            }
            for group in layout.groups
        ],
    }


def _vocabulary(file: GgufFile, shape: ModelConfig) -> dict[str, Any]:
    found = read_vocabulary(file.metadata, shape.vocab)
    make_tokenizer(found)  # what only its engine finds, such as an unknown pre-tokeniser
    return {
        "model": found.model,
        "pre": found.pre,
        "tokens": len(found.tokens),
        "merges": len(found.merges),
        "bos": found.bos,
        "eos": found.eos,
        "eot": found.eot,
        "add_bos": found.add_bos,
        "has_chat_template": bool(found.chat_template),
    }
