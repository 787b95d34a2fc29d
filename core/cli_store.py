"""`draftsmith store verify|stats|merge|repair`: commands about a hidden-state store, by its folder or by its run."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from draftsmith.core.config_io import load_config
from draftsmith.core.errors import UserError
from draftsmith.core.manifest import MANIFEST, read_manifest
from draftsmith.core.progress import console, say
from draftsmith.core.run import RunFolder
from draftsmith.core.store import DAMAGED, INPUTS

store_app = typer.Typer(help="Look at, check, merge and mend hidden-state stores.", no_args_is_help=True)
Given = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FOLDER | section.key=value ...]",
        help="A run, or its hidden_states/ (or a part of it); with --config, what goes over the config file.",
    ),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="YAML config of the run, instead of a folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Shards read side by side; else one a core.")]
_SHOWN = 20


@store_app.command()
def verify(given: Given = None, config: ConfigFile = None, jobs: Jobs = None, as_json: Json = False) -> None:
    """Compare every byte with its checksum, the index and the samples; exit code 1 where something is wrong."""
    from draftsmith.hidden_state_capture.verify import verify_store

    store, samples = _place("verify", given, config)
    console.quiet = as_json  # no progress between the JSON
    verdict = verify_store(store, samples, jobs)
    console.quiet = False
    if as_json:
        print(json.dumps([vars(fault) for fault in verdict.faults], indent=2))
    else:
        _show_faults(store, verdict)
        if verdict.faults:
            say(f"Mend: `draftsmith store repair {store}`, then `draftsmith capture` for the samples that are lost.")
    raise typer.Exit(1 if verdict.faults else 0)


@store_app.command()
def stats(
    given: Given = None,
    config: ConfigFile = None,
    probed: Annotated[int, typer.Option("--samples", min=0, help="Samples read for the layers' rms.")] = 64,
    as_json: Json = False,
) -> None:
    """Samples, tokens and bytes by source and split, and the rms of every layer's states."""
    from draftsmith.hidden_state_capture.stats import store_stats

    store, _ = _place("stats", given, config)
    found = store_stats(store, probed)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show_stats(store, found)


@store_app.command()
def merge(
    parts: Annotated[list[Path], typer.Argument(help="Stores, or runs that have one.")],
    into: Annotated[Path, typer.Option("--into", help="Folder of the new store, e.g. runs/NAME/hidden_states.")],
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not read every byte of the parts first.")] = False,
) -> None:
    """Make one store of several, without copying states where the file system has hard links."""
    from draftsmith.hidden_state_capture.merge import merge_stores

    with RunFolder(into.parent).lock():
        manifest = merge_stores([_place("merge", [str(part)], None)[0] for part in parts], into, verify=not no_verify)
    samples = sum(m["samples"] for m in manifest["merged_from"])
    say(f"hidden states: {samples} samples of {len(parts)} stores -> {into}")
    say(f"the parts can be deleted once `draftsmith store verify {into}` finds nothing")


@store_app.command()
def repair(given: Given = None, config: ConfigFile = None, jobs: Jobs = None) -> None:
    """Verify, and where shards are damaged set them aside, so that `capture` makes what is lost of them again."""
    from draftsmith.hidden_state_capture.repair import repair_store

    store, samples = _place("repair", given, config)
    with RunFolder(store.parent).lock():
        verdict = repair_store(store, samples, jobs)
    _show_faults(store, verdict)
    if verdict.faults:
        bad = verdict.bad_shards
        lost = sum(len(verdict.rows[name]) for name in bad) - verdict.kept + sum(f.missing for f in verdict.faults)
        say(
            f"{store} is a capture in progress again: {', '.join(bad) or 'no shard'} set aside"
            + (f" in {store / DAMAGED}" if bad else "")
            + (f", what is whole of them kept ({verdict.kept} samples)" if verdict.kept else "")
            + f", {lost} samples to go. Run `draftsmith capture` with its config."
        )


def _place(command: str, given: list[str] | None, config: Path | None) -> tuple[Path, Path | None]:
    """The store, and the samples of its run where they are there."""
    given, example = given or [], f"`draftsmith store {command} runs/quickstart`"
    if config:
        if folders := [g for g in given if "=" not in g]:
            raise UserError(f"{folders[0]} is a folder beside --config.", "Give one of them.")
        store = RunFolder.of(load_config(config, given)).hidden_states
    elif len(given) != 1:
        what = (
            f"{len(given)} folders are given: {', '.join(given)}" if given else "neither a folder nor --config is given"
        )
        raise UserError(f"{what}.", f"Give one of them, e.g. {example}.")
    elif "=" in given[0] and not Path(given[0]).exists():
        raise UserError(
            f"`{given[0]}` is an override, and there is no --config that it would go over.", f"E.g. {example}."
        )
    else:
        store = Path(given[0])
    if not (store / MANIFEST).is_file() and (store / "hidden_states").is_dir():
        store = store / "hidden_states"
    _must_be_a_store(store, f"Give a run, or its hidden_states/, e.g. {example}.")
    samples = RunFolder(store.parent).samples
    return store, samples if (samples / MANIFEST).is_file() else None


def _must_be_a_store(folder: Path, example: str) -> None:
    """Refuse a path that is something else, saying what, and with `example` as the mend.

    Raises:
        UserError: it is not there, is no folder, holds another stage's output, or a capture that is not finished.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: {'a file, not a folder' if folder.exists() else 'no such folder'}.", example)
    if manifest := read_manifest(folder):
        if (stage := manifest.get("stage")) != "capture":
            raise UserError(f"{folder} holds the output of `{stage}`, not hidden states.", example)
        return
    if (folder / INPUTS).is_file():
        whole, aside = len(list(folder.glob("shard-*.json"))), (folder / DAMAGED).is_dir()
        why = "it was repaired, and its damaged shards are set aside" if aside else "it was stopped, or is running"
        raise UserError(
            f"{folder} is a capture that is not finished ({why}): {whole} shards are whole, the others to go.",
            "Run `draftsmith capture` with its config; there is nothing to repair before that.",
        )
    what = "an exported draft" if (folder / "config.json").is_file() else f"no hidden states (no {MANIFEST})"
    raise UserError(f"{folder} holds {what}.", example)


def _show_faults(store: Path, verdict: Any) -> None:
    shards = verdict.manifest["shards"]
    if not verdict.faults:
        what = "checksums, index and samples" if verdict.against_samples else "checksums and index"
        samples, size = sum(s["samples"] for s in shards), sum(s["bytes"] for s in shards)
        say(f"{store}: {samples} samples in {len(shards)} shards, {size / 1e6:,.0f} MB: {what} agree")
        return
    table = Table(title=f"{store}: faults ({len(verdict.faults)})", title_justify="left")
    for column in ("shard", "sample", "what is wrong"):
        table.add_column(column)
    for fault in verdict.faults[:_SHOWN]:
        table.add_row(fault.shard or "", escape(fault.sample_id or ""), escape(fault.what))
    console.print(table)
    if len(verdict.faults) > _SHOWN:
        say(f"and {len(verdict.faults) - _SHOWN} more; --json lists all")


def _show_stats(store: Path, found: dict[str, Any]) -> None:
    table = Table(title=str(store), title_justify="left")
    for column in ("source", "split", "samples", "tokens", "supervised"):
        table.add_column(column, justify="left" if column in ("source", "split") else "right")
    total = {"source": "all", "split": "", **{k: found[k] for k in ("samples", "tokens", "supervised_tokens")}}
    for row in [*found["groups"], total]:
        figures = (f"{row[k]:,}" for k in ("samples", "tokens", "supervised_tokens"))
        table.add_row(escape(row["source"]), row["split"], *figures)
    console.print(table)
    say(
        f"{found['bytes'] / 1e6:,.1f} MB of {found['storage']} in {found['shards']} shards, "
        f"{found['bytes_per_token']:,.0f} bytes a token; {found['rejected']} samples rejected; "
        f"lengths {' / '.join(str(v) for v in found['lengths'].values())} (least, median, most)"
    )
    if found["layers"]:
        layers = Table(title="states", title_justify="left")
        for column in ("layer", "rms", "of first tokens", "of the others", "largest"):
            layers.add_column(column, justify="right")
        for layer_id, *figures in (row.values() for row in found["layers"]):
            layers.add_row(str(layer_id), *(f"{x:,.2f}" for x in figures))
        console.print(layers)
