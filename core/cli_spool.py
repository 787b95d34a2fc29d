"""Whether a spool holds what a training would ask of it, by the samples' own sizes: for plans and dry runs.

Like the other modules of the command line it imports a stage when it is asked for.
"""

from draftsmith.core.config import Config
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import MANIFEST
from draftsmith.core.run import RunFolder
from draftsmith.core.target import Target


def spool_refusal(
    config: Config, run: RunFolder, target: Target, layer_ids: list[int], processes: int = 1
) -> UserError | None:
    """What the run would refuse; None: it would not, there is no spool, or no samples to know it by.

    Args:
        config: of the run.
        run: its folder.
        target: its shape.
        layer_ids: auxiliary ones.
        processes: that train.
    """
    spool = config.capture.mode == "spool" and config.train.engine != "torchspec"
    if not spool or not (run.samples / MANIFEST).is_file():
        return None
    from draftsmith.core.samples import TrainSamples
    from draftsmith.data.batching import spool_plan
    from draftsmith.hidden_state_capture.todo import longest_sample

    samples = TrainSamples(run.samples, longest_sample(config, target))
    states = {
        "storage": config.capture.storage,
        "layer_ids": layer_ids,
        "target": {"hidden_size": target.hidden_size},
    }
    try:
        spool_plan(samples, config, states, processes)
    except UserError as error:
        return error
    return None
