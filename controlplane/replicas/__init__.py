"""Several control planes: leader election, the shared plan, and what they report to each other."""
