"""`python -m sandbox.tidb_sim`: run one simulated TiDB server."""

from sandbox.tidb_sim.command import main

main()
