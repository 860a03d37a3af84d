"""Reports of benchmarks: figures, tables and charts."""
