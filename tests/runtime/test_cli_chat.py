"""``millpond chat`` over a fake runtime, and over a real house in a process of its own."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import anyio
import pytest
from millpond.codecs.messages import RestoreReport
from millpond.runtime import cli_chat, cli_lines
from millpond.runtime.cli import main
from millpond.runtime.errors import EngineDied, MillpondError, RequestFailed
from millpond.runtime.results import Completion, StreamedToken, Timings, Usage
from millpond.runtime.testing.tiny_model import tiny_gemma3

Capture = pytest.CaptureFixture[str]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }} {{ m.content }}"
    "<end_of_turn>{% endfor %}<start_of_turn>model "
)


class FakeStream:
    """The scripted texts of one answer: a str is a token, an error is raised, a signal is sent."""

    def __init__(self, script: list[Any]) -> None:
        self.script, self.texts = list(script), [one for one in script if isinstance(one, str)]
        self.index = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamedToken:
        await anyio.lowlevel.checkpoint()
        if not self.script:
            raise StopAsyncIteration
        part = self.script.pop(0)
        if isinstance(part, MillpondError):
            raise part
        if isinstance(part, signal.Signals):
            os.kill(os.getpid(), part)
            await anyio.sleep_forever()
        self.index += 1
        return StreamedToken(token_id=self.index, text=part, index=self.index - 1)

    async def result(self) -> Completion:
        await anyio.lowlevel.checkpoint()
        return Completion(
            text="".join(self.texts),
            token_ids=tuple(range(len(self.texts))),
            finish_reason="length" if len(self.texts) == 3 else "stop",
            usage=Usage(prompt_tokens=600, cached_tokens=512, completion_tokens=len(self.texts)),
            timings=Timings(ttft_ms=20.0, decode_ms=100.0),
            restore=RestoreReport(blocks=3, bytes=4096, misses={}),
        )


class FakeRuntime:
    """What ``cli_chat`` uses of a runtime; every chat takes the next script."""

    load_ms, device, chat_template = 12.5, "cpu", "{{ messages }}"
    identity = SimpleNamespace(
        name="fake",
        fingerprint=bytes(32),
        namespace="legacy",
        descriptor=SimpleNamespace(kv_dtype=SimpleNamespace(value="f32")),
    )

    def __init__(self) -> None:
        self.scripts: list[list[Any]] = []
        self.asked: list[list[dict[str, str]]] = []
        self.events: list[str] = []
        self.config: Any = None
        self.sampling: Any = None

    @asynccontextmanager
    async def open(self, config: Any) -> AsyncIterator[Self]:
        self.config = config
        try:
            yield self
        finally:
            self.events.append("closed")

    @asynccontextmanager
    async def stream_chat(self, messages: Any, sampling: Any) -> AsyncIterator[FakeStream]:
        self.asked.append(messages)
        self.sampling = sampling
        yield FakeStream(self.scripts.pop(0) if self.scripts else ["Hel", "lo"])

    async def drain(self) -> None:
        self.events.append("drained")

    def spill_report(self) -> Any:
        return SimpleNamespace(blocks=0, bytes=0, refused=0, problem="")


class Bench:
    """Runs the command over texts on stdin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
        self.runtime, self._patch, self._backend = FakeRuntime(), monkeypatch, backend
        monkeypatch.setattr(cli_chat, "_opener", lambda: self.runtime.open)
        self.open_pipes: list[int] = []

    def talk(self, typed: bytes, *flags: str, ends: bool = True) -> int:
        read, write = os.pipe()
        os.write(write, typed)
        if ends:
            os.close(write)
        else:
            self.open_pipes.append(write)
        with open(read, encoding="utf-8") as stdin:
            self._patch.setattr(sys, "stdin", stdin)
            code = main(["chat", "--model", "m.gguf", "--backend", self._backend, *flags])
            self._patch.undo()
            if not ends:  # the thread still reads: let it have its end before the pipe goes
                os.close(self.open_pipes.pop())
        return code


@pytest.fixture(params=["asyncio", "trio"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    yield Bench(monkeypatch, request.param)


def roles(messages: list[dict[str, str]]) -> str:
    return " ".join(f"{message['role'][0]}:{message['content']}" for message in messages)


def test_a_piped_talk_answers_and_ends(bench: Bench, capfd: Capture) -> None:
    assert bench.talk(b"hi\n/stats\n/exit\nnot read\n") == 0
    out, err = capfd.readouterr()
    answer, stats = out.splitlines()
    assert answer == "Hello"
    assert "512 of them cached" in stats and "20 ms" in stats and "10.0 tok/s" in stats
    assert err == ""
    assert bench.runtime.events == ["drained", "closed"]


def test_the_history_is_kept_until_it_is_cleared(bench: Bench) -> None:
    assert bench.talk(b"a\n\n  \nb\r\n/clear\nc", "--system", "be brief") == 0
    assert [roles(asked) for asked in bench.runtime.asked] == [
        "s:be brief u:a",
        "s:be brief u:a a:Hello u:b",
        "s:be brief u:c",
    ]


def test_flags_reach_the_runtime(bench: Bench) -> None:
    flags = ("--chat-template", "own.jinja", "--max-tokens", "7", "--temperature", "0.5")
    assert bench.talk(b"a\n", *flags, "--no-spill") == 0
    assert bench.runtime.config.chat_template == "own.jinja"
    assert bench.runtime.config.spill is False
    assert (bench.runtime.sampling.max_tokens, bench.runtime.sampling.temperature) == (7, 0.5)


def test_what_is_no_command_is_a_message(bench: Bench, capfd: Capture) -> None:
    assert bench.talk(b"/stats\n/what\n/help\n/etc/passwd is what?\n /exit \n") == 0
    assert [roles(asked) for asked in bench.runtime.asked] == ["u:/etc/passwd is what?"]
    err = capfd.readouterr().err.splitlines()
    assert err[0] == "no answer ended yet"
    assert err[1] == err[2] and "/clear" in err[1]


def test_ctrl_c_stops_the_answer_and_not_the_talk(bench: Bench, capfd: Capture) -> None:
    bench.runtime.scripts = [["One, two", signal.SIGINT], [signal.SIGINT]]
    assert bench.talk(b"count\nmore\nagain\n") == 0
    out, err = capfd.readouterr()
    assert out == "One, two\nHello\n"
    assert err.splitlines() == ["stopped", "stopped"]
    # the stopped answer stands as far as it came; one without any text leaves no trace
    assert roles(bench.runtime.asked[2]) == "u:count a:One, two u:again"


def test_sigterm_ends_the_talk_in_order(bench: Bench) -> None:
    bench.runtime.scripts = [["One", signal.SIGTERM]]
    assert bench.talk(b"count\n", ends=False) == 128 + signal.SIGTERM
    assert bench.runtime.events == ["closed"]


def test_a_failed_message_leaves_no_trace_but_the_exit_code(bench: Bench, capfd: Capture) -> None:
    bench.runtime.scripts = [["Hal", RequestFailed("no memory", 3)]]
    assert bench.talk(b"a\nb\n") == 1
    out, err = capfd.readouterr()
    assert out == "Hal\nHello\n" and "request 3: no memory" in err
    assert roles(bench.runtime.asked[1]) == "u:b"


def test_a_dead_engine_ends_the_talk(bench: Bench, capfd: Capture) -> None:
    bench.runtime.scripts = [["Hal", EngineDied("gone")]]
    assert bench.talk(b"a\nb\n") == 1
    assert "gone" in capfd.readouterr().err
    assert len(bench.runtime.asked) == 1


def test_lines_that_are_no_text_are_refused_one_by_one(
    bench: Bench, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as small:
        small.setattr(cli_lines, "PROMPT_BYTES_MAX", 1000)
        small.setattr(cli_lines, "READ_BYTES", 64)
        data = b"\xff\xfe\n" + b"x" * 5000 + b"\n" + b"y" * 999 + "é\nö".encode()
        assert bench.talk(data) == 1
    err = capfd.readouterr().err.splitlines()
    assert "byte 0xff" in err[0] and "more than 1000 bytes" in err[1] and "more than" in err[2]
    assert [roles(asked) for asked in bench.runtime.asked] == ["u:ö"]


def test_a_stdin_that_cannot_be_read_ends_the_talk(
    bench: Bench, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", "--model", "m.gguf"]) == 1
    assert "stdin: Bad file descriptor" in capfd.readouterr().err


def test_a_model_without_a_template_is_refused_at_once(bench: Bench, capfd: Capture) -> None:
    bench.runtime.chat_template = ""  # type: ignore[misc]
    assert bench.talk(b"hi\n") == 1
    assert "--chat-template" in capfd.readouterr().err
    assert bench.runtime.asked == []


def test_json_is_one_object_at_the_end(bench: Bench, capfd: Capture) -> None:
    bench.runtime.scripts = [["a", "b", "c"]]
    assert bench.talk(b"hi\n/stats\nso\n", "--json") == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert roles(found["messages"]) == "u:hi a:abc u:so a:Hello"
    assert [answer["text"] for answer in found["answers"]] == ["abc", "Hello"]
    assert "cut after 3 tokens" in err and "512 of them cached" in err


# -- a process of its own, with a tiny model


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gemma3(metadata={"tokenizer.chat_template": TEMPLATE}))
    whole = [sys.executable, "-m", "millpond.runtime", "chat", "--model", str(path), "--no-spill"]
    return [*whole, "--max-tokens", "1900"]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_blocked_stdin_does_not_keep_the_process(backend: str, command: list[str]) -> None:
    whole = [*command, "--max-tokens", "4", "--backend", backend]
    with subprocess.Popen(whole, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"hi\n/stats\n")
        process.stdin.flush()
        while b"prompt tokens" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_ctrl_c_on_a_terminal_stops_answer_then_program(backend: str, command: list[str]) -> None:
    ours, theirs = pty.openpty()
    seen = bytearray()

    def read_until(text: bytes) -> None:
        while text not in seen:
            seen.extend(os.read(ours, 4096))
        del seen[: seen.index(text) + len(text)]

    # the first terminal that the leader of a session opens becomes the one that it obeys
    takes = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"
    whole = [sys.executable, "-c", takes, *command, "--backend", backend]
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen(whole, start_new_session=True, **streams) as process:
        os.close(theirs)
        read_until(b"> ")
        os.write(ours, b"hi\n")
        read_until(b"hi\r\n")
        seen.extend(os.read(ours, 4096))  # the answer has begun
        os.write(ours, b"\x03")
        read_until(b"stopped\r\n> ")
        os.write(ours, b"\x03")
        read_until(b"once more ends")
        read_until(b"> ")
        os.write(ours, b"\x03")
        assert process.wait(60) == 128 + signal.SIGINT
    os.close(ours)


@pytest.mark.real
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_real_instruct_model_answers(backend: str, tmp_path: Path) -> None:
    model = Path(
        os.environ.get("MILLPOND_TEST_CHAT_MODEL")
        or Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-instruct.gguf"
    )
    if not model.is_file():
        pytest.skip(f"no model file at {model}")
    whole = [sys.executable, "-m", "millpond.runtime", "chat", "--model", str(model)]
    done = subprocess.run(
        [*whole, "--backend", backend, "--spill-root", str(tmp_path), "--max-tokens", "12"],
        input=b"hi\n/stats\n/exit\n",
        capture_output=True,
        check=True,
    )
    answer, stats = done.stdout.decode().splitlines()
    assert answer.startswith("Hello")
    assert "tok/s" in stats and "0 of them cached" in stats
