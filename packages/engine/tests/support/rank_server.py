"""A process that has imported what the ranks of a test need, and forks them: their imports take longer than most tests.

`serve` takes jobs from a pipe, one after the other: (script, arguments, one environment per rank, files for their
stderr). It answers with the ranks' exit codes; a rank that has not ended by the deadline is killed.
"""

import faulthandler
import multiprocessing
import os
import runpy
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "megatron_on_cpu"))
import megatron_on_cpu

TIMEOUT_S = 500


def serve(pipe):
    """Until the other end of the pipe is closed."""
    import transformers  # noqa: F401

    import rl_engine.backends.fsdp
    import rl_engine.testing  # noqa: F401

    while True:
        try:
            script, arguments, environments, errors = pipe.recv()
        except EOFError:
            return
        pipe.send(_exit_codes(script, arguments, environments, errors))


def _exit_codes(script, arguments, environments, errors):
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=_be, args=(script, arguments, environment, error))
        for environment, error in zip(environments, errors, strict=True)
    ]
    for rank in ranks:
        rank.start()
    ends_at = time.monotonic() + TIMEOUT_S
    for rank in ranks:
        rank.join(max(0.0, ends_at - time.monotonic()))
    for rank in ranks:
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


def _be(script, arguments, environment, error):
    """`python -W ignore SCRIPT ARGUMENTS...` in this environment; what it says on stderr goes to a file."""
    os.environ.update(environment)
    sink = os.open(error, os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 2)
    os.close(sink)
    faulthandler.enable()  # a rank that the C library aborts tells where each of its threads was
    sys.argv = [script, *arguments]
    warnings.simplefilter("ignore")
    with megatron_on_cpu.cuda_stand_in() if "megatron" in " ".join(sys.argv) else nullcontext():
        runpy.run_path(script, run_name="__main__")
