"""The ways a command can end other than well; the CLI turns them into exit codes 2 and 1."""


class UserError(ValueError):
    """Bad config or input (exit code 2).

    Args:
        what: names the file, line or sample and says what is wrong with it.
        mend: what the user should do about it.
    """

    def __init__(self, what: str, mend: str) -> None:
        super().__init__(what, mend)  # both as args: the error crosses process borders by pickle
        self.what, self.mend = what, mend

    def __str__(self) -> str:
        return f"{self.what} {self.mend}"


class StageFailed(RuntimeError):
    """The stage ran and did not do what it promises (exit code 1), e.g. an engine died or a proof failed."""


class ProcessGone(StageFailed):
    """Another process of the training ended first, and knows why."""
