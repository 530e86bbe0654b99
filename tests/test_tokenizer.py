"""Encoding, chat templates and streaming, on the real tokenizer and on small ones."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jspec.checkpoints import resolve_source
from jspec.tokenizer import StreamDecoder, Tokenizer, load_tokenizer

SHARED = Path(__file__).resolve().parents[2] / "shared"
TEXTS = [
    "Hello world",
    "  two  spaces 1 22  333\n\n\ttab it's",
    "naïve café — “quotes” … 😀👩‍👩‍👧 漢字 \u200b עברית",
    "def f(x):\n    return x ** 2  # <|im_end|> is text here",
    "",
]


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    """SmolLM2-135M-Instruct's tokenizer; downloaded once, skipped where that is impossible."""
    try:
        return load_tokenizer(resolve_source("smollm2-135m", progress=False))
    except ValueError as error:
        pytest.skip(f"no real model: {error}")


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Llama 2's kind: ▁ for spaces, byte tokens, one leading space stripped."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "a", "b", "▁a", "▁▁", "é", "b▁", "<think>"]
    backend = Backend(
        models.BPE(
            {piece: index for index, piece in enumerate(pieces)},
            [("▁", "a"), ("▁", "▁"), ("b", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("<think>", special=False)])
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    )


def _byte_level(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({piece: index for index, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens([AddedToken("<思考>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", chat_template=chat_template
    )


def _streamed(tokenizer: Tokenizer, chunks: list[list[int]]) -> str:
    decoder = tokenizer.stream_decoder()
    return "".join([decoder.push(chunk) for chunk in chunks]) + decoder.flush()


# --- the real tokenizer


def test_real_ids(real: Tokenizer):
    assert real.encode("Hello world") == [19556, 905]
    # Digits are single tokens, and split off before the spaces in front of them are joined.
    assert real.encode("a  12") == [81, 256, 33, 34]
    assert real.vocab_size == 49152
    assert real.eos_token_ids == {2}
    assert real.bos_token_id == 1


@pytest.mark.parametrize("text", TEXTS)
def test_real_round_trip(real: Tokenizer, text: str):
    expected = text.replace("<|im_end|>", "")  # parsed as the special token, and skipped
    assert real.decode(real.encode(text)) == expected


def test_real_chat(real: Tokenizer):
    ids = real.encode_chat([{"role": "user", "content": "Hi"}])
    rendered = real.backend.decode(ids)
    assert real.has_chat_template
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_real_prompts_equal_recorded_ones(real: Tokenizer):
    recorded = SHARED / "golden" / "real" / "mt_bench.json"
    prompts = SHARED / "data" / "mt_bench.jsonl"
    if not recorded.is_file() or not prompts.is_file():
        pytest.skip(f"no recorded prompts at {recorded.parent}")
    lines = [json.loads(line) for line in prompts.read_text("utf-8").splitlines()]
    turns = {line["id"]: line["turns"][0] for line in lines}
    rows = json.loads(recorded.read_text("utf-8"))
    assert len({row["id"] for row in rows}) == 10
    for row in rows:
        message = {"role": "user", "content": turns[row["id"]]}
        assert real.encode_chat([message]) == row["prompt_ids"]


# Ids of the byte tokens lie just above the special ones; text gives plausible sequences.
_REAL_IDS = st.one_of(st.integers(0, 16), st.integers(0, 300), st.integers(0, 49160))
_REAL_CHUNKS = st.lists(st.one_of(st.lists(_REAL_IDS, max_size=6), st.text(max_size=12)))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=_REAL_CHUNKS)
def test_real_stream_is_exact(real: Tokenizer, drawn: list[list[int] | str]):
    chunks = [real.encode(chunk) if isinstance(chunk, str) else chunk for chunk in drawn]
    assert _streamed(real, chunks) == real.decode([token for chunk in chunks for token in chunk])


@pytest.mark.parametrize("text", TEXTS)
def test_real_stream_never_shows_half_a_character(real: Tokenizer, text: str):
    decoder = real.stream_decoder()
    shown = ""
    for token in real.encode(text):
        shown += decoder.push([token])
        assert "\ufffd" not in shown
    assert shown + decoder.flush() == text.replace("<|im_end|>", "")


def test_stream_decoder_starts_over_after_flush(real: Tokenizer):
    decoder = StreamDecoder(real)
    emoji = real.encode("😀")
    assert len(emoji) > 1
    assert decoder.push(emoji[:1]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.push(emoji) == "😀"
    assert decoder.flush() == ""


# --- other kinds of tokenizers


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chunks=st.lists(
        st.lists(st.one_of(st.integers(0, 268), st.integers(255, 268)), max_size=5), max_size=8
    )
)
def test_sentencepiece_stream_is_exact(sentencepiece: Tokenizer, chunks: list[list[int]]):
    ids = [token for chunk in chunks for token in chunk]
    assert _streamed(sentencepiece, chunks) == sentencepiece.decode(ids)


def test_sentencepiece_bytes_wait_for_the_end_of_their_run(sentencepiece: Tokenizer):
    euro = sentencepiece.encode("€", add_special_tokens=False)[1:]
    assert len(euro) == 3
    a = sentencepiece.encode("a", add_special_tokens=False)
    decoder = sentencepiece.stream_decoder()
    assert decoder.push(euro) == ""
    assert decoder.push(a) == "€ a"
    assert decoder.push(euro[:2]) == ""
    assert decoder.flush() == "\ufffd\ufffd"


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 260), max_size=30))
def test_byte_level_stream_is_exact(ids: list[int]):
    assert _streamed(_BYTE_LEVEL, [ids[:3], ids[3:]]) == _BYTE_LEVEL.decode(ids)


_BYTE_LEVEL = Tokenizer(_byte_level())


def test_unknown_decoder_cannot_stream():
    backend = Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.bos_token_id is None
    with pytest.raises(NotImplementedError, match="decoder 'WordPiece'; expected ByteLevel"):
        tokenizer.stream_decoder()


# --- folders


def test_folder(tmp_path: Path):
    template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    _byte_level(template).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.eos_token_ids == {7, 8, 9, 256}
    assert tokenizer.vocab_size == 258
    assert tokenizer.decode(tokenizer.encode("héllo")) == "héllo"
    messages = [{"role": "user", "content": "hé"}]
    assert tokenizer.decode(tokenizer.encode_chat(messages)) == "[hé]"


def test_no_chat_template():
    tokenizer = Tokenizer(_byte_level())
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="has no chat template; pass the prompt as plain text"):
        tokenizer.encode_chat([{"role": "user", "content": "Hi"}])


def test_template_that_refuses():
    tokenizer = Tokenizer(_byte_level("{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ValueError, match="refuses the messages: roles must alternate"):
        tokenizer.encode_chat([{"role": "user", "content": "Hi"}])


def test_no_tokenizer(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no tokenizer at .*: expected a checkpoint folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"holds no tokenizer: expected tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be loaded") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_long_text_is_encoded_without_advice(caplog: pytest.LogCaptureFixture):
    backend = _byte_level()
    backend.model_max_length = 4
    with caplog.at_level(logging.WARNING):
        assert len(Tokenizer(backend).encode("longer than four")) == 16
    assert not caplog.records


def test_loading_prints_nothing(tmp_path: Path):
    _byte_level().save_pretrained(tmp_path)
    code = f"from jspec.tokenizer import load_tokenizer; load_tokenizer({str(tmp_path)!r})"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout == run.stderr == ""
