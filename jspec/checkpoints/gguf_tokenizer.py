"""The tokenizer inside a GGUF file, rebuilt as the model's own `tokenizer.json` would have it.

transformers can convert GGUF tokenizers too, but needs torch for it, and gives every byte-level
vocabulary it has no entry for GPT-2's word splitting: SmolLM2 also splits off single digits, so
"a  1" would come out as other tokens than the model was trained on.

References: llama.cpp's `src/llama-vocab.cpp` (which names stand for which splitting) and the
`tokenizer.json` of the models themselves.
"""

from typing import TYPE_CHECKING, Any

from jspec.checkpoints.gguf_container import GGUFFile

if TYPE_CHECKING:
    import tokenizers

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{_REST}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> the regex that splits words; "digits" and "gpt2" are built-in splitters.
_SPLITS = {
    "smollm": "digits",
    "gpt-2": "gpt2",
    "olmo": "gpt2",
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
# Words that are tokens are taken whole, before any merging.
_WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "tekken"}
_ADD_BOS = {"llama3", "llama-v3", "llama-bpe", "tekken"}
_NFC = {"qwen2", "deepseek-r1-qwen"}


def gguf_tokenizer(file: GGUFFile) -> Any:
    """A `transformers.PreTrainedTokenizerFast` for the vocabulary of a GGUF file.

    Raises:
        ValueError: the file holds no vocabulary.
        NotImplementedError: a vocabulary or word splitting that is not known.
    """
    from transformers import PreTrainedTokenizerFast

    model = file.metadata.get("tokenizer.ggml.model")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not model or not tokens:
        raise ValueError(f"{file.path} holds no tokenizer; use the folder the model came from")
    if model == "gpt2":
        backend = _byte_level(file, tokens)
        add_bos = file.metadata.get("tokenizer.ggml.pre") in _ADD_BOS
    elif model == "llama":
        backend = _sentencepiece(file, tokens)
        add_bos = True
    else:
        raise NotImplementedError(
            f"{file.path}: GGUF tokenizer {model!r} is not supported, expected gpt2 or llama; use "
            "the model's safetensors folder instead"
        )
    special = {
        name: tokens[token_id]
        for name, key in _SPECIAL.items()
        if (token_id := file.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    _add_marked_tokens(backend, file, tokens)
    backend.post_processor = _post_processor(
        special.get("bos_token") if _flag(file, "add_bos_token", add_bos) else None,
        special.get("eos_token") if _flag(file, "add_eos_token", False) else None,
        {token: index for index, token in enumerate(tokens)},
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _byte_level(file: GGUFFile, tokens: list[str]) -> "tokenizers.Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind = file.metadata.get("tokenizer.ggml.pre")
    if kind not in _SPLITS:
        raise NotImplementedError(
            f"{file.path}: GGUF word splitting {kind!r} (tokenizer.ggml.pre) is not supported, "
            f"expected {', '.join(_SPLITS)}; use the model's safetensors folder instead"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in file.metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=kind in _WHOLE_WORDS))
    split = _SPLITS[kind]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in _BUILT_IN)
    if split == "digits":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    elif split == "gpt2":
        first = []
    else:
        first = [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    backend.decoder = decoders.ByteLevel()
    if kind in _NFC:
        backend.normalizer = normalizers.NFC()
    return backend


_BUILT_IN = ("digits", "gpt2")


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> "tokenizers.Tokenizer":
    """SentencePiece BPE (Llama 2, Mistral 7B) with bytes for unknown characters."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate(tokens)},
            _merges(tokens, file.metadata["tokenizer.ggml.scores"], _token_types(file, tokens)),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = _flag(file, "add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best: every pair, by its result's score."""
    normal = {token: index for index, token in enumerate(tokens) if types[index] == _NORMAL}
    ranked = []
    for token, index in normal.items():
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        ranked += [
            (-scores[index], normal[left], normal[right], left, right)
            for left, right in pairs
            if left in normal and right in normal
        ]
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_marked_tokens(backend: "tokenizers.Tokenizer", file: GGUFFile, tokens: list[str]) -> None:
    """Control tokens are matched whole and skipped in text; user-defined ones only matched."""
    from tokenizers import AddedToken

    types = _token_types(file, tokens)
    for kind in (_CONTROL, _USER_DEFINED):
        marked = [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, its in zip(tokens, types)
            if its == kind
        ]
        (backend.add_special_tokens if kind == _CONTROL else backend.add_tokens)(marked)


def _post_processor(bos: str | None, eos: str | None, ids: dict[str, int]) -> Any:
    from tokenizers import processors

    used = [token for token in (bos, eos) if token is not None]
    template = " ".join([*([bos] if bos else []), "$A", *([eos] if eos else [])])
    return processors.TemplateProcessing(
        single=template.split(" "), special_tokens=[(token, ids[token]) for token in used]
    )


def _token_types(file: GGUFFile, tokens: list[str]) -> list[int]:
    return file.metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    return bool(file.metadata.get(f"tokenizer.ggml.{name}", default))
