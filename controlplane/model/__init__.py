"""Data types shared by the whole control plane: frozen values, no I/O."""
