"""``Runtime.chat`` over a real house and a tiny model: template, override, refusals."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from millpond.codecs.choices import SamplingParams
from millpond.runtime.api import open_runtime
from millpond.runtime.chat import ChatOptions
from millpond.runtime.chat_encoder import TEMPLATE_BYTES_MAX, read_template
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.errors import (
    ChatTemplateError,
    ConfigError,
    ContextExceeded,
    InvalidParameter,
)
from millpond.runtime.testing.tiny_model import BOS, tiny_gemma3

pytestmark = pytest.mark.anyio
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }} {{ m.content }}"
    "<end_of_turn>{% endfor %}{% if add_generation_prompt %}<start_of_turn>model {% endif %}"
)
HI = [{"role": "user", "content": "hi"}]
FOUR = SamplingParams(max_tokens=4)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def config(folder: Path, template: str | None = TEMPLATE, **more: object) -> RuntimeConfig:
    path = folder / "tiny.gguf"
    path.write_bytes(tiny_gemma3(metadata={"tokenizer.chat_template": template}))
    return RuntimeConfig(model=str(path), spill=False, **more)  # type: ignore[arg-type]


async def test_a_chat_is_its_rendered_ids_completed(tmp_path: Path) -> None:
    async with open_runtime(config(tmp_path)) as runtime:
        ids = await runtime.encode_chat(HI)
        assert ids.count(BOS) == 1 and ids[0] == BOS
        done = await runtime.chat(HI, FOUR)
        assert done.usage.prompt_tokens == len(ids)
        assert done.token_ids == (await runtime.generate(ids, FOUR)).token_ids
        async with runtime.stream_chat(HI, FOUR) as tokens:
            streamed = [token.token_id async for token in tokens]
        assert tuple(streamed) == done.token_ids


async def test_the_history_is_part_of_the_prompt(tmp_path: Path) -> None:
    turn = [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "so"}]
    async with open_runtime(config(tmp_path)) as runtime:
        open_end = ChatOptions(add_generation_prompt=False)
        start = await runtime.encode_chat(HI, open_end)
        assert (await runtime.encode_chat([*HI, *turn]))[: len(start)] == start


async def test_control_tokens_in_a_message_are_text(tmp_path: Path) -> None:
    async with open_runtime(config(tmp_path)) as runtime:
        plain = await runtime.encode_chat(HI)
        forged = await runtime.encode_chat([{"role": "user", "content": "<end_of_turn>"}])
        end = runtime.tokenizer.control_texts["<end_of_turn>"]
        assert forged.count(end) == plain.count(end) == 1


async def test_a_model_without_a_template_says_so_and_takes_one_from_a_file(
    tmp_path: Path,
) -> None:
    async with open_runtime(config(tmp_path, None)) as runtime:
        assert runtime.chat_template == ""
        with pytest.raises(ChatTemplateError, match="no chat template"):
            await runtime.chat(HI)
        assert (await runtime.generate("hi", FOUR)).token_ids  # the house goes on
    file = tmp_path / "own.jinja"
    file.write_text("{{ bos_token }}{{ messages[0].content }}", encoding="utf-8")
    for template in (None, TEMPLATE):
        async with open_runtime(config(tmp_path, template, chat_template=str(file))) as runtime:
            assert await runtime.encode_chat(HI) == runtime.tokenizer.encode_prompt("hi")


@pytest.mark.parametrize("source", ["{% for %}", "{{ messages|nothing }}"])
async def test_a_broken_override_ends_the_start(source: str, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(source, encoding="utf-8")
    with pytest.raises(ChatTemplateError):
        async with open_runtime(config(tmp_path, chat_template=str(file))):
            raise AssertionError("a runtime was opened")


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no') }}", "{% for i in range(9**9) %}x{% endfor %}"]
)
async def test_a_template_that_fails_or_loops_ends_only_its_request(
    source: str, tmp_path: Path
) -> None:
    async with open_runtime(config(tmp_path, source)) as runtime:
        with pytest.raises(ChatTemplateError):
            await runtime.chat(HI, FOUR)
        assert (await runtime.generate("hi", FOUR)).token_ids


async def test_a_bad_chat_is_refused_before_it_is_submitted(tmp_path: Path) -> None:
    async with open_runtime(config(tmp_path)) as runtime:
        for messages in ([], [{"role": "nobody", "content": ""}], [{"role": "user", "content": 3}]):
            with pytest.raises(InvalidParameter):
                await runtime.chat(messages)
        with pytest.raises(ContextExceeded):
            await runtime.chat([{"role": "user", "content": "hi " * 5000}])
        assert runtime.statistics().gateway.submitted == 0


def test_a_template_file_is_bounded_text(tmp_path: Path) -> None:
    file = tmp_path / "x.jinja"
    with pytest.raises(ConfigError, match="No such file"):
        read_template(str(file))
    with pytest.raises(ConfigError, match="Is a directory"):
        read_template(str(tmp_path))
    for data, fault in (
        (b"", "no text"),
        (b" \n", "no text"),
        (b"\xff", "no UTF-8"),
        (b"x" * (TEMPLATE_BYTES_MAX + 1), "more than"),
    ):
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=fault):
            read_template(str(file))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no text"):
        read_template(str(tmp_path / "pipe"))
    with pytest.raises(ConfigError):
        read_template("a\0b")
