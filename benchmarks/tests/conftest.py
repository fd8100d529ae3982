"""The benchmarks are scripts that import one another, and no package: their folder and this one are put on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
torch.set_num_threads(1)
