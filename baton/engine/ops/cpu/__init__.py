"""C++ kernels for bfloat16 on x86 CPUs with AVX512-BF16 or AMX. Optional: without them, or for
shapes and dtypes that they do not serve, the torch code in `ops` runs."""
