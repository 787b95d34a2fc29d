"""The objective in float64, written from the design and from vLLM's `llama_eagle3.py`, not from the code under test.

One row at a time, everything spelled out, no shared code. Test modules get it as the fixture `reference`:

    sums = reference.reference_losses(objective, batch, steps)          # what any path must give
    wanted = reference.reference_gradients(objective, batch, steps, decay)

Only the weights, the shape and the options are read from `objective`.
"""

import math
from dataclasses import dataclass

import torch


@dataclass
class Sums:
    """loss[j-1] float64 with its graph, rows[j-1] and hits[j-1] of step j; leaves: parameters by name, float64.

    weighted[j-1]: the losses again, times the options' `rejected_weight` where an earlier step of the row was no hit.
    """

    loss: list
    rows: list
    hits: list
    leaves: dict
    weighted: list


@dataclass
class Gradients:
    """loss: float, of the weighted sums; gradients: float64 by parameter name, zeros where one is not reached; by step:
    rows, hits.
    """

    loss: float
    gradients: dict
    rows: list
    hits: list


def reference_losses(objective, batch, steps):
    """Loss sums, supervised rows and hits of every step.

    Args:
        objective: `core.objective.Objective`; its draft's parameters, its target head and its loss options are used.
        batch: `core.batch.Batch` of packed documents.
        steps: J.

    Returns:
        `Sums`.
    """
    row = Row(objective)
    last = {int(r): m.double() for r, m in zip(batch.last_rows_M, batch.last_MH, strict=True)}
    zero = torch.zeros((), dtype=torch.float64)
    sums = Sums([zero] * steps, [0] * steps, [0] * steps, row.p, [zero] * steps)
    for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        x, r = batch.input_ids_T[begin:end].tolist(), batch.loss_mask_T[begin:end].tolist()
        aux = batch.aux_TAH[begin:end].double()
        state = {k - begin: v for k, v in last.items() if begin <= k < end}
        # Step 1 runs at every row whose next token is known; its keys stay for the rows after.
        inputs = [row.layer_input(x[t + 1], row.fuse(aux[t]))[0] for t in range(len(x) - 1)]
        step1 = [(t, *row.key_value(inp, t)) for t, inp in enumerate(inputs)]
        for t in range(len(x)):
            weight = 1.0
            for j, loss, hit in row.chain(x, r, aux, state, t, step1, steps):
                sums.loss[j - 1] = sums.loss[j - 1] + loss
                sums.weighted[j - 1] = sums.weighted[j - 1] + weight * loss
                if not hit:
                    weight = objective.loss.rejected_weight
                sums.rows[j - 1] += 1
                sums.hits[j - 1] += hit
    return sums


def reference_gradients(objective, batch, steps, decay):
    """Loss of the batch as a whole optimizer step, and its gradients.

    Args:
        objective, batch, steps: as `reference_losses`.
        decay: step j weighs decay^(j-1).

    Returns:
        `Gradients`.
    """
    sums = reference_losses(objective, batch, steps)
    loss = sum(decay**j * s / max(1, c) for j, (s, c) in enumerate(zip(sums.weighted, sums.rows, strict=True)))
    if loss.requires_grad:
        loss.backward()
    grads = {k: torch.zeros_like(v) if v.grad is None else v.grad for k, v in sums.leaves.items()}
    return Gradients(float(loss.detach()), grads, sums.rows, sums.hits)


def rope_table(shape):
    """Frequencies float64 [rotary_dim / 2] and the factor on cos and sin, from the papers' formulas."""
    rope, width = shape.rope, int(shape.head_dim * shape.rope.get("partial_rotary_factor", 1.0))
    exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
    plain = rope["rope_theta"] ** -exponent
    kind = rope["rope_type"]
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / rope["factor"], 1.0
    original = rope["original_max_position_embeddings"]
    turns = original * plain / (2 * math.pi)  # full turns over the original context
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * plain + (1 - keep) * plain / rope["factor"], 1.0
    assert kind == "yarn"

    def index_of(rotations):
        """Index of the frequency that makes so many turns."""
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    first, last = index_of(rope.get("beta_fast", 32)), index_of(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    ramp = ((torch.arange(width // 2, dtype=torch.float64) - first) / max(last - first, 0.001)).clamp(0, 1)
    scaled = (1 - ramp) * plain + ramp * plain / rope["factor"]
    return scaled, rope.get("attention_factor", 0.1 * math.log(rope["factor"]) + 1.0)


class Row:
    """One row of one document; `p` are float64 leaves that gradients are read from."""

    def __init__(self, objective):
        draft = objective.draft
        self.shape, self.head, self.loss = draft.shape, objective.target_head, objective.loss
        self.draft_ids = {int(t): i for t, i in enumerate(objective.draft_ids) if i >= 0}
        self.p = {k: v.detach().double().clone().requires_grad_(True) for k, v in draft.state_dict().items()}
        self.embed = self.p["embed_tokens.weight"] if draft.shape.own_embedding else draft.embed_VH.double()
        self.frequencies, self.factor = rope_table(draft.shape)

    def norm(self, x, name):
        return x / torch.sqrt((x * x).mean() + self.shape.rms_norm_eps) * self.p[name]

    def rotate(self, x_nd, position):
        half = len(self.frequencies)
        cos, sin = torch.cos(position * self.frequencies), torch.sin(position * self.frequencies)
        a, b, rest = x_nd[:, :half], x_nd[:, half : 2 * half], x_nd[:, 2 * half :]
        return torch.cat([self.factor * (a * cos - b * sin), self.factor * (b * cos + a * sin), rest], dim=1)

    def fuse(self, aux):
        if self.shape.fc_norm:
            aux = torch.stack([self.norm(aux[i], f"fc_norm.{i}.weight") for i in range(self.shape.num_aux)])
        flat = aux.flatten()
        return self.p["fc.weight"] @ (self.norm(flat, "input_norm.weight") if self.shape.norm_before_fc else flat)

    def layer_input(self, token, feature):
        normed = self.norm(feature, "midlayer.hidden_norm.weight")
        x = torch.cat([self.norm(self.embed[token], "midlayer.input_layernorm.weight"), normed])
        return x, normed if self.shape.norm_before_residual else feature

    def project(self, x, which, heads):
        return (self.p[f"midlayer.self_attn.{which}_proj.weight"] @ x).view(heads, self.shape.head_dim)

    def key_value(self, x, position):
        heads = self.shape.num_kv_heads
        return self.rotate(self.project(x, "k", heads), position), self.project(x, "v", heads)

    def output(self, x, residual, position, cache):
        """The layer's output of a query at `position` over a cache of (position, key, value)."""
        window = self.shape.sliding_window
        seen = [(k, v) for at, k, v in cache if window is None or position - at < window]
        group = self.shape.num_heads // self.shape.num_kv_heads
        q_nd = self.rotate(self.project(x, "q", self.shape.num_heads), position)
        k_snd = torch.stack([k for k, _ in seen]).repeat_interleave(group, dim=1)
        v_snd = torch.stack([v for _, v in seen]).repeat_interleave(group, dim=1)
        weights_sn = ((k_snd * q_nd).sum(-1) / math.sqrt(self.shape.head_dim)).softmax(0)
        mixed = (weights_sn[..., None] * v_snd).sum(0).flatten()
        residual = residual + self.p["midlayer.self_attn.o_proj.weight"] @ mixed
        m = self.norm(residual, "midlayer.post_attention_layernorm.weight")
        gate, up = (self.p[f"midlayer.mlp.{which}_proj.weight"] @ m for which in ("gate", "up"))
        return residual + self.p["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def targets(self, state):
        """The target's probabilities of the draft vocabulary's tokens, and the same renormalised."""
        weight = self.head.norm_H.double() + (1.0 if self.head.form == "rms_plus_one" else 0.0)
        state = state / torch.sqrt((state * state).mean() + self.head.eps) * weight
        y = self.head.head_VH.double() @ state / self.loss.temperature
        every = y if self.head.full_VH is None else self.head.full_VH.double() @ state / self.loss.temperature
        p = (y - every.logsumexp(0)).exp()
        return p, p / p.sum()

    def row_loss(self, logits, state):
        p, r = self.targets(state)
        log_q = (logits / self.loss.temperature).log_softmax(0)
        alpha = torch.minimum(p, log_q.exp()).sum()
        kl = (r * (r.log() - log_q)).sum()
        mix = math.exp(-self.loss.lk_eta * float(alpha.detach()))
        return {
            "soft_ce": -(r * log_q).sum(),
            "soft_ce_full": -(p * log_q).sum(),
            "kl": kl,
            "lk_alpha": -alpha.log(),
            "lk_lambda": mix * kl + (1 - mix) * (1 - alpha),
        }[self.loss.name]

    def chain(self, x, r, aux, state, t, step1, steps):
        """(j, loss, hit) of every supervised step at row t of one document."""
        own, feature = [], None
        for j in range(1, steps + 1):
            if t + j + 1 >= len(x) or not all(r[t + 1 : t + j + 2]):
                return
            position = t + j - 1
            inp, residual = self.layer_input(x[t + j], self.fuse(aux[t]) if j == 1 else feature)
            if j > 1:
                own.append((position, *self.key_value(inp, position)))
            output = self.output(inp, residual, position, step1[: t + 1] + own)
            normed = self.norm(output, "norm.weight")
            feature = normed if self.shape.norm_output else output
            logits = self.p["lm_head.weight"] @ normed
            hit = int(logits.argmax()) == self.draft_ids.get(x[t + j + 1], -1)
            yield j, self.row_loss(logits, state[t + j]), int(hit)
