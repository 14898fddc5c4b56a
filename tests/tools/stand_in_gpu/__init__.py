"""A GPU that is not there, for the CUDA build of torch; see README.md."""
