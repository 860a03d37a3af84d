"""What Envoys report by load reports (LRS) and by their metrics service stream."""
