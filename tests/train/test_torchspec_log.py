"""TorchSpec's log lines: its own bar, drawn by tqdm as it calls it, and its messages, letter by letter."""

import io

from tqdm import tqdm

from draftsmith.train.torchspec.entry import Scalars
from draftsmith.train.torchspec.log import events


def of_bar(steps, **postfix):
    """What `progress.set_postfix(..., refresh=False); progress.update(1)` writes (controller/loop.py)."""
    written = io.StringIO()
    bar = tqdm(total=14277, desc="Training", unit="step", initial=0, file=written, mininterval=0)
    for _ in range(steps):
        bar.set_postfix(postfix, refresh=False)
        bar.update(1)
    return written.getvalue()


def test_its_bar():
    text = of_bar(3, loss="3.102", acc="0.212", acc_len="0.27", thru="1.5", wait="0.1s", pool=12, epoch="1/3")
    lines = [line for line in text.split("\r") if line]
    found = [event for line in lines for event in events(line)]
    assert [(e.kind, e.step, e.total) for e in found] == [("progress", i, 14277) for i in (1, 2, 3)]
    assert found[-1].values["loss"] == "3.102" and found[-1].values["pool"] == "12"
    message = "[2026-04-20 10:11:12,345] loop.py:431 INFO Training completed: 3 steps in 9.1s | avg inference=1.0"
    assert [e.kind for e in events(lines[-1] + message)] == ["progress", "completed"]  # a bar leaves its line open


def test_its_messages():
    ray = "\x1b[36m(TrainerActor pid=1234, ip=10.0.0.2)\x1b[0m [2026-04-20 10:11:12,345] checkpoint.py:338 INFO "
    said = {
        "Saved checkpoint to /r/output/checkpoints/iter_0000051": ("saved", "/r/output/checkpoints/iter_0000051"),
        "Loaded model from /r/start/iter_0000000/model": ("started_from", "/r/start/iter_0000000/model"),
        "Loading dataset from cache: /r/c/tokenized_dataset/ab.pt": ("cached", "/r/c/tokenized_dataset/ab.pt"),
        "Tokenizing dataset (cache will be saved to /r/c/ab.pt)": ("not_cached", "/r/c/ab.pt"),
        "Formatting dataset (cache will be saved to /r/c/ab.pt)": ("not_cached", "/r/c/ab.pt"),
        "Failed to load optimizer from /r/o: bad": ("not_loaded", "Failed to load optimizer from /r/o: bad"),
        "Model checkpoint /r/m not found; skipping load.": (
            "not_loaded", "Model checkpoint /r/m not found; skipping load."
        ),
        "Failed to load verifier norm: 'x'. last_hidden_states will be used without normalization.": (
            "not_loaded", "Failed to load verifier norm: 'x'. last_hidden_states will be used without normalization."
        ),
    }  # fmt: skip
    for text, expected in said.items():
        assert [(e.kind, e.text) for e in events(ray + text)] == [expected]
    [event] = events("[...] eval.py:153 INFO Step 50 eval: loss=3.9012, acc=0.2500, sim_acc_len=0.31")
    assert event.step == 50
    assert event.values == {"eval_loss": 3.9012, "eval_accuracy": 0.25, "eval_simulated_accepted": 0.31}
    # What it says when all is well, and must not be taken for a failure.
    assert not events("LR scheduler checkpoint not found at /r/start/iter_0/lr_scheduler, skipping LR scheduler load.")
    assert not events("[...] loop.py:330 INFO TIMING step=5: step=1.000s data=0.100s")


def test_its_scalars(capsys):
    """As its loop hands them to a TensorBoard writer: one by one, a step's together."""
    scalars = Scalars(None)
    for step in (1, 2):
        for key, value in (
            ("train/ploss_0", 3.0), ("train/ploss_1", 4.0), ("train/acc_0", 0.5), ("train/acc_1", 0.25),
            ("train/lr", 1e-4), ("train/step", step), ("perf/train_capacity", 8.0), ("train/avg_loss", 3.4),
        ):  # fmt: skip
            scalars.add_scalar(key, value, step)
    assert capsys.readouterr().out.count("DRAFTSMITH") == 1  # the second step may not be whole
    scalars.flush()
    [event] = [e for line in capsys.readouterr().out.splitlines() for e in events(line)]
    assert event.kind == "scalars" and event.step == 2
    assert event.values == {
        "loss": 3.0 + 0.8 * 4.0, "loss_per_step": [3.0, 4.0], "accuracy_per_step": [0.5, 0.25],
        "learning_rate": 1e-4, "samples_per_second": 8.0, "torchspec": {"train/avg_loss": 3.4},
    }  # fmt: skip
    assert not events('DRAFTSMITH {"step": 3, "tra') and not events("DRAFTSMITH 3")
