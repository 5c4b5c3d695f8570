"""MPI, by mpi4py: the ranks that mpiexec has started."""
