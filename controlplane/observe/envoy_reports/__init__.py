"""Reports of the Envoys: load reports (LRS) and the metrics service stream of the module."""
