"""Text to token ids and back, in one piece or as a stream.

A thin wrapper over the model's own tokenizer: `transformers` for a folder, the vocabulary inside
a GGUF file otherwise. transformers is imported when a tokenizer is loaded, not before, and kept
from logging.
"""

import codecs
import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jspec.checkpoints.gguf_container import GGUFFile
from jspec.checkpoints.gguf_models import gguf_generation_config
from jspec.checkpoints.gguf_tokenizer import gguf_tokenizer


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """The tokenizer of a checkpoint: a folder with tokenizer files, or a `.gguf` file.

    Raises:
        ValueError: there is no tokenizer at `path`.
        NotImplementedError: a GGUF vocabulary of an unknown kind.
    """
    path = Path(path)
    if path.suffix.lower() == ".gguf" and path.is_file():
        file = GGUFFile(path)
        with _quiet():
            return Tokenizer(gguf_tokenizer(file), gguf_generation_config(file))
    if not path.is_dir():
        raise ValueError(f"no tokenizer at {path}: expected a checkpoint folder or a .gguf file")
    if not any((path / name).is_file() for name in _FILES):
        raise ValueError(
            f"{path} holds no tokenizer: expected {', '.join(_FILES[:-1])} or {_FILES[-1]}; copy "
            "it from where the weights came from"
        )
    with _quiet():
        from transformers import AutoTokenizer

        try:
            backend = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"the tokenizer in {path} cannot be loaded: {reason}") from error
    configs = [path / "config.json", path / "generation_config.json"]
    return Tokenizer(
        backend, *(json.loads(c.read_text(encoding="utf-8")) for c in configs if c.is_file())
    )


class Tokenizer:
    """Encodes and decodes text for one model.

    Attributes:
        eos_token_ids: the ids that stop generation: the tokenizer's, the config's and the
            generation config's together.
        bos_token_id: the id that starts a text, if the model has one.
        vocab_size: number of token ids the tokenizer knows; the model's may be padded above it.
    """

    def __init__(self, backend: Any, *configs: Mapping[str, Any]):
        """Wrap a transformers tokenizer; `configs` may name more ids that stop generation."""
        self.backend = backend
        ends = {backend.eos_token_id} | {
            token for config in configs for token in _as_list(config.get("eos_token_id"))
        }
        self.eos_token_ids: frozenset[int] = frozenset(ends - {None})
        self.bos_token_id: int | None = backend.bos_token_id
        self.vocab_size: int = len(backend)
        self._pieces: _Pieces | None = None

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works: instruction-tuned models have a template, base ones not."""
        return bool(self.backend.chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with whatever the model expects around it (bos) unless told not."""
        # verbose=False: the length limit it would warn about is the engine's business.
        encoded = self.backend(text, add_special_tokens=add_special_tokens, verbose=False)
        return list(encoded["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat, up to where the assistant's answer begins.

        Args:
            messages: `{"role": "system" | "user" | "assistant", "content": text}` in order.

        Raises:
            ValueError: the model has no chat template, or its template refuses the messages.
        """
        import jinja2

        if not self.has_chat_template:
            raise ValueError(
                "the model's tokenizer has no chat template; pass the prompt as plain text "
                "(--no-chat), or use an instruction-tuned model"
            )
        try:
            text = self.backend.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template refuses the messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens; broken UTF-8 becomes U+FFFD."""
        return self.backend.decode(
            [int(token) for token in ids],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )

    def token_text(self, token: int) -> str:
        """What one id stands for: its text, special tokens by name, lone bytes as `<0xE2>`."""
        piece = self.pieces()[token]
        if isinstance(piece, bytes):
            return piece.decode("utf-8", "replace")
        if isinstance(piece, int):
            return f"<0x{piece:02X}>"
        if piece is None:
            name = self.backend.convert_ids_to_tokens(token)
            return f"<{token}>" if name is None else str(name)
        return piece

    def first_difference(self, other: "Tokenizer") -> str | None:
        """Where two vocabularies part, in words; None where every id means the same token."""
        ours, theirs = (
            {index: token for token, index in tokenizer.backend.get_vocab().items()}
            for tokenizer in (self, other)
        )
        for index in sorted(ours.keys() | theirs.keys()):
            mine, its = ours.get(index), theirs.get(index)
            if mine != its:
                return f"id {index} is {mine!r} in one and {its!r} in the other"
        return None

    def stream_decoder(self) -> "StreamDecoder":
        """A fresh incremental decoder for one text."""
        return StreamDecoder(self)

    def pieces(self) -> "_Pieces":
        """What each id contributes to the text; shared by all stream decoders."""
        if self._pieces is None:
            self._pieces = _Pieces(self.backend)
        return self._pieces


class StreamDecoder:
    """Decodes a growing list of ids: the pushes and the final flush join to `decode(all ids)`.

    Text that a later id could still change is held back: the bytes of an unfinished character and,
    with SentencePiece's byte tokens, the whole run of them (one bad byte spoils the run). Each id
    costs the same however long the text is.

    decoder = tokenizer.stream_decoder()
    for ids in rounds:
        print(decoder.push(ids), end="")
    print(decoder.flush())
    """

    def __init__(self, tokenizer: Tokenizer):
        """Start an empty text.

        Raises:
            NotImplementedError: the tokenizer joins its tokens in a way that is not known here.
        """
        self._pieces = tokenizer.pieces()
        self._reset()

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with these ids."""
        return "".join([self._piece(int(token)) for token in ids])

    def flush(self) -> str:
        """The text still held back, ending this text; the decoder then starts a new one."""
        text = self._end_of_run() + self._utf8.decode(b"", final=True)
        self._reset()
        return text

    def _reset(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()  # SentencePiece byte tokens in a row
        self._at_start = self._pieces.strip_first_space

    def _piece(self, token: int) -> str:
        piece = self._pieces[token]
        if piece is None:
            return ""
        if isinstance(piece, bytes):  # a byte-level token
            return self._utf8.decode(piece)
        if isinstance(piece, int):  # a SentencePiece byte token
            self._run.append(piece)
            return ""
        return self._end_of_run() + self._strip(piece)

    def _end_of_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = "\ufffd" * len(self._run)
        self._run.clear()
        return self._strip(text)

    def _strip(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class _Pieces:
    """Token id -> bytes (byte-level), str (SentencePiece), int (one byte of it) or None (no text).

    Mirrors the `decoders` of the tokenizers library: ByteLevel, or the sequence Replace ▁,
    ByteFallback, Fuse, Strip that SentencePiece models use.
    """

    def __init__(self, backend: Any):
        rust = getattr(backend, "backend_tokenizer", None)
        if rust is None:
            raise NotImplementedError(
                f"streaming needs a tokenizer.json; {type(backend).__name__} has none: save it "
                "with `AutoTokenizer.from_pretrained(…).save_pretrained(…)` in its folder"
            )
        added = rust.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}
        self._token = rust.id_to_token
        steps = _decoder_steps(json.loads(rust.to_str())["decoder"])
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        if not self._byte_level and not _is_sentencepiece(steps):
            raise NotImplementedError(
                f"streaming does not know the tokenizer's decoder {' + '.join(kinds) or None!r}; "
                "expected ByteLevel or SentencePiece's: generate without streaming"
            )
        self.strip_first_space = kinds[-1] == "Strip"
        self._cache: dict[int, bytes | str | int | None] = {}

    def __getitem__(self, token_id: int) -> bytes | str | int | None:
        if token_id not in self._cache:
            self._cache[token_id] = self._make(token_id)
        return self._cache[token_id]

    def _make(self, token_id: int) -> bytes | str | int | None:
        token = self._token(token_id)
        if token is None or token in self._special:
            return None
        if self._byte_level:
            return _to_bytes(token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            with contextlib.suppress(ValueError):
                return int(token[3:5], 16)
        return token.replace("▁", " ")


def _decoder_steps(decoder: dict | None) -> list[dict]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _is_sentencepiece(steps: list[dict]) -> bool:
    expected = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    return steps in (expected, expected[:-1])


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte.

    Reference: `bytes_to_unicode` in https://github.com/openai/gpt-2/blob/master/src/encoder.py.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    alphabet = {chr(byte): byte for byte in shown}
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()


def _to_bytes(token: str) -> bytes:
    # A token with a character outside the alphabet (an added one) stands for itself.
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def _as_list(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from advising about torch and tokenizer conversions while it loads."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
