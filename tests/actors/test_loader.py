"""The loader sends exact rows, gives every slot back, and notices a file that changes under it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from millpond.actors.loader import Loader
from millpond.codecs.fingerprint import NumericsIdentity
from millpond.codecs.messages import Loaded, Tensor, Weights
from millpond.codecs.repack import PackedParts
from millpond.runtime.channels import Inbox, channel
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.errors import EngineStalled
from millpond.runtime.gguf_file import GgufFile
from millpond.runtime.identify import identify
from millpond.runtime.staging import StagingPool
from millpond.runtime.threads import Worker

pytestmark = pytest.mark.anyio
SLOT_BYTES = 2**20


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class InlineWorker:
    """Runs each call at once, after a checkpoint."""

    async def call(self, function: Callable[[], Any], stall_s: float | None = None) -> Any:
        await anyio.lowlevel.checkpoint()
        return function()


class StuckWorker(InlineWorker):
    """As a thread that hangs in a read: from the fourth call on nothing comes back in time."""

    def __init__(self) -> None:
        self.calls = 0

    async def call(self, function: Callable[[], Any], stall_s: float | None = None) -> Any:
        self.calls += 1
        if self.calls > 3:
            raise EngineStalled(f"host: a call ran longer than {stall_s:g} s")
        return await super().call(function)


def make_loader(
    path: Path, pool: StagingPool, weight_form: str = "dense", worker: Worker | None = None
) -> Loader:
    numerics = NumericsIdentity(
        device_kind="cpu",
        device_model="test",
        compute_dtype="float32",
        weight_form=weight_form,
        mlx_version="0",
        blas_name="",
        blas_version="",
        blas_threads=1,
        kernel_revision=1,
    )
    file = GgufFile.open(path)
    identity = identify(file, RuntimeConfig(model=str(path)), numerics, {})
    return Loader(file, identity, pool, worker or InlineWorker(), 5)


class FakeEngine:
    """Copies rows out of their slots, dequantises what was repacked, and puts tensors together."""

    def __init__(self, pool: StagingPool) -> None:
        self.pool = pool
        self.tensors: dict[str, np.ndarray] = {}
        self.rows: dict[str, int] = {}
        self.encodings: dict[str, str] = {}
        self.loaded: Loaded | None = None

    async def run(self, weights: Inbox[Weights]) -> None:
        async with weights:
            async for message in weights:
                if isinstance(message, Loaded):
                    self.loaded = message
                    continue
                view = self.pool.view(message.slot, message.lease, message.payload_bytes)
                self._copy(message, view)
                self.pool.give(message.slot, message.lease)

    def _copy(self, tensor: Tensor, view: memoryview) -> None:
        columns = tensor.shape[-1]
        whole = self.tensors.setdefault(tensor.name, np.empty(tensor.shape, np.float32))
        assert self.rows.get(tensor.name, 0) == tensor.first_row
        self.rows[tensor.name] = tensor.first_row + tensor.rows
        self.encodings[tensor.name] = tensor.encoding
        target = whole.reshape(-1, columns)[tensor.first_row : tensor.first_row + tensor.rows]
        if tensor.encoding == "f32":
            target[...] = np.frombuffer(view, np.float32).reshape(target.shape)
            return
        bits = int(tensor.encoding[1:].split("g")[0])
        assert tensor.encoding == f"q{bits}g32" and tensor.scale_dtype == "f32"
        parts = PackedParts.inside(view, target.size, bits)
        stream = np.unpackbits(parts.packed.view(np.uint8), bitorder="little")
        quants = stream.reshape(-1, bits) @ (1 << np.arange(bits))
        found = np.repeat(parts.scales, 32) * quants.astype(np.float32)
        target[...] = (found + np.repeat(parts.biases, 32)).reshape(target.shape)


async def load(loader: Loader, pool: StagingPool) -> FakeEngine:
    outbox, inbox = channel("weights", Weights, 2)
    engine = FakeEngine(pool)
    async with anyio.create_task_group() as group:
        group.start_soon(loader.run, outbox)
        group.start_soon(engine.run, inbox)
    assert pool.statistics().lent == 0
    return engine


def fixture(folder: Path, stem: str) -> Path:
    return folder / "fixtures" / f"{stem}.gguf"


def flip_a_bit(path: Path, name: str) -> None:
    tensor = next(one for one in GGUFReader(path).tensors if one.name == name)
    with path.open("r+b") as file:
        file.seek(tensor.data_offset)
        byte = file.read(1)[0]
        file.seek(tensor.data_offset)
        file.write(bytes([byte ^ 1]))


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


STEMS = (
    "gemma3-tiny-f16",
    "gemma4-dense-k256-mixed",
    "gemma4-ple-tiny-q8_0",
    "gemma4-moe-tiny-q8_0",
)


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("weight_form", ["dense", "repacked"])
@pytest.mark.parametrize("slot_bytes", [SLOT_BYTES, 2**14])
async def test_every_needed_row_arrives_with_its_exact_value(
    shared_reference: Path, stem: str, weight_form: str, slot_bytes: int
) -> None:
    path = fixture(shared_reference, stem)
    pool = StagingPool("weights", 2, slot_bytes)
    loader = make_loader(path, pool, weight_form)
    engine = await load(loader, pool)
    assert engine.loaded == Loaded(tensors=len(engine.tensors))
    unused = set()
    for tensor in GGUFReader(path).tensors:
        expected = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name in engine.tensors:
            assert np.array_equal(engine.tensors[tensor.name], expected, equal_nan=True)
        else:
            unused.add(tensor.name.split(".", 2)[2])
    assert unused <= {"attn_k.weight", "attn_v.weight", "attn_k_norm.weight"}
    assert bool(unused) == ("ple" in stem)
    statistics = loader.statistics()
    assert statistics.tensors == statistics.tensors_total == len(engine.tensors)
    assert statistics.read_bytes == statistics.total_bytes
    is_packed = any(encoding != "f32" for encoding in engine.encodings.values())
    assert is_packed == (weight_form == "repacked" and "f16" not in stem)


async def test_a_row_that_no_slot_holds_is_a_clear_error(shared_reference: Path) -> None:
    pool = StagingPool("weights", 2, 100)
    loader = make_loader(fixture(shared_reference, "gemma3-tiny-f32"), pool)
    engine = await load(loader, pool)
    assert engine.loaded is not None
    assert "found rows of 256 bytes, expected at most 100" in engine.loaded.error


async def test_one_changed_byte_after_the_identity_fails_the_load(
    shared_reference: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copy(fixture(shared_reference, "gemma4-ple-tiny-f16"), tmp_path))
    for name in ("token_embd.weight", "blk.7.attn_k.weight"):  # one is needed, one only hashed
        pool = StagingPool("weights", 2, SLOT_BYTES)
        loader = make_loader(path, pool)
        flip_a_bit(path, name)
        engine = await load(loader, pool)
        assert engine.loaded is not None
        assert "the file changed while it was loaded" in engine.loaded.error


async def test_a_file_cut_short_after_the_identity_fails_the_load(
    shared_reference: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copy(fixture(shared_reference, "gemma3-tiny-q8_0"), tmp_path))
    pool = StagingPool("weights", 2, SLOT_BYTES)
    loader = make_loader(path, pool)
    cut_in_half(path)
    engine = await load(loader, pool)
    assert engine.loaded is not None
    assert "the file became shorter while it was read" in engine.loaded.error


async def test_a_file_swapped_at_the_same_path_changes_nothing(
    shared_reference: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copy(fixture(shared_reference, "gemma3-tiny-q8_0"), tmp_path))
    pool = StagingPool("weights", 2, SLOT_BYTES)
    loader = make_loader(path, pool)
    shutil.copy(fixture(shared_reference, "gemma3-tiny-f16"), tmp_path / "other")
    os.replace(tmp_path / "other", path)
    engine = await load(loader, pool)
    assert engine.loaded is not None and not engine.loaded.error


async def test_cancelling_anywhere_brings_every_slot_home(shared_reference: Path) -> None:
    path = fixture(shared_reference, "gemma3-tiny-q4_0")
    for turns in range(40):
        pool = StagingPool("weights", 2, SLOT_BYTES)
        loader = make_loader(path, pool)
        outbox, inbox = channel("weights", Weights, 1)
        async with anyio.create_task_group() as group:
            group.start_soon(loader.run, outbox)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        async for message in inbox:
            if isinstance(message, Tensor):
                pool.give(message.slot, message.lease)
        assert pool.statistics().lent == 0


async def test_an_engine_that_is_gone_brings_every_slot_home(shared_reference: Path) -> None:
    pool = StagingPool("weights", 2, SLOT_BYTES)
    loader = make_loader(fixture(shared_reference, "gemma3-tiny-q4_0"), pool)
    outbox, inbox = channel("weights", Weights, 1)
    inbox.close()
    with pytest.raises(anyio.BrokenResourceError):
        await loader.run(outbox)
    assert pool.statistics().lent == 0


async def test_a_read_that_hangs_ends_the_load_and_keeps_the_slot_it_may_write_to(
    shared_reference: Path,
) -> None:
    pool = StagingPool("weights", 2, SLOT_BYTES)
    loader = make_loader(fixture(shared_reference, "gemma3-tiny-f32"), pool, worker=StuckWorker())
    outbox, inbox = channel("weights", Weights, 2)
    engine = FakeEngine(pool)
    async with anyio.create_task_group() as group:
        group.start_soon(loader.run, outbox)
        group.start_soon(engine.run, inbox)
    assert engine.loaded is not None and "longer than 5 s" in engine.loaded.error
    assert pool.statistics().lent == 1
