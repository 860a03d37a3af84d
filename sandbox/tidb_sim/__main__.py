"""`python -m sandbox.tidb_sim`: one stand-in as a process."""

from sandbox.tidb_sim.command import main

main()
