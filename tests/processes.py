"""Processes that have imported torch and this package before they start, so that a test can afford several."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

# A server imports these once; what it forks has them.
SERVER = multiprocessing.get_context("forkserver")
PRELOADED = ["tests.optim.test_sharding", "tests.experiments.test_train", "sklearn.datasets", "matplotlib.pyplot"]
SERVER.set_forkserver_preload(PRELOADED)


def run_ranks(function: Callable[..., None], *arguments: object, count: int, folder: Path) -> None:
    """Call ``function(rank, *arguments)`` in ``count`` processes, which form a group over Gloo, and wait for them."""
    of_all = (function, arguments, count, str(folder / "store"))
    torch.multiprocessing.start_processes(_run_rank, of_all, count, start_method=SERVER.get_start_method())


def _run_rank(rank: int, function: Callable[..., None], arguments: tuple[object, ...], count: int, file: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(file, count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    function(rank, *arguments)
    # Shutting gloo's threads down sometimes aborts (torch 2.13), so the process exits without once all ranks are done.
    store.add("through", 1)
    while store.add("through", 0) < count:
        time.sleep(0.01)
    os._exit(0)


def start_command(
    arguments: Sequence[object],
    output: Path | str = os.devnull,
    environment: dict[str, str] | None = None,
    change: Callable[[], None] | None = None,
) -> BaseProcess:
    """Start the command line with one thread; return its process.

    output: a file to which all that it prints is appended. change: called in the process before the command runs.
    """
    process = SERVER.Process(target=_run, args=(list(map(str, arguments)), str(output), environment or {}, change))
    process.start()
    return process


def _run(arguments: list[str], output: str, environment: dict[str, str], change: Callable[[], None] | None) -> None:
    from loco_ext.cli import main

    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(file, standard)
    os.environ.update(environment)
    torch.set_num_threads(1)
    if change is not None:
        change()
    sys.exit(main(arguments))


def run_command(*arguments: object, change: Callable[[], None] | None = None) -> None:
    """Run the command line in a process of its own, which must succeed."""
    process = start_command(arguments, change=change)
    process.join()
    assert process.exitcode == 0, arguments


def kill_when(ready: Callable[[], object], *arguments: object, change: Callable[[], None] | None = None) -> None:
    """Run the command line in a process of its own, which is killed as soon as ``ready()`` is true."""
    process = start_command(arguments, change=change)
    while process.is_alive() and not ready():
        time.sleep(0.001)
    assert process.is_alive(), arguments
    process.kill()
    process.join()


def wait_for_all(processes: Sequence[BaseProcess]) -> int:
    """Wait until all processes have succeeded or one has failed, which ends the others; return its exit code or 0."""
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                for other in running.values():
                    other.kill()
                    other.join()
                return process.exitcode
    return 0


def die() -> None:
    """End this process as a crash of the machine does."""
    os.kill(os.getpid(), signal.SIGKILL)
