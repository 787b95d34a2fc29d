"""How two records of what an output was made from differ, in words: keys by their full name, files by what they are.

A hash tells nobody anything; that the samples were made anew since does.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from draftsmith.core.config import Config

_UNSET: Any = object()

# Hashed input (full match of its place) -> what it is of, and what has become of it.
_FILES = {
    r"(?:.*\.)?samples_manifest_sha256(?:\[\d+\])?": ("the samples", "were made anew since"),
    r"(?:.*\.)?hidden_states_manifest_sha256": ("the hidden states", "were captured anew since"),
    r"(?:.*\.)?vocab_mapping_sha256": ("the vocabulary mapping", "was made anew since"),
    r"export_manifest_sha256": ("the draft", "was exported anew since"),
    r"draft_config_sha256": ("the draft's config.json", "is another file than then"),
    r"draft_weights_sha256": ("the draft's weights", "are others than then"),
    r"weights_sha256": ("the checkpoint's weights", "are others than then (it was trained anew since)"),
    r"draft_sha256": ("the checkpoint's draft.json", "is another file than then (it was trained anew since)"),
    r"(?:.*\.)?target\.config_sha256": ("the target's config.json", "is another file than then"),
    r"(?:.*\.)?target\.weights_sha256": ("the target's weights", "are others than then"),
    r"(?:.*\.)?target\.generation_config_sha256": ("the target's generation_config.json", "is another file than then"),
    r"(?:.*\.)?target\.chat_template_sha256": ("the target's chat template", "is another one than then"),
    r"(?:.*\.)?target\.tokenizer\.(?P<name>.+)": ("the target's {name}", "is another file than then"),
    r"data\.sources\[(?P<name>\d+)\]\.sha256": ("the content of data.sources[{name}]", "is another one than then"),
    r"contamination_sha256.*": ("what data.contamination.sets name", "is another content than then"),
    r"sets(?:\[\d+\])?": ("what eval.sets name", "is another content than then"),
}
# Where a manifest calls a key of the config otherwise.
_KEYS = {
    "seed": "run.seed",
    "layer_ids": "capture.layer_ids",
    "storage": "capture.storage",
    "mode": "capture.mode",
    "engine_dtype": "target.dtype",
    "tensor_parallel": "target.tensor_parallel",
    "engine_args": "target.engine_args",
    "sampling": "data.sampling",
}


@dataclass(frozen=True)
class Difference:
    """One value that differs.

    Attributes:
        at: its place in the record, e.g. `train.seed` or `data.sources[0].path`.
        there, here: both values; `_UNSET` where the record has none.
    """

    at: str
    there: Any
    here: Any

    def key(self) -> str | None:
        """The config's key, in full; None: it is no setting of the config."""
        head, dot, rest = self.at.removeprefix("inputs.").partition(".")  # a whole manifest, or its inputs
        key = _KEYS.get(head, head) + dot + rest
        section, *_ = key.split(".")
        return key if "." in key and section in Config.model_fields and not _file_of(self.at) else None

    def said(self, name_there: str, name_here: str) -> str:
        """One phrase, e.g. `train.epochs is 2 there and 3 in the config`."""
        if self.at == "checkpoint":
            return f"the checkpoint is {self.there} {name_there} and {self.here} by now"
        if file := _file_of(self.at):
            return self._said_of_file(*file, name_there, name_here)
        key = self.key()
        there, here = (default_of(key) if v is _UNSET else v for v in (self.there, self.here))
        return f"{key or self.at} is {_short(there)} {name_there} and {_short(here)} {name_here}"

    def _said_of_file(self, what: str, become: str, name_there: str, name_here: str) -> str:
        if (name_there, name_here) != ("there", "in the config"):
            return f"{what}: not the same {name_there} and {name_here}"
        if _set(self.there) is None:
            return f"there {_verb(become, 'is', 'are')} {what} now, and not then"
        if _set(self.here) is None:
            return f"there {_verb(become, 'was', 'were')} {what} then, and not now"
        return f"{what} {become}"

    def override(self) -> str | None:
        """`section.key=value` that gives what was given then; None: no override gives it."""
        key, value = self.key(), self.there
        if not key or not re.fullmatch(r"[A-Za-z0-9_.]+", key) or self._of_sources():
            return None
        value = default_of(key) if value is _UNSET else value
        return None if value is _UNSET else f"{key}={_as_override(value)}"

    def _of_sources(self) -> bool:
        return self.at.startswith("data.sources")


def find(there: Any, here: Any) -> list[Difference]:
    """Every value of two JSON-serialisable records that differs."""
    there, here = (json.loads(json.dumps(value)) for value in (there, here))
    found = list(_walk(there, here, ""))
    places = {d.at for d in found}
    # Of another path the content is another one too, and of another checkpoint.
    return [d for d in found if not _follows(d.at, places)]


def _follows(at: str, places: set[str]) -> bool:
    source = re.fullmatch(r"(data\.sources\[\d+\])\.(sha256|revision)", at)
    if source:
        return f"{source[1]}.path" in places
    return at in ("weights_sha256", "draft_sha256") and bool(places & {"checkpoint"})


def _walk(there: Any, here: Any, at: str) -> Iterator[Difference]:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in dict.fromkeys([*there, *here]):
            yield from _walk(there.get(key, _UNSET), here.get(key, _UNSET), f"{at}.{key}" if at else key)
        return
    lists = isinstance(there, list) and isinstance(here, list) and len(there) == len(here)
    if lists and all(isinstance(item, dict) for item in [*there, *here]):  # else the lists say more whole
        for i, (a, b) in enumerate(zip(there, here, strict=True)):
            yield from _walk(a, b, f"{at}[{i}]")
    elif _set(there) != _set(here):
        yield Difference(at, there, here)


def _set(value: Any) -> Any:
    return None if value is _UNSET else value


def _file_of(at: str) -> tuple[str, str] | None:
    for pattern, (what, become) in _FILES.items():
        if match := re.fullmatch(pattern, at):
            return what.format(**match.groupdict()), become
    return None


def default_of(key: str | None) -> Any:
    """The config's default of a dotted key, `_UNSET` where there is no such key."""
    at: Any = Config().model_dump(mode="json")
    for part in (key or "").split("."):
        if not isinstance(at, dict) or part not in at:
            return _UNSET
        at = at[part]
    return at


def _verb(become: str, one: str, several: str) -> str:
    return several if become.split()[0] in ("are", "were") else one


def _short(value: Any) -> str:
    if value is None or value is _UNSET:
        return "not set"
    text = json.dumps(_without_hashes(value), ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def _without_hashes(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_hashes(v) for k, v in value.items() if "sha256" not in k}
    return [_without_hashes(v) for v in value] if isinstance(value, list) else value


def _as_override(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
