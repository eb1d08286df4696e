"""For torchrun and launchers that behave like it: interval checkpoints."""

import job as shared
import torch.distributed as dist

dist.init_process_group("gloo")
shared.train_with_interval_checkpoints(shared.read_job())
dist.destroy_process_group()
