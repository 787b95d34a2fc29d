"""Methods that vLLM mixes into its workers (`worker_extension_cls`), so that the driver can reach the writer."""

from typing import Any

from draftsmith.hidden_state_capture.connector import HiddenStatesConnector


class CaptureWorker:
    """Called by name through `LLM.collective_rpc`; every worker answers, only TP rank 0 has a writer."""

    def draftsmith_written(self) -> int:
        """Samples that the writer has taken in so far."""
        writer = _connector().writer
        if writer is None:
            return 0
        writer.check()
        return writer.written

    def draftsmith_flush(self) -> None:
        """Put everything on disk."""
        if writer := _connector().writer:
            writer.flush()


def _connector() -> HiddenStatesConnector:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    assert isinstance(connector, HiddenStatesConnector)
    return connector
