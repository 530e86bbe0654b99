"""A text with its tokens coloured by who wrote them."""

from jspec.drawing.svg import FAINT, FONT, INK, LOOKS, PAPER, RULE, Html, element, escape
from jspec.engine.output import Output
from jspec.tokenizer import Tokenizer

_WRITERS = {True: "accepted", False: "bonus"}
_SAYS = {True: "drafted, accepted", False: "the target's own"}


def draw_text(output: Output, tokenizer: Tokenizer | None = None) -> Html:
    """The generated tokens of a finished text, accepted drafts apart from the target's own.

    A token that only completes a character shows the whole character; the round and the token's id
    show under the mouse. The first token comes from the prefill.

    Args:
        output: from `Engine.generate`.
        tokenizer: of the target; without one the ids are shown.
    """
    marks = output.stats.from_draft()
    rounds = [0]
    for number, emitted in enumerate(output.stats.accept_lengths, start=1):
        rounds += [number] * emitted
    decoder = None if tokenizer is None else tokenizer.stream_decoder()
    spans, shown = [], []
    for token, drafted, number in zip(output.token_ids, marks, rounds, strict=True):
        if decoder is None or tokenizer is None:
            text = f"{token} "
        elif token in tokenizer.eos_token_ids:
            text = tokenizer.token_text(token)
        else:
            text = decoder.push([token])
        shown.append(text)
        spans.append(_span(text, drafted, f"token {token}, round {number}: {_SAYS[drafted]}"))
    if decoder is not None:
        shown.append(decoder.flush())
        spans.append(_span(shown[-1], marks[-1], "an unfinished character"))
    counted = sum(marks[: len(output.token_ids)])
    legend = element(
        "div",
        {"style": f"color:{FAINT};margin-top:8px"},
        _span("drafted", True, _SAYS[True]),
        f" {counted} of {len(output.token_ids)} tokens  ",
        _span("the target's own", False, _SAYS[False]),
        f" {len(output.token_ids) - counted}",
    )
    style = (
        f"background:{PAPER};color:{INK};border:1px solid {RULE};border-radius:6px;padding:10px;"
        f"font-family:{FONT};font-size:13px;line-height:1.7;white-space:pre-wrap"
    )
    # MathJax would set what stands between two dollar signs.
    attributes = {"class": "tex2jax_ignore", "style": style}
    return Html(element("div", attributes, *spans, legend), "".join(shown))


def _span(text: str, drafted: bool, says: str) -> str:
    look = LOOKS[_WRITERS[drafted]]
    style = f"background:{look.fill};color:{look.text};border-bottom:2px solid {look.border}"
    return element(
        "span", {"class": _WRITERS[drafted], "style": style, "title": says}, escape(text)
    )
