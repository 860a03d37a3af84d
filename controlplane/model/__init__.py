"""The data that the control plane works with: frozen values, no I/O."""
