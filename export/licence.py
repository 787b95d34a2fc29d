"""The target's licence, as its folder says it: a draft holds rows of the target's lm_head and inherits it."""

import yaml

from draftsmith.core import embedded
from draftsmith.core.target import Target


def target_licence(target: Target) -> str | None:
    """Licence id (`apache-2.0`, `other`) from the head of the target's model card; None: it does not say."""
    if target.path == embedded.NAME:
        return embedded.LICENCE
    card = target.local_path / "README.md"
    if not card.is_file():
        return None
    head, *rest = card.read_text(encoding="utf-8", errors="replace").split("\n---", 1)
    if not head.startswith("---") or not rest:
        return None
    try:
        said = yaml.safe_load(head.removeprefix("---"))
    except yaml.YAMLError:
        return None
    licence = said.get("license") if isinstance(said, dict) else None
    return str(licence) if licence else None
