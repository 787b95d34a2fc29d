"""Targets that vLLM's capture was never seen to serve: refused before an engine takes minutes to start.

The probe judges the states of every target, these too; but a target this large costs an hour before it is asked.
"""

from draftsmith.core.config import CaptureConfig
from draftsmith.core.errors import UserError
from draftsmith.core.target import Target


def refusal(config: CaptureConfig, target: Target) -> tuple[str, str] | None:
    """What is wrong and its mend, where the target's attention is of a kind that was never captured."""
    if config.untried_targets or not getattr(target.hf_config, "index_topk", None):
        return None
    return (
        f"{target.path} has sparse latent attention (index_topk in its config.json): vLLM's own connector refuses such "
        "targets, and draftsmith's was never run on one.",
        "Set capture.untried_targets=true to try; the probe then judges its states.",
    )


def check_capturable(config: CaptureConfig, target: Target) -> None:
    """Refuse a target of such a kind.

    Raises:
        UserError: as `refusal` says.
    """
    if found := refusal(config, target):
        raise UserError(*found)
