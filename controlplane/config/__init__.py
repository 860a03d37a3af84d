"""The settings: their definitions, how they are read from a file and the environment, and their docs."""
