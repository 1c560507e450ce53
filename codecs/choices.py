"""What a request says about the choice of its tokens, and what it is told about each."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
# the end of the text so far is compared with each of them, at every token
StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
PIN_S_MAX = 366 * 86400.0  # of a request's pin
PinSeconds = Annotated[float, msgspec.Meta(ge=0.0, le=PIN_S_MAX)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Bias = Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]  # decides by itself at either end


class AnswerForm(NamedTuple):
    """What a completion is held to: the field that says it, and its text."""

    kind: Literal["json_schema", "grammar"]
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose the next token; part of the public API and of Submit.

    max_tokens    completion tokens at most, the terminating one included
    temperature   0 is greedy; logits are divided by it
    top_k         keep the k most probable tokens; 0 keeps all
    top_p         keep the smallest set with at least this probability mass; 1 keeps all
    min_p         drop tokens less probable than this share of the best one's probability
    seed          random key; None draws one.  A key is a function of seed, choice and step alone
    stop          strings that end the completion and are no part of its text; 1,024 characters
    ignore_eos    go on after an end-of-generation token
    digest_logits return the xxh3-128 of each step's float32 logits (exactness checks)
    repetition_penalty  divides positive and multiplies negative logits of ids that prompt or
                  completion hold (Keskar et al. 2019, CTRL); 1 is off
    presence_penalty, frequency_penalty  subtracted from the logits of the completion's ids, once,
                  and once for each time
    logit_bias    added to the logits of these ids, -100 to 100
    logprobs      return the log-probability of each token and of this many best ones; None: none
    json_schema   text of a JSON schema that the completion is held to; "" for none
    choice        which of a prompt's several answers this one is
    grammar       text of a grammar, in the Lark form of llguidance, that the completion is held to;
                  "" for none; not together with a schema
    """

    max_tokens: Positive = 256
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 0.0
    top_k: Count = 0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[tuple[StopText, ...], msgspec.Meta(max_length=16)] = ()
    ignore_eos: bool = False
    digest_logits: bool = False
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=10.0)] = 1.0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    logit_bias: Annotated[dict[TokenId, Bias], msgspec.Meta(max_length=1024)] = {}
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    json_schema: Annotated[str, msgspec.Meta(max_length=2**17)] = ""
    choice: Annotated[int, msgspec.Meta(ge=0, le=1023)] = 0
    grammar: Annotated[str, msgspec.Meta(max_length=2**19)] = ""

    @property
    def form(self) -> AnswerForm | None:
        """What the completion is held to, None for nothing; the schema where both are given."""
        if self.json_schema:
            return AnswerForm("json_schema", self.json_schema)
        return AnswerForm("grammar", self.grammar) if self.grammar else None


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log-probability of a chosen token under the model, before temperature and filters.

    logprob  natural logarithm, of the logits after penalties and bias
    top      the most probable ids and theirs, best first
    """

    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()
