"""What a config names on this machine, looked for before anything is done: all that is missing is said at once."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from draftsmith.core.config import Config, TargetConfig
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import MANIFEST
from draftsmith.core.run import RunFolder
from draftsmith.core.sources import HUB, files_of, is_hub
from draftsmith.core.target import check_named


def check_paths(config: Config, target: bool = True, sources: bool = True) -> None:
    """Look for the target, its chat template, and where the run is not prepared yet every source and set.

    Nothing is fetched: what lies on a hub is taken to be there.

    Args:
        config: of the run.
        target: look for the target.
        sources: look for sources and sets too.

    Raises:
        UserError: names everything that is not there.
    """
    checks: list[Callable[[], object]] = []
    if target:
        checks += [partial(check_named, config.target), partial(_template, config.target)]
    if sources and not (RunFolder.of(config).samples / MANIFEST).is_file():
        paths = [s.path for s in config.data.sources] + config.data.contamination.sets + config.eval.sets
        checks += [partial(files_of, path) for path in paths if not path.startswith(HUB) and not is_hub(path)]
    missing = [error for check in checks if (error := _error(check))]
    if missing:  # a line each, and the mend behind the last that it is for
        by_mend: dict[str, list[str]] = {}
        for error in missing:
            by_mend.setdefault(error.mend, []).append(error.what)
        *said, (mend, what) = [(mend, "\n".join(what)) for mend, what in by_mend.items()]
        raise UserError("\n".join([*(f"{before} {way}" for way, before in said), what]), mend)


def _error(check: Callable[[], object]) -> UserError | None:
    try:
        check()
    except UserError as error:
        return error
    return None


def _template(config: TargetConfig) -> None:
    if config.chat_template and not Path(config.chat_template).is_file():
        raise UserError(
            f"target.chat_template: {config.chat_template} does not exist.", "Give the path of a Jinja file, or null."
        )
