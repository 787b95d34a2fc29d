"""A vLLM engine that lives in a process of its own and is gone, with all its memory, when the work is done.

    result = in_engine_process(work, *args)      # spawns, runs work(*args) there, ends the process
    def work(...):
        with vllm_engine(config, target, ...) as llm: ...

Works with vLLM 0.24 to 0.33, on CUDA and on CPU. `kill -9` of the stage takes the engine with it.
"""

import functools
import importlib.util
import itertools
import logging
import multiprocessing
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from draftsmith.core.config import TargetConfig
from draftsmith.core.errors import StageFailed, UserError
from draftsmith.core.progress import say
from draftsmith.core.target import Target

if TYPE_CHECKING:
    import torch
    from vllm import LLM, RequestOutput, SamplingParams

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K")
_CPU_KV_CACHE_GIB = "2"


def in_engine_process(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a fresh process and return its result.

    Args:
        work: a module-level function; arguments and result must be picklable.
        *args: its positional arguments.
        **kwargs: its keyword arguments.

    Raises:
        UserError, StageFailed: as `work` raised them.
        StageFailed: the process died (out of memory, a crash in native code).
    """
    with EngineProcess() as process:
        return outcome(process.submit(work, *args, **kwargs), work.__name__)


def in_engine_processes(works: Sequence[functools.partial[T]]) -> list[T]:
    """Run every work in a fresh process of its own, side by side, and return their results.

    Args:
        works: partials of module-level functions, as `in_engine_process` takes them.

    Raises:
        UserError, StageFailed: as the first one to fail raised them; the others are ended.
    """
    with ExitStack() as stack:
        running = [stack.enter_context(EngineProcess()).submit(work) for work in works]
        return all_outcomes(running, works[0].func.__name__)


class EngineProcess:
    """A process that an engine lives in for as long as the block; what runs in it shares its module globals.

    What is not done at the block's end is ended.
    """

    def __enter__(self) -> Self:
        """Start it."""
        self._submitted: list[Future[Any]] = []
        self._pool = ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn"), initializer=lead_group, initargs=(os.getpid(),)
        )
        self._group = outcome(self._pool.submit(os.getpgrp), "lead_group")  # it may die before it leads one
        return self

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run `work` there, beside the block; `outcome` waits for it."""
        self._submitted.append(self._pool.submit(work, *args, **kwargs))
        return self._submitted[-1]

    def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` there and return its result; as `in_engine_process`."""
        return outcome(self.submit(work, *args, **kwargs), work.__name__)

    def let_end(self) -> None:
        """It ends once its work is done; the block's end waits for that. Several end side by side this way."""
        self._pool.shutdown(wait=False)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End it, and whatever it started."""
        try:
            if kind is None and all(f.done() and not f.exception() for f in self._submitted):
                self._pool.shutdown()  # the process ends by itself and frees what it shares with us
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)


def outcome(running: Future[T], name: str) -> T:
    """Wait for the result of an `EngineProcess`; raises as `in_engine_process` does."""
    try:
        return running.result()
    except BrokenProcessPool:
        raise StageFailed(
            f"the engine process of `{name}` died without a message (killed, or out of memory); "
            "free memory or lower max_num_seqs in target.engine_args, and run the stage again."
        ) from None


def all_outcomes(running: Sequence[Future[T]], name: str) -> list[T]:
    """Wait for the results of several `EngineProcess`es, or for the first to fail; raises as `outcome` does."""
    ended, _ = wait(running, return_when=FIRST_EXCEPTION)
    for future in ended:
        outcome(future, name)
    return [future.result() for future in running]


def lead_group(parent: int) -> None:
    """Make a process group of this process and its children that does not outlive `parent`.

    vLLM's own children are not tied to us: after `kill -9` they would hold the accelerator's memory for ever. A
    shell in the group looks at the parent once a second and ends the whole group when it is gone.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    watch = f"while kill -0 {parent} 2>/dev/null; do sleep 1; done; kill -9 -{os.getpgrp()}"
    subprocess.Popen(
        ["/bin/sh", "-c", watch],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@contextmanager
def vllm_engine(config: TargetConfig, target: Target, **llm_args: Any) -> Iterator["LLM"]:
    """Start vLLM on the target and yield it; to be used inside `in_engine_process`.

    Args:
        config: the target section; its `engine_args` win over `llm_args`.
        target: the resolved target.
        llm_args: arguments of `vllm.LLM` that the stage needs.

    Raises:
        StageFailed: the engine did not start, or something failed while it ran.
    """
    _set_environment()
    from vllm import LLM

    args: dict[str, Any] = {
        "model": str(target.local_path),
        "dtype": engine_dtype(config),
        "tensor_parallel_size": config.tensor_parallel,
        "trust_remote_code": config.trust_remote_code,
        "enforce_eager": not has_cuda(),
        "use_tqdm_on_load": False,
        **llm_args,
        **config.engine_args,
    }
    begin = time.monotonic()
    say(f"vLLM: starting {target.path} ...")
    try:
        llm = LLM(**args)
    except Exception as error:  # vLLM raises many unrelated types here
        raise StageFailed(
            f"vLLM could not start on {target.path}: {last_line(error)}. Its own messages are above."
        ) from error
    say(f"vLLM: ready in {time.monotonic() - begin:.0f} s")
    try:
        with engine_errors():
            yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def seeded_args() -> dict[str, Any]:
    """Arguments of an engine whose requests have seeds of their own.

    vLLM draws once for every part of a prompt and winds the generator back, which a CPU's cannot: its engine ends with
    "CPU Generator does not use offset". So no prompt is cut in parts there.
    """
    return {} if has_cuda() else {"enable_chunked_prefill": False}


@contextmanager
def engine_errors() -> Iterator[None]:
    """Errors of the block as ours: an engine's own types may not even cross to the parent process.

    Raises:
        StageFailed: the engine failed.
    """
    try:
        yield
    except (UserError, StageFailed):
        raise
    except Exception as error:
        raise StageFailed(f"the engine failed: {last_line(error)}. Run the stage again when that is mended.") from None


def generate(
    llm: "LLM", prompts: Sequence[list[int]], params: "Sequence[SamplingParams]", in_flight: int | None = None
) -> Iterator[tuple[int, "RequestOutput"]]:
    """Answer prompts and yield each (index, output) as it finishes, in no particular order.

    Args:
        llm: a running engine.
        prompts: prompt token ids.
        params: sampling parameters of each prompt.
        in_flight: requests held by the engine at once; None: all, and the engine schedules them.
    """
    asked = zip(range(len(prompts)), prompts, params, strict=True)
    yield from answer(llm, lambda: next(asked, None), in_flight or len(prompts))


def answer(
    llm: "LLM", take: "Callable[[], tuple[K, list[int], SamplingParams] | None]", in_flight: int
) -> Iterator[tuple[K, "RequestOutput"]]:
    """Keep an engine full with what `take` gives, and yield each (key, output) as it finishes.

    Args:
        llm: a running engine.
        take: gives key, prompt token ids and sampling parameters; None while there is nothing to ask before another
            output has been looked at.
        in_flight: requests held by the engine at once.
    """
    from vllm import TokensPrompt

    engine, asked = llm.llm_engine, dict[str, K]()
    numbers = itertools.count()
    while True:
        while len(asked) < in_flight and (taken := take()):
            key, prompt_ids, params = taken
            number = str(next(numbers))
            asked[number] = key
            engine.add_request(number, TokensPrompt(prompt_token_ids=prompt_ids), params)
        if not asked:
            return
        for output in engine.step():
            if output.finished:
                yield asked.pop(output.request_id), output


def require_vllm(stage: str) -> None:
    """Refuse early, before any work, where vLLM is missing.

    Raises:
        UserError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"`{stage}` runs the target on vLLM, and vLLM is not installed.",
            "Run `make setup`; see `draftsmith doctor`.",
        )


def has_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def has_bfloat16() -> bool:
    """Whether this machine multiplies bfloat16 natively: its GPUs (sm_80 and newer), or where there is none its CPU."""
    if has_cuda():
        import torch

        return all(multiplies_bfloat16(torch.device("cuda", i)) for i in range(torch.cuda.device_count()))
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text(encoding="utf-8").split() if cpuinfo.is_file() else []
    return "avx512_bf16" in flags or "amx_bf16" in flags


def multiplies_bfloat16(device: "torch.device") -> bool:
    """Whether a GPU does so; those before sm_80 (V100, T4) emulate it, and Triton does not compile it for them."""
    import torch

    return torch.cuda.get_device_capability(device) >= (8, 0)


def engine_dtype(config: TargetConfig) -> str:
    """Name of the dtype that the target runs in on this machine."""
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if has_bfloat16() else "float32"


def last_line(error: Exception) -> str:
    """Last line of an error's text, where libraries put the reason."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].rstrip(".")


def _set_environment() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # A forked engine would inherit a CUDA context that it cannot use.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # Modules that vLLM loads before it sets up its logger would speak all the same.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    if has_cuda():
        if importlib.util.find_spec("flashinfer") is None:
            os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    else:
        # vLLM takes half of the memory otherwise; and with one device a second process only costs time
        # (SmolLM2-135M on two cores: start 19 s -> 6 s, 350 -> 580 tokens/s).
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_KV_CACHE_GIB)
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
