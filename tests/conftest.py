"""One thread: the models are so small that threads only wait for each other."""

import torch

torch.set_num_threads(1)
