"""Torch's own backends: Gloo, NCCL, UCC, XCCL, and backends written for torch.distributed."""
