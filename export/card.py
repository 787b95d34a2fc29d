"""README.md of an exported draft: what it is, how to serve it, what was proven, what it reaches, how it was made."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import yaml

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from draftsmith.core.config import Config, ExportConfig
from draftsmith.core.pages import template_environment
from draftsmith.core.target import Target
from draftsmith.export.draft import Draft
from draftsmith.export.layout import served_name
from draftsmith.export.verify import summary

PLOT = "acceptance.png"
_VERDICTS = {
    True: "Every check that was judged is within its bound.",
    False: "**A check failed: do not serve this draft.**",
    None: "**Nothing was checked.**",
}
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Facts:
    """What a card is written from.

    Attributes:
        draft: what was exported.
        target: its target; None where a folder was converted without one.
        options: the export section in force.
        licence: licence id; None: unknown.
        proof: content of verification.json.
        report: of an evaluation of this very draft, if there is one.
        config: of the run; None for a converted folder.
        training: the checkpoint's state; None for a converted folder.
        samples: manifest of the samples; None: not at hand.
    """

    draft: Draft
    target: Target | None
    options: ExportConfig
    licence: str | None
    proof: dict[str, Any]
    report: dict[str, Any] | None = None
    config: Config | None = None
    training: dict[str, Any] | None = None
    samples: dict[str, Any] | None = None


def model_card(facts: Facts) -> str:
    """Markdown; acceptance figures only where an evaluation of this very draft is at hand."""
    draft, sglang = facts.draft, facts.options.layer_id_convention == "sglang"
    flags = [flag for flag in _FLAGS if getattr(draft.shape, flag)]
    flags += [f"sliding window of {draft.shape.sliding_window}"] if draft.shape.sliding_window else []
    environment = template_environment("draftsmith.export").overlay(autoescape=False)
    environment.filters["cell"] = lambda text: str(text).replace("|", "&#124;").replace("\n", " ")
    environment.filters["speed"] = lambda value: f"{value:.0f}" if value is not None else ""
    return environment.get_template("README.md.j2").render(
        front_matter=_front_matter(facts),
        target_title=_title(facts.target),
        parameters=sum(t.numel() for t in draft.tensors.values()),
        shape=draft.shape,
        layer_ids=draft.layer_ids,
        sglang_ids=[i - 1 for i in draft.layer_ids] if sglang else [],
        flags=flags,
        revision=(facts.target and facts.target.revision) or "as found locally",
        licence=facts.licence,
        origin=draft.origin,
        commands=serve_commands(facts),
        proof=facts.proof,
        served=facts.report["served"] if facts.report else [],
        verdict=_VERDICTS[facts.proof["passed"]],
        summary=summary(facts.proof["checks"], facts.proof["served"]),  # an earlier version's file has none
        data=_data(facts.samples),
        sources=(facts.samples or {}).get("sources", {}),
        training=_training(facts),
    )


def serve_commands(facts: Facts) -> list[str]:
    """Shell commands that serve the target with this draft; the folder stands as PATH_OF_THIS_FOLDER."""
    target = facts.target
    name = shlex.quote(_served(target)) if target else "TARGET"
    k = facts.config.eval.k[0] if facts.config else facts.options.verify_k
    parallel = facts.config.target.tensor_parallel if facts.config else 1
    remote = bool(facts.config and facts.config.target.trust_remote_code)
    if facts.options.layer_id_convention == "sglang":
        more = (f" --tp-size {parallel}" if parallel > 1 else "") + (" --trust-remote-code" if remote else "")
        return [
            f"python -m sglang.launch_server --model-path {name}{more} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path PATH_OF_THIS_FOLDER --speculative-num-steps {k} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}"
        ]
    more = f" --revision {target.revision}" if target and target.revision else ""
    more += f" --tensor-parallel-size {parallel}" if parallel > 1 else ""
    more += " --trust-remote-code" if remote else ""
    spec = json.dumps({"method": "eagle3", "model": "PATH_OF_THIS_FOLDER", "num_speculative_tokens": k})
    commands = [f"vllm serve {name}{more} --speculative-config {shlex.quote(spec)}"]
    if facts.options.format == "speculators":
        commands.append("vllm serve PATH_OF_THIS_FOLDER   # the target is named in config.json")
    return commands


def plot_acceptance(report: dict[str, Any], file: Path) -> None:
    """Share of rounds whose i-th draft was accepted, for every served set and replay; a small PNG."""
    figure, axes = plt.subplots(figsize=(5.6, 3.0), layout="constrained")
    for row in report.get("replay", []):
        axes.plot(range(1, row["k"] + 1), row["per_position"], "o-", color="#4269d0", label=f"replay, K = {row['k']}")
    for row in report["served"]:
        name = str(row["set"]).replace("$", r"\$")  # matplotlib would read it as mathematics
        label = f"{name}, K = {row['k']}, T = {row['temperature']:g}, {row['concurrency']} in flight"
        axes.plot(range(1, row["k"] + 1), row["per_position"], "s--", alpha=0.7, ms=4, label=label)
    axes.set(xlabel="drafted position", ylabel="share of rounds accepted", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(axes.get_lines()) <= 8:
        axes.legend(frameon=False, fontsize=7)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _front_matter(facts: Facts) -> str:
    tags = ["eagle3", "speculative-decoding", "draftsmith"]
    fields: dict[str, Any] = {"library_name": "vllm", "pipeline_tag": "text-generation", "tags": tags}
    if facts.target and facts.target.revision:  # the hub wants an id of its own here
        fields["base_model"] = facts.target.path
    if facts.licence:
        fields["license"] = facts.licence
    return yaml.safe_dump(fields, sort_keys=True)


def _served(target: Target) -> str:
    # A path of the machine that exported means nothing elsewhere.
    return served_name(target) if target.revision else f"PATH_OF/{_title(target)}"


def _title(target: Target | None) -> str:
    if target is None:
        return "an unnamed target"
    return target.path if target.revision else Path(target.path).name


def _data(samples: dict[str, Any] | None) -> str:
    if not samples:
        return ""
    counts = samples["counts"]
    said = f"{counts['train']:,} samples for training and {counts['eval']:,} held out"
    if "tokens" in samples:
        said += f", {samples['tokens']:,} tokens, {samples['reply_tokens']:,} of them the target's replies"
    for key, which in (("coverage_train", "trained on"), ("coverage_eval", "held out")):
        if samples.get(key) is not None:
            said += f", {samples[key]:.1%} of those {which} in its vocabulary"
    return said + "."


def _training(facts: Facts) -> str:
    if facts.training is None or facts.config is None:
        return ""
    config, sampling = facts.config, facts.config.data.sampling
    written = (
        f"on the target's own replies at temperature {sampling.temperature}"
        if config.data.replies == "regenerate"
        else "on replies that came with the sources"
    )
    return (
        f"{facts.training['step']:,} optimizer steps of {config.train.tokens_per_batch:,} packed tokens, "
        f"{config.train.ttt_steps} steps of training-time test, loss `{config.train.loss}`, {written}."
    )
