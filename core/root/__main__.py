"""`python -m draftsmith`."""

from draftsmith.core.cli import main

if __name__ == "__main__":  # the guard is for spawned processes, which import this module again
    main()
