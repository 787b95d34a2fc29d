"""Run alone or under torchrun: trains one config after another.

Its argument is a JSON list of jobs {"config": path, "term": step, "kill": step}: with `term` the process gets a SIGTERM
as it logs that step, with `kill` it dies by SIGKILL. The samples of every step go to `seen-RANK.jsonl` in the run.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from draftsmith.core.config_io import load_config
from draftsmith.core.run import RunFolder
from draftsmith.train.loop import Trainer
from draftsmith.train.metrics import Metrics
from draftsmith.train.stage import train

torch.set_num_threads(1)
rank = os.environ.get("RANK", "0")
log, take = Metrics.log, Trainer._optimizer_step


def train_job(job):
    ends = {job.get("term"): signal.SIGTERM, job.get("kill"): signal.SIGKILL}
    config = load_config(Path(job["config"]))

    def log_and_end(self, step, **values):
        log(self, step, **values)
        if "loss" in values and step in ends:
            os.kill(os.getpid(), ends[step])

    def take_and_note(self, batches, asked):
        with (RunFolder.of(config).root / f"seen-{rank}.jsonl").open("a") as file:
            ids = [name for work in batches.works for name in work.batch.sample_ids]
            file.write(json.dumps({"step": self.state.step, "ids": ids}) + "\n")
        return take(self, batches, asked)

    Metrics.log, Trainer._optimizer_step = log_and_end, take_and_note
    train(config)


for each in json.loads(sys.argv[1]):
    train_job(each)
