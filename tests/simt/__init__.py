"""Host emulation of the CUDA kernels: builds them with g++ and runs them against the reference."""
