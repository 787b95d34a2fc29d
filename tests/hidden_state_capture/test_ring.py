"""The ring of host memory: lent in order, never twice, and bounded."""

import random
import threading
import time
from collections import deque

import pytest

from draftsmith.hidden_state_capture.ring import HostRing


@pytest.mark.parametrize("seed", range(5))
def test_regions_never_overlap_whatever_comes_back_when(seed):
    draw, ring, lent = random.Random(seed), HostRing(4096, pinned=False), deque()
    starts = []
    for number in range(1, 400):
        size = draw.choice([1, 64, 300, 1000, 2000])
        while lent and (ring._place(-(-size // 64) * 64) is None or draw.random() < 0.2):
            at = draw.randrange(len(lent))
            region, mark = lent[at]
            assert (region.bytes_B == mark).all(), "somebody else has written here"
            ring.give(region)
            del lent[at]
        region = ring.take(size)
        starts.append(region.start)
        if draw.random() < 0.3:
            ring.trim(region, size // 2)
        region.bytes_B.fill_(number % 251)
        lent.append((region, number % 251))
    assert {start for start in starts if start > 0} and starts.count(0) > 1  # it went round


def test_taking_waits_for_room_and_gets_the_memory_that_came_back():
    ring = HostRing(256, pinned=False)
    first, _ = ring.take(128), ring.take(128)
    got = []
    taker = threading.Thread(target=lambda: got.append(ring.take(100)))
    taker.start()
    time.sleep(0.1)
    assert not got
    ring.give(first)
    taker.join(5)
    assert got[0].start == first.start


def test_what_is_larger_than_the_ring_goes_alone_in_memory_of_its_own():
    ring = HostRing(256, pinned=False)
    first = ring.take(64)
    got = []
    taker = threading.Thread(target=lambda: got.append(ring.take(1000)))
    taker.start()
    time.sleep(0.1)
    assert not got
    ring.give(first)
    taker.join(5)
    assert got[0].bytes_B.numel() >= 1000
    second = threading.Thread(target=lambda: got.append(ring.take(64)))
    second.start()
    time.sleep(0.1)
    assert len(got) == 1
    ring.give(got[0])
    second.join(5)
    assert got[1].start == 0


def test_a_trimmed_region_leaves_its_end_to_the_next():
    ring = HostRing(1024, pinned=False)
    first = ring.take(1024)
    ring.trim(first, 128)
    assert first.bytes_B.numel() == 128 and ring.take(512).start == 128
