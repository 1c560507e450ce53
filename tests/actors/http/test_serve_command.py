"""``millpond serve`` as a process, over tiny real models, with the official client."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from millpond.runtime.guidance import can_guide
from millpond.runtime.testing.tiny_model import TOKENS, tiny_gemma3

openai = pytest.importorskip("openai", reason="the official client is not installed")
WORDS = " ".join(f"word{index} of the story" for index in range(40))
CHAT: list[Any] = [{"role": "user", "content": f"{WORDS} goes on"}]

needs_schema = pytest.mark.skipif(not can_guide(), reason="the schema extra is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate(("a", "b")):
        (tmp_path / f"{name}.gguf").write_bytes(tiny_gemma3(seed))
    return tmp_path


class Process:
    """A running server."""

    def __init__(self, child: subprocess.Popen[bytes], report: dict[str, Any]) -> None:
        self.child, self.report = child, report
        self.url = str(report["url"])

    def client(self) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def stop(self) -> int:
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(30)


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Process]:
    command = [sys.executable, "-P", "-m", "millpond.runtime", "serve", "--json", *arguments]
    command += ["--port", "0", "--spill-root", str(folder / "spill")]
    with open(folder / "log", "ab") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line, (folder / "log").read_text()
        yield Process(child, json.loads(line))
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def streamed(client: Any, model: str = "a") -> tuple[str, Any]:
    text, usage = "", None
    options = {"include_usage": True}
    for part in client.chat.completions.create(
        model=model,
        messages=CHAT,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options=options,
    ):
        if part.choices:
            text += part.choices[0].delta.content or ""
        usage = part.usage or usage
    return text, usage


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_chat_is_warm_and_the_same_after_a_restart(folder: Path, backend: str) -> None:
    texts = []
    for cached in (0, 768):
        with serving(folder, "--model", str(folder / "a.gguf"), "--backend", backend) as process:
            text, usage = streamed(process.client())
            assert usage.prompt_tokens_details.cached_tokens == cached
            texts.append(text)
            assert process.stop() == 0
    assert texts[0] == texts[1] and texts[0]


def test_a_pool_of_one_goes_from_a_to_b_and_comes_back_warm(folder: Path) -> None:
    with serving(folder, "--models", str(folder), "--models-max", "1") as process:
        client = process.client()
        first, cold = streamed(client, "a")
        other, _ = streamed(client, "b")
        again, warm = streamed(client, "a")
        assert first == again != other
        assert cold.prompt_tokens_details.cached_tokens == 0
        assert warm.prompt_tokens_details.cached_tokens == 768
        metrics = httpx.get(f"{process.url}/metrics").text
        assert "millpond_model_evictions_total 2.0" in metrics
        assert 'millpond_restored_blocks_total{model="a"}' in metrics
        assert process.stop() == 0


@needs_schema
def test_an_answer_has_the_form_that_was_asked_for(folder: Path) -> None:
    shape = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}, "count": {"enum": [1, 2, 3]}},
        "required": ["size", "count"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": shape}}
    with serving(folder, "--model", str(folder / "a.gguf")) as process:
        create = process.client().chat.completions.create
        done = create(model="a", messages=CHAT, response_format=form, max_tokens=300, seed=1)
        found = json.loads(done.choices[0].message.content or "")
        assert found["size"] in ("small", "large") and found["count"] in (1, 2, 3)
        bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "?"}}}
        with pytest.raises(openai.BadRequestError) as caught:
            create(model="a", messages=CHAT, response_format=bad)
        assert caught.value.param == "response_format"
        assert process.stop() == 0


MARKS = (b"<|tool_call>", b"<tool_call|>", b'<|"|>')
TEMPLATE = "{% for one in messages %}{{ one.content }}{% endfor %}{# tools <|tool_call> #}"
PAINT: Any = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}, "coats": {"type": "integer"}},
            "required": ["colour", "coats"],
        },
    },
}


@needs_schema
@pytest.mark.parametrize("kind", [3, 4], ids=["control", "user-defined"])
def test_a_call_can_be_asked_for_whatever_kind_of_token_its_marks_are(
    folder: Path, kind: int
) -> None:
    """Gemma 4's files call their marks user-defined: with a text of its own and a name given, each
    stood there twice, and no call was ever one.
    """
    kinds = [2, 3, 3, 3, 3] + [6] * 256 + [1] * (len(TOKENS) - 264) + [kind] * 3
    metadata = {
        "tokenizer.ggml.tokens": [*TOKENS[:-3], *MARKS],
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.chat_template": TEMPLATE,
    }
    (folder / "marks.gguf").write_bytes(tiny_gemma3(0, metadata))
    with serving(folder, "--model", str(folder / "marks.gguf")) as process:
        create = process.client().chat.completions.create
        for seed in range(3):
            more: Any = {"tools": [PAINT], "tool_choice": "required", "seed": seed}
            done = create(model="marks", messages=CHAT, max_tokens=100, **more).choices[0]
            assert done.finish_reason == "tool_calls" and not done.message.content
            (call,) = done.message.tool_calls or ()
            assert call.function.name == "paint"
            found = json.loads(call.function.arguments)
            assert found["colour"] in ("red", "blue") and type(found["coats"]) is int
        assert process.stop() == 0


def test_a_prompt_is_pinned_for_the_seconds_that_its_body_names(folder: Path) -> None:
    body = {"model": "a", "prompt": "word " * 300, "max_tokens": 2, "pin": 600}
    with serving(folder, "--model", str(folder / "a.gguf")) as process:
        assert httpx.post(f"{process.url}/v1/completions", json=body).status_code == 200
        while True:
            found = httpx.get(f"{process.url}/admin/cache").json()
            if found["models"]["a"]["pins"]:
                break
        assert found["root"]["pinned_bytes"] > 0
        body["no_store"] = True
        refused = httpx.post(f"{process.url}/v1/completions", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "pin"
        assert process.stop() == 0


def test_a_killed_server_loses_nothing_that_was_written(folder: Path) -> None:
    with serving(folder, "--model", str(folder / "a.gguf")) as process:
        text, _ = streamed(process.client())
        while not httpx.get(f"{process.url}/admin/cache").json()["models"]["a"]["spilled_blocks"]:
            pass
        process.child.kill()
    with serving(folder, "--model", str(folder / "a.gguf")) as process:
        again, usage = streamed(process.client())
        assert again == text and usage.prompt_tokens_details.cached_tokens > 0


def test_a_second_signal_ends_the_process_at_once(folder: Path) -> None:
    with serving(folder, "--model", str(folder / "a.gguf"), "--drain", "600") as process:
        body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{process.url}/v1/completions", json=body) as response:
            next(response.iter_bytes())
            process.child.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.ConnectError):  # once it stops, nobody new gets in
                while httpx.get(f"{process.url}/health"):
                    pass
            assert process.child.poll() is None
            process.child.send_signal(signal.SIGTERM)
            assert process.child.wait(30) == -signal.SIGTERM


def test_a_unix_socket_is_private_and_goes_at_the_end(folder: Path) -> None:
    path = folder / "socket"
    with serving(folder, "--model", f"mine={folder / 'a.gguf'}", "--unix", str(path)) as process:
        assert process.report["unix"] == str(path)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            listed = client.get("http://localhost/v1/models").json()["data"]
            assert [one["id"] for one in listed] == ["mine"]
        twin = [sys.executable, "-P", "-m", "millpond.runtime", "serve", "--unix", str(path)]
        twin += ["--model", str(folder / "a.gguf")]
        refused = subprocess.run(twin, capture_output=True, text=True, check=False)
        assert refused.returncode == 2 and "another server listens there" in refused.stderr
        assert process.stop() == 0
    assert not path.exists()


def test_a_socket_file_that_a_killed_server_left_is_replaced(folder: Path) -> None:
    path = folder / "socket"
    for _ in range(2):
        with serving(folder, "--model", str(folder / "a.gguf"), "--unix", str(path)) as process:
            process.child.kill()
            process.child.wait()
        assert path.exists()
    path.unlink()
    path.write_text("mine")
    command = [sys.executable, "-P", "-m", "millpond.runtime", "serve", "--unix", str(path)]
    command += ["--model", str(folder / "a.gguf")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    "arguments", [(), ("--model", "nowhere.gguf"), ("--models", "nowhere"), ("--port", "-1")]
)
def test_a_wrong_command_line_is_told_in_one_line(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    from millpond.runtime.cli import main

    assert main(["serve", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_model_that_cannot_be_loaded_ends_the_start(folder: Path) -> None:
    (folder / "c.gguf").write_bytes(b"GGUF nothing")
    command = [sys.executable, "-P", "-m", "millpond.runtime", "serve", "--port", "0"]
    command += ["--model", str(folder / "c.gguf"), "--no-spill"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "c.gguf" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "houses", "share"),
    [("30%", 1, "30.000000%"), ("30%", 4, "7.500000%"), ("8GiB", 4, str(2 * 2**30))],
)
def test_the_memory_for_caches_is_divided_among_the_models(
    text: str, houses: int, share: str
) -> None:
    from millpond.runtime.cli_serve import _kv_share

    assert _kv_share(text, houses) == share


def test_the_choices_of_a_prompt_cost_its_prefill_once(folder: Path) -> None:
    with serving(folder, "--model", str(folder / "a.gguf")) as process:
        body = {"prompt": "abcd" * 200, "n": 4, "max_tokens": 3, "ignore_eos": True}
        found = httpx.post(f"{process.url}/v1/completions", json=body).json()
        assert len(found["choices"]) == 4
        assert (
            'millpond_prefilled_tokens_total{model="a"} 801.0'
            in httpx.get(f"{process.url}/metrics").text
        )
        assert process.stop() == 0
