"""Read and write the annotations of tensors."""
