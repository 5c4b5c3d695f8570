"""Torch's own wires: Gloo, NCCL, UCC, XCCL, and backends written for torch.distributed."""
