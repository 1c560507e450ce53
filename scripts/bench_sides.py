#!/usr/bin/env python3
"""One side of ``bench_engine``: a process that holds a model and answers questions on stdin.

Called by ``bench_engine`` with one JSON object; each line in is a question, each line out its
figure.  Not for use by hand.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Protocol

import anyio
import anyio.to_thread
import numpy as np
from millpond.runtime import Limits, RuntimeConfig, SamplingParams, open_runtime
from millpond.runtime.blas import preload

STEP_TOKENS = 2048  # of mlx-lm's prefill, as its own default
EXTRA_TOKENS = 40  # what the first of a batch may decode until the last one has begun
WRITES_MAX = 4  # times that a prompt is read again until all its blocks are on disk


def prompt(tokens: int, seed: int) -> list[int]:
    """Ids that no other seed gives, from the part of the vocabulary that every model has."""
    ids: list[int] = np.random.default_rng(seed).integers(300, 4000, tokens).tolist()
    return [2, *ids[1:]]


class Peer(Protocol):
    """A peer, one sequence at a time."""

    about: dict[str, Any]

    def stream(self, ids: list[int], tokens: int) -> Iterator[int]:
        """Yield greedy tokens."""

    def batch(self, ids: list[list[int]], tokens: int) -> float:
        """Return tokens a second of equally long prompts together, prefill left out."""


class MlxLm:
    """mlx-lm with the weights of a file as millpond loads them, Gemma 3 only."""

    def __init__(self, asked: dict[str, Any]) -> None:
        preload(asked["threads"])
        mx: Any = import_module("mlx.core")
        import mlx_lm
        from millpond.runtime.testing.direct import load_direct

        config = RuntimeConfig(
            model=asked["model"], weight_form=asked["weights"], blas_threads=asked["threads"]
        )
        identity, _, model = load_direct(asked["model"], config)
        self._model = _as_mlx_lm(identity.config, model._family)
        mx.eval(self._model.parameters())
        del model
        mx.clear_cache()
        self.about = {"name": "mlx-lm", "version": mlx_lm.__version__, "mlx": mx.__version__}

    def stream(self, ids: list[int], tokens: int) -> Iterator[int]:
        mx: Any = import_module("mlx.core")
        from mlx_lm.generate import generate_step

        for token, _ in generate_step(
            mx.array(ids), self._model, max_tokens=tokens, prefill_step_size=STEP_TOKENS
        ):
            yield int(token)

    def batch(self, ids: list[list[int]], tokens: int) -> float:
        mx: Any = import_module("mlx.core")
        from mlx_lm.models.cache import make_prompt_cache

        cache = make_prompt_cache(self._model)
        found = mx.argmax(self._model(mx.array(ids), cache=cache)[:, -1], axis=-1)[:, None]
        mx.eval(found)
        started = time.perf_counter()
        for _ in range(tokens):
            after = mx.argmax(self._model(found, cache=cache)[:, -1], axis=-1)[:, None]
            mx.async_eval(after)
            found.tolist()
            found = after
        mx.eval(found)
        return len(ids) * tokens / (time.perf_counter() - started)


def _as_mlx_lm(config: Any, family: Any) -> Any:
    import mlx.core as mx
    from mlx_lm.models import gemma3_text

    sliding = next(layer for layer in config.layers if layer.kind.value == "sliding")
    full = next(layer for layer in config.layers if layer.kind.value == "full")
    count, dim = len(config.layers), full.head_dim
    arguments: dict[str, Any] = {
        "model_type": "gemma3_text",
        "hidden_size": config.hidden,
        "num_hidden_layers": count,
        "intermediate_size": full.feed_forward,
        "num_attention_heads": config.heads,
        "num_key_value_heads": full.kv_heads,
        "head_dim": dim,
        "rms_norm_eps": config.norm_eps,
        "vocab_size": config.vocab,
        "rope_theta": full.rope_base,
        "rope_local_base_freq": sliding.rope_base,
        "query_pre_attn_scalar": dim,
        "sliding_window": config.sliding_window,
        "sliding_window_pattern": config.layers.index(full) + 1,
    }
    if full.rope_scale != 1.0:
        arguments["rope_scaling"] = {"rope_type": "linear", "factor": 1 / full.rope_scale}
    model = gemma3_text.Model(gemma3_text.ModelArgs(**arguments))
    model.sanitize({})  # without an output map of its own it uses the embedding
    _put(model.model.embed_tokens, "weight", family._embedding, model.model)
    model.model.norm.weight = family._norm - 1
    cuts = [config.heads * dim, (config.heads + full.kv_heads) * dim]
    for made, ours in zip(model.layers, family._layers, strict=True):
        q, k, v = _split(ours.qkv, cuts)
        gate, up = _split(ours.gate_up, [full.feed_forward])
        attention, mlp = made.self_attn, made.mlp
        for owner, name, part in (
            (attention, "q_proj", q),
            (attention, "k_proj", k),
            (attention, "v_proj", v),
            (attention, "o_proj", ours.output),
            (mlp, "gate_proj", gate),
            (mlp, "up_proj", up),
            (mlp, "down_proj", ours.down),
        ):
            _put(getattr(owner, name), name, part, owner)
        attention.q_norm.weight, attention.k_norm.weight = ours.q_norm - 1, ours.k_norm - 1
        made.input_layernorm.weight = ours.attn_norm - 1
        made.post_attention_layernorm.weight = ours.post_attention_norm - 1
        made.pre_feedforward_layernorm.weight = ours.ffn_norm - 1
        made.post_feedforward_layernorm.weight = ours.post_ffw_norm - 1
    mx.eval(model.parameters())
    return model


def _split(linear: Any, cuts: list[int]) -> list[Any]:
    """Rows of a joined map as maps of their own."""
    import mlx.core as mx

    names = [name for name in ("weight", "scales", "biases") if hasattr(linear, name)]
    columns = [
        [mx.contiguous(part) for part in mx.split(getattr(linear, name), cuts, axis=0)]
        for name in names
    ]
    more = (linear.bits, linear.group) if len(names) > 1 else ()
    return [type(linear)(*parts, *more) for parts in zip(*columns, strict=True)]


def _put(module: Any, name: str, linear: Any, owner: Any) -> None:
    nn: Any = import_module("mlx.nn")

    if not hasattr(linear, "scales"):
        module.weight = linear.weight
        return
    made = module.to_quantized(group_size=linear.group, bits=linear.bits)
    made.weight, made.scales, made.biases = linear.weight, linear.scales, linear.biases
    is_table = isinstance(module, nn.Embedding)
    setattr(owner, "embed_tokens" if is_table else name, made)


class LlamaCpp:
    """llama.cpp on the file as it is.

    ``use_extra_bufts`` is off: built with gcc 12 and less its AMX kernels crash.
    """

    def __init__(self, asked: dict[str, Any]) -> None:
        import ctypes

        import llama_cpp as lib

        self._lib, self._sequences = lib, 8
        lib.llama_backend_init()
        self._silent = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._silent, ctypes.c_void_p(0))
        options = lib.llama_model_default_params()
        options.use_extra_bufts = False
        options.n_gpu_layers = 0 if asked["device"] == "cpu" else -1
        self._model = lib.llama_model_load_from_file(asked["model"].encode(), options)
        context = lib.llama_context_default_params()
        context.n_ctx, context.n_seq_max = 8192, self._sequences
        context.n_batch = context.n_ubatch = 512
        context.n_threads = context.n_threads_batch = asked["threads"]
        context.kv_unified, context.no_perf = True, True
        self._context = lib.llama_init_from_model(self._model, context)
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self.about = {"name": "llama.cpp", "version": lib.__version__, "threads": asked["threads"]}

    def stream(self, ids: list[int], tokens: int) -> Iterator[int]:
        self._clear()
        token = self._run([(token, place, 0) for place, token in enumerate(ids)])[-1]
        yield token
        for place in range(len(ids), len(ids) + tokens - 1):
            token = self._run([(token, place, 0)])[-1]
            yield token

    def batch(self, ids: list[list[int]], tokens: int) -> float:
        self._clear()
        found = [
            self._run([(token, place, number) for place, token in enumerate(one)])[-1]
            for number, one in enumerate(ids)
        ]
        started = time.perf_counter()
        for place in range(len(ids[0]), len(ids[0]) + tokens):
            found = self._run([(token, place, number) for number, token in enumerate(found)])
        return len(ids) * tokens / (time.perf_counter() - started)

    def _clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _run(self, rows: list[tuple[int, int, int]]) -> list[int]:
        """Run (token, position, sequence) rows; return the best id after the last of each."""
        lib, last = self._lib, {sequence: row for row, (_, _, sequence) in enumerate(rows)}
        best: dict[int, int] = {}
        for first in range(0, len(rows), 512):
            part = rows[first : first + 512]
            batch = lib.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for row, (token, place, sequence) in enumerate(part):
                batch.token[row], batch.pos[row] = token, place
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                batch.logits[row] = int(last[sequence] == first + row)
            if lib.llama_decode(self._context, batch):
                raise SystemExit("llama_decode failed")
            lib.llama_batch_free(batch)
            for row, (_, _, sequence) in enumerate(part):
                if last[sequence] == first + row:
                    logits = lib.llama_get_logits_ith(self._context, row)
                    best[sequence] = int(
                        np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax()
                    )
        return [best[sequence] for sequence in sorted(best)]


def answer_peer(peer: Peer, asked: dict[str, Any]) -> float:
    """Return the figure for one question."""
    if asked["what"] == "batch":
        prompts = [prompt(asked["n"], asked["seed"] + number) for number in range(8)]
        return peer.batch(prompts, asked["k"])
    tokens = asked.get("k", 0) + 1
    started, stamps = time.perf_counter(), []
    for _ in peer.stream(prompt(asked["n"], asked["seed"]), tokens):
        stamps.append(time.perf_counter())
    if asked["what"] == "prefill":
        return float(asked["n"] / (stamps[0] - started))
    return float((len(stamps) - 1) / (stamps[-1] - stamps[0]))


async def serve_ours(asked: dict[str, Any]) -> None:
    """Open a runtime and answer until stdin ends."""
    gpu = asked["device"] == "gpu"
    config = RuntimeConfig(
        model=asked["model"],
        spill="root" in asked,
        spill_root=asked.get("root"),
        spill_bytes_max="30GiB",
        weight_form=asked["weights"],
        kv_dtype="bf16" if gpu else None,
        blas_threads=asked["threads"],
        # finished caches are dropped, so that ``warm`` reads the disk; no block is ever refused
        limits=Limits(held_max=0, spill_slots=64, channel_messages=128),
    )
    async with open_runtime(config) as runtime:
        chunk = config.chunk_tokens_on("gpu" if gpu else "cpu")
        about = {"name": "millpond", "device": str(runtime.device), "chunk_tokens": chunk}
        print(json.dumps(about), flush=True)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            question = json.loads(line)
            value = await answer_ours(runtime, question, chunk)
            print(json.dumps({"value": value}), flush=True)


async def answer_ours(runtime: Any, asked: dict[str, Any], chunk: int) -> float:
    """Return the figure for one question."""
    ids = prompt(asked["n"], asked["seed"])
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    if asked["what"] == "prefill":
        done = await runtime.generate(ids, one)
        return float(1e3 * asked["n"] / done.timings.ttft_ms)
    if asked["what"] == "warm":
        kept = prompt(max(chunk, asked["n"] // chunk * chunk) + 1, asked["n"])
        done = await runtime.generate(kept, one)
        for _ in range(WRITES_MAX):
            if done.usage.cached_tokens == len(kept) - 1:
                break
            await runtime.drain()  # the first time: written now, read next
            done = await runtime.generate(kept, one)
        if done.usage.cached_tokens != len(kept) - 1:
            raise SystemExit(f"warm: found {done.usage.cached_tokens} cached of {len(kept)}")
        return float(done.timings.ttft_ms)
    if asked["what"] == "decode":
        return await _decoded(runtime, [ids], asked["k"])
    prompts = [prompt(asked["n"], asked["seed"] + number) for number in range(8)]
    return await _decoded(runtime, prompts, asked["k"])


async def _decoded(runtime: Any, prompts: list[list[int]], tokens: int) -> float:
    """Tokens a second from when every request has its first token until one has its last."""
    stamps: list[list[float]] = [[] for _ in prompts]
    sampling = SamplingParams(
        max_tokens=tokens + 1 + (EXTRA_TOKENS if len(prompts) > 1 else 0), ignore_eos=True
    )

    async def one(number: int) -> None:
        async with runtime.stream(prompts[number], sampling) as stream:
            async for _ in stream:
                stamps[number].append(time.perf_counter())

    async with anyio.create_task_group() as group:
        for number in range(len(prompts)):
            group.start_soon(one, number)
    started, ended = max(one[0] for one in stamps), min(one[-1] for one in stamps)
    count = sum(sum(started < stamp <= ended for stamp in one) for one in stamps)
    return count / (ended - started)


def main() -> None:
    """Load, say so, answer."""
    asked = json.loads(sys.argv[1])
    if asked["side"] == "ours":
        anyio.run(serve_ours, asked)
        return
    peer: Peer = MlxLm(asked) if asked["side"] == "mlx-lm" else LlamaCpp(asked)
    print(json.dumps(peer.about), flush=True)
    for line in sys.stdin:
        print(json.dumps({"value": answer_peer(peer, json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
