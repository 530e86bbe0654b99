"""Records to tokens, and which of the tokens are supervised.

Supervised is what the target itself would write: from the end of the generation prompt up to and
including the end token. A mask that is one token off trains a head on prompts, or never on ends.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import jinja2
import numpy as np

from jspec.tokenizer import Tokenizer
from train.data.records import Record

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """A token sequence to learn from.

    Attributes:
        id: of its record.
        tokens: [L] int32.
        mask: [L] bool, the supervised tokens.
    """

    id: str
    tokens: np.ndarray
    mask: np.ndarray


class Unusable(ValueError):
    """A record that cannot be learnt from; `reason` is short, for counting."""

    def __init__(self, reason: str, place: str):
        super().__init__(f"{place}: {reason}")
        self.reason = reason


def render(record: Record, tokenizer: Tokenizer | None, *, last_turn_only: bool = False) -> Example:
    """Tokens and mask of one record.

    Args:
        record: from `read_records`.
        tokenizer: the target's; not needed for `input_ids`.
        last_turn_only: of several answers supervise only the last.

    Raises:
        Unusable: no assistant turn, or the template refuses the messages.
        ValueError: the tokenizer lacks what the record needs (a chat template, offsets).
    """
    if record.input_ids is not None:
        return _example(record, record.input_ids, record.loss_mask)
    if tokenizer is None:
        raise ValueError(
            f"{record.place} is text, and the target has no tokenizer; give `input_ids`"
        )
    if record.text is not None:
        tokens = tokenizer.encode(record.text)
        first = int(bool(tokens) and tokens[0] == tokenizer.bos_token_id)
        return _example(record, tokens, [0] * first + [1] * (len(tokens) - first))
    messages = _from_first_user(record)
    if not any(message["role"] == "assistant" for message in messages):
        raise Unusable("no assistant turn", record.place)
    if record.answer_ids is not None:
        return _with_answer(record, messages, tokenizer)
    try:
        text, spans = chat_spans(tokenizer, messages)
    except jinja2.TemplateError as error:
        raise Unusable(f"the chat template refuses it ({error})", record.place) from error
    tokens, mask = _mask_tokens(tokenizer, text, spans[-1:] if last_turn_only else spans)
    return _example(record, tokens, mask)


def chat_spans(
    tokenizer: Tokenizer, messages: Sequence[dict[str, str]]
) -> tuple[str, list[tuple[int, int]]]:
    """A rendered chat, and the character span of each answer with its end token.

    A template with generation markers says itself where answers are. For any other, the chat is
    rendered up to each answer: what follows the generation prompt is the answer.

    Raises:
        ValueError: the tokenizer has no template, or one whose beginning depends on what follows.
        jinja2.TemplateError: the template refuses the messages.
    """
    if not tokenizer.has_chat_template:
        raise ValueError(
            "the target's tokenizer has no chat template: use an instruction-tuned target, or "
            "data of plain text or input_ids"
        )
    backend = tokenizer.backend
    if _has_markers(backend):
        return _marked_spans(backend, messages)
    text = _render(backend, messages)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(backend, messages[:index], add_generation_prompt=True)
        upto = _render(backend, messages[: index + 1])
        if not (text.startswith(before) and text.startswith(upto) and len(before) < len(upto)):
            raise ValueError(
                "the chat template rewrites earlier turns, so answers cannot be told apart; add "
                "{% generation %} … {% endgeneration %} around the assistant's text in it, or "
                "regenerate the data with one answer each"
            )
        spans.append((len(before), _end_of_answer(tokenizer, text, len(before), len(upto))))
    return text, spans


def _from_first_user(record: Record) -> list[dict[str, str]]:
    """ShareGPT cuts long chats in pieces; an answer without its question is left out."""
    messages = list(record.messages or ())
    start = next((i for i, m in enumerate(messages) if m["role"] != "assistant"), len(messages))
    return messages[start:]


def _with_answer(record: Record, messages: list[dict[str, str]], tokenizer: Tokenizer) -> Example:
    if messages[-1]["role"] != "assistant":
        raise Unusable("token_ids without a last assistant turn", record.place)
    assert record.answer_ids is not None
    try:
        prompt = tokenizer.encode_chat(messages[:-1])
    except ValueError as error:
        raise Unusable(str(error), record.place) from error
    mask = [0] * len(prompt) + [1] * len(record.answer_ids)
    return _example(record, [*prompt, *record.answer_ids], mask)


def _example(record: Record, tokens, mask) -> Example:
    return Example(
        id=record.id, tokens=np.asarray(tokens, np.int32), mask=np.asarray(mask, np.int8) > 0
    )


def _render(backend, messages, **options) -> str:
    return backend.apply_chat_template(list(messages), tokenize=False, **options)


def _has_markers(backend) -> bool:
    template = backend.chat_template
    return isinstance(template, str) and bool(_MARKER.search(template))


def _marked_spans(backend, messages) -> tuple[str, list[tuple[int, int]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        conversations=[list(messages)],
        chat_template=backend.chat_template,
        return_assistant_tokens_mask=True,
        **backend.special_tokens_map,
    )
    return texts[0], [(int(begin), int(end)) for begin, end in spans[0]]


def _end_of_answer(tokenizer: Tokenizer, text: str, begin: int, end: int) -> int:
    """After the turn's first end token; templates add a line break that nobody generates."""
    ends = [tokenizer.backend.convert_ids_to_tokens(i) for i in sorted(tokenizer.eos_token_ids)]
    found = [(text.find(token, begin, end), token) for token in ends if token]
    found = [(at, token) for at, token in found if at >= 0]
    if not found:
        return end
    at, token = min(found)
    return at + len(token)


def _mask_tokens(
    tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """Tokens whose characters all lie inside a span; one that reaches out of it is the prompt's."""
    if not getattr(tokenizer.backend, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer.backend).__name__} cannot say which characters a token covers; the "
            "target needs a tokenizer.json"
        )
    encoded = tokenizer.backend(
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    mask, span = [], 0
    for begin, end in encoded["offset_mapping"]:
        while span < len(spans) and begin >= spans[span][1]:
            span += 1
        inside = span < len(spans) and spans[span][0] <= begin < end <= spans[span][1]
        mask.append(int(inside))
    return list(encoded["input_ids"]), mask
