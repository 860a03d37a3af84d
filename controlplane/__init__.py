"""The control plane: facts flow in, one pure function decides, one publisher tells the Envoys."""
