"""The command line without a model: usage, bad input, output and signals, over a fake runtime."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import anyio
import pytest
from millpond.codecs.messages import RestoreReport
from millpond.runtime import cli_generate, cli_prompt
from millpond.runtime.cli import main
from millpond.runtime.cli_terminal import Terminal, bytes_text, one_line
from millpond.runtime.errors import RequestFailed
from millpond.runtime.results import Completion, StreamedToken, Timings, Usage

Capture = pytest.CaptureFixture[str]
GENERATE = ["generate", "--model", "m.gguf"]


class FakeStream:
    def __init__(self, runtime: FakeRuntime) -> None:
        self.runtime = runtime
        self.left = list(runtime.texts)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamedToken:
        await anyio.lowlevel.checkpoint()
        if not self.left:
            await self.runtime.at_end()
            raise StopAsyncIteration
        index = len(self.runtime.texts) - len(self.left)
        return StreamedToken(token_id=index, text=self.left.pop(0), index=index)

    async def result(self) -> Completion:
        await anyio.lowlevel.checkpoint()
        count = len(self.runtime.texts)
        return Completion(
            text="".join(self.runtime.texts),
            token_ids=tuple(range(count)),
            finish_reason="stop",
            usage=Usage(prompt_tokens=600, cached_tokens=512, completion_tokens=count),
            timings=Timings(ttft_ms=20.0, decode_ms=100.0),
            restore=RestoreReport(blocks=3, bytes=4096, misses={"corrupt": 1}),
        )


class FakeRuntime:
    """What ``cli_generate`` uses of a runtime."""

    load_ms, device = 12.5, "cpu"
    identity = SimpleNamespace(
        name="fake",
        fingerprint=bytes(32),
        namespace="legacy",
        descriptor=SimpleNamespace(kv_dtype=SimpleNamespace(value="f32")),
    )

    def __init__(self) -> None:
        self.texts: list[str] = ["Hel", "lo", "", "!"]
        self.problem = ""
        self.config: Any = None
        self.prompt: Any = None
        self.sampling: Any = None
        self.events: list[str] = []
        self.at_end: Callable[[], Any] = anyio.lowlevel.checkpoint

    @asynccontextmanager
    async def open(self, config: Any) -> AsyncIterator[Self]:
        self.config = config
        try:
            yield self
        finally:
            self.events.append("closed")

    @asynccontextmanager
    async def stream(
        self, prompt: Any, sampling: Any, pin: Any = None
    ) -> AsyncIterator[FakeStream]:
        self.prompt, self.sampling = prompt, sampling
        yield FakeStream(self)

    async def drain(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.events.append("drained")

    def spill_report(self) -> Any:
        report = SimpleNamespace(blocks=2, bytes=2048, refused=1, problem=self.problem)
        report.pin_problem = ""
        return report


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()
    monkeypatch.setattr(cli_generate, "_opener", lambda: runtime.open)
    return runtime


def lines(text: str) -> list[str]:
    return text.splitlines()


# -- usage


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["generate"],
        ["generate", "--model", "m.gguf"],
        ["inspect"],
        ["inspect", "--model", "m.gguf", "n.gguf"],
        ["cache"],
        [*GENERATE, "--prompt", "a", "--prompt-file", "b"],
        [*GENERATE, "--prompt", "a", "--bad-flag"],
        [*GENERATE, "--prompt", "a", "--max-tok", "3"],
        [*GENERATE, "--prompt", "a", "--max-tokens", "0"],
        [*GENERATE, "--prompt", "a", "--max-tokens", "many"],
        [*GENERATE, "--prompt", "a", "--temperature", "nan"],
        [*GENERATE, "--prompt", "a", "--temperature", "-1"],
        [*GENERATE, "--prompt", "a", "--top-k", "-1"],
        [*GENERATE, "--prompt", "a", "--top-p", "0"],
        [*GENERATE, "--prompt", "a", "--min-p", "1.5"],
        [*GENERATE, "--prompt", "a", "--seed", "-1"],
        [*GENERATE, "--prompt", "a", "--stop", ""],
        [*GENERATE, "--prompt", "a", "--kv-dtype", "int4"],
        [*GENERATE, "--prompt", "a", "--reuse", "fast"],
        [*GENERATE, "--prompt", "a", "--backend", "curio"],
        [*GENERATE, "--prompt", "a", "--spill-bytes-max", "10 apples"],
        [*GENERATE, "--prompt", "a", "--block-tokens", "0"],
        [*GENERATE, "--prompt", "a", "--blas-threads", "0"],
        [*GENERATE, "--prompt", "a", "--spill-root", ""],
        ["cache", "ls", "--spill-root", ""],
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    arguments: list[str], fake: FakeRuntime, capfd: Capture
) -> None:
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(lines(err)) == 1 and err.startswith("millpond: ")
    assert fake.config is None


def test_a_value_out_of_range_names_its_flag(fake: FakeRuntime, capfd: Capture) -> None:
    main([*GENERATE, "--prompt", "a", "--top-p", "4"])
    assert "--top-p" in capfd.readouterr().err


def test_help_is_quick_for_it_loads_no_model_code() -> None:
    script = (
        "import sys\nfrom millpond.runtime.cli import main\n"
        "try: main(['generate', '--help'])\nexcept SystemExit: pass\n"
        "print({'mlx.core', 'trio', 'sentencepiece', 'millpond.actors'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert lines(found.stdout.decode())[-1] == "set()"


# -- generate


def test_the_object_has_exactly_the_promised_keys(fake: FakeRuntime, capfd: Capture) -> None:
    assert main([*GENERATE, "--prompt", "hi", "--json"]) == 0
    out, err = capfd.readouterr()
    assert len(lines(out)) == 1
    found = json.loads(out)
    assert {key: list(value) for key, value in found.items() if isinstance(value, dict)} == {
        "usage": ["prompt_tokens", "cached_tokens", "completion_tokens"],
        "timings": ["load_ms", "ttft_ms", "restore_ms", "prefill_ms", "decode_ms"],
        "restore": ["blocks", "bytes", "misses"],
        "spill": ["blocks", "bytes", "refused"],
        "model": ["name", "fingerprint", "namespace", "device", "kv_dtype"],
    }
    assert list(found)[:3] == ["text", "token_ids", "finish_reason"] and len(found) == 8
    assert found["text"] == "Hello!" and found["token_ids"] == [0, 1, 2, 3]
    assert found["timings"]["load_ms"] == 12.5 and found["restore"]["misses"] == {"corrupt": 1}
    assert fake.events == ["drained", "closed"]
    assert "512 of them cached" in err and "30.0 tok/s" in err


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_text_is_streamed_to_stdout_and_the_summary_is_not(
    backend: str, fake: FakeRuntime, capfd: Capture
) -> None:
    assert main([*GENERATE, "--prompt", "hi", "--backend", backend]) == 0
    out, err = capfd.readouterr()
    assert out == "Hello!\n" and len(lines(err)) == 1


def test_flags_fill_the_configuration_and_the_rest_keeps_its_defaults(fake: FakeRuntime) -> None:
    flags = "--max-tokens 7 --temperature 0.5 --top-k 3 --stop a --stop b --seed 9 --no-spill"
    flags += " --kv-dtype f16 --block-tokens 128 --spill-root r --spill-bytes-max 1GiB --repo n"
    assert main([*GENERATE, "--prompt", "hi", *flags.split()]) == 0
    assert (fake.sampling.max_tokens, fake.sampling.stop) == (7, ("a", "b"))
    assert (fake.sampling.temperature, fake.sampling.top_k, fake.sampling.seed) == (0.5, 3, 9)
    assert fake.sampling.top_p == 1.0
    config = fake.config
    assert (config.model, config.repo, config.spill, config.kv_dtype) == (
        "m.gguf",
        "n",
        False,
        "f16",
    )
    assert (config.block_tokens, config.prefill_chunk_tokens) == (128, 128)
    assert (config.spill_root, config.spill_bytes_max) == ("r", "1GiB")


def test_prompts_are_taken_to_the_letter(fake: FakeRuntime, tmp_path: Path) -> None:
    text, ids = tmp_path / "p.txt", tmp_path / "p.json"
    text.write_bytes("\ufeffa\r\nb ä\n".encode())
    main([*GENERATE, "--prompt-file", str(text)])
    assert fake.prompt == "\ufeffa\r\nb ä\n"
    ids.write_text(" [2, 3,\n5]")
    main([*GENERATE, "--token-ids-file", str(ids)])
    assert fake.prompt == [2, 3, 5]


def test_no_spilling_is_said_once(fake: FakeRuntime, capfd: Capture) -> None:
    fake.problem = "root: Permission denied"
    assert main([*GENERATE, "--prompt", "hi", "--json"]) == 0
    err = lines(capfd.readouterr().err)
    assert err[0] == "millpond: spilling is off: root: Permission denied" and len(err) == 2


def test_an_error_while_streaming_is_one_line(fake: FakeRuntime, capfd: Capture) -> None:
    async def fail() -> None:
        raise RequestFailed("the engine gave up", 3)

    fake.at_end = fail
    assert main([*GENERATE, "--prompt", "hi"]) == 1
    out, err = capfd.readouterr()
    assert out == "Hello!"
    assert err == "millpond: request 3: the engine gave up\n"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_request_in_order(
    backend: str, number: signal.Signals, fake: FakeRuntime, capfd: Capture
) -> None:
    async def interrupted() -> None:
        os.kill(os.getpid(), number)
        await anyio.sleep_forever()

    fake.at_end = interrupted
    assert main([*GENERATE, "--prompt", "hi", "--json", "--backend", backend]) == 128 + number
    assert fake.events == ["closed"]
    assert capfd.readouterr().out == ""


STUBBORN = """
import anyio
from millpond.runtime.cli_signals import until_signalled

async def work():
    print("ready", flush=True)
    try:
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            print("closing", flush=True)
            await anyio.sleep_forever()

anyio.run(until_signalled, work, backend="BACKEND")
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_second_signal_ends_the_process(backend: str) -> None:
    script = [sys.executable, "-c", STUBBORN.replace("BACKEND", backend)]
    with subprocess.Popen(script, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        running.send_signal(signal.SIGTERM)
        assert running.stdout.readline() == b"closing\n"
        running.send_signal(signal.SIGTERM)
    assert running.returncode == -signal.SIGTERM


# -- bad prompts


@pytest.mark.parametrize(
    ("flag", "data", "found"),
    [
        ("--prompt-file", b"", "found no text"),
        ("--prompt-file", b"ok \xff", "0xff at offset 3"),
        ("--token-ids-file", b"[]", "found no token"),
        ("--token-ids-file", b"[1, -1]", "$[1]"),
        ("--token-ids-file", b"[1, 4294967296]", "$[1]"),
        ("--token-ids-file", b"[1, true]", "$[1]"),
        ("--token-ids-file", b"[1.5]", "$[0]"),
        ("--token-ids-file", b'{"ids": [1]}', "expected a JSON list"),
        ("--token-ids-file", b"[" * 100_000, "expected a JSON list"),
        ("--token-ids-file", b"[1, 2", "expected a JSON list"),
    ],
)
def test_a_bad_prompt_is_one_line(
    flag: str, data: bytes, found: str, fake: FakeRuntime, capfd: Capture, tmp_path: Path
) -> None:
    path = tmp_path / "p"
    path.write_bytes(data)
    assert main([*GENERATE, flag, str(path)]) == 1
    out, err = capfd.readouterr()
    assert out == "" and len(lines(err)) == 1 and found in err
    assert fake.config is None


def test_an_empty_or_undecodable_prompt_is_one_line(fake: FakeRuntime, capfd: Capture) -> None:
    for prompt in ("", "a\udcff"):
        assert main([*GENERATE, "--prompt", prompt]) == 1
        assert len(lines(capfd.readouterr().err)) == 1


def test_a_prompt_file_that_cannot_be_read_is_one_line(
    fake: FakeRuntime, capfd: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_prompt, "PROMPT_BYTES_MAX", 100)
    for path in (tmp_path, tmp_path / "none", Path("/dev/zero"), "a\0b"):
        assert main([*GENERATE, "--prompt-file", str(path)]) == 1
        out, err = capfd.readouterr()
        assert out == "" and len(lines(err)) == 1


# -- output


def test_stderr_may_be_closed(capfd: Capture) -> None:
    Terminal(None, None).say("nobody hears")


def test_text_for_people_is_short_and_on_one_line() -> None:
    assert one_line("a\nb\x1b[0m\x9b\r") == "a b\\x1b[0m\\x9b\\x0d"
    assert [bytes_text(n) for n in (0, 1023, 1024, 5 * 2**20, 2**31, 2**43)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "2.0 GiB",
        "8.0 TiB",
    ]
