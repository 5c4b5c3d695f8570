"""Read and write the annotations of tensors: types over mesh axes, specs, wrappers."""
