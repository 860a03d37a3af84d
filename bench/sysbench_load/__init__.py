"""Load by sysbench."""
