"""Run on MPI through mpi4py, among the ranks that mpiexec has started."""
