"""draftsmith trains EAGLE3 draft models for vLLM: from prompts to a verified, measured draft."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("draftsmith")
except PackageNotFoundError:  # run from the folders themselves (make NO_SETUP=1), not installed
    __version__ = "0+uninstalled"
