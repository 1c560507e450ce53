"""The fake model's texts: ids are bytes, so that any text has ids and any id below 256 a text.

    "Hi" → [256, 72, 105]; 256 begins a prompt, 257 ends an answer

The tokenizer is the real one, over a vocabulary of single bytes.
"""

from __future__ import annotations

import hashlib

from millpond.codecs.descriptors import KvDType, KvSpillDescriptor, LayerType
from millpond.codecs.fingerprint import GuardInputs, NumericsIdentity, kv_guard, model_fingerprint
from millpond.runtime.config import RuntimeConfig
from millpond.runtime.families.config import LayerConfig, ModelConfig
from millpond.runtime.identity import ModelIdentity, Vocabulary
from millpond.runtime.kv.layout import KvLayout

BEGIN_ID, END_ID = 256, 257
VOCAB = 258
CONTEXT_TOKENS = 8192  # as many as a test's prompts need, and few enough for one array
WINDOW_TOKENS = 32
LETTERS = b"abcdefghijklmnopqrstuvwxyz "
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_NORMAL, _CONTROL = 1, 3
_KINDS = (LayerType.SLIDING, LayerType.SLIDING, LayerType.FULL)


def fake_weights(name: str) -> bytes:
    """Return the weights of a fake model: another name, other texts."""
    return hashlib.sha256(b"weights of " + name.encode()).digest()


def letter_of(digest: bytes) -> int:
    """Return the id that a digest stands for: a letter or a space."""
    return LETTERS[int.from_bytes(digest[:8], "little") % len(LETTERS)]


def text_of(token_ids: bytes) -> str:
    """Return the text of packed ids, control ids left out."""
    ids = memoryview(token_ids).cast("I")
    return bytes(one for one in ids if one < BEGIN_ID).decode(errors="replace")


def fake_identity(name: str, config: RuntimeConfig) -> tuple[ModelIdentity, KvLayout]:
    """Return a fake model's identity, and the layout of its cache on the configured grid.

    Three layers, two of them sliding; raises DescriptorError for a grid that is none.
    """
    shape = _shape(config.context_tokens)
    dtype = KvDType(config.kv_dtype) if config.kv_dtype else KvDType.F16
    descriptor = KvSpillDescriptor.from_gemma_loaded_model(shape, kv_dtype=dtype)
    chunk_tokens = config.chunk_tokens_on("cpu")
    layout = KvLayout.from_descriptor(
        descriptor, config.block_tokens, chunk_tokens, config.sliding_boundary_on("cpu")
    )
    numerics = NumericsIdentity(
        device_kind="cpu",
        device_model="fake",
        compute_dtype="float32",
        weight_form="dense",
        mlx_version="",
        blas_name="none",
        blas_version="",
        blas_threads=1,
        kernel_revision=0,
    )
    digest = hashlib.sha256(fake_weights(name)).hexdigest()
    guard = GuardInputs(
        tensors_sha256=digest,
        family=shape.family,
        family_revision=0,
        rope=(),
        kv_dtype=dtype.value,
        groups=tuple(group.name for group in layout.groups),
        block_tokens=config.block_tokens,
        chunk_tokens=chunk_tokens,
        numerics=numerics,
    )
    repo = config.repo or name
    identity = ModelIdentity(
        name=name,
        repo=repo,
        quant="",
        config=shape,
        descriptor=descriptor,
        fingerprint=model_fingerprint(repo, "", "", "", ""),
        namespace="legacy",
        guard=kv_guard(guard),
        tensors_sha256=digest,
        numerics=numerics,
        vocabulary=byte_vocabulary(),
    )
    return identity, layout


def byte_vocabulary() -> Vocabulary:
    """Return a vocabulary of single bytes, the id of each its value, and two control tokens."""
    spelled = [_spelling(value).encode() for value in range(256)]
    return Vocabulary(
        model="gpt2",
        pre="gpt-2",
        tokens=(*spelled, b"<|begin|>", b"<|end|>"),
        scores=(),
        types=(*[_NORMAL] * 256, _CONTROL, _CONTROL),
        merges=(b"no merge",),  # a BPE has some; this one's tokens do not exist
        bos=BEGIN_ID,
        eos=END_ID,
        unk=None,
        eot=None,
        add_bos=True,
        add_eos=False,
        add_space_prefix=False,
        chat_template=CHAT_TEMPLATE,
    )


def _spelling(value: int) -> str:
    """Return the printable character that stands for a byte in byte-level vocabularies.

    Printable bytes of Latin-1 stand for themselves, the others for the characters from 256 on.
    """
    others = [one for one in range(256) if not _is_plain(one)]
    return chr(value) if _is_plain(value) else chr(256 + others.index(value))


def _is_plain(value: int) -> bool:
    return 33 <= value <= 126 or 161 <= value <= 172 or 174 <= value <= 255


def _shape(context_tokens: int | None) -> ModelConfig:
    layers = tuple(
        LayerConfig(
            kind=kind,
            kv_heads=1,
            head_dim=4,
            feed_forward=4,
            rope_base=1e4,
            rope_dims=4,
            kv_source=index,
        )
        for index, kind in enumerate(_KINDS)
    )
    return ModelConfig(
        family="fake",
        vocab=VOCAB,
        hidden=4,
        heads=1,
        norm_eps=1e-6,
        attention_scale=1.0,
        embedding_scale=1.0,
        logit_softcap=0.0,
        context_tokens=min(context_tokens or CONTEXT_TOKENS, CONTEXT_TOKENS),
        sliding_window=WINDOW_TOKENS,
        layers=layers,
    )
