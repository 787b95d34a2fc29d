"""`draftsmith train --dry-run`: what would be started, and nothing is."""

from pathlib import Path

import yaml

from draftsmith.core.config import Config
from draftsmith.core.errors import UserError
from draftsmith.core.progress import say
from draftsmith.core.run import RunFolder


def dry_run(config: Config) -> None:
    """Print what `train` would do.

    Raises:
        UserError: it would refuse.
    """
    if config.train.engine == "torchspec":
        from draftsmith.train.torchspec.plan import make_plan

        plan = make_plan(config, dry=True)
        steps = f"{plan.steps} steps" if plan.steps else "steps: not known before `draftsmith prepare`"
        say(f"# {plan.folder / 'torchspec.yaml'} ({steps})")
        say(yaml.safe_dump(plan.tree(), sort_keys=False, allow_unicode=True).rstrip())
        say("# the command")
        say(plan.shown())
        return
    if config.train.engine == "deepspeed":
        from draftsmith.train.zero import read_deepspeed_config

        read_deepspeed_config(config.train.deepspeed_config)
    if config.train.init_from and not Path(config.train.init_from).expanduser().is_dir():
        raise UserError(f"train.init_from: there is no folder {config.train.init_from}.", "Check the path.")
    run = RunFolder.of(config)
    done = run.complete_checkpoints()
    say(f"# engine {config.train.engine}, {run.hidden_states} -> {run.checkpoints}")
    say(f"# {f'goes on from {done[-1].name}' if done else 'from the start'}; settings:")
    say(
        yaml.safe_dump({"train": config.train.model_dump(mode="json", exclude={"torchspec"})}, sort_keys=False).rstrip()
    )
