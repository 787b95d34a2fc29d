"""Does what is on disk fit the config at hand? Asked by every stage that reads another stage's output."""

from typing import Any

from draftsmith.core.config import Config
from draftsmith.core.manifest import check_inputs, read_manifest
from draftsmith.core.run import RunFolder
from draftsmith.core.target import Target, resolve_layer_ids


def check_upstream(config: Config, run: RunFolder, target: Target, states: dict[str, Any]) -> None:
    """Refuse hidden states and samples that this config would not have made.

    Args:
        config: the config at hand.
        run: its run folder.
        target: its resolved target.
        states: manifest of `hidden_states/`.

    Raises:
        UserError: names every setting that differs.
    """
    here = {
        "target": target.fingerprint(config.target),
        "layer_ids": resolve_layer_ids(config.capture, target.num_layers),
        "storage": config.capture.storage,
    }
    check_inputs(run.hidden_states, states, {**states["inputs"], **here})
    if samples := read_manifest(run.samples):
        # The sources themselves may be gone by now: what counts is what was made of them.
        data = config.data.model_dump(mode="json", exclude={"max_skip_share", "sources"})
        check_inputs(run.samples, samples, {**samples["inputs"], "data": {**samples["inputs"]["data"], **data}})
