"""Reports of the Envoys: load reports (LRS), and stats of the Tidevoy module (metrics service)."""
