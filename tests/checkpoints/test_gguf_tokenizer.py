"""Tokenizers rebuilt from GGUF metadata, against the libraries that made them."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from jspec.checkpoints.gguf_container import GGUFFile
from jspec.checkpoints.gguf_tokenizer import gguf_tokenizer

TEXT = (
    "The quick brown fox's 12 dogs don't jump over 3456 lazy cats.\n\n  Indented  text, "
    "naïve café; HELLO WORLD! It'll cost $1,299.50 — “quoted” 漢字 😀\t(tab)\r\nEnd\n"
)


def _file(**metadata) -> GGUFFile:
    file = object.__new__(GGUFFile)
    file.path = Path("m.gguf")
    file.metadata = {f"tokenizer.{key.replace('__', '.')}": metadata[key] for key in metadata}
    return file


@pytest.fixture(scope="module")
def byte_level() -> tuple[list[str], list[str]]:
    """Tokens and merges of a small byte-level BPE that merges across every kind of character."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.train_from_iterator(
        [TEXT] * 3 + [" 12 345 6789", "  \n\n ", "abc ABC"],
        trainers.BpeTrainer(
            vocab_size=600,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=["<|end|>", "<|bos|>"],
        ),
    )
    model = backend.get_vocab()
    tokens = sorted(model, key=lambda token: model[token])
    merges = json.loads(backend.to_str())["model"]["merges"]
    return tokens, [" ".join(merge) for merge in merges]


def _build(byte_level, pre: str, **more):
    tokens, merges = byte_level
    types = [3, 3] + [1] * (len(tokens) - 2)
    return gguf_tokenizer(
        _file(
            ggml__model="gpt2",
            ggml__pre=pre,
            ggml__tokens=tokens,
            ggml__merges=merges,
            ggml__token_type=types,
            ggml__bos_token_id=1,
            ggml__eos_token_id=0,
            **more,
        )
    )


def _words(tokenizer, text: str) -> list[str]:
    return [
        text[start:end]
        for _, (start, end) in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    ]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'m", " 1234", " ", " x", "!?", "\n"]),
        ("smollm", ["I", "'m", " ", "1", "2", "3", "4", " ", " x", "!?", "\n"]),
        ("qwen2", ["I", "'m", " ", "1", "2", "3", "4", " ", " x", "!?\n"]),
        ("llama-bpe", ["I", "'m", " ", "123", "4", " ", " x", "!?\n"]),
        ("tekken", ["I", "'m", " ", "1", "2", "3", "4", " ", " x", "!?\n"]),
    ],
)
def test_word_splitting(byte_level, pre: str, expected: list[str]):
    assert _words(_build(byte_level, pre), "I'm 1234  x!?\n") == expected


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe", "tekken"])
def test_byte_level_round_trip_and_bos(byte_level, pre: str):
    tokenizer = _build(byte_level, pre)
    ids = tokenizer(TEXT)["input_ids"]
    starts_with_bos = pre in ("llama-bpe", "tekken")
    assert (ids[0] == 1) == starts_with_bos
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    assert tokenizer("<|end|>a", add_special_tokens=False)["input_ids"][0] == 0
    assert len(tokenizer) == len(byte_level[0])


def test_flags_override_defaults(byte_level):
    added = _build(byte_level, "smollm", ggml__add_bos_token=True, ggml__add_eos_token=True)
    ids = added("a")["input_ids"]
    assert (ids[0], ids[-1]) == (1, 0)
    assert _build(byte_level, "llama-bpe", ggml__add_bos_token=False)("a")["input_ids"][0] != 1


def test_transformers_agrees_where_it_knows_the_splitting(byte_level):
    pytest.importorskip("torch")
    conversion = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    tokens, merges = byte_level
    for pre in ("qwen2", "llama-bpe", "tekken"):
        described = {
            "tokenizer_type": "gpt2",
            "pre_tokenizer_type": pre,
            "tokens": tokens,
            "merges": merges,
            "token_type": [3, 3] + [1] * (len(tokens) - 2),
        }
        theirs, _ = conversion.convert_gguf_tokenizer("llama", described)
        mine = _build(byte_level, pre)
        assert _words(mine, TEXT) == [
            TEXT[a:b] for _, (a, b) in theirs.pre_tokenizer.pre_tokenize_str(TEXT)
        ]


def test_sentencepiece_equals_the_library(tmp_path: Path):
    library = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(TEXT.split(".") * 4 + ["abc abcd bcd  bc"]), "utf-8")
    library.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "spm"),
        model_type="bpe",
        vocab_size=430,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    spm = library.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    size = spm.get_piece_size()
    kinds = [
        2 if spm.is_unknown(i) else 3 if spm.is_control(i) else 6 if spm.is_byte(i) else 1
        for i in range(size)
    ]
    tokenizer = gguf_tokenizer(
        _file(
            ggml__model="llama",
            ggml__tokens=[spm.id_to_piece(i) for i in range(size)],
            ggml__scores=[spm.get_score(i) for i in range(size)],
            ggml__token_type=kinds,
            ggml__bos_token_id=1,
            ggml__eos_token_id=2,
            ggml__unknown_token_id=0,
        )
    )
    for text in (TEXT, "hello", " leading", "日本 é", "two  spaces", "a\nb"):
        ids = tokenizer(text)["input_ids"]
        assert ids == [1, *spm.encode(text)], text
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("metadata", "error", "reason"),
    [
        ({}, ValueError, "m.gguf holds no tokenizer"),
        (
            {"ggml__model": "t5", "ggml__tokens": ["a"]},
            NotImplementedError,
            "tokenizer 't5' is not supported, expected gpt2 or llama",
        ),
        (
            {"ggml__model": "gpt2", "ggml__tokens": ["a"], "ggml__pre": "viking"},
            NotImplementedError,
            "word splitting 'viking' .* is not supported, expected smollm",
        ),
    ],
)
def test_refusals(metadata: dict, error: type[Exception], reason: str):
    with pytest.raises(error, match=reason) as raised:
        gguf_tokenizer(_file(**metadata))
    assert "\n" not in str(raised.value)
