"""The generation loop and what it reports."""

from jspec.engine.engine import Engine, Prompt
from jspec.engine.output import Output, Update
from jspec.engine.stats import Stats

__all__ = ["Engine", "Output", "Prompt", "Stats", "Update"]
