"""Worker groups on both runtimes; the Ray ones are real Ray processes."""

import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from rl_tq.types import BatchMeta
from rl_trainer.errors import PlacementError, WorkerDiedError, WorkerTimeoutError
from rl_trainer.runtime import create_runtime
from rl_trainer.runtime.base import Call, Dispatch, ResourcePool, WorkerContext, register
from rl_trainer.runtime.dispatch import Mesh, join, spread
from rl_trainer.runtime.network import free_address
