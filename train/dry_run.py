"""`draftsmith train --dry-run`: what would be refused, and what TorchSpec would be given; nothing is started."""

from pathlib import Path

import yaml

from draftsmith.core.config import Config
from draftsmith.core.errors import UserError
from draftsmith.core.progress import say


def dry_run(config: Config) -> None:
    """Print TorchSpec's YAML and the command.

    Raises:
        UserError: it would refuse.
    """
    from draftsmith.train.torchspec.plan import make_plan
    from draftsmith.train.torchspec.there import refusal

    plan = make_plan(config, dry=True)
    steps = f"{plan.steps} steps" if plan.steps else "steps: not known before `draftsmith prepare`"
    say(f"# {plan.folder / 'torchspec.yaml'} ({steps})")
    say(yaml.safe_dump(plan.tree(), sort_keys=False, allow_unicode=True).rstrip())
    say("# the command")
    say(plan.shown())
    if why := refusal(config):
        say(f"# does not fit: {why}")


def check(config: Config) -> None:
    """Files that a training of ours names.

    Raises:
        UserError: one is not there, or DeepSpeed would not take it.
    """
    if config.train.engine == "deepspeed":
        from draftsmith.train.zero_config import read_deepspeed_config

        read_deepspeed_config(config.train.deepspeed_config)
    if config.train.init_from and not Path(config.train.init_from).expanduser().is_dir():
        raise UserError(f"train.init_from: there is no folder {config.train.init_from}.", "Check the path.")
