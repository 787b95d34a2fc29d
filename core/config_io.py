"""YAML file + `section.key=value` overrides -> `Config`, with errors that name the line and suggest the key.

Precedence: default, YAML, override. `dump_config` writes the resolved config; loading it gives an equal one.
"""

import difflib
import json
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from draftsmith.core.config import Config
from draftsmith.core.errors import UserError

KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `1e-4` as a float, as YAML 1.2 and every user do; PyYAML's own reads a string."""


class _Dumper(yaml.SafeDumper):
    """Its counterpart: quotes the string `1e-4`."""


for _yaml in (_Loader, _Dumper):
    _yaml.yaml_implicit_resolvers = {k: list(v) for k, v in _yaml.yaml_implicit_resolvers.items()}
    _yaml.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read, override and validate a config.

    Args:
        path: YAML file; an empty file means all defaults.
        overrides: `section.key=value` strings; the value is read as YAML.

    Raises:
        UserError: the file is missing, is not YAML, or has a key or value that the schema refuses.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(
            f"{path}: no such config file.",
            "Check --config (or CONFIG=...), or start from configs/quickstart.yaml.",
        )
    tree, places = _read_yaml(path)
    for text in overrides or []:
        _apply_override(tree, text, places)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, str(path), places) from None


def dump_config(config: Config) -> str:
    """The resolved config as YAML, every key written out."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def schema_json() -> str:
    """JSON schema of the config, for editors; `configs/schema.json` holds this text."""
    return json.dumps(Config.model_json_schema(), indent=2) + "\n"


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        tree = loader.construct_document(node) if isinstance(node, yaml.MappingNode) else {}
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise UserError(
            f"{where}: not valid YAML: {problem}.", "Mend the syntax there (indentation, quotes, brackets)."
        ) from None
    places: dict[KeyPath, str] = {}
    if node is None:
        return {}, places
    if not isinstance(node, yaml.MappingNode):
        raise UserError(
            f"{path}: the file is not a mapping of sections.", "Write sections such as `target:` and `data:`."
        )
    try:
        _note_places(node, (), path, places)
    except RecursionError:
        raise UserError(f"{path}: an alias (`*name`) stands inside what it refers to.", "Remove it.") from None
    # A section whose keys are all commented out reads as null: it means "all defaults".
    return {key: {} if value is None else value for key, value in tree.items()}, places


def _note_places(node: yaml.Node, at: KeyPath, path: Path, places: dict[KeyPath, str]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            where = f"{path}, line {key_node.start_mark.line + 1}"
            key = (*at, str(key_node.value))
            if key in places:
                raise UserError(
                    f"{where}: `{_dotted(key)}` is given twice (first at {places[key]}).",
                    "Remove one of them.",
                )
            places[key] = where
            _note_places(value_node, key, path, places)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            places[(*at, i)] = f"{path}, line {item.start_mark.line + 1}"
            _note_places(item, (*at, i), path, places)


def _apply_override(tree: dict[str, Any], text: str, places: dict[KeyPath, str]) -> None:
    keys, equals, raw = text.partition("=")
    path = tuple(keys.strip().split("."))
    if not equals or len(path) < 2 or not all(path):
        raise UserError(f"`{text}` is not an override.", "Write it as section.key=value, e.g. train.epochs=3.")
    try:
        value = yaml.load(raw, _Loader)
    except yaml.YAMLError:
        raise UserError(
            f"override `{text}`: the value is not valid YAML.", "Quote it, e.g. 'run.name=\"a: b\"'."
        ) from None
    here = tree
    for key in path[:-1]:
        here = here.setdefault(key, {})
        if not isinstance(here, dict):
            raise UserError(f"override `{text}`: `{key}` is not a section.", "Override the whole value instead.")
    here[path[-1]] = value
    for old in [p for p in places if p[: len(path)] == path]:
        del places[old]
    places[path] = f"override `{text}`"


def _explain(error: ValidationError, file: str, places: dict[KeyPath, str]) -> UserError:
    lines = [_explain_one(detail, file, places) for detail in error.errors()]
    return UserError("\n".join(lines), "See configs/schema.json for every key, its type and its meaning.")


def _explain_one(detail: ErrorDetails, file: str, places: dict[KeyPath, str]) -> str:
    loc: KeyPath = tuple(part for part in detail["loc"] if part == "auto" or not _is_type_tag(part))
    where = next((places[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in places), file)
    if detail["type"] == "extra_forbidden":
        known = _known_keys(loc[:-1])
        near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
        hint = f" Did you mean `{_dotted((*loc[:-1], near[0]))}`?" if near else f" Known keys: {', '.join(known)}."
        return f"{where}: unknown key `{_dotted(loc)}`.{hint}"
    said = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error" and (named := _places_of_named(said, places)):
        return f"{' and '.join(named)}: {said}."
    if not loc:
        return f"{where}: {said}."
    return f"{where}: `{_dotted(loc)}`: {detail['msg']} (got {detail['input']!r})."


def _places_of_named(said: str, places: dict[KeyPath, str]) -> list[str]:
    """Where the keys were given that do not go together: each names its keys; a default was given nowhere."""
    found = []
    for name in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", said):
        path = tuple(name.split("."))
        given = (places.get(path[:n], "") for n in range(len(path), 0, -1))
        found += [place for place in given if place and (place.startswith("override") or place == places.get(path))][:1]
    return list(dict.fromkeys(found))


def _is_type_tag(part: str | int) -> bool:
    """Pydantic appends the union member it tried (`list[int]`, `literal['auto']`) to the location."""
    return isinstance(part, str) and bool(re.search(r"[\[\]']|^(int|str|float)$", part))


def _known_keys(at: KeyPath) -> list[str]:
    model: Any = Config
    for part in at:
        if isinstance(part, int):
            continue
        field = model.model_fields[part].annotation
        model = next(
            (a for a in (field, *getattr(field, "__args__", ())) if isinstance(a, type) and issubclass(a, BaseModel)),
            None,
        )
        if model is None:
            return []
    return list(model.model_fields)


def _dotted(path: KeyPath) -> str:
    return ".".join(str(part) for part in path)
