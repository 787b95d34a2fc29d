"""A command group that is a stage too: `eval --config FILE` beside `eval compare A B`."""

from typing import Any

from typer.core import TyperGroup

STAGE = "run"


class StageGroup(TyperGroup):
    """Without the name of one of its commands, a group is the stage itself."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the stage's name first where no other command is named."""
        named = bool(args) and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if named else [STAGE, *args])
