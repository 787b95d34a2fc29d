"""What a running vLLM engine's draft sees and says: its input states, its logits and the tokens that it proposes.

The hooks sit on three calls that the V1 and the V2 model runner of vLLM 0.24 to 0.33 have alike: the drafter's
`propose`, and its model's `combine_hidden_states` and `compute_logits`. They see what runs in Python, so the engine
must run eagerly (`enforce_eager`), and requests are probed one at a time. `draft_chain` is the same in our model.

Shape suffixes: T tokens of a prompt, A auxiliary states, H hidden, K drafted tokens, V draft vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.core.batch import Batch
from draftsmith.core.draft import DraftModel
from draftsmith.core.engine import generate
from draftsmith.core.errors import StageFailed
from draftsmith.core.unroll import unroll

if TYPE_CHECKING:
    from vllm import LLM

WORKER = "draftsmith.core.draft_probe.ProbedWorker"


@dataclass(frozen=True)
class FirstDraft:
    """The first round of one prompt.

    Attributes:
        aux_TAH: the target's states, as the drafter was given them.
        next_id: the token that the target gave after the prompt.
        tokens_K: int64, the drafted tokens by target id.
        logits_KV: of the drafts; None where the engine computed them out of sight.
    """

    aux_TAH: Tensor
    next_id: int
    tokens_K: Tensor
    logits_KV: Tensor | None


class ProbedWorker:
    """Methods that vLLM mixes into its workers (`worker_extension_cls=WORKER`), for `LLM.collective_rpc`."""

    def draftsmith_probe(self, tokens: int) -> None:
        """Keep the next proposal of a prompt of so many tokens."""
        drafter = _drafter(self)
        if drafter is None:
            return
        if not hasattr(drafter, "draftsmith_seen"):
            _watch(drafter)
        drafter.draftsmith_seen = {"wanted": tokens}

    def draftsmith_probed(self, file: str) -> str | None:
        """Write what was kept to a file; only the first worker does.

        Returns:
            Why there is nothing; None: it is written.
        """
        if getattr(self, "rank", 0) != 0:
            return None
        drafter = _drafter(self)
        seen = getattr(drafter, "draftsmith_seen", {})
        if "tokens" not in seen or "states" not in seen:
            return "no drafter was found in it" if drafter is None else "its drafter proposed nothing for the prompt"
        logits = {"logits": torch.cat(seen["logits"])} if seen["logits"] else {}
        tensors = {"states": seen["states"][: seen["wanted"]], "tokens": seen["tokens"], **logits}
        save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, file)
        return None


def probe_first_drafts(llm: "LLM", prompts: list[list[int]], folder: Path) -> list[int]:
    """Let an engine draft once after each prompt, one after another, at temperature 0.

    Args:
        llm: an eager engine with `worker_extension_cls=WORKER`, a draft and no prefix caching.
        prompts: token ids, each fitting into one prefill step.
        folder: where a file for each is left, for `read_first_drafts`.

    Returns:
        The token that the target gave after each.

    Raises:
        StageFailed: the engine drafts in a way that the probe does not see.
    """
    from vllm import SamplingParams

    params, next_ids = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False), []
    for i, prompt in enumerate(prompts):
        llm.collective_rpc("draftsmith_probe", args=(len(prompt),))
        [(_, output)] = generate(llm, [prompt], [params])
        answers = llm.collective_rpc("draftsmith_probed", args=(str(_file(folder, i)),))
        if reason := next((r for r in answers if r), None):
            raise StageFailed(f"the engine cannot be probed: {reason}.")
        next_ids.append(int(output.outputs[0].token_ids[0]))
    return next_ids


def read_first_drafts(folder: Path, next_ids: list[int], num_aux: int) -> list[FirstDraft]:
    """What `probe_first_drafts` left in a folder, for a draft over `num_aux` auxiliary states."""
    found = []
    for i, next_id in enumerate(next_ids):
        seen = load_file(_file(folder, i))
        states = seen["states"].unflatten(-1, (num_aux, -1))
        found.append(FirstDraft(states, next_id, seen["tokens"].long(), seen.get("logits")))
    return found


@torch.no_grad()
def draft_chain(
    draft: DraftModel, target_ids: Tensor, aux_TAH: Tensor, ids: list[int], k: int
) -> tuple[Tensor, Tensor]:
    """What our model drafts after a prompt, each step fed its own token before.

    Args:
        draft: the draft.
        target_ids: int64 [V].
        aux_TAH: states of the prompt.
        ids: the prompt's T tokens and the target's next one.
        k: tokens to draft.

    Returns:
        Their target ids, int64 [K], and logits, float32 [K, V], on the CPU.
    """
    size, device = len(aux_TAH), draft.fc.weight.device
    assert len(ids) == size + 1
    # Rows after the prompt only make room for the drafted tokens; no row before them looks there.
    total, tokens, logits = size + k + 1, list(ids), []
    aux = torch.cat([aux_TAH, aux_TAH.new_zeros(k + 1, *aux_TAH.shape[1:])])
    for j in range(1, k + 1):
        batch = Batch(
            sample_ids=("chain",),
            offsets=(0, total),
            input_ids_T=torch.tensor(tokens + [0] * (total - len(tokens))),
            loss_mask_T=torch.arange(total) >= size,
            positions_T=torch.arange(total),
            aux_TAH=aux,
            last_MH=aux.new_zeros(0, aux.shape[-1]),
            last_rows_M=torch.zeros(0, dtype=torch.int64),
        )
        *_, last = unroll(draft, batch.to(device), j)
        row = (last.rows_R == size - 1).nonzero()[0, 0]
        logits.append(draft.lm_head(last.hidden_RH[row]).float().cpu())
        tokens.append(int(target_ids[int(logits[-1].argmax())]))
    return torch.tensor(tokens[size + 1 :]), torch.stack(logits)


def _file(folder: Path, number: int) -> Path:
    return folder / f"first-draft-{number:05d}.safetensors"


def _drafter(worker: Any) -> Any:
    runner = getattr(worker, "model_runner", None)
    # `drafter` is the V1 runner's, `speculator` the V2 runner's; both exist on one of them at most.
    return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)


def _watch(drafter: Any) -> None:
    """Put the hooks on a drafter; they keep what belongs to the first proposal after `draftsmith_probe`."""
    model, propose = drafter.model, drafter.propose
    combine, compute = model.combine_hidden_states, model.compute_logits

    def watched_combine(states: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen = drafter.draftsmith_seen
        if "states" not in seen and len(states) >= seen["wanted"]:
            seen |= {"states": states.detach().clone(), "logits": []}
        return combine(states, *args, **kwargs)

    def watched_compute(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        seen = drafter.draftsmith_seen
        if "logits" in seen and "tokens" not in seen and logits is not None:
            seen["logits"].append(_of_the_draft(model, logits.detach()[:1]).float())
        return logits

    def watched_propose(*args: Any, **kwargs: Any) -> Any:
        tokens = propose(*args, **kwargs)
        seen = drafter.draftsmith_seen
        if "states" in seen and "tokens" not in seen:
            seen["tokens"] = torch.as_tensor(tokens)[0].detach().clone()
        return tokens

    drafter.draftsmith_seen = {"wanted": 1 << 62}
    model.combine_hidden_states, model.compute_logits = watched_combine, watched_compute
    drafter.propose = watched_propose


def _of_the_draft(model: Any, logits: Tensor) -> Tensor:
    """Logits over the draft's own vocabulary; vLLM gives them spread over the target's."""
    offsets = getattr(model, "draft_id_to_target_id", None)
    if offsets is None or logits.shape[-1] == len(offsets):
        return logits
    return logits[:, torch.arange(len(offsets), device=logits.device) + offsets]
