"""One answer to one line of output, in the form its request came in."""

import json
import time
from typing import Any

from jspec.commands.figures import without_nan
from jspec.engine import Output
from serve.lines import LineError, LineRequest


def answer(request: LineRequest, output: Output, token_text) -> dict[str, Any]:
    """The record of a finished text.

    Args:
        request: as it was asked.
        output: what came of it.
        token_text: shows one token id, for log-probabilities.
    """
    stats = output.stats
    usage = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(output.token_ids),
        "total_tokens": len(output.prompt_token_ids) + len(output.token_ids),
    }
    counted = {
        "accept_length": stats.accept_length,
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "correct": stats.correct,
    }
    if request.form == "native":
        record = {
            "id": request.name,
            "line": request.number,
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "usage": usage,
            "stats": counted,
        }
        if output.logprobs is not None:
            record["logprobs"] = output.logprobs
            record["top_logprobs"] = output.top_logprobs
        if output.simulated:
            record["simulated"] = True
        return without_nan(record)
    choice: dict[str, Any] = {"index": 0, "finish_reason": output.finish_reason}
    chat = request.form == "chat"
    if chat:
        choice["message"] = {"role": "assistant", "content": output.text}
    else:
        choice["text"] = output.text
    choice["logprobs"] = None
    if output.logprobs is not None and output.top_logprobs is not None:
        choice["logprobs"] = (_chat_logprobs if chat else _logprobs)(output, token_text)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request.number}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "usage": usage,
        "stats": counted,
    }
    return without_nan(
        {
            "id": _batch_id(request.number),
            "custom_id": request.name,
            "response": {
                "status_code": 200,
                "request_id": f"req_{request.number}",
                "body": body,
            },
            "error": None,
        }
    )


def refusal(error: LineError, number: int, *, openai: bool) -> dict[str, Any]:
    """The record of a line that cannot be served.

    Args:
        error: why.
        number: of the line.
        openai: whether the line is in that form.
    """
    said = {"field": error.field, "message": str(error), "line": number}
    if not openai:
        return {"id": error.name, "line": number, "error": said}
    return {
        "id": _batch_id(number),
        "custom_id": error.name,
        "response": None,
        "error": {"code": "invalid_request", "param": error.field, **said},
    }


def identify(record: Any) -> tuple[int, Any] | None:
    """(line number, name) of a record of either form; None for anything else."""
    if not isinstance(record, dict):
        return None
    if "custom_id" in record:
        head, _, number = str(record.get("id")).rpartition("_")
        if head == "batch_req" and number.isdecimal():
            return int(number), record["custom_id"]
        return None
    number = record.get("line")
    return (number, record.get("id")) if type(number) is int else None


def dump(record: dict[str, Any]) -> bytes:
    """One line, with its end. Half a surrogate pair, which is no character, stays an escape."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _batch_id(number: int) -> str:
    return f"batch_req_{number}"


def _chat_logprobs(output: Output, token_text) -> dict[str, Any]:
    def entry(token: int, value: float) -> dict[str, Any]:
        text = token_text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8"))}

    assert output.logprobs is not None
    assert output.top_logprobs is not None
    content = [
        {**entry(token, value), "top_logprobs": [entry(*pair) for pair in top.items()]}
        for token, value, top in zip(output.token_ids, output.logprobs, output.top_logprobs)
    ]
    return {"content": content}


def _logprobs(output: Output, token_text) -> dict[str, Any]:
    assert output.top_logprobs is not None
    tokens = [token_text(token) for token in output.token_ids]
    starts = [0]
    for token in tokens[:-1]:
        starts.append(starts[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": output.logprobs,
        "top_logprobs": [
            {token_text(token): value for token, value in top.items()}
            for top in output.top_logprobs
        ],
        "text_offset": starts,
    }
