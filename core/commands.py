"""Commands in messages, as the user would have to type them: with the config file and the overrides at hand.

What finds a fault does not know which file the config came from; the command line does, and completes messages here.
"""

import re
import shlex
import sys
from collections.abc import Sequence

_STAGES = "prepare|capture|train|eval|export|summary"
_DRAFTSMITH = re.compile(rf"`draftsmith ({_STAGES})((?: [^`]*)?)`")
_MAKE = re.compile(rf"`make ({_STAGES})((?: [^`]*)?)`")
_OVERRIDE = re.compile(r"[a-z_]+(?:\.[A-Za-z0-9_-]+)+=.*", re.DOTALL)
# Commands of a stage, which have the config but no overrides behind them.
_GROUPS = {"merge", "serve-args", "compare", "diagnose"}
_PLAIN = re.compile(r"[A-Za-z0-9_./=,:@%+\[\]-]+")  # what the shell of `make` takes as it stands


def with_config(text: str, arguments: Sequence[str] | None = None) -> str:
    """`text`, every stage's command in backticks completed by what names the run.

    Args:
        text: a message.
        arguments: of the command at hand; None: this process's. Without `--config` among them `text` stays as it is.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    file = _value(arguments, "--config", "-c")
    if file is None:
        return text
    overrides = [a.removeprefix("--set=") for a in arguments if _OVERRIDE.fullmatch(a.removeprefix("--set="))]
    draft = _value(arguments, "--draft")

    def behind(stage: str) -> list[str]:
        return [*overrides, *(["--draft", draft] if draft and stage == "eval" else [])]

    def draftsmith(match: re.Match[str]) -> str:
        stage, rest = match[1], match[2]
        words = rest.split()
        if "--config" in words or "convert" in words:
            return match[0]
        if words and words[0] in _GROUPS:
            return f"`draftsmith {stage}{rest} {shlex.join(['--config', file])}`"
        return f"`{shlex.join(['draftsmith', stage, '--config', file, *behind(stage)])}{rest}`"

    def make(match: re.Match[str]) -> str:
        stage, rest = match[1], match[2]
        if "CONFIG=" in rest:
            return match[0]
        given = re.search(r"ARGS=(\S+)", rest)
        arguments = [*behind(stage), *([given[1]] if given else [])]
        args = f" ARGS={_quoted(arguments)}" if arguments else ""
        return f"`make {stage}{re.sub(r' ARGS=[^ ]+', '', rest)} CONFIG={shlex.quote(file)}{args}`"

    return _MAKE.sub(make, _DRAFTSMITH.sub(draftsmith, text))


def _quoted(arguments: list[str]) -> str:
    """For ARGS: read by the user's shell, and again by that of `make`."""
    inner = " ".join(a if _PLAIN.fullmatch(a) else shlex.quote(a) for a in arguments)
    plain = all(_PLAIN.fullmatch(a) for a in arguments)
    return (
        inner if plain and len(arguments) == 1 and "[" not in inner else f'"{inner}"' if plain else shlex.quote(inner)
    )


def _value(arguments: Sequence[str], *names: str) -> str | None:
    """Of the last option of one of these names."""
    found = None
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            found = value if equals else arguments[i + 1] if i + 1 < len(arguments) else None
    return found
