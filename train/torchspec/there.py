"""Whether TorchSpec, and a vLLM that it can read, are installed for the Python that is to run it."""

import inspect
import json
import subprocess
import sys

from draftsmith.core.config import Config
from draftsmith.core.errors import UserError
from draftsmith.train.torchspec.entry import vllm_refusal, vllm_versions

_SECONDS = 60.0
# Found and not imported: an import of either takes long and wants a GPU.
_ASK = f"""
import importlib.metadata, importlib.util, json
{inspect.getsource(vllm_versions)}
there = importlib.util.find_spec("torchspec") and importlib.util.find_spec("torchspec.train_entry")
print(json.dumps({{"torchspec": bool(there), "vllm": vllm_versions()}}))
"""


def refusal(config: Config) -> UserError | None:
    """Why TorchSpec would not start with this config on this machine; None: nothing is known against it.

    Args:
        config: `train.torchspec.python` and `train.torchspec.backend` decide.
    """
    wanted = config.train.torchspec
    python = wanted.python or sys.executable
    try:
        # -P: what lies in the folder that we are called in is not what is installed.
        asked = subprocess.run([python, "-P", "-c", _ASK], capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return UserError(f"{python} cannot be run ({error}).", "Check train.torchspec.python.")
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        return UserError(f"{python} does not say what is installed for it: {last}.", "Check train.torchspec.python.")
    found = json.loads(asked.stdout.splitlines()[-1])
    if not found["torchspec"]:
        return UserError(
            f"TorchSpec is not installed for {python}.",
            f"Run `{python} -m pip install -r requirements/torchspec.txt`, or name another Python in "
            "train.torchspec.python.",
        )
    if wanted.backend == "vllm" and (reason := vllm_refusal(found["vllm"])):
        return UserError(
            f"{reason} ({python}).",
            "Name another Python in train.torchspec.python, or set train.torchspec.backend=sglang.",
        )
    return None


def require(config: Config) -> None:
    """Refuse before anything is written or started.

    Raises:
        UserError: TorchSpec, or its engine, is not there.
    """
    if found := refusal(config):
        raise found
