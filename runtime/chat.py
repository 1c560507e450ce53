"""Chat templates: messages → text → token ids.

Control tokens belong to the template.  ``encode_chat`` gives exactly the ids of the whole rendered
text, its control tokens parsed, except that none is parsed from what users wrote: contents, names,
tools, variables.  How that is told is in ``chat_marks``; three cases are left then:

1. The text with marks, once they are out, is the plain text: the marks say what is whose.
2. The template treats text with marks otherwise (it looks for a text in a content, say, and cuts it
   out), but the plain text has the same control tokens in the same order: none is a user's.
3. It has others: users wrote some.  The text with marks is taken, in which theirs stand as text.

A text without any markable character needs one rendering, any other two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millpond.runtime.chat_marks import Marks
from millpond.runtime.chat_messages import (
    ContentForm,
    checked_messages,
    checked_values,
    in_form,
    texts_of,
)
from millpond.runtime.chat_meter import Meter
from millpond.runtime.chat_sandbox import compile_template, render
from millpond.runtime.errors import ChatTemplateError, InvalidParameter
from millpond.runtime.tokenizer import Tokenizer

__all__ = ["ChatOptions", "ChatTemplate", "encode_chat", "make_chat_template"]

_PROBE = "millpond-probe"
_PROBE_CPU_S_MAX = 0.5
_RESERVED = frozenset(
    ("add_generation_prompt", "bos_token", "documents", "eos_token", "messages", "tools")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a template may be told beside the messages.

    tools                  function definitions, JSON values
    add_generation_prompt  end with the beginning of the model's turn
    variables              further template variables, such as ``enable_thinking``; JSON values
    """

    tools: Sequence[Mapping[str, object]] = ()
    add_generation_prompt: bool = True
    variables: Mapping[str, object] = field(default_factory=dict)


class ChatTemplate:
    """A compiled template; immutable, any thread.  Rendering belongs on a worker thread.

    source        the Jinja text
    content_form  how it reads contents, found out by two small renderings

    Whatever the template does, a rendering ends within about two seconds of processor
    time and bounded memory (``chat_meter``).
    """

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        """Compile it; the tokens' texts are given to it under these names.

        Raises ChatTemplateError for an empty source or one that is no template.
        """
        if not source:
            raise ChatTemplateError("the model file has no chat template; give one of your own")
        self.source = source
        self._code = compile_template(source)
        self._constants: dict[str, Any] = {"bos_token": bos_token, "eos_token": eos_token}
        self.content_form: ContentForm = "text"
        if self._reads([{"type": "text", "text": _PROBE}]):
            self.content_form = "both" if self._reads(_PROBE) else "parts"

    def render(
        self, messages: Sequence[Mapping[str, object]], options: ChatOptions | None = None
    ) -> str:
        """Return the text of a chat, without any difference between its own and user text.

        Raises InvalidParameter for messages or options that are none, ChatTemplateError for
        whatever goes wrong in the template, its own refusals (``raise_exception``) included.
        """
        return self.render_checked(_checked(messages, options or ChatOptions()))

    def render_checked(self, chat: CheckedChat) -> str:
        """Return the text of a chat; raises ChatTemplateError."""
        messages = [
            message | {"content": in_form(message["content"], self.content_form)}
            for message in chat.messages
        ]
        if "developer" not in self.source:
            for message in messages:
                if message["role"] == "developer":
                    message["role"] = "system"
        variables = chat.variables | {
            "messages": messages,
            "tools": chat.tools or None,
            "add_generation_prompt": chat.add_generation_prompt,
        }
        return self._render(variables, Meter(sum(map(len, chat.texts()))))

    def _reads(self, content: object) -> bool:
        """Tell whether a content comes out as text, and not as the listing of a Python value."""
        messages = [{"role": "user", "content": content}]
        variables = {"messages": messages, "tools": None, "add_generation_prompt": True}
        try:
            text = self._render(variables, Meter(0, _PROBE_CPU_S_MAX))
        except ChatTemplateError:
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text

    def _render(self, variables: Mapping[str, object], meter: Meter) -> str:
        return render(self._code, {"documents": None, **variables, **self._constants}, meter)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedChat:
    """Messages (content a str or a list of str), tools and variables, copied and checked."""

    messages: list[dict[str, Any]]
    tools: list[Any]
    variables: dict[str, Any]
    add_generation_prompt: bool

    def texts(self) -> Iterator[str]:
        """Yield every text that users wrote."""
        return texts_of([self.messages, self.tools, self.variables])

    def marked(self, marks: Marks) -> CheckedChat:
        """Return the same with marks in all that users wrote; roles are not theirs."""
        messages = [marks.marked(message) | {"role": message["role"]} for message in self.messages]
        return CheckedChat(
            messages=messages,
            tools=marks.marked(self.tools),
            variables={name: marks.marked(value) for name, value in self.variables.items()},
            add_generation_prompt=self.add_generation_prompt,
        )


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, object]],
    options: ChatOptions | None = None,
) -> list[int]:
    """Return a chat's token ids, BOS once; see the head of this file.  On a worker thread.

    Raises InvalidParameter and ChatTemplateError as ``ChatTemplate.render`` does.
    """
    chat = _checked(messages, options or ChatOptions())
    plain = template.render_checked(chat)
    marks = Marks(tokenizer.control_texts, (template.source, *chat.texts()))
    marked_chat = chat.marked(marks)
    if not marks.count:
        return tokenizer.with_bos(tokenizer.encode_with_control(plain))
    text, tainted = marks.unmarked(template.render_checked(marked_chat))
    ids = tokenizer.encode_with_control(text, tainted)
    if text != plain:
        plain_ids = tokenizer.encode_with_control(plain)
        controls = frozenset(tokenizer.control_texts.values())
        if list(filter(controls.__contains__, plain_ids)) == list(
            filter(controls.__contains__, ids)
        ):
            ids = plain_ids
    return tokenizer.with_bos(ids)


def make_chat_template(tokenizer: Tokenizer, source: str) -> ChatTemplate:
    """Return the template of a model, or of a file that replaces it; raises ChatTemplateError."""
    return ChatTemplate(
        source, tokenizer.special_text(tokenizer.bos), tokenizer.special_text(tokenizer.eos)
    )


def _checked(messages: Sequence[Mapping[str, object]], options: ChatOptions) -> CheckedChat:
    checked = checked_messages(messages)
    variables = checked_values(dict(options.variables), "template variables")
    if not _RESERVED.isdisjoint(variables):
        found = ", ".join(sorted(_RESERVED & variables.keys()))
        raise InvalidParameter(f"template variables: {found} cannot be given")
    return CheckedChat(
        messages=checked,
        tools=checked_values(list(options.tools), "tools"),
        variables=variables,
        add_generation_prompt=options.add_generation_prompt,
    )
