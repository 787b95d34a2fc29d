"""One way to read a file that may be damaged: the error names it and says how to make it again."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from safetensors import SafetensorError

from draftsmith.core.errors import UserError


@contextmanager
def reading(path: Path, mend: str) -> Iterator[None]:
    """Turn what readers raise on a missing, cut or corrupt file into a `UserError`.

    Args:
        path: the file or folder that is read in the block.
        mend: what makes it again.

    Raises:
        UserError: the block could not read it.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, SafetensorError, pa.ArrowException, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise _damaged(path, error, mend) from None
    except (RuntimeError, KeyError, TypeError) as error:  # torch.load and files that hold something else
        raise _damaged(path, error, mend) from None


def _damaged(path: Path, error: Exception, mend: str) -> UserError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return UserError(f"{path}: missing or damaged ({reason}).", mend)
