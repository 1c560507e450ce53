"""G1: a hit changes no bit.  The whole runtime, restarted over one spill root, on both backends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from millpond.runtime import Limits, Runtime, RuntimeConfig, SamplingParams, open_runtime
from millpond.runtime.kv.blocks import pack_tokens
from millpond.runtime.kv.header import read_identity
from millpond.runtime.kv.layout import KvLayout

pytestmark = pytest.mark.anyio
LENGTHS = (255, 256, 257, 511, 512, 513, 700, 1024, 1025, 2000)
SAMPLING = SamplingParams(max_tokens=8, digest_logits=True, ignore_eos=True)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def prompt(length: int, seed: int = 1) -> list[int]:
    ids = np.random.default_rng(seed).integers(4, 500, size=length).tolist()
    return [2, *ids[1:]]


def config(model: Path, root: Path | None, **more: Any) -> RuntimeConfig:
    """Pools so large that a tiny model's prefill never outruns the disk: refusals are not the point."""
    return RuntimeConfig(
        model=str(model),
        spill=root is not None,
        spill_root=str(root) if root else None,
        limits=Limits(spill_slots=256, channel_messages=512),
        **more,
    )


@asynccontextmanager
async def opened(settings: RuntimeConfig) -> AsyncIterator[Runtime]:
    async with open_runtime(settings) as runtime:
        yield runtime
        await runtime.drain()


def roomy(fixture: Path, folder: Path) -> Path:
    """A copy of a tiny model whose context, 1,024 tokens in the file, is 4,096."""
    data = fixture.read_bytes()
    at = data.index(b"gemma3.context_length") + len(b"gemma3.context_length") + 4
    copy = folder / fixture.name
    copy.write_bytes(data[:at] + (4096).to_bytes(4, "little") + data[at + 4 :])
    return copy


def block_files(root: Path, group: str = "*") -> list[Path]:
    return sorted(root.glob(f"v1/*/{group}/*/*.safetensors"))


async def answers(settings: RuntimeConfig, prompts: Sequence[list[int]]) -> list[Any]:
    async with opened(settings) as runtime:
        found = [await runtime.generate(ids, SAMPLING) for ids in prompts]
        await runtime.drain()
        figures = runtime.statistics()
        assert all(pool.lent == 0 for pool in figures.pools), "a slot did not come home"
        assert figures.engine.prefilled_tokens == sum(
            one.usage.prompt_tokens - one.usage.cached_tokens for one in found
        ), "cached_tokens is what was really not prefilled"
    return found


def same(cold: Any, warm: Any) -> None:
    assert warm.token_ids == cold.token_ids
    assert warm.logits_xxh3 == cold.logits_xxh3, "the logits differ in a bit"


async def test_every_length_around_a_border_is_equal_after_a_restart(
    shared_reference: Path, tmp_path: Path
) -> None:
    model = roomy(shared_reference / "fixtures" / "gemma3-tiny-f32.gguf", tmp_path)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    tmp_path = tmp_path / "root"
    cold = await answers(config(model, None), prompts)
    first = await answers(config(model, tmp_path), prompts)
    warm = await answers(config(model, tmp_path), prompts)
    for length, one, two, three in zip(LENGTHS, cold, first, warm, strict=True):
        assert two.usage.cached_tokens == 0
        assert three.usage.cached_tokens == (length - 1) // 256 * 256
        same(one, two)
        same(one, three)


FIXTURES = (
    "gemma3-27b-tiny-q8_0",
    "gemma4-dense-tiny-f16",
    "gemma4-dense-k256-mixed",
    "gemma4-ple-tiny-q8_0",
    "gemma4-moe-tiny-q4_0",
)


@pytest.mark.parametrize("stem", FIXTURES)
@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_every_family_is_equal_after_a_restart(
    shared_reference: Path, tmp_path: Path, stem: str
) -> None:
    model = shared_reference / "fixtures" / f"{stem}.gguf"
    prompts = [prompt(length, seed=length) for length in (257, 700)]
    cold = await answers(config(model, None), prompts)
    await answers(config(model, tmp_path), prompts)
    warm = await answers(config(model, tmp_path), prompts)
    for one, two in zip(cold, warm, strict=True):
        assert two.usage.cached_tokens == (two.usage.prompt_tokens - 1) // 256 * 256
        same(one, two)


@pytest.mark.parametrize(
    ("kv_dtype", "chunk"), [("f32", 16), ("f16", 32), ("bf16", 64), ("bf16", 16), ("f32", 64)]
)
@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_every_ring_residue_is_equal_with_blocks_of_the_window(
    shared_reference: Path, tmp_path: Path, kv_dtype: str, chunk: int
) -> None:
    """The window of the model is 16; blocks are smaller and larger than it."""
    model = shared_reference / "fixtures" / "gemma4-dense-tiny-f32.gguf"
    for block in (8, 16, 32):
        if chunk % block:
            continue
        grid: dict[str, Any] = {
            "kv_dtype": kv_dtype,
            "block_tokens": block,
            "prefill_chunk_tokens": chunk,
            "sliding_boundary_tokens": 0,
        }
        prompts = [prompt(64 + residue, seed=residue) for residue in (0, 1, 2, 7, 15, 16, 17, 33)]
        root = tmp_path / f"{block}"
        cold = await answers(config(model, None, **grid), prompts)
        await answers(config(model, root, **grid), prompts)
        warm = await answers(config(model, root, **grid), prompts)
        for one, two in zip(cold, warm, strict=True):
            assert two.usage.cached_tokens == (two.usage.prompt_tokens - 1) // chunk * chunk
            same(one, two)


@pytest.mark.parametrize("block", [8, 32])
@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_a_deleted_sliding_file_is_a_miss_there_for_every_ring_residue(
    shared_reference: Path, tmp_path: Path, block: int
) -> None:
    """The window is 16: larger than one kind of blocks, smaller than the other."""
    model = shared_reference / "fixtures" / "gemma4-dense-tiny-f32.gguf"
    grid: dict[str, Any] = {
        "block_tokens": block,
        "prefill_chunk_tokens": block,
        "sliding_boundary_tokens": 0,
    }
    prompts = [prompt(block + 16 + residue, seed=residue) for residue in range(16)]
    prompts.append(prompt(block + 80, seed=99))
    cold = await answers(config(model, None, **grid), prompts)
    await answers(config(model, tmp_path, **grid), prompts)
    gone = 0
    for path in block_files(tmp_path, "*sliding*"):
        data = path.read_bytes()
        found = read_identity(data[: 8 + int.from_bytes(data[:8], "little")])[0]
        for ids in prompts:
            last = (len(ids) - 1) // block * block - block
            is_last = found.token_ids == pack_tokens(ids[last : last + block])
            if found.first_token == last and is_last:
                path.unlink()
                gone += 1
    assert gone >= len(prompts)
    warm = await answers(config(model, tmp_path, **grid), prompts)
    for one, two in zip(cold, warm, strict=True):
        limit = (two.usage.prompt_tokens - 1) // block * block
        assert two.usage.cached_tokens == limit - block
        assert sum(two.restore.misses.values()) == 1
        same(one, two)


async def test_a_shared_prefix_is_reused_by_a_longer_prompt(
    shared_reference: Path, tmp_path: Path
) -> None:
    model = roomy(shared_reference / "fixtures" / "gemma3-tiny-f32.gguf", tmp_path)
    short = prompt(600)
    longer = short + prompt(500, seed=9)
    await answers(config(model, tmp_path), [short])
    cold = (await answers(config(model, None), [longer]))[0]
    warm = (await answers(config(model, tmp_path), [longer]))[0]
    assert warm.usage.cached_tokens == 512
    same(cold, warm)


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_one_changed_weight_byte_gives_no_hit(shared_reference: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    data = bytearray((shared_reference / "fixtures" / "gemma3-tiny-f32.gguf").read_bytes())
    model.write_bytes(data)
    ids = prompt(513)
    await answers(config(model, tmp_path / "root"), [ids])
    data[-3] ^= 1
    model.write_bytes(data)
    changed = (await answers(config(model, tmp_path / "root"), [ids]))[0]
    assert changed.usage.cached_tokens == 0
    data[-3] ^= 1
    model.write_bytes(data)
    assert (await answers(config(model, tmp_path / "root"), [ids]))[0].usage.cached_tokens == 512


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_other_salt_dtype_and_grid_give_no_hit(
    shared_reference: Path, tmp_path: Path
) -> None:
    model = shared_reference / "fixtures" / "gemma3-tiny-f32.gguf"
    ids = prompt(513)
    await answers(config(model, tmp_path), [ids])
    for changed in (
        config(model, tmp_path, kv_dtype="f16"),
        config(model, tmp_path, prefill_chunk_tokens=512),
        config(model, tmp_path, block_tokens=128),
    ):
        assert (await answers(changed, [ids]))[0].usage.cached_tokens == 0
    async with opened(config(model, tmp_path)) as runtime:
        assert (await runtime.generate(ids, SAMPLING, salt="a")).usage.cached_tokens == 0
        await runtime.drain()
        assert (await runtime.generate(ids, SAMPLING, salt="b")).usage.cached_tokens == 0
        assert (await runtime.generate(ids, SAMPLING, salt="a")).usage.cached_tokens == 512


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_a_flipped_byte_is_quarantined_and_the_answer_stays(
    shared_reference: Path, tmp_path: Path
) -> None:
    model = roomy(shared_reference / "fixtures" / "gemma3-tiny-f32.gguf", tmp_path)
    ids = prompt(1025)
    tmp_path = tmp_path / "root"
    cold = (await answers(config(model, tmp_path), [ids]))[0]
    victim = block_files(tmp_path, "*-full-*")[1]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 0x10
    victim.write_bytes(data)
    found = (await answers(config(model, tmp_path), [ids]))[0]
    same(cold, found)
    assert found.usage.cached_tokens < 1024
    assert found.restore.misses.get("corrupt") == 1
    assert not victim.exists() or victim.read_bytes() != bytes(data)
    assert any(victim.stem in path.name for path in (tmp_path / "quarantine").iterdir())


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_a_restore_reads_no_more_than_the_minimum(
    shared_reference: Path, tmp_path: Path
) -> None:
    model = roomy(shared_reference / "fixtures" / "gemma3-tiny-f32.gguf", tmp_path)
    ids = prompt(2000)
    await answers(config(model, tmp_path), [ids])
    async with opened(config(model, tmp_path)) as runtime:
        done = await runtime.generate(ids, SAMPLING)
        layout = KvLayout.from_descriptor(runtime.identity.descriptor, 256, 256, 1024)
    blocks = sum(len(layout.blocks_for(group, 1792)) for group in layout.groups)
    assert done.restore.blocks == blocks
    assert done.restore.bytes <= layout.minimum_bytes(1792) + 8192 * blocks


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_a_block_file_opens_with_the_safetensors_library(
    shared_reference: Path, tmp_path: Path
) -> None:
    numpy_loader = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    model = shared_reference / "fixtures" / "gemma3-tiny-f32.gguf"
    await answers(config(model, tmp_path), [prompt(300)])
    files = block_files(tmp_path)
    assert len(files) == 2
    for path in files:
        tensors = numpy_loader.load_file(path)
        assert sorted(tensors) == ["k", "v"]
        assert tensors["k"].shape == tensors["v"].shape
        assert tensors["k"].shape[2] == 256
        assert np.isfinite(tensors["k"]).all()


async def test_a_root_that_cannot_be_used_leaves_the_answers_right(
    shared_reference: Path, tmp_path: Path
) -> None:
    model = shared_reference / "fixtures" / "gemma3-tiny-f32.gguf"
    (tmp_path / "file").write_text("in the way")
    cold = (await answers(config(model, None), [prompt(300)]))[0]
    async with opened(config(model, tmp_path / "file")) as runtime:
        same(cold, await runtime.generate(prompt(300), SAMPLING))
        assert runtime.health().spill_problem
        assert runtime.health().is_serving
