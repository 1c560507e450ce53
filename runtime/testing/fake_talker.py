"""``Talker``: a fake model whose answers a test may choose, and which a test may hold.

``Tempo`` says when its next step may begin, ``TalkerThread`` waits for that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec
from anyio import CancelScope, Event, current_time, move_on_after, sleep
from millpond.codecs.choices import SamplingParams, TokenLogprob
from millpond.codecs.messages import Submit, ToStore
from millpond.runtime.kv.layout import KvLayout
from millpond.runtime.steps import Sampled
from millpond.runtime.testing.fake_model import FakeModel
from millpond.runtime.testing.fake_rows import next_digest
from millpond.runtime.testing.fake_text import END_ID, VOCAB, letter_of, text_of
from millpond.runtime.testing.workers import Pace, SimWorker

Answers = Callable[[str], str | None]
HELD_S_MAX = 60.0  # longer than any test holds a model and means it
LOOK_S = 0.005  # how often a held model looks whether anybody still waits for it


class Tempo:
    """When a step of the fake model may begin.

    step_s  time that every step takes
    given   tokens that it gave so far
    """

    def __init__(self) -> None:
        # mutable state, changed by the test, by the model and in the methods below
        self.step_s = 0.0
        self.given = 0
        self._is_needed: Callable[[], bool] = bool
        self._is_free = True
        self._limit: int | None = None
        self._changed, self._held = Event(), Event()

    def start(self, is_needed: Callable[[], bool]) -> None:
        """Rule over a house from now on; while nobody needs the model, nothing holds it."""
        self._is_needed, self._is_free = is_needed, False

    def free(self) -> None:
        """Let every step begin at once, as the house closes."""
        self._is_free = True
        self.release()

    def hold(self, after_tokens: int) -> None:
        """Begin no step once so many more tokens were given."""
        self._limit = self.given + after_tokens
        self._held = Event()

    def release(self) -> None:
        """Hold it no longer."""
        self._limit = None
        self._changed.set()
        self._changed = Event()

    async def wait_held(self) -> None:
        """Wait until the model is held."""
        await self._held.wait()

    async def wait(self) -> None:
        """Wait until a step may begin; raises AssertionError if that takes HELD_S_MAX."""
        if self.step_s and not self._is_free:
            await sleep(self.step_s)
        started = current_time()
        while not self._is_free and self._limit is not None and self.given >= self._limit:
            self._held.set()
            if not self._is_needed():
                return
            if current_time() - started > HELD_S_MAX:
                raise AssertionError(
                    f"the model was held for {HELD_S_MAX:g} s: release() was never called"
                )
            with move_on_after(LOOK_S):
                await self._changed.wait()


class Talker(FakeModel):
    """A ``FakeModel`` over bytes: letters, or what ``answers`` chooses for a prompt.

    answers  prompt → the whole answer, which ends there; None: letters without end
    tempo    counts the tokens

    Letters are chosen by the rows of everything before them, so a wrong row changes the text.
    """

    def __init__(self, layout: KvLayout, answers: Answers, tempo: Tempo) -> None:
        super().__init__(layout, VOCAB)
        self._answers, self._tempo = answers, tempo
        self._read = msgspec.msgpack.Decoder(ToStore).decode
        # mutable state, changed only in see
        self.prompts: dict[int, str] = {}
        self._scripts: dict[int, tuple[int, bytes]] = {}  # prompt tokens, the answer's bytes

    def see(self, arrow: str, data: bytes) -> None:
        """Look at a message on its way to the store; fits a house's ``tap``."""
        message = self._read(data) if arrow == "submissions" else None
        if not isinstance(message, Submit):
            return
        prompt = self.prompts[message.request_id] = text_of(message.token_ids)
        answer = self._answers(prompt)
        if answer is not None:
            scripted = (len(message.token_ids) // 4, answer.encode())
            self._scripts[message.request_id] = scripted

    def _sample(self, sequence_id: int, end: int, sampling: SamplingParams) -> Sampled:
        self._tempo.given += 1
        digest = next_digest(self._seen(sequence_id, end))
        token_id = self._chosen(sequence_id, end, _drawn(digest, sampling))
        shown = digest if sampling.digest_logits else b""
        return Sampled(sequence_id, token_id, shown, _logprob(token_id, sampling))

    def _chosen(self, sequence_id: int, end: int, digest: bytes) -> int:
        if sequence_id not in self._scripts:
            return letter_of(digest)
        prompt_tokens, answer = self._scripts[sequence_id]
        place = end - prompt_tokens
        return answer[place] if place < len(answer) else END_ID


def _drawn(digest: bytes, sampling: SamplingParams) -> bytes:
    """Another seed or choice gives other letters, unless the sampling is greedy."""
    if not sampling.temperature:
        return digest
    key = f"{sampling.seed or 0}/{sampling.choice}".encode()
    return hashlib.blake2b(digest + key, digest_size=16).digest()


def _logprob(token_id: int, sampling: SamplingParams) -> TokenLogprob | None:
    """The token itself is the best one, each next letter half as probable as the one before."""
    if sampling.logprobs is None:
        return None
    others = [one for one in range(ord("a"), ord("z") + 1) if one != token_id]
    ranked = [token_id, *others][: sampling.logprobs]
    return TokenLogprob(
        logprob=-0.5, top=tuple((one, -0.5 - 0.7 * rank) for rank, one in enumerate(ranked))
    )


class TalkerThread(SimWorker):
    """The engine's thread: its calls begin when the tempo says so."""

    def __init__(self, seed: int, tempo: Tempo) -> None:
        super().__init__("engine", seed, Pace(share=0.0))
        self._tempo = tempo

    async def _begin(self, kind: str) -> None:
        await super()._begin(kind)
        with CancelScope(shield=True):
            await self._tempo.wait()
