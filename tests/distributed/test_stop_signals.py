"""A run's signal handling ends with the run; tests/resume/test_preemption.py tests what one and two signals do."""

import os
import signal
import threading
import time

from lmtrain.distributed.stop_signals import SIGNALS, StopSignals


def listeners() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "signals"]


def wakeup() -> int:
    """Returns the file descriptor that Python writes signals to."""
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found)
    return found


def test_it_leaves_nothing_behind() -> None:
    handlers, wakeup_fd, threads = [signal.getsignal(number) for number in SIGNALS], wakeup(), listeners()
    signals = StopSignals()
    signals.close()  # without having listened
    for number in SIGNALS:
        signals = StopSignals()
        signals.listen()
        assert signals.listens
        assert signals.first is None
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 60
        while signals.first is None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert signals.first == number.name
        signals.close()
        signals.close()
        assert not signals.listens
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert wakeup() == wakeup_fd
    for thread in set(listeners()) - set(threads):
        thread.join(60)
    assert set(listeners()) <= set(threads)  # a thread of an earlier test may have ended meanwhile
