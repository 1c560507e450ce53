"""One request as the gateway sees it: stop strings over token borders, log-probabilities, ends."""

from __future__ import annotations

import random

import pytest
from millpond.actors.gateway_request import Request
from millpond.codecs.choices import SamplingParams, TokenLogprob
from millpond.codecs.messages import Finished, Submit, Tokens

PIECES = ("a", "b", "ab", "ba", "aab", "", "é", "c", "abc")


class Pieces:
    """Ids are places in PIECES; a character may come in two halves."""

    def __init__(self, held: str = "") -> None:
        self.held = held

    def push(self, token_id: int) -> str:
        return PIECES[token_id]

    def finish(self) -> str:
        return self.held


def request(held: str = "", **sampling: object) -> Request:
    submit = Submit(
        request_id=1,
        token_ids=b"\0" * 4,
        root=b"r" * 32,
        chain=(),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
    )
    return Request(submit, Pieces(held), lambda: 0.0, 0.0)


def expected(ids: list[int], stops: tuple[str, ...], held: str) -> tuple[str, bool]:
    """What may be shown of a completion: cut before the stop string that is whole first."""
    text = ""
    for token_id in ids:
        text += PIECES[token_id]
        found = [at for at in map(text.find, stops) if at >= 0]
        if found:
            return text[: min(found)], True
    text += held
    found = [at for at in map(text.find, stops) if at >= 0]
    return (text[: min(found)], True) if found else (text, False)


def test_no_part_of_a_stop_string_is_ever_shown_however_tokens_cut_it() -> None:
    draw = random.Random(5)
    stopped = 0
    for _ in range(3000):
        alphabet = ("a", "b", "ab", "bab", "abcb", "aa", "cé", "abab")
        stops = tuple(draw.sample(alphabet, draw.randrange(1, 4)))
        ids = [draw.randrange(len(PIECES)) for _ in range(draw.randrange(1, 12))]
        held = draw.choice(("", "\ufffd", "b"))
        one = request(held, stop=stops, max_tokens=50)
        whole, has_stop = expected(ids, stops, held)
        shown = ""
        for place, token_id in enumerate(ids):
            done = one.take(Tokens(request_id=1, first_index=place, token_ids=(token_id,)))
            while one.ready:
                shown += one.ready.popleft().text
            assert whole.startswith(shown), (stops, ids, shown)
            if done:
                break
        one.end(Finished(request_id=1, reason="length"))
        shown += "".join(token.text for token in one.ready)
        assert shown == one.text == whole, (stops, ids)
        completion = one.completion()
        assert completion.finish_reason == ("stop" if has_stop else "length")
        stopped += has_stop
    assert 500 < stopped < 2900


def test_tokens_after_the_stop_string_are_not_counted() -> None:
    one = request(stop=("ab",))
    assert one.take(Tokens(request_id=1, first_index=0, token_ids=(0, 1, 7)))
    one.end(Finished(request_id=1, reason="cancelled"))
    done = one.completion()
    assert (done.text, done.token_ids, done.finish_reason) == ("", (0, 1), "stop")


@pytest.mark.parametrize("held", ["", "\ufffd"])
def test_every_token_brings_its_own_log_probability(held: str) -> None:
    one = request(held, logprobs=1, stop=("zz",))
    told = [TokenLogprob(logprob=-float(place), top=((place, -1.0),)) for place in range(4)]
    for place in range(4):
        one.take(
            Tokens(request_id=1, first_index=place, token_ids=(place,), logprobs=(told[place],))
        )
    one.end(Finished(request_id=1, reason="length"))
    assert one.completion().logprobs == tuple(told)
    for token in one.ready:
        assert token.logprob == told[token.index]
