"""``millpond chat``: a talk with a model, a line of stdin a message, answers as they come.

Ctrl-C stops an answer, and the talk goes on with what there is of it.  Where nothing is answered
the first Ctrl-C is a question, the second one in a row ends the program, as SIGTERM always does.
"""

from __future__ import annotations

import re
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from anyio import CancelScope, to_thread
from millpond.codecs.choices import SamplingParams
from millpond.runtime.cli_arguments import runtime_config, sampling_params
from millpond.runtime.cli_generate import generate_report, summary
from millpond.runtime.cli_lines import Lines
from millpond.runtime.cli_signals import until_signalled
from millpond.runtime.cli_terminal import Terminal
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.errors import ChatTemplateError, InvalidParameter, RequestError
from millpond.runtime.results import Completion

if TYPE_CHECKING:
    from millpond.runtime.api import Runtime

Opener = Callable[[RuntimeConfig], AbstractAsyncContextManager["Runtime"]]
DONE, FAILED = 0, 1
_COMMANDS = "/clear forgets the talk, /stats tells about the last answer, /exit ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """What a talk is begun with.

    system      what the model is told first; empty: nothing
    as_json     print one object at the end instead of the answers as they come
    descriptor  where messages are read from
    is_typed    a person types them
    """

    config: RuntimeConfig
    sampling: SamplingParams
    system: str
    as_json: bool
    descriptor: int
    is_typed: bool


def run(options: Namespace, terminal: Terminal, opener: Opener | None = None) -> int:
    """Run the command; return its exit code: 1 if a message could not be answered.

    Raises UsageError, OutputClosed, EngineError and every error of ``open_runtime``.
    """
    talk = Talk(
        config=runtime_config(options),
        sampling=sampling_params(options),
        system=options.system,
        as_json=options.json,
        descriptor=-1 if sys.stdin is None else sys.stdin.fileno(),
        is_typed=sys.stdin is not None and sys.stdin.isatty(),
    )
    session = Session(talk, terminal)
    work = partial(session.run, opener or _opener())
    code = anyio.run(until_signalled, work, session.takes, backend=options.backend)
    if talk.as_json and code == DONE:
        terminal.write_json({"messages": session.messages, "answers": session.reports})
    return code or (FAILED if session.failed else DONE)


def _opener() -> Opener:
    from millpond.runtime.api import open_runtime

    return open_runtime


class Session:
    """One talk.

    messages  the talk so far, the system's message first
    reports   of each answer, as ``millpond generate --json`` prints them
    failed    messages that were not answered
    """

    def __init__(self, talk: Talk, terminal: Terminal) -> None:
        self._talk, self._terminal = talk, terminal
        # mutable state, changed only in run and what it calls, and in takes
        self.messages: list[dict[str, str]] = []
        self.reports: list[dict[str, Any]] = []
        self.failed = 0
        self._answering: CancelScope | None = None
        self._listening = self._asked_to_end = False
        self._clear()

    async def run(self, opener: Opener) -> None:
        """Open the runtime and talk until stdin ends or ``/exit``."""
        with ExitStack() as shown:
            shown.enter_context(self._terminal.waiting(f"loading {self._talk.config.model}"))
            async with opener(self._talk.config) as runtime:
                shown.close()
                if not runtime.chat_template:
                    raise ChatTemplateError(
                        "the model file has no chat template; --chat-template gives it one"
                    )
                problem = runtime.spill_report().problem
                if problem:
                    self._terminal.say(f"millpond: spilling is off: {problem}")
                await self._listen(runtime)
                await runtime.drain()

    def takes(self, number: int) -> bool:
        """Tell whether a signal is for the talk and not for the program, and act on it."""
        if number != signal.SIGINT:
            return False
        if self._answering is not None:
            first = not self._answering.cancel_called
            self._answering.cancel()
            return first
        if not self._listening or self._asked_to_end:
            return False
        self._asked_to_end = True
        self._terminal.ask("\n")
        self._terminal.tell("Ctrl-C once more ends; so does /exit")
        self._prompt()
        return True

    async def _listen(self, runtime: Runtime) -> None:
        """Read messages and answer them."""
        lines = Lines(self._talk.descriptor)
        while True:
            self._prompt()
            self._listening, self._asked_to_end = True, False
            try:
                line = await lines.next()
            except InvalidParameter as error:
                self._refuse(error)
                continue
            finally:
                self._listening = False
            if line is None:
                self._terminal.ask("\n" if self._talk.is_typed else "")
                return
            text = line.strip()
            if text == "/exit":
                return
            if re.fullmatch(r"/\w*", text):
                await self._command(text)
            elif text:
                await self._answer(runtime, text)

    async def _command(self, text: str) -> None:
        match text:
            case "/clear":
                self._clear()
            case "/stats" if not self.reports:
                self._terminal.tell("no answer ended yet")
            case "/stats" if self._talk.as_json:
                self._terminal.tell(summary(self.reports[-1]))
            case "/stats":
                await self._write(summary(self.reports[-1]) + "\n")
            case _:
                self._terminal.tell(_COMMANDS)

    async def _answer(self, runtime: Runtime, text: str) -> None:
        """Answer one message; the talk has both then, or neither."""
        asked = [*self.messages, {"role": "user", "content": text}]
        shown: list[str] = []
        done: Completion | None = None
        with CancelScope() as scope:
            self._answering = scope
            try:
                done = await self._stream(runtime, asked, shown)
            except (RequestError, ChatTemplateError) as error:
                await self._end_line(shown)
                self._refuse(error)
                return
            finally:
                self._answering = None
        await self._end_line(shown)
        if done is None:
            self._terminal.tell("stopped")
        else:
            self.reports.append(generate_report(done, runtime))
            if done.finish_reason == "length":
                self._terminal.tell(f"cut after {len(done.token_ids)} tokens, see --max-tokens")
        answer = "".join(shown) if done is None else done.text
        if answer:
            self.messages = [*asked, {"role": "assistant", "content": answer}]

    async def _stream(
        self, runtime: Runtime, asked: list[dict[str, str]], shown: list[str]
    ) -> Completion:
        async with runtime.stream_chat(asked, self._talk.sampling) as tokens:
            async for token in tokens:
                if token.text:
                    shown.append(token.text)
                    if not self._talk.as_json:
                        await self._write(token.text)
            return await tokens.result()

    async def _end_line(self, shown: list[str]) -> None:
        if shown and not self._talk.as_json and not shown[-1].endswith("\n"):
            await self._write("\n")

    async def _write(self, text: str) -> None:
        """Off the loop, for a reader of stdout may take as long as it likes."""
        await to_thread.run_sync(self._terminal.write_text, text, abandon_on_cancel=True)

    def _prompt(self) -> None:
        if self._talk.is_typed:
            self._terminal.ask("> ")

    def _refuse(self, error: Exception) -> None:
        self.failed += 1
        self._terminal.tell(f"millpond: {error}")

    def _clear(self) -> None:
        system = self._talk.system
        self.messages = [{"role": "system", "content": system}] if system else []
