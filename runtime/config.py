"""Every limit, with its unit and the reason for its number.  Plain data; checked once, at spawn."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
from millpond.codecs.descriptors import KvDType
from millpond.runtime.errors import ConfigError

ComputeDType = Literal["float32", "bfloat16"]
WeightForm = Literal["dense", "repacked"]
KIB, MIB, GIB = 2**10, 2**20, 2**30
_SLOTS = ("restore_slots", "spill_slots", "weight_slots")
CHUNK_TOKENS_CPU, CHUNK_TOKENS_GPU = 256, 1024
BOUNDARY_TOKENS_CPU, BOUNDARY_TOKENS_GPU = 1024, 4096
_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40}
_UNITS |= {"k": KIB, "m": MIB, "g": GIB, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of queues, pools and waits; the defaults suit one machine and one user.

    requests_max          requests in the house at once; more are refused (QueueFull)
    sequences_max         sequences that run at once; the others wait in order
    bypass_max            admissions, or chunks, that later or shorter prompts may have before one
                          that waits: short prompts are quick, and long ones never starve
    held_max              live caches of finished requests that are kept for the next turn
    channel_messages      messages that wait in one arrow; small, so that back-pressure shows
    restore_slots, spill_slots, weight_slots   slots of each staging pool
    slot_bytes_max        largest slot; larger blocks pass in plane ranges
    weight_slot_bytes     bytes of a weight slot: long enough for full speed, short in memory
    restores_max          requests whose blocks are read at once
    restore_attempts_max  times that a restore starts over after a bad block, then it is a miss
    disk_readers          threads that read blocks
    engine_stall_s        a pinned call longer than this fails the house (600 until warm)
    engine_warm_s         the same until the first kernels are compiled
    disk_stall_s          a file operation longer than this latches spilling off
    read_stall_s          reading a weight slot's worth of a file longer than this fails a load
    drain_s               time that a closing house gets to write what was offered
    stuck_s               a request that stands still so long, with nothing to wait for, is ended;
                          longer than any turn of the loop, shorter than a user's patience; 0: never
    quarantine_bytes_max  bytes that bad files may keep for inspection
    free_bytes_min        free space of the file system that spilling never takes
    """

    requests_max: int = 64
    sequences_max: int = 8
    bypass_max: int = 4
    held_max: int = 16
    channel_messages: int = 64
    restore_slots: int = 4
    spill_slots: int = 16
    weight_slots: int = 3
    slot_bytes_max: int = 64 * MIB
    weight_slot_bytes: int = 32 * MIB
    restores_max: int = 2
    restore_attempts_max: int = 4
    disk_readers: int = 2
    engine_stall_s: float = 120.0
    engine_warm_s: float = 600.0
    disk_stall_s: float = 60.0
    read_stall_s: float = 120.0
    drain_s: float = 30.0
    stuck_s: float = 60.0
    quarantine_bytes_max: int = 256 * MIB
    free_bytes_min: int = 512 * MIB


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How to open a runtime.

    model                    path of a GGUF file
    repo                     name for the cache namespace; None: ``general.name``, else the stem
    spill                    False: neither read nor write a spill root
    spill_root               folder of the KV blocks; None: ``$XDG_CACHE_HOME/millpond/spill``
    spill_bytes_max          budget of the root: bytes, ``"10GiB"`` or ``"25%"`` of its file system
    kv_dtype                 f32, f16 or bf16; None: environment, else the compute dtype
    compute_dtype            float32 or bfloat16; None: float32 on a CPU, else bfloat16
    weight_form              dense or repacked; None: dense
    reuse                    ``exact``: a hit changes no bit
    block_tokens             tokens of a KV block
    prefill_chunk_tokens     ``C`` of the grid, a multiple of block_tokens; None: by the device, see
                             ``chunk_tokens_on``
    sliding_boundary_tokens  sliding blocks are kept at its multiples; 0: everywhere; None: by the
                             device, see ``sliding_boundary_on``
    kv_bytes_max             budget of the live KV caches, running ones by their worst case: bytes,
                             ``"4GiB"`` or a share ``"50%"`` of the device's memory
    spill_key_file           file of a key with which blocks are encrypted; None: the environment's
                             ``MILLPOND_SPILL_KEY``, else they are plain
    weight_bytes_max         the weights may take so much of it as they are held
    context_tokens           tokens of prompt and completion at most; None: as trained
    durability               ``process`` survives a crash of ours, ``power`` one of the machine
    deterministic            sequences decode one by one, so that none depends on what runs beside
                             it; False: together, equal up to rounding and several times faster
    blas_threads             threads of the float32 BLAS; more than one collapses on a busy machine
    fast_blas                use the BLAS of the ``fast-cpu`` extra where it is installed
    limits                   bounds
    chat_template            path of a Jinja file that replaces the chat template of the model
    """

    model: str
    repo: str | None = None
    spill: bool = True
    spill_root: str | None = None
    spill_bytes_max: int | str = "10GiB"
    kv_dtype: str | None = None
    compute_dtype: ComputeDType | None = None
    weight_form: WeightForm | None = None
    reuse: Literal["exact"] = "exact"
    block_tokens: int = 256
    prefill_chunk_tokens: int | None = None
    sliding_boundary_tokens: int | None = None
    context_tokens: int | None = None
    durability: Literal["process", "power"] = "process"
    blas_threads: int = 1
    fast_blas: bool = True
    limits: Limits = Limits()
    chat_template: str | None = None
    deterministic: bool = False
    kv_bytes_max: int | str = "50%"
    weight_bytes_max: int | str = "90%"
    spill_key_file: str | None = None

    def checked(self) -> RuntimeConfig:
        """Return this configuration if every field has its type and range; raise ConfigError."""
        try:
            found = msgspec.convert(msgspec.to_builtins(self), RuntimeConfig)
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigError(f"configuration: {error}") from error
        for name in ("block_tokens", "prefill_chunk_tokens", "blas_threads"):
            value = getattr(found, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: found {value}, expected at least 1")
        for name in ("sequences_max", "channel_messages", *_SLOTS):
            if getattr(found.limits, name) < 1:
                raise ConfigError(f"limits.{name}: found 0 or less, expected at least 1")
        for name in msgspec.structs.asdict(found.limits):
            if getattr(found.limits, name) < 0:
                raise ConfigError(f"limits.{name}: found a negative number, expected 0 or more")
        if found.spill_root == "":
            raise ConfigError("spill_root: found no text, expected the path of a folder")
        for name in ("spill_bytes_max", "kv_bytes_max", "weight_bytes_max"):
            parse_bytes(getattr(found, name), total=1)
        return found

    def chunk_tokens_on(self, device_kind: str) -> int:
        """Return ``C``: as configured, else about 256 tokens on a CPU and 1,024 on a GPU.

        Small chunks are faster on a CPU, and a hit is a multiple of them; a GPU waits for the host
        to describe a small chunk longer than it computes.  Figures: ``docs/performance.md``.
        """
        if self.prefill_chunk_tokens is not None:
            return self.prefill_chunk_tokens
        wanted = CHUNK_TOKENS_CPU if device_kind == "cpu" else CHUNK_TOKENS_GPU
        return max(1, wanted // self.block_tokens) * self.block_tokens

    def sliding_boundary_on(self, device_kind: str) -> int:
        """Return as configured, else about 1,024 tokens on a CPU and 4,096 on a GPU.

        A GPU prefills a chunk in less time than the rows of a window take to the host.  The ends
        of prompts, and where prompts were seen to part, are kept anyway.
        """
        if self.sliding_boundary_tokens is not None:
            return self.sliding_boundary_tokens
        chunk = self.chunk_tokens_on(device_kind)
        wanted = BOUNDARY_TOKENS_CPU if device_kind == "cpu" else BOUNDARY_TOKENS_GPU
        return max(1, wanted // chunk) * chunk

    def resolved_spill_root(self) -> Path:
        """Return the absolute spill root; ``~`` is expanded."""
        if self.spill_root is not None:
            return Path(self.spill_root).expanduser().absolute()
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(cache).expanduser().absolute() / "millpond" / "spill"


def parse_bytes(value: int | str, total: int) -> int:
    """Return a count of bytes from an int, ``"10GiB"``, ``"512 MB"`` or a share ``"25%"`` of total.

    Raises ConfigError for anything else.
    """
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"bytes: found {value}, expected 0 or more")
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", value)
    if match is None or (match[2] != "%" and match[2].lower() not in _UNITS):
        raise ConfigError(f'bytes: found {value!r}, expected for example 1000000, "10GiB" or "25%"')
    if match[2] == "%":
        share = float(match[1])
        if share > 100:
            raise ConfigError(f"bytes: found {value!r}, expected at most 100%")
        return int(total * share / 100)
    return int(float(match[1]) * _UNITS[match[2].lower()])


def resolve_kv_dtype(
    configured: str | None, compute_dtype: str, environment: Mapping[str, str]
) -> KvDType:
    """Return the KV dtype: configuration, else environment, else the compute dtype.

    Environment: ``MILLPOND_KV_DTYPE=f32|f16|bf16``, else ``HF2Q_F16_KV=1`` (F16).  Called once, at
    spawn.  Raises ConfigError for an unknown name.
    """
    name = configured or environment.get("MILLPOND_KV_DTYPE") or ""
    if not name:
        if environment.get("HF2Q_F16_KV") == "1":
            return KvDType.F16
        return KvDType.F32 if compute_dtype == "float32" else KvDType.BF16
    try:
        return KvDType(name.lower())
    except ValueError:
        raise ConfigError(f"kv_dtype: found {name!r}, expected f32, f16 or bf16") from None
