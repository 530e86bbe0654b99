"""Reading single keys of a config dictionary, with errors that name them."""

from collections.abc import Mapping
from typing import Any


def positive_int(config: Mapping[str, Any], key: str) -> int:
    """The positive integer under `key`.

    Raises:
        ValueError: missing, or something else.
    """
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"config key {key!r} is {value!r}; expected a positive integer.")
    return value


def only(config: Mapping[str, Any], key: str, expected: object) -> None:
    """Check that a switch is absent or has the one value that is implemented.

    Raises:
        NotImplementedError: any other value.
    """
    value = config.get(key, expected)
    if value != expected:
        raise NotImplementedError(f"{key}={value!r} is not supported; expected {expected!r}.")
