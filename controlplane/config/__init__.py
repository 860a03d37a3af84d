"""The settings: what there is, how a file and the environment set it, and how it is documented."""
