"""Kills trainings inside their saves, again and again, and then lets the last one end.

    killed.py STRAIGHT.yaml KILLED.yaml KILLS SEED

Every child is forked from this process, which has everything imported and trains nothing: a start costs no seconds.
The run of STRAIGHT.yaml ends undisturbed, and tells what a save consists of: what Python's audit hooks see of it (every
file that is opened, renamed, deleted). Two thirds of the kills are spread over these events, from the first to the
last; the others come at random moments. Prints one JSON object: the events, and how every child ended.
"""

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

from draftsmith.core.config_io import load_config
from draftsmith.train import state
from draftsmith.train.stage import train

torch.set_num_threads(1)
WATCHED = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree")


def train_until(config, event=None, save=3, after=None, told=None):
    """Train; die at the event number `event` of the `save`-th save, or `after` so many seconds from its begin."""
    write, saves, here = state._write, [], threading.local()

    def audit(name, args):
        if name in WATCHED and getattr(here, "seen", None) is not None:
            here.seen.append(name)
            if len(here.seen) == event and len(saves) == save:
                os.kill(os.getpid(), signal.SIGKILL)

    def die():
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGKILL)

    def watched(*args):
        saves.append(1)
        if after is not None and len(saves) == save:
            threading.Thread(target=die, daemon=True).start()
        here.seen = []
        write(*args)
        seen, here.seen = here.seen, None
        if told and len(saves) == save:
            told.write_text(json.dumps(seen))

    state._write = watched
    sys.addaudithook(audit)
    train(config)


def in_child(action):
    """The exit of a forked process; negative is a signal."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main():
    straight, config = load_config(Path(sys.argv[1])), load_config(Path(sys.argv[2]))
    kills, chance = int(sys.argv[3]), random.Random(int(sys.argv[4]))
    told = Path(sys.argv[2]).with_suffix(".events")
    assert in_child(lambda: train_until(straight, told=told)) == 0
    events = json.loads(told.read_text())
    inside = 2 * kills // 3
    ends = []
    for i in range(kills):
        if i < inside:
            event = 1 + i * (len(events) - 1) // (inside - 1)
            ends.append(in_child(lambda event=event: train_until(config, event=event)))
        else:
            after, save = chance.uniform(0, 0.03), chance.randint(1, 3)
            ends.append(in_child(lambda after=after, save=save: train_until(config, after=after, save=save)))
    last = in_child(lambda: train(config))
    print(json.dumps({"events": events, "ends": ends, "last": last}))


main()
