"""An embedded engine that a test finds in the middle, however fast the machine is."""

import threading
import time


def slow_down(server, num_requests):
    """At most 16 tokens of a request in 50 ms: 800 take seconds. Returns what is set when so many have their first."""
    engine, step, has_begun = server.engine, server.engine.step, threading.Event()

    def slow_step(interrupt):
        step(interrupt)
        if len(engine.scheduler.running) == num_requests:
            has_begun.set()
        time.sleep(0.05)

    engine.step = slow_step
    return has_begun
