"""Load with sysbench."""
