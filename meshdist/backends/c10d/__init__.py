"""Run on torch's backends: Gloo, NCCL, UCC, XCCL, and others written for torch.distributed."""
